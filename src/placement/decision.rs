//! The result of a decision.

use std::collections::BTreeSet;

use crate::platform::Architecture;

/// Where a pod may run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// On these architectures; never empty.
    Architectures(BTreeSet<Architecture>),
    /// On every architecture.
    TolerateAll,
    /// On none: the images share no architecture.
    NoCommonArchitecture,
}

impl Decision {
    /// The value of the annotation `archaware.dev/decision`.
    pub fn annotation(&self) -> String {
        match self {
            Self::Architectures(set) => join(set, ","),
            Self::TolerateAll => "any".to_owned(),
            Self::NoCommonArchitecture => "none".to_owned(),
        }
    }

    /// The value of the metric label `result`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Architectures(_) => "architectures",
            Self::TolerateAll => "any",
            Self::NoCommonArchitecture => "none",
        }
    }
}

/// Joins the names of architectures.
pub fn join(set: &BTreeSet<Architecture>, separator: &str) -> String {
    set.iter()
        .map(Architecture::as_str)
        .collect::<Vec<_>>()
        .join(separator)
}
