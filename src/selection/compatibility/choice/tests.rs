use std::collections::BTreeMap;

use super::*;
use crate::selection::compatibility::NodeFacts;

pub(in super::super) type Labels = BTreeMap<String, String>;

/// Key, operator and values.
pub(in super::super) type Condition<'a> = (&'a str, &'a str, &'a [&'a str]);

pub(in super::super) fn document(
    entries: &[(&str, i64, &[Condition<'_>])],
) -> CompatibilityDocument {
    let entries = entries.iter().map(|(tag, weight, expressions)| {
        let expressions = expressions.iter().map(|(key, op, value)| serde_json::json!({"key": key, "op": op, "value": value}));
        let rule = serde_json::json!({"matchFeatures": [{"matchExpressions": expressions.collect::<Vec<_>>()}]});
        serde_json::json!({"tag": tag, "weight": weight, "rules": [rule]})
    });
    let text = serde_json::json!({"compatibilities": entries.collect::<Vec<_>>()}).to_string();
    CompatibilityDocument::parse(RuleKeys::Labels, text.as_bytes()).unwrap()
}

pub(in super::super) fn labels(text: &str) -> Labels {
    let pairs = text
        .split_whitespace()
        .filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

pub(in super::super) fn groups(nodes: &[Labels]) -> Vec<NodeGroup<'_>> {
    let nodes = nodes.iter().enumerate();
    nodes
        .map(|(index, labels)| group(index, labels, 1))
        .collect()
}

fn group(index: usize, labels: &Labels, count: usize) -> NodeGroup<'_> {
    NodeGroup {
        index,
        facts: NodeFacts {
            labels,
            features: None,
        },
        architecture: "amd64",
        variant: None,
        hosts: &[],
        count,
    }
}

pub(in super::super) fn choose<'a>(
    document: &'a CompatibilityDocument,
    groups: &[NodeGroup<'a>],
    runs: Runs<'_>,
) -> Result<Choice<'a>, NoChoice<'a>> {
    let fits = Fits::new(document, groups.iter().copied());
    Choice::choose(document, groups, &fits, runs)
}

/// Every node can run every image.
pub(in super::super) fn anywhere(_: &Compatibility, _: &NodeGroup<'_>) -> ImageFit {
    ImageFit::Runs
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
        let choice = choose(&document, &groups(&nodes), &anywhere).unwrap();
        assert_eq!(
            (&*choice.best.entry.tag, choice.best.groups.len()),
            (chosen, on),
            "{nodes:?}"
        );
    }
}

#[test]
fn what_fits_nowhere_is_explained() {
    let document = document(&[
        ("gpu", 1, &[("gpu", "Exists", &[])]),
        ("odd", 0, &[("gpu", "Near", &[])]),
        ("never", -1, &[]),
    ]);
    let (one, two) = (labels("a=b"), labels("c=d"));
    let groups = [group(0, &one, 3), group(1, &two, 4)];
    let passed_over = |tag: &str, failed: &[(&str, usize)]| PassedOver {
        tag: tag.to_owned(),
        failed: failed
            .iter()
            .map(|(name, nodes)| FailedRule {
                name: (*name).to_owned(),
                nodes: *nodes,
                example: (*name == "rule 1").then(|| format!("{tag} exists, but it is missing")),
            })
            .collect(),
    };
    let why = |document: &CompatibilityDocument, runs: &(dyn Fn(&str) -> bool + Sync)| {
        let by_count = |_: &Compatibility, group: &NodeGroup<'_>| {
            let name = if group.count == 3 { "three" } else { "four" };
            if runs(name) {
                ImageFit::Runs
            } else {
                ImageFit::OtherArchitecture
            }
        };
        match choose(document, &groups, &by_count) {
            Err(NoChoice::Nothing(passed_over)) => passed_over,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        why(&document, &|_| true),
        [
            passed_over("gpu", &[("rule 1", 7)]),
            passed_over("odd", &[("rule 1 (unknown operator \"Near\")", 7)]),
            passed_over("never", &[]),
        ]
    );
    assert!(
        choose(&document, &[], &anywhere).is_err(),
        "no node, no choice"
    );
    let document = self::document(&[("a", 0, &[("a", "Exists", &[])]), ("", 0, &[])]);
    let architecture = "the architecture of its image";
    assert_eq!(
        why(&document, &|group| group == "four"),
        [
            passed_over("a", &[("rule 1", 4), (architecture, 3)]),
            passed_over("", &[(architecture, 3)])
        ]
    );
    // A pod that names its nodes.
    let choice = choose(&document, &groups, &|_, _| ImageFit::NotOnAllNamed);
    let Err(NoChoice::Nothing(reasons)) = choice else {
        panic!("{choice:?}");
    };
    let fields = "matchFields of the pod (its rules have to hold on all nodes that it names)";
    assert_eq!(
        reasons,
        [
            passed_over("a", &[("rule 1", 4), (fields, 3)]),
            passed_over("", &[(fields, 7)])
        ]
    );
}

/// The choice asks for the images of the entries that it considers, and for no other images.
#[test]
fn an_image_that_is_not_known_is_asked_for() {
    let gpu: Condition<'_> = ("gpu", "Exists", &[]);
    let document = document(&[("any", 0, &[]), ("gpu", 9, &[gpu]), ("never", -1, &[])]);
    let asks = |nodes: &[&str], known: &[(&str, bool)]| {
        let nodes: Vec<_> = nodes.iter().map(|text| labels(text)).collect();
        let runs = |entry: &Compatibility, _: &NodeGroup<'_>| {
            let mut entry_images = known.iter().filter(|(tag, _)| *tag == entry.tag);
            match entry_images.next() {
                None => ImageFit::Unknown,
                Some((_, true)) => ImageFit::Runs,
                Some((_, false)) => ImageFit::OtherArchitecture,
            }
        };
        match choose(&document, &groups(&nodes), &runs) {
            Ok(choice) => choice.best.entry.tag.clone(),
            Err(NoChoice::Unknown(entry)) => format!("{}?", entry.tag),
            Err(NoChoice::Nothing(_)) => "nothing".to_owned(),
        }
    };
    assert_eq!(asks(&[""], &[]), "any?");
    assert_eq!(asks(&["", "gpu=1"], &[]), "gpu?");
    assert_eq!(asks(&["", "gpu=1"], &[("gpu", true)]), "gpu");
    assert_eq!(asks(&["", "gpu=1"], &[("gpu", false)]), "any?");
    assert_eq!(
        asks(&["", "gpu=1"], &[("gpu", false), ("any", true)]),
        "any"
    );
    assert_eq!(asks(&[""], &[("any", false)]), "nothing");
}
