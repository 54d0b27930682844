//! Why no image was selected, for users.

use std::fmt;

use crate::{evaluate::Notice, text::brief_list};

use super::compatibility::{FailedRule, InvalidSelection, PassedOver};

/// Maximum number of rules in a text about an entry.
pub(super) const MAX_RULES: usize = 8;

/// Why no image was selected.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum SelectionProblem {
    /// The request is invalid.
    Invalid(String),
    /// No image fits a node that can take the pod.
    NoMatch(NoMatch),
    /// No node affinity of allowed size selects exactly the nodes that fit.
    NotSelectable {
        container: String,
        /// The image that fits some of the nodes.
        image: String,
    },
    /// The document has models but no rules, and no model could choose.
    Model {
        container: String,
        /// The reference of the document.
        document: String,
        why: String,
    },
    /// The document is too large, or has too much work.
    TooLarge {
        container: String,
        /// The reference of the document.
        document: String,
        why: String,
    },
    /// The pod exists, and no image was selected on its creation.
    Created(String),
}

/// No image fits a node that can take the pod.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct NoMatch {
    pub container: String,
    /// The reference of the document.
    pub document: String,
    /// The number of nodes that can take the pod.
    pub nodes: usize,
    /// The first entries, with the rules that failed.
    pub passed_over: Vec<PassedOver>,
    /// The number of further entries.
    pub more: usize,
}

impl From<InvalidSelection> for SelectionProblem {
    fn from(invalid: InvalidSelection) -> Self {
        Self::Invalid(invalid.to_string())
    }
}

impl fmt::Display for SelectionProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(why) => write!(f, "no image is selected: {why}"),
            Self::NoMatch(no_match) => no_match.fmt(f),
            Self::NotSelectable { container, image } => write!(
                f,
                "container {container} keeps its image: node affinity cannot select the nodes that {image} fits: no labels distinguish them, or it would need more than 16 terms, \
                 128 requirements or 64 values of a label"
            ),
            Self::Model {
                container,
                document,
                why,
            } => write!(
                f,
                "container {container} keeps its image: {document} leaves the choice to a model: {why}"
            ),
            Self::TooLarge {
                container,
                document,
                why,
            } => write!(
                f,
                "container {container} keeps its image: {document} is too large: {why}"
            ),
            Self::Created(container) => write!(
                f,
                "container {container} keeps its image: when the pod was created, the webhook did not answer, or it warned that the \
                 document cannot be read or that no image fits a node; recreate the pod to see the warning"
            ),
        }
    }
}

impl fmt::Display for NoMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            container,
            document,
            nodes,
            passed_over,
            more,
        } = self;
        if *nodes == 0 {
            return write!(
                f,
                "container {container}: no node can take the pod, so no image of {document} is selected"
            );
        }
        let are = if *nodes == 1 { "node" } else { "nodes" };
        write!(
            f,
            "container {container}: no image of {document} fits the {nodes} {are} that can take the pod"
        )?;
        for (index, entry) in passed_over.iter().enumerate() {
            let between = if index == 0 { ": " } else { "; " };
            let failed = entry.failed.iter();
            let failed = failed.map(
                |FailedRule {
                     name,
                     nodes,
                     example,
                 }| {
                    let example = example.as_deref().map(|why| format!(" ({why})"));
                    format!("{name} fails on {nodes}{}", example.unwrap_or_default())
                },
            );
            let why = if entry.failed.is_empty() {
                "has a negative weight".to_owned()
            } else {
                brief_list(failed, ", ", MAX_RULES)
            };
            write!(f, "{between}{}: {why}", entry.tag)?;
        }
        if *more > 0 {
            write!(f, "; and {more} more entries")?;
        }
        Ok(())
    }
}

impl SelectionProblem {
    /// The message for the pod.
    pub(super) fn notice(&self) -> Notice {
        Notice::ImageNotSelected {
            why: self.to_string(),
            fits_no_node: matches!(self, Self::NoMatch(_)),
        }
    }

    /// The container that keeps its image.
    pub(super) fn container(&self) -> Option<&String> {
        match self {
            Self::Invalid(_) => None,
            Self::NoMatch(NoMatch { container, .. })
            | Self::NotSelectable { container, .. }
            | Self::Model { container, .. }
            | Self::TooLarge { container, .. }
            | Self::Created(container) => Some(container),
        }
    }
}
