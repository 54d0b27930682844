use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::{
    cluster::objects::DaemonSet,
    config::Config,
    evaluate::Verdict,
    image::ImageError,
    placement::{failure::FailurePolicy, preference::Preferences},
};

fn arch(name: &str) -> Value {
    json!({ "key": "kubernetes.io/arch", "operator": "Equal", "value": name, "effect": "NoSchedule" })
}

/// A DaemonSet whose template has these tolerations, of which the owned ones are recorded.
fn set(tolerations: &[Value], owned: &[Value], is_by_policy: bool) -> DaemonSet {
    let record = json!({ "tolerations": owned, "images": ["a"], "steppedAside": is_by_policy });
    let record = json!({ "archaware.dev/tolerations": record.to_string() });
    serde_json::from_value(json!({
        "metadata": { "name": "d", "namespace": "ns", "uid": "u",
            "annotations": if owned.is_empty() { json!({}) } else { record } },
        "spec": { "template": { "spec": {
            "containers": [{ "image": "a" }], "tolerations": tolerations,
        }}},
    }))
    .unwrap()
}

fn on(names: &[&str]) -> Verdict {
    let set = names.iter().map(|name| name.parse().unwrap()).collect();
    Verdict::Decided(Decision::Architectures(set))
}

fn unresolved() -> Verdict {
    let why = ImageError::unavailable("a", "no answer");
    Verdict::Unresolved {
        failed: vec![("a".to_owned(), why)],
        known: None,
    }
}

fn plan_of(
    set: &DaemonSet,
    (verdict, by_policy): (Verdict, bool),
    mode: DaemonSets,
    remembered: Option<ObjectState>,
    now: Instant,
) -> Plan {
    let evaluation = Evaluation {
        verdict,
        by_policy,
        preferences: Preferences::new(),
        invalid: Vec::new(),
        images: Vec::new(),
        unusable: BTreeSet::new(),
    };
    let config = Config::default();
    let (placement, failure) = (
        PlacementPolicy::from(&config),
        FailurePolicy::from(&config.resolution.failure),
    );
    let policies = Policies {
        placement: &placement,
        failure: &failure,
    };
    let template = Template::new(set);
    plan(&template, &evaluation, policies, mode, remembered, now)
}

fn managed(set: &DaemonSet, verdict: Verdict) -> Plan {
    plan_of(
        set,
        (verdict, false),
        DaemonSets::Manage,
        None,
        Instant::now(),
    )
}

#[test]
fn templates_are_changed_once_and_tell_of_their_rollout() {
    let (amd, arm) = (arch("amd64"), arch("arm64"));
    let plan = managed(&set(&[], &[], false), on(&["amd64"]));
    let write = plan.patch.unwrap();
    let changed = PlannedChange::TemplateChanged {
        decision: "amd64".to_owned(),
        by_policy: false,
    };
    assert_eq!(write.change, changed);
    assert_eq!(write.events[0].reason, EventReason::TolerationsChanged);
    let right = set(
        std::slice::from_ref(&amd),
        std::slice::from_ref(&amd),
        false,
    );
    assert_eq!(managed(&right, on(&["amd64"])).patch, None);
    // The template's own toleration needs no record.
    let own = set(std::slice::from_ref(&arm), &[], false);
    assert_eq!(managed(&own, on(&["arm64"])).patch, None);
}

/// A decision by the images stands while they cannot be resolved, and one of the failure policy until they change,
/// because each change causes a rollout.
#[test]
fn no_second_rollout() {
    let late = Instant::now() + Duration::from_mins(10);
    let amd = arch("amd64");
    let decided = set(
        std::slice::from_ref(&amd),
        std::slice::from_ref(&amd),
        false,
    );
    let verdict = || (unresolved(), false);
    let first = plan_of(
        &decided,
        verdict(),
        DaemonSets::Manage,
        None,
        Instant::now(),
    );
    let second = plan_of(&decided, verdict(), DaemonSets::Manage, first.state, late);
    assert_eq!(second.patch, None);
    let any = PlacementPolicy::from(&Config::default())
        .taint
        .toleration_of_all();
    let aside = set(std::slice::from_ref(&any), std::slice::from_ref(&any), true);
    let kept = (Verdict::Decided(Decision::TolerateAll), true);
    let plan = plan_of(&aside, kept, DaemonSets::Manage, None, Instant::now());
    assert_eq!(
        (plan.patch, plan.counts.len(), plan.events.len()),
        (None, 0, 0)
    );
}

#[test]
fn the_failure_policy_rolls_it_when_it_is_due() {
    let start = Instant::now();
    let (set, late) = (set(&[], &[], false), start + Duration::from_mins(1));
    let verdict = || (unresolved(), false);
    let first = plan_of(&set, verdict(), DaemonSets::Manage, None, start);
    assert_eq!(first.patch, None);
    let second = plan_of(&set, verdict(), DaemonSets::Manage, first.state, late);
    let write = second.patch.unwrap();
    let reasons: Vec<_> = write.events.iter().map(|event| event.reason).collect();
    let expected = [EventReason::TolerationsChanged, EventReason::SteppedAside];
    assert_eq!(reasons, expected);
    assert!(
        write
            .patch
            .into_operations()
            .to_string()
            .contains("steppedAside")
    );
}

#[test]
fn reverts_are_repaired_with_growing_pauses() {
    let start = Instant::now();
    let reverted = set(&[], &[arch("amd64")], false);
    let plan_at = |remembered, now| {
        let verdict = (on(&["amd64"]), false);
        plan_of(&reverted, verdict, DaemonSets::Manage, remembered, now)
    };
    let first = plan_at(None, start);
    assert!(first.patch.is_some());
    let second = plan_at(first.state, start);
    assert_eq!(second.patch, None);
    assert_eq!(second.events[0].reason, EventReason::TolerationsReverted);
    assert_eq!(second.requeue, Some(Duration::from_secs(30)));
    let third = plan_at(second.state, start + Duration::from_secs(30));
    assert!(third.patch.is_some());
}

#[test]
fn a_report_changes_nothing_and_is_made_once() {
    let set = set(&[], &[], false);
    let verdict = || (on(&["amd64"]), false);
    let first = plan_of(&set, verdict(), DaemonSets::Report, None, Instant::now());
    assert_eq!(first.patch, None);
    assert_eq!(first.events[0].reason, EventReason::TolerationsMissing);
    let second = plan_of(
        &set,
        verdict(),
        DaemonSets::Report,
        first.state,
        Instant::now(),
    );
    assert!(second.events.is_empty());
}
