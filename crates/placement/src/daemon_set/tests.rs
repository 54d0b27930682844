use serde_json::json;

use super::*;

fn arch(name: &str) -> Value {
    json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": name, "effect": "NoSchedule"})
}

fn on(names: &[&str]) -> Decision {
    Decision::Architectures(names.iter().map(|name| name.parse().unwrap()).collect())
}

fn images(name: &str) -> BTreeSet<String> {
    BTreeSet::from([name.to_owned()])
}

/// The change of a template with these tolerations, images and record.
fn decide(
    decision: &Decision,
    tolerations: &[Value],
    images: &BTreeSet<String>,
    record: &OwnedTolerations,
    by: DecidedBy,
) -> Option<TemplateChange> {
    let view = TemplateView {
        os: &Os::linux(),
        tolerations,
        owned: &record.find(tolerations, |_| true),
        images,
        record,
    };
    let policy = PlacementPolicy::default();
    decide_template(&policy, decision, view, by)
}

fn record(tolerations: &[Value], decision: &Decision) -> OwnedTolerations {
    if tolerations.is_empty() {
        return OwnedTolerations::default();
    }
    OwnedTolerations {
        tolerations: tolerations.to_vec(),
        images: images("a"),
        decision: Some(decision.annotation()),
        ..OwnedTolerations::default()
    }
}

#[test]
fn templates_follow_their_images_and_foreign_tolerations_stay() {
    let foreign = json!({"key": "gpu", "operator": "Exists"});
    let everything = json!({"operator": "Exists"});
    let (amd, arm) = (arch("amd64"), arch("arm64"));
    for (decision, existing, owned, remove, add, left) in [
        (
            on(&["amd64"]),
            vec![],
            vec![],
            vec![],
            vec![amd.clone()],
            vec![amd.clone()],
        ),
        (
            on(&["amd64", "arm64"]),
            vec![foreign.clone(), amd.clone()],
            vec![amd.clone()],
            vec![],
            vec![arm.clone()],
            vec![amd.clone(), arm.clone()],
        ),
        (
            on(&["arm64"]),
            vec![amd.clone(), foreign.clone()],
            vec![amd.clone()],
            vec![0],
            vec![arm.clone()],
            vec![arm.clone()],
        ),
        (
            Decision::NoCommonArchitecture,
            vec![foreign.clone(), amd.clone(), arm.clone()],
            vec![amd.clone(), arm.clone()],
            vec![2, 1],
            vec![],
            vec![],
        ),
        // One of two equal ones is archaware's.
        (
            on(&["arm64"]),
            vec![amd.clone(), amd.clone()],
            vec![amd.clone()],
            vec![1],
            vec![arm.clone()],
            vec![arm.clone()],
        ),
    ] {
        let record = record(&owned, &on(&["amd64"]));
        let change = decide(
            &decision,
            &existing,
            &images("a"),
            &record,
            DecidedBy::Images,
        )
        .unwrap();
        assert_eq!((change.remove, change.add), (remove, add), "{existing:?}");
        assert_eq!(
            change.record.map(|r| r.tolerations).unwrap_or_default(),
            left
        );
    }
    for (decision, existing, owned) in [
        (on(&["amd64"]), vec![everything.clone()], vec![]),
        (on(&["amd64"]), vec![amd.clone()], vec![]),
        (on(&["amd64"]), vec![amd.clone()], vec![amd.clone()]),
        (Decision::NoCommonArchitecture, vec![foreign], vec![]),
        // The author now tolerates the same taint. archaware keeps its toleration, to avoid a
        // rollout.
        (
            on(&["amd64"]),
            vec![amd.clone(), amd.clone()],
            vec![amd.clone()],
        ),
        (
            on(&["amd64"]),
            vec![amd.clone(), everything],
            vec![amd.clone()],
        ),
    ] {
        let record = record(&owned, &decision);
        let change = decide(
            &decision,
            &existing,
            &images("a"),
            &record,
            DecidedBy::Images,
        );
        assert_eq!(change, None, "{existing:?}");
    }
}

#[test]
fn the_record_follows_the_images_without_a_rollout() {
    let policy = PlacementPolicy::default();
    let any = policy.taint.toleration_of_all();
    let old = OwnedTolerations {
        tolerations: vec![any.clone()],
        images: images("old"),
        is_by_policy: true,
        decision: Some("any".to_owned()),
        ..OwnedTolerations::default()
    };
    assert!(old.is_for(&images("old")) && !old.is_for(&images("new")));
    let (aside, existing) = (Decision::TolerateAll, [any]);
    let change = decide(
        &aside,
        &existing,
        &images("new"),
        &old,
        DecidedBy::StandingPolicy,
    )
    .unwrap();
    assert!(!change.rolls());
    assert_eq!(change.record.unwrap().images, images("new"));
    assert_eq!(
        decide(
            &aside,
            &existing,
            &images("old"),
            &old,
            DecidedBy::StandingPolicy
        ),
        None
    );
}

#[test]
fn a_decision_of_the_failure_policy_is_read_back() {
    for (text, expected) in [
        (
            r#"{"version": 1, "tolerations": [], "steppedAside": true, "decision": "any"}"#,
            Some(Decision::TolerateAll),
        ),
        (
            r#"{"version": 1, "tolerations": [], "steppedAside": true, "decision": "amd64"}"#,
            Some(on(&["amd64"])),
        ),
        (
            r#"{"version": 1, "tolerations": [], "steppedAside": true, "decision": "Wrong!"}"#,
            None,
        ),
        (
            r#"{"version": 1, "tolerations": [], "steppedAside": true}"#,
            None,
        ),
        (
            r#"{"version": 1, "tolerations": [], "decision": "amd64"}"#,
            None,
        ),
    ] {
        let record = OwnedTolerations::parse(Some(text));
        assert_eq!(record.decision_of_policy(), expected, "{text}");
    }
}

#[test]
fn the_record_survives_the_annotation() {
    let record = record(&[arch("amd64")], &on(&["amd64"]));
    let text = record.to_annotation().unwrap();
    assert_eq!(OwnedTolerations::parse(Some(&text)), record);
    assert_eq!(record.decision_of_images(), Some(on(&["amd64"])));
    let newer = text.replace(r#""version":1"#, r#""version":2"#);
    assert_ne!(newer, text);
    assert_eq!(
        OwnedTolerations::parse(Some(&newer)),
        OwnedTolerations::default()
    );
    assert_eq!(
        OwnedTolerations::parse(Some("nonsense")),
        OwnedTolerations::default()
    );
    assert_eq!(OwnedTolerations::parse(None), OwnedTolerations::default());
}

#[test]
fn clean_takes_what_is_owned_once() {
    let existing = [arch("amd64"), arch("arm64"), arch("amd64")];
    let record = record(&[arch("arm64"), arch("amd64")], &on(&["amd64"]));
    let change = clean(&record.find(&existing, |_| true));
    assert_eq!((change.remove, change.record), (vec![2, 1], None));
    let only_arm = |one: &Value| *one == arch("arm64");
    assert_eq!(record.find(&existing, only_arm), [1]);
}

/// A decision of the action `tolerate` holds until the images are known. It does not count as a
/// decision of the images.
#[test]
fn a_decision_of_the_policy_until_the_images_are_known_does_not_stand() {
    let record = json!({ "version": 1, "tolerations": [{"key": "a", "value": "amd64"}], "images": ["a"], "decision": "amd64" });
    for (by_images, decided) in [(true, Some("amd64")), (false, None)] {
        let mut record = record.clone();
        if !by_images {
            record["untilKnown"] = json!(true);
        }
        let record = OwnedTolerations::parse(Some(&record.to_string()));
        let decision = record.decision_of_images();
        assert_eq!(decision.map(|one| one.annotation()).as_deref(), decided);
        assert_eq!(record.decision_of_policy(), None);
    }
}
