use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::placement::affinity::NodeSelectorTerm;

type Labels = BTreeMap<String, String>;

/// Key, operator and values.
type Condition<'a> = (&'a str, &'a str, &'a [&'a str]);

fn document(entries: &[(&str, i64, &[Condition<'_>])]) -> CompatibilityDocument {
    let entries = entries.iter().map(|(tag, weight, expressions)| {
        let expressions = expressions.iter().map(|(key, op, value)| serde_json::json!({"key": key, "op": op, "value": value}));
        let rule = serde_json::json!({"matchFeatures": [{"matchExpressions": expressions.collect::<Vec<_>>()}]});
        serde_json::json!({"tag": tag, "weight": weight, "rules": [rule]})
    });
    let text = serde_json::json!({"compatibilities": entries.collect::<Vec<_>>()}).to_string();
    CompatibilityDocument::parse(DocumentFormat::Labels, text.as_bytes()).unwrap()
}

fn labels(text: &str) -> Labels {
    let pairs = text
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn groups(all: &[Labels]) -> Vec<NodeGroup<'_>> {
    let group = |labels| NodeGroup {
        facts: NodeFacts {
            labels,
            features: None,
        },
        count: 1,
    };
    all.iter().map(group).collect()
}

#[test]
fn the_best_that_fits_is_chosen() {
    let gpu: Condition<'_> = ("gpu", "Exists", &[]);
    let fast: Condition<'_> = ("cpu", "In", &["fast", "faster"]);
    let big: Condition<'_> = ("memory", "Gte", &["64"]);
    let document = document(&[
        ("any", 0, &[]),
        ("fast", 5, &[fast]),
        ("gpu", 9, &[gpu, big]),
        ("also-fast", 5, &[fast]),
        ("never", -1, &[]),
    ]);
    for (nodes, chosen, on) in [
        (vec![""], "any", 1),
        (vec!["cpu=slow", "cpu=fast"], "fast", 1),
        (vec!["cpu=faster", "cpu=fast", "gpu=a"], "fast", 2),
        (vec!["cpu=fast gpu=a memory=64", "gpu=b memory=8"], "gpu", 1),
    ] {
        let nodes: Vec<_> = nodes.into_iter().map(labels).collect();
        let choice = document.choose(&groups(&nodes)).unwrap();
        assert_eq!(
            (&*choice.entry.tag, choice.groups.len()),
            (chosen, on),
            "{nodes:?}"
        );
    }
    let requirements = |nodes: &[Labels]| {
        let groups = groups(nodes);
        let choice = document.choose(&groups).unwrap();
        serde_json::json!(choice.requirements(DocumentFormat::Labels).unwrap()).to_string()
    };
    assert_eq!(
        requirements(&[labels("gpu=a memory=64")]),
        r#"[{"key":"gpu","operator":"Exists"},{"key":"memory","operator":"Gt","values":["63"]}]"#
    );
    assert_eq!(requirements(&[labels("")]), "[]");
}

#[test]
fn what_fits_nowhere_is_explained() {
    let document = document(&[
        ("gpu", 1, &[("gpu", "Exists", &[])]),
        ("odd", 0, &[("gpu", "Near", &[])]),
        ("never", -1, &[]),
    ]);
    let (one, two) = (labels("a=b"), labels("c=d"));
    let facts = |labels| NodeFacts {
        labels,
        features: None,
    };
    let groups = [
        NodeGroup {
            facts: facts(&one),
            count: 3,
        },
        NodeGroup {
            facts: facts(&two),
            count: 4,
        },
    ];
    let passed_over = |tag: &str, failed: &[(&str, usize)]| PassedOver {
        tag: tag.to_owned(),
        failed: failed
            .iter()
            .map(|(name, count)| ((*name).to_owned(), *count))
            .collect(),
    };
    assert_eq!(
        document.choose(&groups).unwrap_err(),
        [
            passed_over("gpu", &[("rule 1", 7)]),
            passed_over("odd", &[("rule 1", 7)]),
            passed_over("never", &[]),
        ]
    );
    assert!(document.choose(&[]).is_err(), "no node, no choice");
}

#[test]
fn a_regular_expression_becomes_the_values_of_nodes() {
    let document = document(&[("new", 0, &[("kernel", "InRegexp", &[r"^6\."])])]);
    let nodes = ["kernel=6.1", "kernel=5.4", "kernel=6.8", "kernel=6.1"].map(labels);
    let groups = groups(&nodes);
    let choice = document.choose(&groups).unwrap();
    let expected = Requirement::new("kernel", "In", vec!["6.1".to_owned(), "6.8".to_owned()]);
    assert_eq!(
        choice.requirements(DocumentFormat::Labels).unwrap(),
        [expected]
    );
}

proptest! {
    /// The chosen entry has the highest weight of those that fit, whatever the order of the nodes; its node affinity selects exactly
    /// the nodes that satisfy its rules.
    #[test]
    fn the_choice_and_its_affinity(
        entries in prop::collection::vec((
            0_i64..3,
            prop::collection::vec(("[ab]", prop::sample::select(vec!["Exists", "DoesNotExist", "In", "NotIn", "InRegexp", "Gt", "Lt", "Gte", "Lte"]), "[1-3]"), 0..3),
        ), 1..4),
        nodes in prop::collection::vec(prop::collection::btree_map("[ab]", "[1-3]", 0..3), 1..6),
    ) {
        let entries: Vec<_> = entries.iter().map(|(weight, expressions)| {
            let expressions = expressions.iter().map(|(key, op, value)| serde_json::json!({"key": key, "op": op, "value": [value]}));
            serde_json::json!({"tag": "t", "weight": weight, "rules": [{"matchFeatures": [{"matchExpressions": expressions.collect::<Vec<_>>()}]}]})
        }).collect();
        let text = serde_json::json!({"compatibilities": entries}).to_string();
        let document = CompatibilityDocument::parse(DocumentFormat::Labels, text.as_bytes()).unwrap();
        let forward = groups(&nodes);
        let fits = |entry: &Compatibility| forward.iter().any(|group| entry.fits(group.facts));
        let best = document.entries.iter().filter(|entry| fits(entry)).map(|entry| entry.weight).max();
        let choice = document.choose(&forward);
        prop_assert_eq!(choice.as_ref().ok().map(|choice| choice.entry.weight), best);
        let backward: Vec<_> = forward.iter().rev().copied().collect();
        let again = document.choose(&backward);
        prop_assert_eq!(choice.is_ok(), again.is_ok());
        if let (Ok(choice), Ok(again)) = (choice, again) {
            prop_assert!(std::ptr::eq(choice.entry, again.entry));
            let requirements = choice.requirements(DocumentFormat::Labels).unwrap();
            for node in &nodes {
                let term = NodeSelectorTerm { match_expressions: requirements.clone(), ..Default::default() };
                let selected = requirements.is_empty() || term.selects(node, "node");
                let fits = choice.entry.fits(NodeFacts { labels: node, features: None });
                prop_assert_eq!(selected, fits, "{:?} {:?}", requirements, node);
            }
        }
    }
}
