use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::{
    cluster::events::EventReason,
    config::Config,
    evaluate::Verdict,
    image::ImageError,
    placement::{
        Decision, PlacementPolicy, failure::FailurePolicy, mode::InvalidAnnotation,
        preference::Preferences,
    },
    plan::EventDraft,
};

const MINUTE: Duration = Duration::from_mins(1);

fn evaluation(verdict: Verdict) -> Evaluation {
    Evaluation {
        verdict,
        by_policy: false,
        preferences: Preferences::new(),
        invalid: Vec::new(),
        images: Vec::new(),
        unusable: std::collections::BTreeSet::new(),
    }
}

fn unresolved() -> Verdict {
    let why = ImageError::unavailable("a", "no answer");
    Verdict::Unresolved {
        failed: vec![("a".to_owned(), why)],
        known: None,
    }
}

fn on(names: &[&str]) -> Verdict {
    let set = names.iter().map(|name| name.parse().unwrap()).collect();
    Verdict::Decided(Decision::Architectures(set))
}

/// A pod with these annotations, spec fields in addition to its image, and node.
fn pod(annotations: &[(&str, &str)], spec: Value) -> Pod {
    let annotations: serde_json::Map<String, Value> = annotations
        .iter()
        .map(|(name, value)| ((*name).to_owned(), json!(value)))
        .collect();
    let mut object = json!({
        "metadata": { "name": "p", "namespace": "ns", "uid": "u", "annotations": annotations },
        "spec": { "containers": [{ "image": "a" }] },
    });
    for (key, value) in spec.as_object().unwrap() {
        object["spec"][key] = value.clone();
    }
    serde_json::from_value(object).unwrap()
}

fn plan_with(
    config: &Config,
    pod: &Pod,
    evaluation: &Evaluation,
    remembered: Option<ObjectState>,
    now: Instant,
) -> Plan {
    let (placement, failure) = (
        PlacementPolicy::from(config),
        FailurePolicy::from(&config.resolution.failure),
    );
    let policies = Policies {
        placement: &placement,
        failure: &failure,
    };
    plan(pod, evaluation, policies, remembered, now)
}

fn plan_of(pod: &Pod, verdict: Verdict) -> Plan {
    let evaluation = evaluation(verdict);
    plan_with(&Config::default(), pod, &evaluation, None, Instant::now())
}

fn reasons(events: &[EventDraft]) -> Vec<EventReason> {
    events.iter().map(|event| event.reason).collect()
}

fn gated() -> Value {
    json!({ "schedulingGates": [{ "name": "archaware.dev/inspect" }] })
}

fn tolerating() -> Value {
    json!({ "tolerations": [{ "key": "kubernetes.io/arch", "operator": "Equal",
        "value": "arm64", "effect": "NoSchedule" }] })
}

fn placed(decision: &str, by_policy: bool) -> PlannedChange {
    PlannedChange::PodPlaced {
        decision: decision.to_owned(),
        by_policy,
    }
}

/// Images that could not be resolved beside others for amd64 only.
#[test]
fn the_failure_policy_decides_within_what_is_known() {
    let verdict = || {
        let Verdict::Unresolved { failed, .. } = unresolved() else {
            panic!()
        };
        let known = Some(std::collections::BTreeSet::from(["amd64".parse().unwrap()]));
        Verdict::Unresolved { failed, known }
    };
    let critical = json!({ "priorityClassName": "system-node-critical" });
    let plan = plan_of(&pod(&[], critical), verdict());
    let patch = plan.patch.unwrap();
    assert_eq!(patch.change, placed("amd64", true));
    assert_eq!(reasons(&patch.events), [EventReason::ToleratedByPolicy]);
    assert_eq!(plan.requeue, None, "nothing could be added to that");
    assert_eq!(
        plan_of(&pod(&[], json!({})), verdict()).patch,
        None,
        "not yet"
    );
}

/// The change, whether the attempt counts, and whether anything remains to be decided.
#[test]
fn every_verdict_has_its_plan() {
    let critical = json!({ "priorityClassName": "system-node-critical" });
    let bound = json!({ "nodeName": "n" });
    let none = || Verdict::Decided(Decision::NoCommonArchitecture);
    let waits = Some(Duration::from_secs(1));
    let looks = Some(Duration::from_mins(10));
    for (spec, verdict, change, is_complete, decides, requeue) in [
        (
            json!({}),
            on(&["arm64"]),
            Some(placed("arm64", false)),
            true,
            true,
            None,
        ),
        (tolerating(), on(&["arm64"]), None, true, true, None),
        (
            gated(),
            on(&["arm64"]),
            Some(placed("arm64", false)),
            true,
            true,
            None,
        ),
        (json!({}), none(), None, true, true, looks),
        (
            gated(),
            none(),
            Some(placed("none", false)),
            true,
            true,
            looks,
        ),
        (json!({}), Verdict::Skip, None, true, true, None),
        (
            gated(),
            Verdict::Skip,
            Some(PlannedChange::GateRemoved),
            true,
            false,
            None,
        ),
        (json!({}), unresolved(), None, true, false, waits),
        (gated(), unresolved(), None, true, false, waits),
        // NoExecute would evict the pod, so startup waits for its decision.
        (bound, unresolved(), None, false, false, waits),
        // A system-critical pod.
        (
            critical,
            unresolved(),
            Some(placed("any", true)),
            true,
            true,
            None,
        ),
    ] {
        let name = format!("{spec} {verdict:?}");
        let plan = plan_of(&pod(&[], spec), verdict);
        assert_eq!(plan.patch.map(|write| write.change), change, "{name}");
        assert_eq!(
            (plan.is_complete, plan.decides, plan.requeue),
            (is_complete, decides, requeue),
            "{name}"
        );
    }
}

#[test]
fn the_failure_policy_is_carried_out_when_it_is_due() {
    let start = Instant::now();
    let config = |action: &str| {
        let text = format!(
            "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n\
             resolution: {{failure: {{action: {action}, architectures: [amd64]}}}}\n"
        );
        crate::config::parse("c", &text).unwrap()
    };
    let evaluation = evaluation(unresolved());
    for (action, expected, event) in [
        (
            "tolerateAll",
            Some(placed("any", true)),
            EventReason::SteppedAside,
        ),
        (
            "tolerate",
            Some(placed("amd64", true)),
            EventReason::ToleratedByPolicy,
        ),
    ] {
        let (config, pod) = (config(action), pod(&[], json!({})));
        let first = plan_with(&config, &pod, &evaluation, None, start);
        assert_eq!(reasons(&first.events), [EventReason::ImageNotResolved]);
        assert_eq!(first.counts, ["unresolved"]);
        let second = plan_with(&config, &pod, &evaluation, first.state, start + MINUTE);
        assert!(second.events.is_empty() && second.counts.is_empty(), "once");
        let write = second.patch.unwrap();
        assert_eq!(reasons(&write.events), [event]);
        assert_eq!(
            (write.counts, Some(write.change)),
            (vec!["by_policy"], expected)
        );
    }
    // Held: the gate is removed when the policy is due, and nothing is added.
    let (config, pod) = (config("hold"), pod(&[], gated()));
    let first = plan_with(&config, &pod, &evaluation, None, start);
    assert_eq!(first.patch, None);
    let second = plan_with(&config, &pod, &evaluation, first.state, start + MINUTE);
    let change = second.patch.map(|write| write.change);
    assert_eq!(
        (change, second.decides),
        (Some(PlannedChange::GateRemoved), false)
    );
}

/// A decision by the images, of this process or an earlier one, stands while they cannot be resolved.
#[test]
fn a_decision_of_the_images_is_better_than_one_without_them() {
    let start = Instant::now();
    let config = Config::default();
    let failed = evaluation(unresolved());
    let late = start + 10 * MINUTE;
    let recorded = pod(&[("archaware.dev/decision", "arm64")], json!({}));
    let first = plan_with(&config, &recorded, &failed, None, start);
    let second = plan_with(&config, &recorded, &failed, first.state.clone(), late);
    assert!(first.decides && second.decides && second.patch.is_none());
    // A decision of the failure policy does not count as one by the images.
    let aside = pod(&[("archaware.dev/decision", "any")], json!({}));
    let first = plan_with(&config, &aside, &failed, None, start);
    let second = plan_with(&config, &aside, &failed, first.state, late);
    assert!(second.patch.is_some());
    // Other images have not made a decision.
    let other = json!({ "containers": [{ "image": "b" }] });
    let other = pod(&[("archaware.dev/decision", "arm64")], other);
    let resolved = plan_with(&config, &recorded, &evaluation(on(&["arm64"])), None, start);
    let first = plan_with(&config, &other, &failed, resolved.state, start);
    let second = plan_with(&config, &other, &failed, first.state, late);
    assert!(second.patch.is_some());
}

#[test]
fn events_are_on_the_object_that_carries_the_annotation() {
    let invalid = |on_namespace| InvalidAnnotation {
        name: "archaware.dev/mode",
        value: "never".to_owned(),
        on_namespace,
    };
    let mut evaluation = evaluation(Verdict::Skip);
    evaluation.invalid = vec![invalid(false), invalid(true)];
    let (config, pod) = (Config::default(), pod(&[], json!({})));
    let plan = plan_with(&config, &pod, &evaluation, None, Instant::now());
    let places: Vec<bool> = plan.events.iter().map(|event| event.on_namespace).collect();
    assert_eq!(places, [false, true]);
    assert_eq!(plan.counts, ["ignored"]);
}

#[test]
fn a_refusable_change_of_a_gated_pod_can_fall_back_to_its_release() {
    let write = plan_of(&pod(&[], gated()), on(&["arm64"])).patch.unwrap();
    assert!(write.gate_removal.is_some());
    let write = plan_of(&pod(&[], json!({})), on(&["arm64"])).patch.unwrap();
    assert_eq!(write.gate_removal, None);
}
