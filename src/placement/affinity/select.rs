//! Which nodes a node selector selects, as the scheduler decides it: `nodeaffinity` of k8s.io/component-helpers, and `Requirement.Matches`
//! of k8s.io/apimachinery's `labels`.

use std::collections::BTreeMap;

use super::{NodeSelectorTerm, Requirement};

/// The only field that a node selector can name.
const NAME: &str = "metadata.name";

impl Requirement {
    /// Whether it holds for a node with these labels.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.holds(labels.get(&self.key).map(String::as_str))
    }

    /// Whether it holds for the value of its key. One that the API server would refuse holds for none.
    fn holds(&self, value: Option<&str>) -> bool {
        let is_listed = |value: &str| self.values.iter().any(|one| one == value);
        let integer = |text: &str| text.parse::<i64>().ok();
        let compared = |is_so: fn(&i64, &i64) -> bool| {
            let [bound] = self.values.as_slice() else {
                return false;
            };
            let both = value.and_then(integer).zip(integer(bound));
            both.is_some_and(|(own, bound)| is_so(&own, &bound))
        };
        match self.operator.as_str() {
            "In" => value.is_some_and(is_listed),
            "NotIn" => !self.values.is_empty() && !value.is_some_and(is_listed),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            "Gt" => compared(i64::gt),
            "Lt" => compared(i64::lt),
            _ => false,
        }
    }
}

impl NodeSelectorTerm {
    /// Whether it selects a node. An empty term selects none.
    pub fn selects(&self, labels: &BTreeMap<String, String>, name: &str) -> bool {
        let (mut expressions, mut fields) =
            (self.match_expressions.iter(), self.match_fields.iter());
        let is_empty = self.match_expressions.is_empty() && self.match_fields.is_empty();
        !is_empty
            && expressions.all(|one| one.selects(labels))
            && fields.all(|one| one.key == NAME && one.holds(Some(name)))
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
