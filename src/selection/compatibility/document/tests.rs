use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;
use testsupport::mutated;

use super::*;
use crate::selection::compatibility::{NodeFacts, NodeFeatures, limits::MAX_MEMORY};

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let pairs = pairs.iter();
    pairs
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

/// Whether the rules of each entry hold.
fn fits(document: &CompatibilityDocument, node: NodeFacts<'_>) -> Vec<bool> {
    let entries = document.entries.iter();
    entries
        .map(|entry| entry.rules.iter().all(|rule| rule.holds(node)))
        .collect()
}

#[test]
fn the_format_of_ocifit() {
    let document = CompatibilityDocument::parse(
        RuleKeys::Labels,
        r#"{"version": "v1alpha1", "compatibilities": [
            {"tag": "reg/app:fast", "description": "with AVX-512", "weight": 10, "rules": [
                {"matchFeatures": [{"matchExpressions": [
                    {"op": "In", "key": "feature.node.kubernetes.io/cpu-cpuid.AVX512F", "value": ["true"]},
                    {"op": "Gte", "key": "memory", "value": "64"}]}]}]},
            {"tag": "reg/app:gpu", "weight": -1, "rules": [
                {"matchFeatures": [{"matchExpressions": [{"op": "Exists", "key": "gpu"}]}]}]},
            {"tag": "reg/app:odd", "rules": [
                {"matchFeatures": [{"matchExpressions": [{"op": "Near", "key": "gpu", "value": ["a"]}]}]}]},
            {"tag": "reg/app:any", "rules": []},
            {"tag": "reg/app:empty", "rules": [{"matchFeatures": [{}]}, {}]}
        ]}"#
        .as_bytes(),
    )
    .unwrap();
    let tags: Vec<_> = document
        .entries
        .iter()
        .map(|entry| (&*entry.tag, entry.weight))
        .collect();
    assert_eq!(tags[..2], [("reg/app:fast", 10), ("reg/app:gpu", -1)]);
    assert_eq!(document.entries[0].description, "with AVX-512");
    let fits_labels = |pairs: &[(&str, &str)]| {
        fits(
            &document,
            NodeFacts {
                labels: &labels(pairs),
                features: None,
            },
        )
    };
    let avx = ("feature.node.kubernetes.io/cpu-cpuid.AVX512F", "true");
    assert_eq!(fits_labels(&[]), [false, false, false, true, true]);
    assert_eq!(fits_labels(&[avx]), [false, false, false, true, true]);
    assert_eq!(
        fits_labels(&[avx, ("memory", "64")]),
        [true, false, false, true, true]
    );
    assert_eq!(
        fits_labels(&[("gpu", "a")]),
        [false, true, false, true, true]
    );
    let why = document.entries[2].rules[0].invalid.clone();
    assert_eq!(why, Some(InvalidExpression::Operator("Near".to_owned())));
}

const NFD: &str = r#"
version: v1alpha1
compatibilities:
- description: a fast CPU
  tag: fast
  weight: 90
  rules:
  - name: cpu
    matchFeatures:
    - feature: CPU.cpuid
      matchExpressions:
        AVX2: {op: Exists}
        AMXINT8: {op: DoesNotExist}
    - feature: kernel.version
      matchExpressions:
        major: {op: Gt, value: ["5"]}
- tag: devices
  rules:
  - matchAny:
    - matchFeatures:
      - feature: pci.device
        matchExpressions:
          vendor: {op: In, value: ["10de"]}
          class: {op: In, value: ["0302"]}
    - matchFeatures:
      - feature: kernel.loadedmodule
        matchName: {op: InRegexp, value: ["^nvidia"]}
- tag: switch
  rules:
  - matchFeatures:
    - feature: kernel.config
      matchExpressions:
        PREEMPT: {op: IsTrue}
"#;

fn features(yaml: &str) -> NodeFeatures {
    serde_saphyr::from_str(yaml).unwrap()
}

#[test]
fn the_format_of_node_feature_discovery() {
    let document = CompatibilityDocument::parse(RuleKeys::Features, NFD.as_bytes()).unwrap();
    let (tag, weight) = (&*document.entries[0].tag, document.entries[0].weight);
    assert_eq!(
        (tag, weight, &*document.entries[0].rules[0].name),
        ("fast", 90, "cpu")
    );
    let no_labels = BTreeMap::new();
    for (name, yaml, expected) in [
        ("nothing", "{}", [false, false, false]),
        (
            "flags and attributes",
            "{flags: {cpu.cpuid: {elements: {AVX2: {}}}}, attributes: {kernel.version: {elements: {major: \"6\"}}}}",
            [true, false, false],
        ),
        (
            "a flag too many",
            "{flags: {cpu.cpuid: {elements: {AVX2: {}, AMXINT8: {}}}}, attributes: {kernel.version: {elements: {major: \"6\"}}}}",
            [false, false, false],
        ),
        (
            "an unknown feature",
            "{flags: {cpu.cpuid: {elements: {AVX2: {}}}}}",
            [false, false, false],
        ),
        (
            "one device has it all",
            "{instances: {pci.device: {elements: [{attributes: {vendor: \"10de\", class: \"0302\"}}, {attributes: {vendor: \"8086\"}}]}}}",
            [false, true, false],
        ),
        (
            "two devices have it together",
            "{instances: {pci.device: {elements: [{attributes: {vendor: \"10de\", class: \"0300\"}}, {attributes: {vendor: \"8086\", class: \"0302\"}}]}}}",
            [false, false, false],
        ),
        (
            "the other alternative",
            "{flags: {kernel.loadedmodule: {elements: {nvidia_uvm: {}}}}}",
            [false, true, false],
        ),
        (
            "true",
            "{attributes: {kernel.config: {elements: {PREEMPT: \"true\"}}}}",
            [false, false, true],
        ),
    ] {
        let features = features(yaml);
        let node = NodeFacts {
            labels: &no_labels,
            features: Some(&features),
        };
        assert_eq!(fits(&document, node), expected, "{name}");
    }
    // Without a `NodeFeature` object, labels still contain a part of the features.
    let node_labels = labels(&[
        ("feature.node.kubernetes.io/cpu-cpuid.AVX2", "true"),
        ("feature.node.kubernetes.io/kernel-version.major", "6"),
        ("feature.node.kubernetes.io/kernel-config.PREEMPT", "true"),
    ]);
    let node = NodeFacts {
        labels: &node_labels,
        features: None,
    };
    assert_eq!(fits(&document, node), [true, false, true]);
}

#[test]
fn what_is_no_document() {
    let parse = |text: &str| CompatibilityDocument::parse(RuleKeys::Labels, text.as_bytes());
    for text in [
        "",
        "[]",
        "{}",
        "compatibilities: 5",
        "{\"compatibilities\": [{\"tag\": [1]}]}",
        "a: b: c",
    ] {
        assert!(
            matches!(parse(text), Err(InvalidDocument::Malformed(_))),
            "{text}"
        );
    }
    let many = |count: usize| {
        let entry = r#"{"tag": "a", "rules": [{"matchFeatures": [{"matchExpressions": [{"op": "In", "key": "a", "value": ["a"]}]}]}]}"#;
        format!(
            "{{\"compatibilities\": [{}]}}",
            vec![entry; count].join(",")
        )
    };
    assert_eq!(
        parse(&many(MAX_ENTRIES)).unwrap().entries.len(),
        MAX_ENTRIES
    );
    assert_eq!(
        parse(&many(MAX_ENTRIES + 1)).unwrap_err(),
        InvalidDocument::TooManyEntries
    );
    let large = vec![b' '; 256 * 1024 + 1];
    let large = CompatibilityDocument::parse(RuleKeys::Labels, &large);
    assert_eq!(
        large.unwrap_err(),
        InvalidDocument::TooLarge(256 * 1024 + 1)
    );
    let binary = CompatibilityDocument::parse(RuleKeys::Labels, &[0xff, 0xfe]);
    assert!(matches!(binary, Err(InvalidDocument::Malformed(_))));
}

proptest! {
    #[test]
    fn the_order_of_rules_does_not_matter(
        rules in prop::collection::vec(("[a-c]", prop::sample::select(vec!["Exists", "DoesNotExist"])), 0..6),
        node_labels in prop::collection::btree_map("[a-c]", "[xy]", 0..4),
    ) {
        let entry = |rules: Vec<&(String, &str)>| {
            let rules: Vec<_> = rules.iter().map(|(key, op)| {
                format!(r#"{{"matchFeatures": [{{"matchExpressions": [{{"op": "{op}", "key": "{key}"}}]}}]}}"#)
            }).collect();
            format!(r#"{{"compatibilities": [{{"tag": "a", "rules": [{}]}}]}}"#, rules.join(","))
        };
        let parse = |text: String| CompatibilityDocument::parse(RuleKeys::Labels, text.as_bytes()).unwrap();
        let node = NodeFacts { labels: &node_labels, features: None };
        let forward = fits(&parse(entry(rules.iter().collect())), node);
        let backward = fits(&parse(entry(rules.iter().rev().collect())), node);
        prop_assert_eq!(&forward, &backward);
        let expected = rules.iter().all(|(key, op)| node_labels.contains_key(key) == (*op == "Exists"));
        prop_assert_eq!(forward, [expected]);
    }

    /// Any text is parsed or refused. None causes a panic.
    #[test]
    fn any_text_is_a_document_or_an_error(text in "\\PC{0,200}") {
        for format in [RuleKeys::Labels, RuleKeys::Features] {
            let _ = CompatibilityDocument::parse(format, text.as_bytes());
        }
    }
}

proptest! {
    #[test]
    fn any_changed_document_is_read_or_refused(document in mutated(json!({
        "version": "v1alpha1", "compatibilities": [{
            "tag": "a", "weight": 5, "description": "d",
            "rules": [{
                "name": "r", "vars": {"a": "b"},
                "matchFeatures": [
                    {"feature": "cpu.cpuid", "matchExpressions": {"AVX2": {"op": "Exists"}},
                        "matchName": {"op": "InRegexp", "value": ["^AVX"]}},
                    {"matchExpressions": [{"key": "k", "op": "Gt", "value": ["1"]}]},
                ],
                "matchAny": [{"matchFeatures": []}],
            }],
        }],
    }))) {
        for format in [RuleKeys::Labels, RuleKeys::Features] {
            if let Err(error) = CompatibilityDocument::parse(format, document.to_string().as_bytes()) {
                prop_assert!(error.to_string().len() < 1024, "{error}");
            }
        }
    }
}

/// Patterns and values are limited, too: compiled patterns need memory.
#[test]
fn values_and_patterns_are_limited() {
    let parse_expression = |op: &str, count: usize| {
        let values = vec!["\"a\""; count].join(",");
        let text = format!(
            r#"{{"compatibilities": [{{"rules": [{{"matchFeatures": [{{"matchExpressions": [{{"key": "k", "op": "{op}", "value": [{values}]}}]}}]}}]}}]}}"#
        );
        CompatibilityDocument::parse(RuleKeys::Labels, text.as_bytes()).map(|_| ())
    };
    assert_eq!(parse_expression("In", 4000), Ok(()));
    assert_eq!(
        parse_expression("In", 5000),
        Err(InvalidDocument::TooManyEntries)
    );
    assert_eq!(parse_expression("InRegexp", 128), Ok(()));
    assert_eq!(
        parse_expression("InRegexp", 129),
        Err(InvalidDocument::TooManyEntries)
    );
}

/// Everything that a document keeps in memory counts, even what no rule evaluates.
#[test]
fn memory_is_limited() {
    let parse = |text: String| CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes());
    let entry = |rules: String| format!("compatibilities: [{{rules: [{rules}]}}]");
    // Rules without expressions.
    let empty = entry(vec!["{}"; 80_000].join(","));
    assert_eq!(parse(empty).unwrap_err(), InvalidDocument::TooManyEntries);
    // A YAML alias counts as the whole content of its anchor, with the content of nested aliases.
    let mut aliases = "a0: &a0 [x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..9 {
        let inner = vec![format!("*a{}", level - 1); 8].join(",");
        aliases += &format!("a{level}: &a{level} [{inner}]\n");
    }
    let started = std::time::Instant::now();
    let bomb = parse(format!("{aliases}compatibilities: *a8"));
    assert!(bomb.is_err());
    let text = "x".repeat(100_000);
    let texts = vec!["*text"; 20].join(",");
    let texts = parse(format!(
        "text: &text {text}\ncompatibilities: [{{tag: [{texts}]}}]"
    ));
    assert_eq!(texts.unwrap_err(), InvalidDocument::TooManyEntries);
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    // Aliases themselves are allowed.
    let aliased = parse(
        "rules: &all [{name: a}]\ncompatibilities: [{rules: *all}, {rules: *all}]".to_owned(),
    );
    assert_eq!(aliased.unwrap().entries.len(), 2);
    // A document of the maximum size stays below `MAX_MEMORY`.
    let names = vec![format!("{{name: {}}}", "n".repeat(30)); 5000].join(",");
    let largest = parse(entry(names)).unwrap();
    assert!(
        (256 * 1024..MAX_MEMORY).contains(&largest.memory),
        "{}",
        largest.memory
    );
}

#[test]
fn messages_are_short_and_harmless() {
    let long = "\\e[2J".repeat(10_000);
    let text = format!(
        "compatibilities: [{{tag: \"{long}\", rules: [{{name: \"{long}\", matchFeatures: [{{feature: a.b, matchExpressions: {{c: {{op: \"{long}\"}}}}}}]}}]}}]"
    );
    let document = CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes()).unwrap();
    let rule = &document.entries[0].rules[0];
    let why = rule.invalid.as_ref().unwrap().to_string();
    for text in [&rule.name, &why] {
        assert!(
            text.chars().count() < 100 && !text.contains('\u{1b}'),
            "{text}"
        );
    }
    let wrong = format!("compatibilities: \"{long}\"");
    let wrong = CompatibilityDocument::parse(RuleKeys::Features, wrong.as_bytes()).unwrap_err();
    assert!(wrong.to_string().chars().count() < 300, "{wrong}");
}

/// Rules read the variables that earlier rules set.
#[test]
fn variables_are_known_where_a_rule_counts() {
    let holds = |rules: &str| {
        let text = format!("compatibilities: {rules}");
        let document = CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes()).unwrap();
        assert!(document.features.is_empty(), "{rules}");
        fits(
            &document,
            NodeFacts {
                labels: &BTreeMap::new(),
                features: None,
            },
        )
    };
    let reads = |expressions: &str| {
        format!("{{matchFeatures: [{{feature: rule.matched, {expressions}}}]}}")
    };
    let is_set = reads("matchExpressions: {LEVEL: {op: Ge, value: 3}}");
    let is_not = reads("matchExpressions: {LEVEL: {op: DoesNotExist}}");
    let is_named = reads("matchName: {op: In, value: LEVEL}");
    for (rules, expected) in [
        (
            format!("[{{rules: [{{vars: {{LEVEL: '3'}}}}, {is_set}]}}]"),
            vec![true],
        ),
        (
            format!("[{{rules: [{{vars: {{LEVEL: '2'}}}}, {is_set}]}}]"),
            vec![false],
        ),
        (
            format!("[{{rules: [{{vars: {{LEVEL: '2'}}}}, {{vars: {{LEVEL: '3'}}}}, {is_set}]}}]"),
            vec![true],
        ),
        (
            format!("[{{rules: [{{vars: {{LEVEL: '3'}}}}, {is_named}]}}]"),
            vec![true],
        ),
        (
            format!("[{{rules: [{{vars: {{OTHER: '3'}}}}, {is_named}]}}]"),
            vec![false],
        ),
        (format!("[{{rules: [{{}}, {is_not}]}}]"), vec![true]),
        // One alternative of `matchAny` is enough.
        (
            "[{rules: [{vars: {LEVEL: '3'}}, {matchAny: [{matchFeatures: [{feature: rule.matched, matchName: {op: In, value: OTHER}}]}, {matchFeatures: [{feature: rule.matched, matchName: {op: In, value: LEVEL}}]}]}]}]".to_owned(),
            vec![true],
        ),
        // No rule precedes the first rule, so `rule.matched` is missing and the condition fails.
        (
            format!("[{{rules: [{is_not}, {{vars: {{LEVEL: '3'}}}}]}}]"),
            vec![false],
        ),
        // Variables of another entry or of a template depend on the node: conditions on them fail.
        (
            format!("[{{rules: [{{vars: {{LEVEL: '3'}}}}]}}, {{rules: [{is_set}]}}]"),
            vec![true, false],
        ),
        (
            format!("[{{rules: [{{vars: {{LEVEL: '3'}}}}]}}, {{rules: [{is_not}]}}]"),
            vec![true, false],
        ),
        (
            format!("[{{rules: [{{varsTemplate: 'LEVEL=3'}}, {is_not}]}}]"),
            vec![false],
        ),
    ] {
        assert_eq!(holds(&rules), expected, "{rules}");
    }
}

/// Go's encoder writes null for an empty list or map, and editors of Windows a byte order mark.
#[test]
fn null_is_like_a_missing_field() {
    for keys in [RuleKeys::Labels, RuleKeys::Features] {
        let with_nulls = r#"{"version": "v1alpha1", "compatibilities": [
            {"tag": "a", "description": null, "weight": null, "rules": null},
            {"tag": "b", "rules": [{"name": null, "matchFeatures": null, "matchAny": null, "vars": null}]},
            {"tag": "c", "rules": [{"matchAny": [{"matchFeatures": [
                {"feature": "x.y", "matchExpressions": null, "matchName": null}]}]}]}
        ]}"#;
        let without = r#"{"compatibilities": [
            {"tag": "a"}, {"tag": "b", "rules": [{}]},
            {"tag": "c", "rules": [{"matchAny": [{"matchFeatures": [{"feature": "x.y"}]}]}]}
        ]}"#;
        let [found, expected] = [format!("\u{feff}{with_nulls}"), without.to_owned()].map(|text| {
            let document = CompatibilityDocument::parse(keys, text.as_bytes()).unwrap();
            format!("{:?}", document.entries)
        });
        assert_eq!(found, expected);
    }
}
