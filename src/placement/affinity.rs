//! A pod's node affinity: what is read of it, and what archaware adds. Affinity is what autoscalers go
//! by, and it holds on nodes without a taint, too.
//!
//! Required terms are alternatives, and a node that matches one of them will do: the architectures have
//! to stand in each of them. A term that names an architecture is its author's word and stays.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::platform::Architecture;

use super::decision::Decision;

/// The label that carries a node's architecture, and its older name.
const LABEL: &str = "kubernetes.io/arch";
const OLD_LABEL: &str = "beta.kubernetes.io/arch";

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
    /// Required terms; one of them has to match.
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub required: Option<NodeSelector>,
    /// Preferred terms.
    #[serde(rename = "preferredDuringSchedulingIgnoredDuringExecution")]
    pub preferred: Option<Vec<PreferredTerm>>,
}

/// A node selector.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// Alternatives.
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// One alternative.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements on labels; all have to hold.
    pub match_expressions: Vec<Requirement>,
    /// Requirements on fields: the node's name.
    pub match_fields: Vec<Requirement>,
}

/// A term that is not required.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PreferredTerm {
    /// From 1 to 100.
    pub weight: i64,
    /// What is preferred.
    pub preference: NodeSelectorTerm,
}

/// A requirement on a label.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Requirement {
    /// The label.
    pub key: String,
    /// `In`, `Exists`, …
    pub operator: String,
    /// For `In` and `NotIn`.
    pub values: Vec<String>,
}

/// What archaware adds to a pod's node affinity. Kept with the pod, it can be taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Change {
    /// Architectures that are required.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require: Option<Require>,
    /// Architectures that are preferred.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefer: Vec<Preference>,
}

/// Architectures that are required, and where that is written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Require {
    /// Which; never empty.
    pub architectures: BTreeSet<Architecture>,
    /// The indexes of the terms that get the expression; none when the pod has no terms, and gets one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub terms: Vec<usize>,
}

/// An architecture that is preferred.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preference {
    /// Which.
    pub architecture: Architecture,
    /// From 1 to 100.
    pub weight: u8,
}

/// Where in an affinity stands what archaware has added; each index is what it is when those before it in
/// its list have been removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undo {
    /// Expressions, as (term, expression).
    pub expressions: Vec<(usize, usize)>,
    /// The required term that was made, when others stand beside it.
    pub term: Option<usize>,
    /// The required terms as a whole: archaware's is the only one.
    pub required: bool,
    /// Preferred terms.
    pub preferred: Vec<usize>,
}

impl Change {
    /// Whether nothing is added.
    pub fn is_empty(&self) -> bool {
        self.require.is_none() && self.prefer.is_empty()
    }
}

impl Require {
    /// What is written.
    pub fn expression(&self) -> Requirement {
        expression(self.architectures.iter())
    }
}

impl Preference {
    /// What is written.
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
        let names = |requirement: &Requirement| [LABEL, OLD_LABEL].contains(&&*requirement.key);
        self.match_expressions.iter().any(names)
    }
}

impl Affinity {
    /// How much there is in it: terms and expressions.
    pub fn len(&self) -> usize {
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

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn required_terms(&self) -> Option<&[NodeSelectorTerm]> {
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

/// What to add to the affinity of a pod with this decision. `preferences` are weights by architecture.
pub fn decide(
    decision: &Decision,
    required: bool,
    preferences: &BTreeMap<Architecture, u8>,
    node_selector: &BTreeMap<String, String>,
    affinity: Option<&Affinity>,
) -> Change {
    let Decision::Architectures(architectures) = decision else {
        return Change::default();
    };
    // Whoever selects an architecture has chosen.
    if [LABEL, OLD_LABEL]
        .iter()
        .any(|label| node_selector.contains_key(*label))
    {
        return Change::default();
    }
    let require = required.then(|| require(architectures, affinity)).flatten();
    Change {
        require,
        prefer: prefer(architectures, preferences, affinity),
    }
}

fn require(architectures: &BTreeSet<Architecture>, affinity: Option<&Affinity>) -> Option<Require> {
    // A term without expressions either matches nothing (`nodeaffinity.isEmptyNodeSelectorTerm` of
    // k8s.io/component-helpers) or names its node: a DaemonSet's pod may go nowhere else.
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

fn prefer(
    architectures: &BTreeSet<Architecture>,
    preferences: &BTreeMap<Architecture, u8>,
    affinity: Option<&Affinity>,
) -> Vec<Preference> {
    let own = affinity.map(Affinity::preferred_terms).unwrap_or_default();
    if own.iter().any(|term| term.preference.names_architecture()) {
        return Vec::new();
    }
    // A pod that names its node has no choice.
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

/// Takes what `change` had added out of an affinity, as far as it is still there. Gives where it was.
pub fn undo(affinity: &mut Affinity, change: &Change) -> Undo {
    let mut undo = Undo::default();
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
                // Another webhook may have put a term in front: then it is looked for.
                let elsewhere = 0..terms.len();
                let found = std::iter::once(index).chain(elsewhere).find_map(|index| {
                    let expressions = &terms.get(index)?.match_expressions;
                    // The last one left was not archaware's: without it the term would match nothing.
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
