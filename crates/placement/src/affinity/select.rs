//! Which nodes a node selector term selects, as the scheduler decides it: `nodeaffinity` of
//! k8s.io/component-helpers.

use std::collections::BTreeMap;

use super::NodeSelectorTerm;

/// The only field that a node selector can name.
const NAME: &str = "metadata.name";

impl NodeSelectorTerm {
    /// Whether it selects a node. An empty term selects none.
    pub fn selects(&self, labels: &BTreeMap<String, String>, name: &str) -> bool {
        let (mut expressions, mut fields) =
            (self.match_expressions.iter(), self.match_fields.iter());
        let is_empty = self.match_expressions.is_empty() && self.match_fields.is_empty();
        !is_empty
            && expressions.all(|expression| expression.selects(labels))
            && fields.all(|field| field.key == NAME && field.holds(Some(name)))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn every_operator() {
        let labels = [("zone", "a"), ("cpus", "8"), ("flag", "")];
        let labels = labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        let selects = |term: Value| {
            let term: NodeSelectorTerm = serde_json::from_value(term).unwrap();
            term.selects(&labels, "node")
        };
        for (key, operator, values, expected) in [
            ("zone", "In", &["a", "b"][..], true),
            ("zone", "In", &["b"], false),
            ("zone", "In", &[], false),
            ("other", "In", &["a"], false),
            ("zone", "NotIn", &["a"], false),
            ("zone", "NotIn", &["b"], true),
            ("other", "NotIn", &["b"], true),
            ("other", "NotIn", &[], false),
            ("flag", "Exists", &[], true),
            ("other", "Exists", &[], false),
            ("other", "DoesNotExist", &[], true),
            ("zone", "DoesNotExist", &[], false),
            ("cpus", "Gt", &["4"], true),
            ("cpus", "Gt", &["8"], false),
            ("cpus", "Lt", &["9"], true),
            ("cpus", "Lt", &["8"], false),
            ("cpus", "Gt", &["4", "5"], false),
            ("cpus", "Gt", &["four"], false),
            ("zone", "Gt", &["4"], false),
            ("other", "Lt", &["4"], false),
            ("zone", "in", &["a"], false),
        ] {
            let term =
                json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]});
            assert_eq!(selects(term), expected, "{key} {operator} {values:?}");
        }
        let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
        let other = json!({"key": "other", "operator": "Exists"});
        let field =
            |name: &str| json!({"key": "metadata.name", "operator": "In", "values": [name]});
        for (term, expected) in [
            (json!({}), false),
            (json!({"matchExpressions": [zone, other]}), false),
            (json!({"matchFields": [field("node")]}), true),
            (json!({"matchFields": [field("other")]}), false),
            (
                json!({"matchExpressions": [zone], "matchFields": [field("node")]}),
                true,
            ),
            (
                json!({"matchExpressions": [other], "matchFields": [field("node")]}),
                false,
            ),
            (
                json!({"matchFields": [{"key": "spec.x", "operator": "Exists"}]}),
                false,
            ),
        ] {
            assert_eq!(selects(term.clone()), expected, "{term}");
        }
    }
}
