//! Rules of image compatibility documents mean what they mean to Node Feature Discovery (NFD)
//! itself.

use std::collections::{BTreeMap, BTreeSet};

use archaware::selection::compatibility::{
    CompatibilityDocument, Expression, NodeFacts, NodeFeatures, RuleKeys, WrittenExpression,
};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use serde_json::{Map, Value, json};
use testsupport::servers::node_feature_discovery::{self as nfd, Evaluated};

const DOCUMENTS: usize = 4_000;

/// Numbers, versions, and what is neither.
fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "-?[0-4]",
        4 => "v?[0-3](\\.[0-3]){1,2}(-rc\\.1|-18-amd64|\\+b)?",
        1 => "true|false",
        1 => "[A-C]|0?1\\.x|",
    ]
}

fn values(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(value(), count)
}

/// Each operator with as many values as it takes, for the most part, and a type.
fn expression() -> impl Strategy<Value = Value> {
    let written = prop_oneof![
        6 => (prop::sample::select(vec!["In", "NotIn"]), values(1..4)),
        3 => (Just("InRegexp"), prop::collection::vec("\\^?[0-3A-C.]\\.?[0-3*]?\\$?", 1..3)),
        8 => (prop::sample::select(vec!["Exists", "DoesNotExist", "IsTrue", "IsFalse", ""]), values(0..1)),
        8 => (prop::sample::select(vec!["Gt", "Ge", "Lt", "Le"]), values(1..2)),
        5 => (prop::sample::select(vec!["GtLt", "GeLe"]), values(2..3)),
        1 => ("[A-Z][a-z]{1,2}|Any|Gte|Exists|Gt|GtLt|In".prop_map(|name| &*name.leak()), values(0..3)),
    ];
    let value_type = prop::sample::select(vec!["", "", "version", "version", "number"]);
    (written, value_type).prop_map(|((operator, values), value_type)| {
        let mut expression = json!({"op": operator});
        if !values.is_empty() {
            expression["value"] = json!(values);
        }
        if !value_type.is_empty() {
            expression["type"] = json!(value_type);
        }
        expression
    })
}

fn condition() -> impl Strategy<Value = Value> {
    let features = [
        "test.flags",
        "test.attributes",
        "test.instances",
        "test.all",
        "Test.Attributes",
        "test.none",
        "test",
        "rule.matched",
    ];
    (
        prop::sample::select(features.to_vec()),
        prop::option::weighted(
            0.8,
            prop::collection::btree_map("[A-C]", expression(), 0..3),
        ),
        prop::option::weighted(0.2, expression()),
    )
        .prop_map(|(feature, elements, name)| {
            let mut condition = json!({"feature": feature});
            if let Some(elements) = elements {
                condition["matchExpressions"] = json!(elements);
            }
            if let Some(name) = name {
                condition["matchName"] = name;
            }
            condition
        })
}

fn conditions() -> impl Strategy<Value = Vec<Value>> {
    prop::collection::vec(condition(), 0..3)
}

fn rule() -> impl Strategy<Value = Value> {
    (
        conditions(),
        prop::option::weighted(0.3, prop::collection::vec(conditions(), 1..3)),
    )
        .prop_map(|(all, any)| {
            let mut rule = json!({"name": "r", "matchFeatures": all});
            if let Some(any) = any {
                let any = any.into_iter().map(|all| json!({"matchFeatures": all}));
                rule["matchAny"] = any.collect();
            }
            rule
        })
}

fn rules(names: &'static str) -> impl Strategy<Value = Vec<Value>> {
    let variables = prop::collection::btree_map(names, value(), 0..3);
    let rule = (rule(), prop::option::weighted(0.3, variables));
    let rule = rule.prop_map(|(mut rule, variables)| {
        if let Some(variables) = variables {
            rule["vars"] = json!(variables);
        }
        rule
    });
    prop::collection::vec(rule, 0..3)
}

/// Entries. Rules read the variables A to C, which only the last entry sets: those of other entries
/// count as unknown here, and so does whether some variable has a name.
fn document() -> impl Strategy<Value = String> {
    let before = prop::collection::vec(rules("[D-E]"), 0..2);
    (before, rules("[A-C]")).prop_map(|(mut before, last)| {
        before.push(last);
        let entries: Vec<_> = before.iter().map(|rules| json!({"rules": rules})).collect();
        let mut document = json!({"version": "v1alpha1", "compatibilities": entries});
        visit(&mut document, &mut |condition| {
            if condition.get("feature") == Some(&json!("rule.matched")) {
                condition.remove("matchName");
            }
        });
        document.to_string()
    })
}

/// Calls a function with each object in a document.
fn visit(value: &mut Value, act: &mut impl FnMut(&mut Map<String, Value>)) {
    match value {
        Value::Object(object) => {
            act(object);
            object.values_mut().for_each(|value| visit(value, act));
        }
        Value::Array(all) => all.iter_mut().for_each(|value| visit(value, act)),
        _ => {}
    }
}

/// Whether an expression means nothing here.
fn is_invalid(expression: &Map<String, Value>) -> bool {
    let text = |key: &str| {
        expression
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let values = expression.get("value").and_then(Value::as_array);
    let values = values.into_iter().flatten().filter_map(Value::as_str);
    let written = WrittenExpression {
        operator: text("op"),
        values: &values.map(str::to_owned).collect::<Vec<_>>(),
        value_type: text("type"),
    };
    Expression::new(RuleKeys::Features, written).is_err()
}

/// What means nothing here means nothing to NFD: it ends with an error when it comes to it.
fn check_invalid(documents: impl Iterator<Item = String>) {
    let mut invalid = BTreeSet::new();
    for text in documents {
        visit(&mut serde_json::from_str(&text).unwrap(), &mut |object| {
            if object.contains_key("op") && is_invalid(object) {
                invalid.insert(Value::Object(object.clone()).to_string());
            }
        });
    }
    let ask = |expression: &String| {
        let expression: Value = serde_json::from_str(expression).unwrap();
        let condition = json!({"feature": "test.a", "matchExpressions": {"A": expression}});
        let rules = [json!({"name": "r", "matchFeatures": [condition]})];
        let document = json!({"version": "v1alpha1", "compatibilities": [{"rules": rules}]});
        let node =
            json!({"flags": {}, "instances": {}, "attributes": {"a": {"elements": {"A": "1"}}}});
        (document.to_string(), vec![node])
    };
    let questions: Vec<_> = invalid.iter().map(ask).collect();
    let answers = nfd::evaluate(&questions);
    for (expression, answer) in invalid.iter().zip(answers) {
        assert!(!answer[0].error.is_empty(), "{expression}: {answer:?}");
    }
    println!("{} expressions mean nothing", invalid.len());
    assert!(invalid.len() > 100);
}

/// The features of a node, named without what they begin with.
fn features() -> impl Strategy<Value = Value> {
    let names = || prop::collection::btree_set("[A-C]", 0..3);
    let attributes = || prop::collection::btree_map("[A-C]", value(), 0..4);
    let instances = || prop::collection::vec(attributes(), 0..3);
    (
        [names(), names()],
        [attributes(), attributes()],
        [instances(), instances()],
    )
        .prop_map(|(names, attributes, instances)| {
            let flags = names.map(|names: BTreeSet<String>| {
                let elements = names.into_iter().map(|name| (name, json!({})));
                json!({"elements": elements.collect::<Map<_, _>>()})
            });
            let attributes =
                attributes.map(|all: BTreeMap<String, String>| json!({"elements": all}));
            let instances = instances.map(|all: Vec<BTreeMap<String, String>>| {
                let elements = all.iter().map(|one| json!({"attributes": one}));
                json!({"elements": elements.collect::<Vec<_>>()})
            });
            let both = |[one, all]: [Value; 2], name: &str| json!({name: one, "all": all});
            json!({
                "flags": both(flags, "flags"),
                "attributes": both(attributes, "attributes"),
                "instances": both(instances, "instances"),
            })
        })
}

/// The same with whole names, as `NodeFeature` objects have them.
fn named(features: &Value) -> NodeFeatures {
    let kinds = features.as_object().unwrap().iter().map(|(kind, all)| {
        let all = all.as_object().unwrap().iter();
        let all = all.map(|(name, found)| (format!("test.{name}"), found.clone()));
        (kind.clone(), Value::Object(all.collect()))
    });
    serde_json::from_value(Value::Object(kinds.collect())).unwrap()
}

#[test]
fn rules_mean_what_they_mean_to_nfd() {
    let mut runner = TestRunner::deterministic();
    let question = (document(), prop::collection::vec(features(), 1..4));
    let questions: Vec<(String, Vec<Value>)> = (0..DOCUMENTS)
        .map(|_| question.new_tree(&mut runner).unwrap().current())
        .collect();
    check_invalid(questions.iter().map(|(text, _)| text.clone()));
    let answers = nfd::evaluate(&questions);
    assert_eq!(answers.len(), DOCUMENTS);
    let labels = BTreeMap::new();
    let (mut compared, mut holding, mut differing) = (0, 0, Vec::new());
    for ((text, nodes), answers) in questions.iter().zip(answers) {
        let document = CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes());
        let document = document.unwrap_or_else(|error| panic!("{error}: {text}"));
        for (node, Evaluated { holds, error }) in nodes.iter().zip(answers) {
            // A value that cannot be compared ends NFD's evaluation of the document. Here it ends
            // that of the rule.
            let Some(mut expected) = holds.filter(|_| error.is_empty()) else {
                continue;
            };
            // NFD may not come to an expression that means nothing. Here its rule holds nowhere.
            for (entry, expected) in document.entries.iter().zip(&mut expected) {
                *expected &= entry.rules.iter().all(|rule| rule.invalid.is_none());
            }
            let features = named(node);
            let fits = |features: &NodeFeatures| -> Vec<bool> {
                let facts = NodeFacts {
                    labels: &labels,
                    features: Some(features),
                };
                let entries = document.entries.iter();
                entries.map(|entry| entry.fits(facts)).collect()
            };
            let found = fits(&features);
            // What rules do not read makes no difference.
            assert_eq!(
                found,
                fits(&features.read_by(|feature| document.features.elements(feature))),
                "{text}\n{node}"
            );
            compared += 1;
            holding += usize::from(expected.contains(&true));
            if found != expected {
                differing.push(format!("{text}\n{node}\nhere {found:?}, NFD {expected:?}"));
            }
        }
    }
    println!("{compared} documents on nodes compared, {holding} with an entry that holds");
    let shortest = differing.iter().min_by_key(|text| text.len());
    assert!(
        differing.is_empty(),
        "{} of {compared} differ, the shortest:\n{}",
        differing.len(),
        shortest.unwrap()
    );
    assert!(compared > DOCUMENTS && holding > DOCUMENTS / 8);
}
