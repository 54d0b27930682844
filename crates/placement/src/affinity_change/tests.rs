use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::UnknownVariants;

use crate::affinity::{LABEL, OLD_LABEL};

use super::*;

fn set(names: &[&str]) -> Architectures {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn prefer() -> VariantPolicy {
    VariantPolicy {
        unknown: UnknownVariants::Prefer,
        label: "archaware.dev/variant".to_owned(),
        taints: false,
    }
}

static EVERY_NODE_IS_LABELLED: UnlabelledNodes = UnlabelledNodes::none();

fn wanted<'a>(
    required: &'a [Architectures],
    variants: &'a VariantPolicy,
    nodes: &'a NodeSet,
) -> AffinityDemand<'a> {
    AffinityDemand {
        required,
        suitable: required.first(),
        variants,
        unlabelled: &EVERY_NODE_IS_LABELLED,
        nodes,
        prefer: Vec::new(),
        terms_are_open: true,
    }
}

fn affinity(value: Value) -> Affinity {
    serde_json::from_value(value).unwrap()
}

fn required(terms: Value) -> Affinity {
    affinity(json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms},
    }}))
}

fn selector(labels: &[(&str, &str)]) -> BTreeMap<String, String> {
    labels
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect()
}

fn change(affinity: Option<&Affinity>, labels: &[(&str, &str)]) -> AffinityChange {
    let preferred = vec![Preference {
        architecture: "arm64".parse().unwrap(),
        weight: 80,
    }];
    let author = AuthorNodes {
        node_selector: &selector(labels),
        affinity,
    };
    decide(
        &wanted(&[set(&["amd64", "arm64"])], &prefer(), &NodeSet::every()),
        preferred,
        author,
    )
}

/// The indexes of the terms that get the expression; `None` when nothing is required.
fn terms(value: Value) -> Option<Vec<usize>> {
    change(Some(&required(value)), &[]).require.map(|require| {
        assert_eq!(require.architectures.len(), 2);
        require.terms
    })
}

#[test]
fn the_architectures_are_required_in_every_term_that_allows_more() {
    let term = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}, {"key": LABEL, "operator": operator, "values": values}]});
    let zone = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
    let old = json!({"matchExpressions": [{"key": OLD_LABEL, "operator": "Exists"}]});
    let field =
        json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
    let mixed = json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}], "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
    for (value, expected) in [
        (json!([zone]), Some(vec![0])),
        (
            json!([zone, term("In", &["arm64"]), zone, {}]),
            Some(vec![0, 2]),
        ),
        (json!([mixed, field]), Some(vec![0])),
        (json!([term("In", &["arm64"])]), None),
        (json!([term("In", &["arm64", "amd64"])]), None),
        // Without the added expression an autoscaler could create an s390x node.
        (json!([term("In", &["arm64", "s390x"])]), Some(vec![0])),
        (json!([term("In", &["s390x"])]), Some(vec![0])),
        (json!([old, term("NotIn", &["s390x"])]), Some(vec![0, 1])),
        (json!([term("DoesNotExist", &[])]), Some(vec![0])),
        (json!([field]), None),
        (json!([{}]), None),
        (json!([{"matchExpressions": []}]), None),
    ] {
        assert_eq!(terms(value.clone()), expected, "{value}");
    }
    for none in [
        None,
        Some(affinity(json!({}))),
        Some(affinity(
            json!({"nodeAffinity": {}, "podAffinity": {"unknown": 1}}),
        )),
        Some(affinity(
            json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}),
        )),
    ] {
        let found = change(none.as_ref(), &[]).require.unwrap();
        assert_eq!(
            (found.terms, found.architectures.len()),
            (vec![], 2),
            "{none:?}"
        );
    }
}

#[test]
fn a_node_selector_says_enough_if_the_images_allow_it() {
    for label in [LABEL, OLD_LABEL] {
        assert!(change(None, &[(label, "arm64")]).is_empty());
        let wrong = change(None, &[(label, "s390x")]);
        assert!(wrong.require.is_some() && wrong.prefer.is_empty());
    }
    assert!(!change(None, &[("zone", "a")]).is_empty());
}

/// If the sets share no architecture, archaware adds each set once to every term.
#[test]
fn a_contradiction_is_required_of_every_term() {
    let sets = [set(&["amd64"]), set(&["arm64", "s390x"]), set(&[])];
    let run = |affinity: Option<&Affinity>| {
        let author = AuthorNodes {
            node_selector: &BTreeMap::new(),
            affinity,
        };
        decide(
            &wanted(&sets, &prefer(), &NodeSet::every()),
            Vec::new(),
            author,
        )
    };
    let on = |values: &[&str]| json!({"key": LABEL, "operator": "In", "values": values});
    let nowhere = json!({"key": LABEL, "operator": "DoesNotExist"});
    let arm = required(json!([{"matchExpressions": [on(&["arm64"])]}]));
    let change = run(Some(&arm));
    let require = change.require.clone().unwrap();
    assert_eq!(require.terms, [0]);
    let terms = json!([{"matchExpressions": [on(&["arm64"]), on(&["amd64"]), on(&["arm64", "s390x"]), nowhere]}]);
    let mut added = required(terms);
    let expressions = &added.required_terms().unwrap()[0].match_expressions;
    assert_eq!(
        require.alternatives()[0].match_expressions,
        expressions[1..]
    );
    assert!(run(Some(&added)).is_empty(), "once");
    let found = undo(&mut added, &change);
    assert!(found.is_complete(&change), "{found:?}");
    assert_eq!(added, arm);
    let bare = run(None);
    let mut made = required(json!([{"matchExpressions": bare
        .require.as_ref().unwrap().alternatives()[0].match_expressions.iter()
        .map(|one| json!({"key": one.key, "operator": one.operator, "values": one.values}))
        .collect::<Vec<_>>()}]));
    assert!(run(Some(&made)).is_empty());
    assert!(undo(&mut made, &bare).is_complete(&bare));
    assert_eq!(made.required_terms(), None);
}

#[test]
fn preferences_are_for_architectures_that_the_images_have() {
    let preferred = |value: Value| {
        affinity(
            json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": value}}),
        )
    };
    let zone = json!([{"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}]);
    let on_old_label = json!([{"weight": 1, "preference": {"matchExpressions": [{"key": OLD_LABEL, "operator": "In", "values": ["amd64"]}]}}]);
    let field = required(
        json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]}]),
    );
    let arm = vec![Preference {
        architecture: "arm64".parse().unwrap(),
        weight: 80,
    }];
    for (affinity, expected) in [
        (None, arm.clone()),
        (Some(preferred(zone)), arm),
        (Some(preferred(on_old_label)), vec![]),
        (Some(field), vec![]),
    ] {
        assert_eq!(
            change(affinity.as_ref(), &[]).prefer,
            expected,
            "{affinity:?}"
        );
    }
}

/// Additions can be removed whatever else was added meanwhile, and an identical entry of the author
/// stays.
#[test]
fn what_was_added_can_be_taken_back() {
    let arch = json!({"key": LABEL, "operator": "In", "values": ["amd64", "arm64"]});
    let zone = json!({"key": "zone", "operator": "Exists"});
    let ours = change(None, &[]);
    let mut alone = required(json!([{"matchExpressions": [arch]}]));
    assert_eq!(
        undo(&mut alone, &ours),
        AffinityUndo {
            required: true,
            ..AffinityUndo::default()
        }
    );
    assert_eq!(alone.required_terms(), None);

    let mut beside = required(json!([{"matchExpressions": [zone]}, {"matchExpressions": [arch]}]));
    assert_eq!(
        undo(&mut beside, &ours),
        AffinityUndo {
            terms: vec![1],
            ..AffinityUndo::default()
        }
    );
    assert_eq!(beside, required(json!([{"matchExpressions": [zone]}])));

    let own_terms = required(json!([{"matchExpressions": [zone]}, {"matchExpressions": [arch]}]));
    let ours = change(Some(&own_terms), &[]);
    let mut added =
        required(json!([{"matchExpressions": [zone, arch]}, {"matchExpressions": [arch]}]));
    assert_eq!(
        undo(&mut added, &ours),
        AffinityUndo {
            expressions: vec![(0, 1)],
            ..AffinityUndo::default()
        }
    );
    assert_eq!(added, own_terms);
    assert_eq!(
        undo(&mut added, &ours),
        AffinityUndo::default(),
        "once is enough"
    );

    let ours = change(None, &[]);
    let term = json!({"weight": 80, "preference": {"matchExpressions": [{"key": LABEL, "operator": "In", "values": ["arm64"]}]}});
    let preferred = json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term, {"weight": 1}]}});
    let mut added = affinity(preferred);
    assert_eq!(
        undo(&mut added, &ours),
        AffinityUndo {
            preferred: vec![0],
            ..AffinityUndo::default()
        }
    );
}

#[test]
fn the_record_survives_the_annotation() {
    let ours = change(None, &[]);
    let text = serde_json::to_string(&ours).unwrap();
    assert_eq!(
        text,
        r#"{"require":{"architectures":["amd64","arm64"]},"prefer":[{"architecture":"arm64","weight":80}]}"#
    );
    assert_eq!(serde_json::from_str::<AffinityChange>(&text).unwrap(), ours);
}

/// The annotation `archaware.dev/added` can be written by anybody who creates a pod.
#[test]
fn a_forged_record_of_repeated_terms_removes_nothing() {
    let arch = |name: &str| json!({"key": LABEL, "operator": "In", "values": [name]});
    let zone = json!({"key": "zone", "operator": "Exists"});
    let repeated = ["amd64", "arm64"].map(|name| json!({"matchExpressions": [zone, arch(name)]}));
    let terms: Vec<Value> = repeated.iter().cycle().take(4).cloned().collect();
    let added = |indexes: &[usize]| -> AffinityChange {
        serde_json::from_value(json!({"require": {
            "architectures": ["amd64", "arm64"],
            "alternatives": [[arch("amd64")], [arch("arm64")]],
            "terms": indexes,
        }}))
        .unwrap()
    };
    for forged in [
        &[1, 0][..],
        &[0, 0],
        &[2, 1, 0],
        &[3],
        &[usize::MAX],
        &[0, usize::MAX],
    ] {
        let mut affinity = required(json!(terms));
        let (before, change) = (affinity.clone(), added(forged));
        let found = undo(&mut affinity, &change);
        assert_eq!(
            (found, &affinity),
            (AffinityUndo::default(), &before),
            "{forged:?}"
        );
    }
    let mut affinity = required(json!(terms));
    let change = added(&[0, 1]);
    assert!(undo(&mut affinity, &change).is_complete(&change));
    let before = json!({"matchExpressions": [zone]});
    assert_eq!(affinity, required(json!([before, before])));
}

/// An empty set of nodes: no node satisfies the added requirement, even if no architecture is
/// required.
#[test]
fn no_node_is_written_as_a_requirement_that_no_node_satisfies() {
    let author = AuthorNodes {
        node_selector: &BTreeMap::new(),
        affinity: None,
    };
    let added = decide(
        &AffinityDemand {
            nodes: &NodeSet::none(),
            ..wanted(&[], &prefer(), &NodeSet::every())
        },
        Vec::new(),
        author,
    );
    let terms = added.require.unwrap().alternatives();
    assert_eq!(terms.len(), 1);
    let labels = [(LABEL.to_owned(), "amd64".to_owned())].into();
    assert!(!terms[0].selects(&labels, "node"));
}
