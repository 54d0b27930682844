use serde_json::{Value, json};

use super::*;

fn set(names: &[&str]) -> BTreeSet<Architecture> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn affinity(value: Value) -> Affinity {
    serde_json::from_value(value).unwrap()
}

fn required(terms: Value) -> Affinity {
    affinity(json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms},
    }}))
}

fn change(affinity: Option<&Affinity>, selector: &[(&str, &str)]) -> AffinityChange {
    let decision = Decision::Architectures(set(&["amd64", "arm64"]));
    let preferences = [("arm64", 80), ("s390x", 10), ("amd64", 0)]
        .map(|(name, weight)| (name.parse().unwrap(), weight))
        .into();
    let selector = selector
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect();
    decide(&decision, true, &preferences, &selector, affinity)
}

/// The indexes of the terms that get the expression; `None` when nothing is required.
fn terms(value: Value) -> Option<Vec<usize>> {
    change(Some(&required(value)), &[]).require.map(|require| {
        assert_eq!(require.architectures, set(&["amd64", "arm64"]));
        require.terms
    })
}

#[test]
fn the_architectures_are_required_in_every_term_that_names_none() {
    let zone = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]});
    let arch = json!({"matchExpressions": [{"key": LABEL, "operator": "In", "values": ["arm64"]}]});
    let old = json!({"matchExpressions": [{"key": OLD_LABEL, "operator": "Exists"}]});
    let both = json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}, {"key": LABEL, "operator": "NotIn", "values": ["s390x"]}]});
    let field =
        json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
    let mixed = json!({"matchExpressions": [{"key": "zone", "operator": "Exists"}], "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
    for (value, expected) in [
        (json!([zone]), Some(vec![0])),
        (json!([zone, arch, zone, {}]), Some(vec![0, 2])),
        (json!([mixed, field]), Some(vec![0])),
        (json!([arch]), None),
        (json!([old, both]), None),
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
            (found.terms, found.architectures),
            (vec![], set(&["amd64", "arm64"])),
            "{none:?}"
        );
    }
}

#[test]
fn a_selected_architecture_is_not_changed() {
    for label in [LABEL, OLD_LABEL] {
        assert!(change(None, &[(label, "s390x")]).is_empty());
    }
    assert!(!change(None, &[("zone", "a")]).is_empty());
}

#[test]
fn only_decided_architectures_are_required() {
    for decision in [Decision::TolerateAll, Decision::NoCommonArchitecture] {
        let preferences = [("arm64".parse().unwrap(), 80)].into();
        assert!(decide(&decision, true, &preferences, &BTreeMap::new(), None).is_empty());
    }
}

#[test]
fn preferences_are_for_architectures_that_the_images_have() {
    let preferred = |value: Value| {
        affinity(
            json!({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": value}}),
        )
    };
    let zone = json!([{"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}}]);
    let own = json!([{"weight": 1, "preference": {"matchExpressions": [{"key": OLD_LABEL, "operator": "In", "values": ["amd64"]}]}}]);
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
        (Some(preferred(own)), vec![]),
        (Some(field), vec![]),
    ] {
        assert_eq!(
            change(affinity.as_ref(), &[]).prefer,
            expected,
            "{affinity:?}"
        );
    }
}

/// Additions can be removed whatever else was added meanwhile, and an identical entry of the author stays.
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
            term: Some(1),
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
