use proptest::prelude::*;

use super::*;
use crate::selection::compatibility::{
    CompatibilityDocument, NodeFacts, NodeGroup,
    choice::tests::{Condition, Labels, anywhere, choose, document, groups, labels},
};

fn required(document: &CompatibilityDocument, nodes: &[Labels]) -> String {
    let groups = groups(nodes);
    let nodes = choose(document, &groups, &anywhere).unwrap().nodes();
    serde_json::json!(nodes.unwrap().required.terms()).to_string()
}

#[test]
fn rules_become_requirements() {
    let gpu: Condition<'_> = ("gpu", "Exists", &[]);
    let big: Condition<'_> = ("memory", "Gte", &["64"]);
    let document = document(&[("any", 0, &[]), ("gpu", 9, &[gpu, big])]);
    assert_eq!(
        required(&document, &[labels("gpu=a memory=64")]),
        r#"[[{"key":"gpu","operator":"Exists"},{"key":"memory","operator":"Gt","values":["63"]}]]"#
    );
    assert_eq!(required(&document, &[labels("")]), "[[]]", "every node");
}

#[test]
fn a_regular_expression_becomes_the_values_of_nodes() {
    let document = document(&[("new", 0, &[("kernel", "InRegexp", &[r"^6\."])])]);
    let nodes = ["kernel=6.1", "kernel=5.4", "kernel=6.8", "kernel=6.1"].map(labels);
    assert_eq!(
        required(&document, &nodes),
        r#"[[{"key":"kernel","operator":"In","values":["6.1","6.8"]}]]"#
    );
}

/// Other nodes that fit the same image are possible, and less preferred.
#[test]
fn the_same_image_runs_on_further_nodes() {
    let (fast, faster): (Condition<'_>, Condition<'_>) =
        (("cpu", "In", &["fast"]), ("cpu", "In", &["faster"]));
    let nodes = ["cpu=fast", "cpu=faster"].map(labels);
    let groups = groups(&nodes);
    for (weights, preferred) in [
        ([0, 0], &[][..]),
        ([10, 0], &[("faster", 10)]),
        ([90, 20], &[("faster", 90), ("fast", 20)]),
        ([1000, 500], &[("faster", 100), ("fast", 50)]),
        ([i64::MAX, 1], &[("faster", 100)]),
    ] {
        let [high, low] = weights;
        let entries = [("same", high, &[faster][..]), ("same", low, &[fast])];
        let document = document(&entries);
        let nodes = choose(&document, &groups, &anywhere)
            .unwrap()
            .nodes()
            .unwrap();
        assert_eq!(nodes.required.terms().len(), 2);
        let found: Vec<_> = nodes
            .preferred
            .iter()
            .map(|term| (term.expressions[0].values[0].as_str(), term.weight))
            .collect();
        assert_eq!(found, preferred, "{weights:?}");
    }
    let two_images = [("one", 5, &[faster][..]), ("other", 0, &[fast])];
    assert_eq!(
        required(&document(&two_images), &nodes),
        r#"[[{"key":"cpu","operator":"In","values":["faster"]}]]"#
    );
}

/// Without a selection, weights become preferences, even if there is only one entry. Entries
/// without a weight add no preference.
#[test]
fn weights_are_preferences() {
    let (fast, faster, any): (Condition<'_>, Condition<'_>, Condition<'_>) = (
        ("cpu", "In", &["fast"]),
        ("cpu", "In", &["faster"]),
        ("gpu", "DoesNotExist", &[]),
    );
    let nodes = ["cpu=fast", "cpu=faster"].map(labels);
    let groups = groups(&nodes);
    for (entries, preferred) in [
        (vec![(0, vec![fast])], vec![]),
        (vec![(10, vec![fast])], vec![("fast", 10)]),
        (
            vec![(10, vec![fast]), (0, vec![faster])],
            vec![("fast", 10)],
        ),
        (
            vec![(10, vec![fast]), (10, vec![faster])],
            vec![("fast", 10), ("faster", 10)],
        ),
        (
            vec![(200, vec![faster]), (100, vec![fast])],
            vec![("faster", 100), ("fast", 50)],
        ),
        // Rules that hold on all nodes, or on no node, add no preference.
        (vec![(10, vec![]), (5, vec![fast, faster])], vec![]),
        (
            vec![(10, vec![fast, any]), (-5, vec![faster])],
            vec![("fast", 10)],
        ),
    ] {
        let weighted_rules = entries.iter();
        let same_image_entries: Vec<_> = weighted_rules
            .map(|(weight, rules)| ("same", *weight, &rules[..]))
            .collect();
        let document = document(&same_image_entries);
        let terms = choose(&document, &groups, &anywhere).unwrap().preferred();
        let found: Vec<_> = terms
            .iter()
            .map(|(_, term)| (term.expressions[0].values[0].as_str(), term.weight))
            .collect();
        assert_eq!(found, preferred, "{entries:?}");
    }
    let rules = [fast];
    let many: Vec<_> = (0..20).map(|n| ("same", 20 - n, &rules[..])).collect();
    let document = document(&many);
    let terms = choose(&document, &groups, &anywhere).unwrap().preferred();
    assert_eq!((terms.len(), terms[0].1.weight), (16, 20), "the best ones");
}

/// The images of two containers.
#[test]
fn two_choices_are_anded() {
    let term_on = |key: &str| vec![Requirement::new(key, Operator::Exists, Vec::new())];
    let (a, b) = (
        NodeSet::any_of([term_on("a"), term_on("b")]),
        NodeSet::any_of([term_on("c")]),
    );
    let keys = |set: &NodeSet| -> Vec<String> {
        let keys = set.terms().iter().map(|list| {
            list.iter()
                .map(|requirement| requirement.key.as_str())
                .collect()
        });
        keys.collect()
    };
    assert_eq!(keys(&a.and(&b)), ["ac", "bc"]);
    assert_eq!(keys(&a.and(&NodeSet::every())), ["a", "b"]);
    assert_eq!(keys(&a.and(&a)), ["a", "ab", "ba", "b"]);
    let many = NodeSet::any_of(('a'..='p').map(|key| term_on(&key.to_string())));
    let some = keys(&many.and(&a));
    assert_eq!(
        (some.len(), &*some[0], &*some[1]),
        (16, "a", "ab"),
        "the first ones"
    );
}

/// If there are many pairs, only those that some node satisfies are written.
#[test]
fn pairs_that_no_node_satisfies_are_left_out() {
    let nodes_by =
        |key: &str| SelectedNodes {
            required: NodeSet::any_of((0..16).map(|value: u8| {
                vec![Requirement::new(key, Operator::In, vec![value.to_string()])]
            })),
            preferred: Vec::new(),
        };
    let nodes = ["a=5 b=5", "a=7 b=9"].map(labels);
    let groups = groups(&nodes);
    let combined = nodes_by("a").and_on(nodes_by("b"), &groups);
    assert_eq!(combined.required.terms().len(), 2);
    assert!(groups.iter().all(|group| combined.select_group(group)));
    // If there are few pairs, all are written, because nodes that join later may satisfy them.
    let few = |key: &str| SelectedNodes {
        required: nodes_by(key).required.truncated(4),
        preferred: Vec::new(),
    };
    let all_pairs = few("a").and_on(few("b"), &groups);
    assert_eq!(all_pairs.required.terms().len(), 16);
    let unmatched_pairs = nodes_by("a").and_on(nodes_by("c"), &groups);
    assert_eq!(
        unmatched_pairs.required.terms().len(),
        16,
        "as many as without nodes"
    );
}

/// A requirement on the names of nodes selects the groups that contain these nodes.
#[test]
fn names_select_the_groups_that_have_them() {
    let nodes = ["a=1", "a=2"].map(labels);
    let names = ["n1", "n2"].map(|name| [name.to_owned()]);
    let mut groups = groups(&nodes);
    for (group, names) in groups.iter_mut().zip(&names) {
        group.hosts = names;
    }
    let named_nodes = SelectedNodes {
        required: NodeSet::all_of([Requirement::new(
            HOSTNAME,
            Operator::In,
            vec!["n2".to_owned()],
        )]),
        preferred: Vec::new(),
    };
    let selected = groups.iter().map(|group| named_nodes.select_group(group));
    assert_eq!(selected.collect::<Vec<_>>(), [false, true]);
}

fn features(text: &str) -> CompatibilityDocument {
    CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes()).unwrap()
}

/// Rules on features become requirements on NFD's labels, or else on the names of nodes.
#[test]
fn features_become_labels_or_names() {
    let avx = "feature.node.kubernetes.io/cpu-cpuid.AVX2=true";
    let label_texts = [format!("{avx} kernel=6"), String::new()];
    let nodes: Vec<Labels> = label_texts.iter().map(|text| labels(text)).collect();
    let hosts = ["node-a".to_owned()];
    let mut groups = groups(&nodes);
    groups[0].hosts = &hosts;
    let with = |expressions: &str| {
        features(&format!(
            "compatibilities: [{{rules: [{{matchFeatures: [{{feature: cpu.cpuid, {expressions}}}]}}]}}]"
        ))
    };
    let required = |document: &CompatibilityDocument, groups: &[NodeGroup<'_>]| {
        let choice = choose(document, groups, &anywhere).unwrap();
        choice
            .nodes()
            .map(|nodes| serde_json::json!(nodes.required.terms()).to_string())
    };
    let by_label = r#"[[{"key":"feature.node.kubernetes.io/cpu-cpuid.AVX2","operator":"Exists"}]]"#;
    let by_name = r#"[[{"key":"kubernetes.io/hostname","operator":"In","values":["node-a"]}]]"#;
    let exists = with("matchExpressions: {AVX2: {op: Exists}}");
    assert_eq!(required(&exists, &groups).unwrap(), by_label);
    let by_regexp = with("matchName: {op: InRegexp, value: [^AVX]}");
    assert_eq!(required(&by_regexp, &groups).unwrap(), by_name);
    // `DoesNotExist` on the label would also select nodes without the feature `cpu.cpuid`, where
    // the rule does not hold. So the requirement names the nodes.
    let absent = with("matchExpressions: {SVE: {op: DoesNotExist}}");
    assert_eq!(required(&absent, &groups).unwrap(), by_name);
    groups[0].hosts = &[];
    assert_eq!(required(&absent, &groups), None, "the names are not known");
    let alternatives = features(
        "compatibilities: [{rules: [{matchAny: [{matchFeatures: [{feature: cpu.cpuid, matchExpressions: {AVX2: {op: Exists}}}]}, {matchFeatures: [{feature: cpu.cpuid, matchExpressions: {SVE: {op: Exists}}}]}]}]}]",
    );
    let found = required(&alternatives, &groups).unwrap();
    assert_eq!(
        found,
        format!(
            "{},{}",
            by_label.trim_end_matches(']').to_owned() + "]",
            by_label
                .replace("AVX2", "SVE")
                .trim_start_matches('[')
                .replacen('{', "[{", 1)
        )
    );
}

/// Whether the API server accepts a requirement (`ValidateNodeSelectorRequirement`).
fn is_valid(requirement: &Requirement) -> bool {
    let values = &requirement.values;
    let are_values = values
        .iter()
        .all(|value| crate::names::is_label_value(value));
    match requirement.operator {
        Operator::In | Operator::NotIn => !values.is_empty() && are_values,
        Operator::Gt | Operator::Lt => {
            matches!(values.as_slice(), [value] if value.parse::<i64>().is_ok()) && are_values
        }
        Operator::Exists | Operator::DoesNotExist => values.is_empty(),
        Operator::Unknown(_) => false,
    }
}

/// Alternatives that no node can satisfy are not written, and those that some nodes satisfy come
/// first.
#[test]
fn impossible_alternatives_are_left_out() {
    let label = "feature.node.kubernetes.io/cpu-model.family";
    let nodes = [format!("{label}=25 zone=a")].map(|text| labels(&text));
    let groups = groups(&nodes);
    let operators_of = |conditions: &[&str]| {
        let alternatives: Vec<_> = conditions
            .iter()
            .map(|expression| format!("{{matchFeatures: [{{feature: cpu.model, matchExpressions: {{family: {expression}}}}}]}}"))
            .collect();
        let text = format!(
            "compatibilities: [{{rules: [{{matchAny: [{}]}}]}}]",
            alternatives.join(", ")
        );
        let document = features(&text);
        let choice = choose(&document, &groups, &anywhere).unwrap();
        let nodes = choice.nodes().unwrap().sorted_by(&groups);
        assert!(
            nodes.required.terms().iter().flatten().all(is_valid),
            "{nodes:?}"
        );
        let operators = nodes.required.terms().iter().map(|term| {
            let texts = term.iter().map(|requirement| {
                format!(
                    "{:?} {}",
                    requirement.operator,
                    requirement.values.join(",")
                )
            });
            texts.collect::<Vec<_>>().join(" ")
        });
        operators.collect::<Vec<_>>()
    };
    let pattern = "{op: InRegexp, value: ['^6$']}";
    let odd = "{op: In, value: ['not a label!']}";
    let below = "{op: Lt, value: 0}";
    let six = "{op: In, value: ['6']}";
    let fits = "{op: Gt, value: -1}";
    assert_eq!(
        operators_of(&[pattern, odd, below, fits]),
        [format!("Lt {}", i64::MAX)]
    );
    assert_eq!(
        operators_of(&[six, fits]),
        [format!("Lt {}", i64::MAX), "In 6".to_owned()]
    );
    assert_eq!(
        operators_of(&["{op: GeLe, value: [25, 30]}"]),
        ["Gt 24 Lt 31"]
    );
    // Node affinity does not compare versions.
    let version = "{op: Ge, value: '24.1', type: version}";
    assert_eq!(operators_of(&[version]), ["In 25"]);
}

/// An affinity with too many values is too large for a pod.
#[test]
fn large_choices_are_refused() {
    let many: Vec<String> = (0..200).map(|n| format!("host=node-{n}")).collect();
    let nodes: Vec<Labels> = many.iter().map(|text| labels(text)).collect();
    let by_pattern = document(&[("x", 0, &[("host", "InRegexp", &["^node"])])]);
    let groups = groups(&nodes);
    assert_eq!(
        choose(&by_pattern, &groups, &anywhere).unwrap().nodes(),
        None
    );
}

proptest! {
    /// The chosen entry has the highest weight of the entries that fit, in any order of the nodes.
    /// The node affinity selects exactly the nodes that satisfy the rules of this entry or of
    /// another entry with the same image.
    #[test]
    fn the_choice_and_its_affinity(
        entries in prop::collection::vec((
            0_i64..3,
            prop::collection::vec(("[ab]", prop::sample::select(vec!["Exists", "DoesNotExist", "In", "NotIn", "InRegexp", "Gt", "Lt", "Gte", "Lte"]), "-?[0-3]"), 0..3),
        ), 1..4),
        nodes in prop::collection::vec(prop::collection::btree_map("[ab]", "[0-3]", 0..3), 1..6),
    ) {
        let entries: Vec<_> = entries.iter().map(|(weight, expressions)| {
            let expressions = expressions.iter().map(|(key, op, value)| serde_json::json!({"key": key, "op": op, "value": [value]}));
            serde_json::json!({"tag": "t", "weight": weight, "rules": [{"matchFeatures": [{"matchExpressions": expressions.collect::<Vec<_>>()}]}]})
        }).collect();
        let text = serde_json::json!({"compatibilities": entries}).to_string();
        let document = CompatibilityDocument::parse(RuleKeys::Labels, text.as_bytes()).unwrap();
        let forward = groups(&nodes);
        let fits = |entry: &crate::selection::compatibility::Compatibility| forward.iter().any(|group| entry.fits(group.facts));
        let best = document.entries.iter().filter(|entry| fits(entry)).map(|entry| entry.weight).max();
        let choice = choose(&document, &forward, &anywhere);
        prop_assert_eq!(choice.as_ref().ok().map(|choice| choice.best.entry.weight), best);
        let backward: Vec<_> = forward.iter().rev().copied().collect();
        let again = choose(&document, &backward, &anywhere);
        prop_assert_eq!(choice.is_ok(), again.is_ok());
        if let (Ok(choice), Ok(again)) = (choice, again) {
            prop_assert!(std::ptr::eq(choice.best.entry, again.best.entry));
            let required = choice.nodes().unwrap().required;
            prop_assert!(required.terms().iter().flatten().all(is_valid), "{:?}", required);
            for node in &nodes {
                let selected = required.selects(node);
                let facts = NodeFacts { labels: node, features: None };
                let mut possible = std::iter::once(&choice.best).chain(&choice.further);
                let fits = possible.any(|fit| fit.entry.fits(facts));
                prop_assert_eq!(selected, fits, "{:?} {:?}", required, node);
            }
        }
    }
}
