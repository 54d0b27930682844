//! The architectures that a pod's author selects, by node selector or required node affinity.
//! archaware only narrows that choice, and reports if no architecture is left.

use std::collections::BTreeMap;

use archaware_platform::Architectures;

use super::{
    affinity::{Affinity, LABELS, NodeSelectorTerm},
    node_set::NodeSet,
    requirement::{Operator, Requirement},
};

/// The node selector and the node affinity that the author of a pod wrote.
#[derive(Clone, Copy, Debug)]
pub struct AuthorNodes<'a> {
    /// `spec.nodeSelector`.
    pub node_selector: &'a BTreeMap<String, String>,
    /// `spec.affinity`.
    pub affinity: Option<&'a Affinity>,
}

impl<'a> AuthorNodes<'a> {
    /// Whether none of `architectures` is selected, so that no node can run the pod.
    pub fn excludes_all(&self, architectures: &Architectures) -> bool {
        self.selected(architectures).is_empty()
    }

    /// The subset of `architectures` that the author selects.
    pub(super) fn selected(&self, architectures: &Architectures) -> Architectures {
        // Terms are `ORed`; a pod without terms may run anywhere.
        let terms = self.terms();
        let is_selected = |name: &str| {
            self.by_node_selector().all(|value| value == name)
                && (terms.is_empty() || terms.iter().any(|term| allows(term, name)))
        };
        let all = architectures.iter();
        let selected = all.filter(|(name, _)| is_selected(name.as_str()));
        Architectures::from_variants(selected.map(|(name, variants)| (name.clone(), variants)))
    }

    /// Whether a node is selected.
    pub fn selects(&self, labels: &BTreeMap<String, String>, name: &str) -> bool {
        let terms = self.terms();
        let mut selector = self.node_selector.iter();
        selector.all(|(key, value)| labels.get(key) == Some(value))
            && (terms.is_empty() || terms.iter().any(|term| term.selects(labels, name)))
    }

    /// The labels by which nodes are selected.
    pub fn label_keys(&self) -> impl Iterator<Item = &'a str> {
        let expressions = self.terms().iter().flat_map(|term| &term.match_expressions);
        let of_terms = expressions.map(|expression| expression.key.as_str());
        self.node_selector
            .keys()
            .map(String::as_str)
            .chain(of_terms)
    }

    /// Whether there are required terms.
    pub fn has_terms(&self) -> bool {
        !self.terms().is_empty()
    }

    /// Whether a term selects nodes by their name.
    pub fn names_fields(&self) -> bool {
        let mut terms = self.terms().iter();
        terms.any(|term| !term.match_fields.is_empty())
    }

    /// Whether `admits` accepts every architecture that the author selects: then the pod is meant
    /// to run there, whatever its images are. If the author does not list them, `admits` gets
    /// `None`, which stands for all architectures.
    pub fn is_admitted(&self, admits: impl Fn(Option<&str>) -> bool) -> bool {
        // The node selector and the terms are `ANDed`, the terms `ORed`.
        if let Some(name) = self.by_node_selector().next() {
            return admits(Some(name));
        }
        let named: Option<Vec<_>> = self.terms().iter().map(named).collect();
        match named {
            Some(names) => names.iter().flatten().all(|name| admits(Some(name))),
            None => admits(None),
        }
    }

    /// Whether the node selector names one of `architectures`. It is `ANDed` with the affinity, so
    /// nothing more is needed.
    pub(super) fn selects_within(&self, architectures: &Architectures) -> bool {
        let is_one = |value: &str| architectures.contains(value);
        self.by_node_selector().next().is_some() && self.by_node_selector().all(is_one)
    }

    /// Whether the author prefers no architecture, and a preferred architecture would have an
    /// effect.
    pub(super) fn is_open_to_preferences(&self) -> bool {
        let preferred = self
            .affinity
            .map(Affinity::preferred_terms)
            .unwrap_or_default();
        let names = |term: &NodeSelectorTerm| architectures_of(term).next().is_some();
        self.by_node_selector().next().is_none()
            && !preferred.iter().any(|term| names(&term.preference))
            && !self.names_nodes()
    }

    /// Whether the terms name single nodes, as in a DaemonSet's pods: a preference has no effect
    /// then.
    pub fn names_nodes(&self) -> bool {
        let terms = self.terms();
        !terms.is_empty() && terms.iter().all(|term| term.match_expressions.is_empty())
    }

    /// Whether the node selector or a required term names an architecture.
    pub fn names_architecture(&self) -> bool {
        let mut terms = self.terms().iter();
        self.by_node_selector().next().is_some()
            || terms.any(|term| architectures_of(term).next().is_some())
    }

    /// The nodes that the node selector and one of the terms select. Ignores `matchFields`, so the
    /// set may contain more nodes.
    pub(super) fn nodes(&self) -> NodeSet {
        let selector = self.node_selector.iter();
        let selector =
            selector.map(|(key, value)| Requirement::new(key, Operator::In, vec![value.clone()]));
        let selector: Vec<Requirement> = selector.collect();
        if self.terms().is_empty() {
            return NodeSet::all_of(selector);
        }
        let with_selector = |term: &NodeSelectorTerm| {
            let requirements = selector.iter().chain(&term.match_expressions);
            requirements.cloned().collect()
        };
        NodeSet::any_of(self.terms().iter().map(with_selector))
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

/// The requirements of a term on the architecture.
fn architectures_of(term: &NodeSelectorTerm) -> impl Iterator<Item = &Requirement> {
    let expressions = term.match_expressions.iter();
    expressions.filter(|requirement| is_on_architecture(requirement))
}

fn allows(term: &NodeSelectorTerm, architecture: &str) -> bool {
    architectures_of(term).all(|requirement| {
        let named = requirement.values.iter().any(|value| value == architecture);
        match requirement.operator {
            Operator::In => named,
            Operator::NotIn => !named,
            Operator::DoesNotExist => false,
            // `Gt` and `Lt` are not evaluated, because no architecture is a number.
            Operator::Exists | Operator::Gt | Operator::Lt | Operator::Unknown(_) => true,
        }
    })
}

/// The architectures that a term allows; `None` if it does not list them.
fn named(term: &NodeSelectorTerm) -> Option<Vec<&str>> {
    let listed = architectures_of(term).find(|requirement| requirement.operator == Operator::In)?;
    let values = listed.values.iter().map(String::as_str);
    Some(values.filter(|value| allows(term, value)).collect())
}

/// Whether a term allows only architectures of this set; `false` if it lists none.
pub(super) fn is_within(term: &NodeSelectorTerm, architectures: &Architectures) -> bool {
    let is_one = |value: &&str| architectures.contains(value);
    named(term).is_some_and(|named| named.iter().all(is_one))
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
            let architectures = "386,amd64".parse().unwrap();
            let author = AuthorNodes {
                node_selector: &parsed,
                affinity: Some(&parsed_affinity),
            };
            let found = author.excludes_all(&architectures);
            assert_eq!(found, excluded, "{selector} {affinity}");
        }
    }

    /// The author selects architectures whose taints the pod tolerates: it is meant to run there.
    #[test]
    fn a_selection_is_admitted_or_not() {
        let term = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "kubernetes.io/arch", "operator": operator, "values": values}]});
        let zone = json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}]});
        let arm = json!({"kubernetes.io/arch": "arm64"});
        for (selector, terms, expected) in [
            (json!({}), json!([zone]), false),
            (arm.clone(), json!([]), true),
            (json!({"kubernetes.io/arch": "amd64"}), json!([]), false),
            (arm.clone(), json!([zone]), true),
            (arm, json!([term("In", &["amd64", "arm64"])]), true),
            (json!({}), json!([term("In", &["arm64"])]), true),
            (json!({}), json!([term("In", &["arm64", "amd64"])]), false),
            (json!({}), json!([term("In", &["arm64"]), zone]), false),
            (json!({}), json!([term("NotIn", &["amd64"])]), false),
        ] {
            let node_selector: BTreeMap<String, String> =
                serde_json::from_value(selector.clone()).unwrap();
            let affinity: Affinity = serde_json::from_value(json!({"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}))
            .unwrap();
            let author = AuthorNodes {
                node_selector: &node_selector,
                affinity: Some(&affinity),
            };
            let only_arm = |name: Option<&str>| name == Some("arm64");
            assert_eq!(author.is_admitted(only_arm), expected, "{selector} {terms}");
            assert!(author.is_admitted(|_| true), "{selector} {terms}");
        }
    }
}
