//! Node affinity of a pod: the parts that archaware reads and the parts that it adds. Autoscalers follow affinity,
//! and it also applies to nodes without a taint.
//!
//! Required terms are `ORed`, so the architectures must be added to each of them. A term that names an architecture was
//! chosen by the pod's author and is not changed.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::platform::Architecture;

use super::decision::Decision;

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
    /// The architectures; never empty.
    pub architectures: BTreeSet<Architecture>,
    /// Indexes of the terms that get the expression. Empty when the pod has no terms and gets a new one.
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

/// Where archaware's additions are in an affinity. Each index applies after the removals before it in the same list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AffinityUndo {
    /// Expressions, as (term, expression).
    pub expressions: Vec<(usize, usize)>,
    /// The required term that archaware added beside others.
    pub term: Option<usize>,
    /// Whether archaware's term is the only required term, so that all of `required` is removed.
    pub required: bool,
    /// Indexes of preferred terms.
    pub preferred: Vec<usize>,
}

impl AffinityChange {
    /// Whether nothing is added.
    pub fn is_empty(&self) -> bool {
        self.require.is_none() && self.prefer.is_empty()
    }
}

impl Require {
    /// The expression to write.
    pub fn expression(&self) -> Requirement {
        expression(self.architectures.iter())
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

fn expression<'a>(architectures: impl IntoIterator<Item = &'a Architecture>) -> Requirement {
    Requirement {
        key: LABEL.to_owned(),
        operator: "In".to_owned(),
        values: architectures.into_iter().map(ToString::to_string).collect(),
    }
}

impl NodeSelectorTerm {
    fn names_architecture(&self) -> bool {
        let names = |requirement: &Requirement| LABELS.contains(&&*requirement.key);
        self.match_expressions.iter().any(names)
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

    fn preferred_terms(&self) -> &[PreferredTerm] {
        let preferred = self
            .node_affinity
            .as_ref()
            .and_then(|node| node.preferred.as_deref());
        preferred.unwrap_or_default()
    }
}

/// The affinity to add to a pod for this decision. `preferences` holds weights by architecture.
pub fn decide(
    decision: &Decision,
    required: bool,
    preferences: &BTreeMap<Architecture, u8>,
    node_selector: &BTreeMap<String, String>,
    affinity: Option<&Affinity>,
) -> AffinityChange {
    let Decision::Architectures(architectures) = decision else {
        return AffinityChange::default();
    };
    // The pod's author selected an architecture.
    if LABELS
        .iter()
        .any(|label| node_selector.contains_key(*label))
    {
        return AffinityChange::default();
    }
    let require = required
        .then(|| required_change(architectures, affinity))
        .flatten();
    AffinityChange {
        require,
        prefer: preferred_change(architectures, preferences, affinity),
    }
}

fn required_change(
    architectures: &BTreeSet<Architecture>,
    affinity: Option<&Affinity>,
) -> Option<Require> {
    // A term without expressions either matches no node (`nodeaffinity.isEmptyNodeSelectorTerm` of
    // k8s.io/component-helpers) or names a single node, as in a DaemonSet's pods. Neither is changed.
    let is_open =
        |term: &NodeSelectorTerm| !term.match_expressions.is_empty() && !term.names_architecture();
    let terms = match affinity.and_then(Affinity::required_terms) {
        None => Vec::new(),
        Some(terms) => {
            let open = terms.iter().enumerate().filter(|(_, term)| is_open(term));
            let open: Vec<usize> = open.map(|(index, _)| index).collect();
            if open.is_empty() {
                return None;
            }
            open
        }
    };
    Some(Require {
        architectures: architectures.clone(),
        terms,
    })
}

fn preferred_change(
    architectures: &BTreeSet<Architecture>,
    preferences: &BTreeMap<Architecture, u8>,
    affinity: Option<&Affinity>,
) -> Vec<Preference> {
    let own = affinity.map(Affinity::preferred_terms).unwrap_or_default();
    if own.iter().any(|term| term.preference.names_architecture()) {
        return Vec::new();
    }
    // A preference has no effect on a pod that names its node.
    let required = affinity.and_then(Affinity::required_terms);
    if required.is_some_and(|terms| terms.iter().all(|term| term.match_expressions.is_empty())) {
        return Vec::new();
    }
    let wanted = preferences
        .iter()
        .filter(|(architecture, weight)| **weight > 0 && architectures.contains(*architecture));
    wanted
        .map(|(architecture, weight)| Preference {
            architecture: architecture.clone(),
            weight: *weight,
        })
        .collect()
}

/// Removes what `change` added, as far as it is still there. Returns where it was.
pub fn undo(affinity: &mut Affinity, change: &AffinityChange) -> AffinityUndo {
    let mut undo = AffinityUndo::default();
    let Some(node) = &mut affinity.node_affinity else {
        return undo;
    };
    if let (Some(own), Some(required)) = (&change.require, &mut node.required) {
        let (expression, terms) = (own.expression(), &mut required.node_selector_terms);
        if own.terms.is_empty() {
            let made = NodeSelectorTerm {
                match_expressions: vec![expression],
                match_fields: Vec::new(),
            };
            undo.required = *terms == [made.clone()];
            if undo.required {
                node.required = None;
            } else if let Some(index) = terms.iter().position(|term| *term == made) {
                terms.remove(index);
                undo.term = Some(index);
            }
        } else {
            for &index in &own.terms {
                // Another webhook may have inserted a term before it, so all terms are searched.
                let elsewhere = 0..terms.len();
                let found = std::iter::once(index).chain(elsewhere).find_map(|index| {
                    let expressions = &terms.get(index)?.match_expressions;
                    // A single remaining expression was written by the author: without it the term would match no
                    // node.
                    let is_one_of_several = expressions.len() > 1;
                    let at = expressions.iter().rposition(|one| *one == expression);
                    Some((index, at.filter(|_| is_one_of_several)?))
                });
                if let Some((index, at)) = found
                    && let Some(term) = terms.get_mut(index)
                {
                    term.match_expressions.remove(at);
                    undo.expressions.push((index, at));
                }
            }
        }
    }
    if let Some(preferred) = &mut node.preferred {
        for own in &change.prefer {
            let own = own.term();
            if let Some(index) = preferred.iter().rposition(|term| *term == own) {
                preferred.remove(index);
                undo.preferred.push(index);
            }
        }
    }
    undo
}

#[cfg(test)]
mod tests;
