//! The architectures that a pod's author selects, by node selector or required node affinity. archaware does not change
//! that choice; it tells when the images do not fit it.

use std::collections::{BTreeMap, BTreeSet};

use crate::platform::Architecture;

use super::affinity::{Affinity, LABELS, NodeSelectorTerm, Requirement};

/// Whether the author selects architectures and none of `architectures` is among them, so that no node can run the pod.
pub fn excludes_all(
    node_selector: &BTreeMap<String, String>,
    affinity: Option<&Affinity>,
    architectures: &BTreeSet<Architecture>,
) -> bool {
    let terms = affinity
        .and_then(Affinity::required_terms)
        .unwrap_or_default();
    let allows = |architecture: &Architecture| {
        let name = architecture.as_str();
        let mut selected = LABELS.iter().filter_map(|label| node_selector.get(*label));
        // Terms are `ORed`; a pod without terms may run anywhere.
        selected.all(|value| value == name)
            && (terms.is_empty() || terms.iter().any(|term| allows(term, name)))
    };
    !architectures.iter().any(allows)
}

fn allows(term: &NodeSelectorTerm, architecture: &str) -> bool {
    let on_architecture = |requirement: &&Requirement| LABELS.contains(&requirement.key.as_str());
    let mut own = term.match_expressions.iter().filter(on_architecture);
    own.all(|requirement| {
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
            let found = excludes_all(&parsed, Some(&parsed_affinity), &architectures);
            assert_eq!(found, excluded, "{selector} {affinity}");
        }
    }
}
