//! The architectures that a pod's author selects, by node selector or required node affinity. archaware narrows that
//! choice, never widens it, and tells when nothing is left.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::platform::Architecture;

use super::{
    TaintKind,
    affinity::{Affinity, LABELS, NodeSelectorTerm, Requirement},
    taint::tolerates,
};

/// What selects the nodes of a pod.
#[derive(Clone, Copy, Debug)]
pub struct AuthorSelection<'a> {
    /// `spec.nodeSelector`.
    pub node_selector: &'a BTreeMap<String, String>,
    /// `spec.affinity`.
    pub affinity: Option<&'a Affinity>,
}

impl<'a> AuthorSelection<'a> {
    /// Whether none of `architectures` is selected, so that no node can run the pod.
    pub fn excludes_all(&self, architectures: &BTreeSet<Architecture>) -> bool {
        // Terms are `ORed`; a pod without terms may run anywhere.
        let terms = self.terms();
        let is_selected = |architecture: &Architecture| {
            let name = architecture.as_str();
            self.by_node_selector().all(|value| value == name)
                && (terms.is_empty() || terms.iter().any(|term| term.allows(name)))
        };
        !architectures.iter().any(is_selected)
    }

    /// Whether the author tolerates the taint of every architecture that they select by name: then the pod is meant to run
    /// there, whatever its images say.
    pub fn is_tolerated(&self, taint: &TaintKind, tolerations: &[Value]) -> bool {
        let named = self.by_node_selector().map(|value| Some(vec![value]));
        let named = named.chain(self.terms().iter().map(NodeSelectorTerm::named));
        let all: Option<Vec<&str>> = named.collect::<Option<Vec<_>>>().map(|all| all.concat());
        let is_tolerated = |name: &str| {
            let taint = name.parse().ok().map(|named| taint.taint(&named));
            taint.is_some_and(|taint| tolerations.iter().any(|one| tolerates(one, &taint)))
        };
        match all {
            Some(names) => !names.is_empty() && names.into_iter().all(is_tolerated),
            None => tolerations.iter().any(|one| taint.is_tolerated_by(one)),
        }
    }

    /// Whether the node selector names one of `architectures`. It is `ANDed` with the affinity, so nothing more is needed.
    pub(super) fn selects_within(&self, architectures: &BTreeSet<Architecture>) -> bool {
        let is_one = |value: &str| architectures.iter().any(|one| one.as_str() == value);
        self.by_node_selector().next().is_some() && self.by_node_selector().all(is_one)
    }

    /// Whether a preference would have an effect, and the author has none.
    pub(super) fn is_open_to_preferences(&self) -> bool {
        let own = self
            .affinity
            .map(Affinity::preferred_terms)
            .unwrap_or_default();
        let names = |term: &NodeSelectorTerm| term.on_architecture().next().is_some();
        let terms = self.terms();
        // A preference has no effect on a pod that names its node.
        let names_node =
            !terms.is_empty() && terms.iter().all(|term| term.match_expressions.is_empty());
        self.by_node_selector().next().is_none()
            && !own.iter().any(|term| names(&term.preference))
            && !names_node
    }

    /// Whether the node selector or a required term names an architecture.
    pub fn names_architecture(&self) -> bool {
        let mut terms = self.terms().iter();
        self.by_node_selector().next().is_some()
            || terms.any(|term| term.on_architecture().next().is_some())
    }

    fn terms(&self) -> &'a [NodeSelectorTerm] {
        let terms = self.affinity.and_then(Affinity::required_terms);
        terms.unwrap_or_default()
    }

    fn by_node_selector(&self) -> impl Iterator<Item = &'a str> {
        let selector = self.node_selector;
        LABELS
            .iter()
            .filter_map(|label| selector.get(*label))
            .map(String::as_str)
    }
}

/// Whether a requirement is on the label for the architecture, or its deprecated name.
pub fn is_on_architecture(requirement: &Requirement) -> bool {
    LABELS.contains(&requirement.key.as_str())
}

impl NodeSelectorTerm {
    fn on_architecture(&self) -> impl Iterator<Item = &Requirement> {
        let all = self.match_expressions.iter();
        all.filter(|requirement| is_on_architecture(requirement))
    }

    fn allows(&self, architecture: &str) -> bool {
        self.on_architecture().all(|requirement| {
            let named = requirement.values.iter().any(|value| value == architecture);
            match requirement.operator.as_str() {
                "In" => named,
                "NotIn" => !named,
                "DoesNotExist" => false,
                // `Exists`; `Gt` and `Lt` compare numbers.
                _ => true,
            }
        })
    }

    /// The architectures that the term allows; `None` if it does not list them.
    fn named(&self) -> Option<Vec<&str>> {
        let listed = self.on_architecture().find(|one| one.operator == "In")?;
        let values = listed.values.iter().map(String::as_str);
        Some(values.filter(|value| self.allows(value)).collect())
    }

    /// Whether the term allows no architecture but these.
    pub(super) fn is_within(&self, architectures: &BTreeSet<Architecture>) -> bool {
        let is_one = |value: &&str| architectures.iter().any(|one| one.as_str() == *value);
        self.named().is_some_and(|named| named.iter().all(is_one))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_images_fit_the_selection_or_do_not() {
        let term = |operator: &str, values: &[&str]| {
            json!({"matchExpressions": [
                {"key": "kubernetes.io/arch", "operator": operator, "values": values},
                {"key": "zone", "operator": "In", "values": ["a"]},
            ]})
        };
        let required = |terms: &[Value]| json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        let none = json!({});
        for (selector, affinity, excluded) in [
            (json!({}), none.clone(), false),
            (json!({"zone": "a"}), none.clone(), false),
            (json!({"kubernetes.io/arch": "amd64"}), none.clone(), false),
            (json!({"kubernetes.io/arch": "arm64"}), none.clone(), true),
            (
                json!({"beta.kubernetes.io/arch": "arm64"}),
                none.clone(),
                true,
            ),
            (json!({}), required(&[]), false),
            (
                json!({}),
                required(&[term("In", &["amd64", "arm64"])]),
                false,
            ),
            (json!({}), required(&[term("In", &["arm64"])]), true),
            (
                json!({}),
                required(&[term("NotIn", &["amd64", "386"])]),
                true,
            ),
            (json!({}), required(&[term("NotIn", &["arm64"])]), false),
            (json!({}), required(&[term("DoesNotExist", &[])]), true),
            (json!({}), required(&[term("Exists", &[])]), false),
            (
                json!({}),
                required(&[term("In", &["arm64"]), term("In", &["386"])]),
                false,
            ),
            (
                json!({}),
                required(&[term("In", &["arm64"]), json!({})]),
                false,
            ),
            (
                json!({"kubernetes.io/arch": "amd64"}),
                required(&[term("In", &["386"])]),
                true,
            ),
        ] {
            let parsed: BTreeMap<String, String> =
                serde_json::from_value(selector.clone()).unwrap();
            let parsed_affinity: Affinity = serde_json::from_value(affinity.clone()).unwrap();
            let architectures = ["386", "amd64"].map(|name| name.parse().unwrap()).into();
            let author = AuthorSelection {
                node_selector: &parsed,
                affinity: Some(&parsed_affinity),
            };
            let found = author.excludes_all(&architectures);
            assert_eq!(found, excluded, "{selector} {affinity}");
        }
    }

    /// The author selects architectures and tolerates their taints: the pod is meant to run there.
    #[test]
    fn a_selection_is_tolerated_or_not() {
        let taint: TaintKind = TaintKind {
            key: "kubernetes.io/arch".to_owned(),
            effect: super::super::Effect::NoSchedule,
        };
        let arm = json!({"key": "kubernetes.io/arch", "value": "arm64"});
        let all = json!({"operator": "Exists"});
        let term = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "kubernetes.io/arch", "operator": operator, "values": values}]});
        for (selector, terms, tolerations, expected) in [
            (json!({}), json!([]), json!([all]), false),
            (
                json!({"kubernetes.io/arch": "arm64"}),
                json!([]),
                json!([arm]),
                true,
            ),
            (
                json!({"kubernetes.io/arch": "amd64"}),
                json!([]),
                json!([arm]),
                false,
            ),
            (
                json!({"kubernetes.io/arch": "amd64"}),
                json!([]),
                json!([all]),
                true,
            ),
            (
                json!({}),
                json!([term("In", &["arm64"])]),
                json!([arm]),
                true,
            ),
            (
                json!({}),
                json!([term("In", &["arm64", "amd64"])]),
                json!([arm]),
                false,
            ),
            (
                json!({}),
                json!([term("In", &["arm64"]), term("NotIn", &["amd64"])]),
                json!([arm]),
                false,
            ),
            (
                json!({}),
                json!([term("NotIn", &["amd64"])]),
                json!([all]),
                true,
            ),
            (json!({}), json!([term("In", &["arm64"])]), json!([]), false),
        ] {
            let node_selector: BTreeMap<String, String> =
                serde_json::from_value(selector.clone()).unwrap();
            let affinity: Affinity = serde_json::from_value(json!({"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}))
            .unwrap();
            let author = AuthorSelection {
                node_selector: &node_selector,
                affinity: Some(&affinity),
            };
            let found = author.is_tolerated(&taint, tolerations.as_array().unwrap());
            assert_eq!(found, expected, "{selector} {terms} {tolerations}");
        }
    }
}
