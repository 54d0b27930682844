//! Node affinity of a pod: the parts that archaware reads and the parts that it adds. Autoscalers follow affinity,
//! and it also applies to nodes without a taint.
//!
//! Required terms are `ORed`, so the architectures must be added to each of them. A term that allows only architectures
//! that can run the pod is not changed; one that allows more is narrowed, because an autoscaler would make nodes of these,
//! too.

mod undo;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::platform::Architecture;

use super::author_selection::AuthorSelection;

pub use undo::{AffinityUndo, undo};

/// The node label for the architecture, and its deprecated name.
const LABEL: &str = "kubernetes.io/arch";
const OLD_LABEL: &str = "beta.kubernetes.io/arch";
/// Both.
pub(super) const LABELS: [&str; 2] = [LABEL, OLD_LABEL];

/// `spec.affinity`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Affinity {
    /// Node affinity.
    pub node_affinity: Option<NodeAffinity>,
}

/// `spec.affinity.nodeAffinity`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeAffinity {
    /// Required terms; a node must match one of them.
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub required: Option<NodeSelector>,
    /// Preferred terms.
    #[serde(rename = "preferredDuringSchedulingIgnoredDuringExecution")]
    pub preferred: Option<Vec<PreferredTerm>>,
}

/// The required node affinity; not the pod's `nodeSelector`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// Terms, `ORed`.
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// One term.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements on labels, `ANDed`.
    pub match_expressions: Vec<Requirement>,
    /// Requirements on fields: only `metadata.name` exists.
    pub match_fields: Vec<Requirement>,
}

/// A preferred term.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PreferredTerm {
    /// From 1 to 100.
    pub weight: i64,
    /// The term that is preferred.
    pub preference: NodeSelectorTerm,
}

/// A requirement on a label.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Requirement {
    /// The label key.
    pub key: String,
    /// `In`, `Exists`, …
    pub operator: String,
    /// Values for `In` and `NotIn`.
    pub values: Vec<String>,
}

/// What archaware adds to a pod's node affinity. Recorded on the pod, so that it can be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AffinityChange {
    /// Required architectures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require: Option<Require>,
    /// Preferred architectures.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefer: Vec<Preference>,
}

/// Required architectures and the terms that get them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Require {
    /// The architectures; empty: none, because an image has none for the OS of the pod.
    pub architectures: BTreeSet<Architecture>,
    /// More such sets, that share nothing with the others: no node can run the pod, and autoscalers see it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub further: Vec<BTreeSet<Architecture>>,
    /// Indexes of the terms that get the expressions. Empty when the pod has no terms and gets a new one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub terms: Vec<usize>,
}

/// A preferred architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preference {
    /// The architecture.
    pub architecture: Architecture,
    /// From 1 to 100.
    pub weight: u8,
}

impl AffinityChange {
    /// Whether nothing is added.
    pub fn is_empty(&self) -> bool {
        self.require.is_none() && self.prefer.is_empty()
    }
}

impl Require {
    /// The expressions to write, one for each set.
    pub fn expressions(&self) -> Vec<Requirement> {
        let sets = std::iter::once(&self.architectures).chain(&self.further);
        sets.map(expression).collect()
    }
}

impl Preference {
    /// The term to write.
    pub fn term(&self) -> PreferredTerm {
        PreferredTerm {
            weight: self.weight.into(),
            preference: NodeSelectorTerm {
                match_expressions: vec![expression([&self.architecture])],
                match_fields: Vec::new(),
            },
        }
    }
}

/// The API server accepts no `In` without values; every node has the label, so that `DoesNotExist` matches none.
fn expression<'a>(architectures: impl IntoIterator<Item = &'a Architecture>) -> Requirement {
    let values: Vec<_> = architectures.into_iter().map(ToString::to_string).collect();
    let operator = if values.is_empty() {
        "DoesNotExist"
    } else {
        "In"
    };
    Requirement {
        key: LABEL.to_owned(),
        operator: operator.to_owned(),
        values,
    }
}

impl Affinity {
    /// The number of terms and requirements, for the size limit of the webhook.
    pub fn size(&self) -> usize {
        let of_term =
            |term: &NodeSelectorTerm| 1 + term.match_expressions.len() + term.match_fields.len();
        let required = self
            .required_terms()
            .unwrap_or_default()
            .iter()
            .map(of_term);
        let preferred = self
            .preferred_terms()
            .iter()
            .map(|term| of_term(&term.preference));
        required.chain(preferred).sum()
    }

    pub(super) fn required_terms(&self) -> Option<&[NodeSelectorTerm]> {
        let required = self.node_affinity.as_ref()?.required.as_ref()?;
        Some(&required.node_selector_terms)
    }

    pub(super) fn preferred_terms(&self) -> &[PreferredTerm] {
        let preferred = self
            .node_affinity
            .as_ref()
            .and_then(|node| node.preferred.as_deref());
        preferred.unwrap_or_default()
    }
}

/// The additions to a pod whose node has to have an architecture of each of the `required` sets. No sets: nothing is required.
pub fn decide(
    required: &[BTreeSet<Architecture>],
    preferred: Vec<Preference>,
    author: AuthorSelection<'_>,
) -> AffinityChange {
    AffinityChange {
        require: required_change(required, author),
        prefer: preferred
            .into_iter()
            .filter(|_| author.is_open_to_preferences())
            .collect(),
    }
}

/// Whether node affinity would have to be added so that only these architectures are selected.
pub fn requires_more(architectures: &BTreeSet<Architecture>, author: AuthorSelection<'_>) -> bool {
    required_change(std::slice::from_ref(architectures), author).is_some()
}

fn required_change(
    required: &[BTreeSet<Architecture>],
    author: AuthorSelection<'_>,
) -> Option<Require> {
    let (first, further) = required.split_first()?;
    let shared = further.iter().fold(first.clone(), |a, b| &a & b);
    let mut require = Require {
        architectures: first.clone(),
        further: further.to_vec(),
        terms: Vec::new(),
    };
    if author.selects_within(&shared) {
        return None;
    }
    if let Some(terms) = author.affinity.and_then(Affinity::required_terms) {
        let expressions = require.expressions();
        // A term without expressions either matches no node (`nodeaffinity.isEmptyNodeSelectorTerm` of
        // k8s.io/component-helpers) or names a single node, as in a DaemonSet's pods. Neither is changed.
        let needs_more = |term: &NodeSelectorTerm| {
            let own = &term.match_expressions;
            let has_all = expressions.iter().all(|one| own.contains(one));
            !own.is_empty() && !has_all && !term.is_within(&shared)
        };
        let open = terms
            .iter()
            .enumerate()
            .filter(|(_, term)| needs_more(term));
        require.terms = open.map(|(index, _)| index).collect();
        if require.terms.is_empty() {
            return None;
        }
    }
    Some(require)
}

#[cfg(test)]
mod tests;
