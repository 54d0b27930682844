//! Compares the evaluation of whole documents of Node Feature Discovery with a second interpreter,
//! which evaluates the generated rules without parsing a document.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::selection::compatibility::NodeFacts;

/// The only feature that the nodes have; conditions on another feature never hold.
const FEATURE: &str = "cpu.topology";
const UNKNOWN: &str = "cpu.unknown";

/// An operator and its values.
type Written = (&'static str, Vec<String>);

#[derive(Clone, Debug)]
struct Condition {
    feature: &'static str,
    elements: BTreeMap<String, Written>,
    name: Option<Written>,
}

#[derive(Clone, Debug)]
struct Rule {
    all: Vec<Condition>,
    any: Vec<Vec<Condition>>,
}

/// The result of an operator for a value; `found` is `None` if the key is missing.
fn holds((op, values): &Written, found: Option<&str>) -> bool {
    let Some(found) = found else {
        return *op == "DoesNotExist";
    };
    let number = |text: &str| text.parse::<i64>().ok();
    let compare = |comparison: fn(&i64, &i64) -> bool| {
        let limit = values.first().and_then(|value| number(value));
        number(found)
            .zip(limit)
            .is_some_and(|(found, limit)| comparison(&found, &limit))
    };
    let is_in = values.iter().any(|value| value == found);
    match *op {
        "In" | "InRegexp" => is_in,
        "NotIn" => !is_in,
        "Exists" => true,
        "Gt" => compare(i64::gt),
        "Lt" => compare(i64::lt),
        "IsTrue" => found == "true",
        "IsFalse" => found == "false",
        _ => false,
    }
}

impl Condition {
    fn holds(&self, node: &BTreeMap<String, String>) -> bool {
        let value = |key: &String| node.get(key).map(String::as_str);
        let mut elements = self.elements.iter();
        let by_name = self.name.as_ref().is_none_or(|written| {
            let mut names = node.keys();
            names.any(|name| holds(written, Some(name)))
        });
        self.feature == FEATURE
            && by_name
            && elements.all(|(key, expression)| holds(expression, value(key)))
    }

    fn to_json(&self) -> Value {
        let written = |(op, values): &Written| match (*op, values.as_slice()) {
            ("InRegexp", values) => {
                let values: Vec<_> = values.iter().map(|value| format!("^{value}$")).collect();
                json!({ "op": op, "value": values })
            }
            (_, []) => json!({ "op": op }),
            (_, values) => json!({ "op": op, "value": values }),
        };
        let elements = self.elements.iter();
        let elements: serde_json::Map<_, _> = elements
            .map(|(key, expression)| (key.clone(), written(expression)))
            .collect();
        let mut condition = json!({ "feature": self.feature, "matchExpressions": elements });
        if let Some(name) = &self.name {
            condition["matchName"] = written(name);
        }
        condition
    }
}

impl Rule {
    fn holds(&self, node: &BTreeMap<String, String>) -> bool {
        let all_hold = |list: &[Condition]| list.iter().all(|condition| condition.holds(node));
        let any_holds = self.any.is_empty() || self.any.iter().any(|list| all_hold(list));
        any_holds && all_hold(&self.all)
    }

    fn to_json(&self) -> Value {
        let list = |conditions: &[Condition]| -> Vec<Value> {
            conditions.iter().map(Condition::to_json).collect()
        };
        let alternatives: Vec<_> = self
            .any
            .iter()
            .map(|conditions| json!({ "matchFeatures": list(conditions) }))
            .collect();
        json!({ "matchFeatures": list(&self.all), "matchAny": alternatives })
    }
}

fn values() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec("[0-3]|true|false", 1..3)
}

fn written() -> impl Strategy<Value = Written> {
    prop_oneof![
        (
            prop::sample::select(vec!["In", "NotIn", "InRegexp"]),
            values()
        ),
        (
            prop::sample::select(vec!["Gt", "Lt"]),
            "[0-3]".prop_map(|value| vec![value])
        ),
        (
            prop::sample::select(vec!["Exists", "DoesNotExist", "IsTrue", "IsFalse"]),
            Just(Vec::new())
        ),
    ]
}

fn on_names() -> impl Strategy<Value = Written> {
    let names = prop::collection::vec("[a-c]", 1..3);
    (prop::sample::select(vec!["In", "NotIn", "InRegexp"]), names)
}

fn conditions(most: usize) -> impl Strategy<Value = Vec<Condition>> {
    let parts = (
        prop::sample::select(vec![FEATURE, FEATURE, FEATURE, UNKNOWN]),
        prop::collection::btree_map("[a-c]", written(), 0..3),
        prop::option::of(on_names()),
    );
    let condition = parts.prop_map(|(feature, elements, name)| Condition {
        feature,
        elements,
        name,
    });
    prop::collection::vec(condition, 0..most)
}

fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let rule = (conditions(2), prop::collection::vec(conditions(3), 0..3));
    prop::collection::vec(rule.prop_map(|(all, any)| Rule { all, any }), 0..3)
}

proptest! {
    /// Rules, alternatives, names, and expressions on elements that a node has or lacks.
    #[test]
    fn documents_mean_what_they_say(
        entries in prop::collection::vec(rules(), 1..3),
        nodes in prop::collection::vec(prop::collection::btree_map("[a-c]", "[0-3]|true|false", 1..4), 1..4),
    ) {
        let entry = |rules: &Vec<Rule>| {
            let rules: Vec<_> = rules.iter().map(Rule::to_json).collect();
            json!({ "tag": "t", "rules": rules })
        };
        let text = json!({ "compatibilities": entries.iter().map(entry).collect::<Vec<_>>() });
        let document = CompatibilityDocument::parse(RuleKeys::Features, text.to_string().as_bytes()).unwrap();
        let labels = BTreeMap::new();
        for node in &nodes {
            let features = json!({ "attributes": { FEATURE: { "elements": node } } });
            let features = serde_json::from_value(features).unwrap();
            let facts = NodeFacts { labels: &labels, features: Some(&features) };
            let found: Vec<_> = document.entries.iter().map(|entry| entry.rules.iter().all(|rule| rule.holds(facts))).collect();
            let expected: Vec<_> = entries.iter().map(|rules| rules.iter().all(|rule| rule.holds(node))).collect();
            prop_assert_eq!(found, expected, "{} {:?}", text, node);
        }
    }
}
