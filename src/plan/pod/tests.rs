use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::{
    cluster::events::EventReason,
    config::Config,
    evaluate::{Conflict, EvaluatedImage, Notice, Verdict},
    image::ImageError,
    placement::{
        Decision, PlacementPolicy,
        failure::{FailureAction, FailurePolicy},
        image_locality::{HoldingNodes, ImageLocality},
        mode::InvalidAnnotation,
    },
    plan::EventDraft,
};

const MINUTE: Duration = Duration::from_mins(1);

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

/// A pod with these annotations and, in addition to its image, these spec fields.
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
        gates: true,
    };
    plan(pod, evaluation, policies, remembered, now)
}

/// The webhook was disabled, and the failure policy holds the pod: its gate goes all the same.
#[test]
fn no_gate_stays_without_the_webhook() {
    let pod = pod(&[], gated());
    let placement = PlacementPolicy::from(&Config::default());
    let failure = FailurePolicy {
        action: FailureAction::Hold,
        ..FailurePolicy::from(&Config::default().resolution.failure)
    };
    let evaluation = Evaluation::new(unresolved());
    for (gates, released) in [(true, false), (false, true)] {
        let policies = Policies {
            placement: &placement,
            failure: &failure,
            gates,
        };
        let plan = plan(&pod, &evaluation, policies, None, Instant::now());
        let change = plan.patch.map(|patch| patch.change);
        assert_eq!(
            change == Some(PlannedChange::GateRemoved),
            released,
            "{gates}"
        );
    }
}

fn plan_of(pod: &Pod, verdict: Verdict) -> Plan {
    let evaluation = Evaluation::new(verdict);
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

/// One image could not be resolved; the other images are for amd64 only.
#[test]
fn the_failure_policy_decides_within_what_is_known() {
    let verdict = || {
        let Verdict::Unresolved { failed, .. } = unresolved() else {
            panic!()
        };
        let known = Some("amd64".parse().unwrap());
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

/// Nodes that hold an image are preferred only if the images have made no decision.
#[test]
fn nodes_that_hold_its_images_are_preferred_by_the_policy() {
    let mut config = Config::default();
    config.resolution.failure.after = Duration::ZERO;
    let locality = ImageLocality {
        images: vec!["a".to_owned()],
        nodes: HoldingNodes {
            count: 1,
            hosts: vec!["holder".to_owned()],
            architectures: "arm64".parse().unwrap(),
        },
        copies: None,
    };
    let evaluation = Evaluation {
        demands: locality.demand().into_iter().collect(),
        ..Evaluation::new(unresolved())
    };
    let plan = |annotations: &[(&str, &str)], spec: Value| {
        let pod = pod(annotations, spec);
        let plan = plan_with(&config, &pod, &evaluation, None, Instant::now());
        plan.patch.unwrap()
    };
    let by_policy = plan(&[], gated());
    assert_eq!(by_policy.change, placed("any", true));
    assert!(format!("{:?}", by_policy.patch).contains("holder"));
    let note = &by_policy.events[0].note;
    assert!(
        note.ends_with("Such nodes are preferred: one node (arm64) holds a"),
        "{note}"
    );
    // An earlier decision by the images stands.
    let mut spec = gated();
    spec["tolerations"] = tolerating()["tolerations"].clone();
    spec["nodeSelector"] = json!({ "kubernetes.io/arch": "arm64" });
    let earlier = plan(&[("archaware.dev/decision", "arm64")], spec);
    assert_eq!(earlier.change, placed("arm64", false));
    assert!(!format!("{:?}", earlier.patch).contains("holder"));
}

/// For each verdict: the change, whether nothing remains to be decided, and when to look again.
#[test]
fn every_verdict_has_its_plan() {
    let critical = json!({ "priorityClassName": "system-node-critical" });
    let none = || Verdict::Decided(Decision::NoCommonArchitecture);
    let waits = Some(Duration::from_secs(1));
    let looks = Some(Duration::from_mins(10));
    let on_arm = || Some(placed("arm64", false));
    let placed_none = || Some(placed("none", false));
    for (spec, verdict, change, decides, requeue) in [
        (json!({}), on(&["arm64"]), on_arm(), true, None),
        (tolerating(), on(&["arm64"]), None, true, None),
        (gated(), on(&["arm64"]), on_arm(), true, None),
        // It waits, and its annotation says so.
        (json!({}), none(), placed_none(), false, looks),
        (gated(), none(), placed_none(), false, looks),
        (json!({}), Verdict::Skip, None, true, None),
        (
            gated(),
            Verdict::Skip,
            Some(PlannedChange::GateRemoved),
            false,
            None,
        ),
        (json!({}), unresolved(), None, false, waits),
        (gated(), unresolved(), None, false, waits),
        // A system-critical pod.
        (
            critical,
            unresolved(),
            Some(placed("any", true)),
            true,
            None,
        ),
    ] {
        let name = format!("{spec} {verdict:?}");
        let plan = plan_of(&pod(&[], spec), verdict);
        assert_eq!(plan.patch.map(|write| write.change), change, "{name}");
        assert_eq!((plan.decides, plan.requeue), (decides, requeue), "{name}");
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
    let evaluation = Evaluation::new(unresolved());
    for (action, expected, event) in [
        (
            "tolerateAll",
            Some(placed("any", true)),
            EventReason::ToleratesEveryArchitecture,
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
    // Held: nothing is added, and the gate stays, so that no autoscaler sees the pod.
    let (config, pod) = (config("hold"), pod(&[], gated()));
    let first = plan_with(&config, &pod, &evaluation, None, start);
    assert_eq!(first.patch, None);
    let second = plan_with(&config, &pod, &evaluation, first.state, start + MINUTE);
    assert_eq!((second.patch, second.decides), (None, false));
}

/// A decision by the images stands while the images cannot be resolved, also after a restart.
#[test]
fn a_decision_of_the_images_is_better_than_one_without_them() {
    let start = Instant::now();
    let config = Config::default();
    let failed = Evaluation::new(unresolved());
    let late = start + 10 * MINUTE;
    let recorded = pod(&[("archaware.dev/decision", "arm64")], tolerating());
    let first = plan_with(&config, &recorded, &failed, None, start);
    let second = plan_with(&config, &recorded, &failed, first.state.clone(), late);
    assert!(first.decides && second.decides && second.patch.is_none());
    // A decision of the failure policy does not count as one by the images.
    let aside = pod(&[("archaware.dev/decision", "any")], json!({}));
    let first = plan_with(&config, &aside, &failed, None, start);
    let second = plan_with(&config, &aside, &failed, first.state, late);
    assert!(second.patch.is_some());
    // The pod's images changed, so the earlier decision does not count.
    let spec = json!({ "containers": [{ "image": "b" }] });
    let changed = pod(&[("archaware.dev/decision", "arm64")], spec);
    let resolved = plan_with(
        &config,
        &recorded,
        &Evaluation::new(on(&["arm64"])),
        None,
        start,
    );
    let first = plan_with(&config, &changed, &failed, resolved.state, start);
    let second = plan_with(&config, &changed, &failed, first.state, late);
    assert!(second.patch.is_some());
}

/// A recorded decision counts only if its tolerations are on the pod: the annotation may have been
/// copied, and the configuration may have changed.
#[test]
fn a_decision_that_is_not_applied_is_none() {
    let (start, failed) = (Instant::now(), Evaluation::new(unresolved()));
    let late = start + 10 * MINUTE;
    let moved = crate::config::parse(
        "c",
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\ntaint: {key: other/key}\n",
    )
    .unwrap();
    let recorded = |spec| pod(&[("archaware.dev/decision", "arm64")], spec);
    for (name, config, pod) in [
        ("copied", Config::default(), recorded(json!({}))),
        ("another key", moved, recorded(tolerating())),
    ] {
        let first = plan_with(&config, &pod, &failed, None, start);
        assert!(!first.decides && first.patch.is_none(), "{name}");
        let second = plan_with(&config, &pod, &failed, first.state, late);
        let change = second.patch.map(|write| write.change);
        assert_eq!(change, Some(placed("any", true)), "{name}");
    }
    // What this process decided itself is applied again, for example after the patch was refused.
    let config = Config::default();
    let (mut decided, fresh) = (Evaluation::new(on(&["arm64"])), pod(&[], json!({})));
    decided.images = vec![EvaluatedImage::for_tests("a", None)];
    let first = plan_with(&config, &fresh, &decided, None, start);
    let second = plan_with(&config, &fresh, &failed, first.state, late);
    let change = second.patch.map(|write| write.change);
    assert_eq!(change, Some(placed("arm64", false)));
    assert!(second.requeue.is_some(), "the images are tried again");
}

/// An arm64 image in a pod whose author selects amd64 nodes.
#[test]
fn an_author_who_excludes_the_images_is_told() {
    let selector = json!({ "nodeSelector": { "kubernetes.io/arch": "amd64" } });
    let mut none = Evaluation::new(Verdict::Decided(Decision::NoCommonArchitecture));
    none.conflict = Some(Conflict::Excluded("arm64".parse().unwrap()));
    let plan = plan_with(
        &Config::default(),
        &pod(&[], selector.clone()),
        &none,
        None,
        Instant::now(),
    );
    assert_eq!(reasons(&plan.events), [EventReason::ArchitectureExcluded]);
    assert!(
        plan.events[0].note.contains("run its images: arm64"),
        "{:?}",
        plan.events
    );
    assert!(plan.requeue.is_some() && plan.patch.is_some());
    let plan = plan_of(&pod(&[], selector.clone()), on(&["amd64", "arm64"]));
    assert!(plan.events.is_empty() && plan.requeue.is_none());
    // The author also tolerates the taint of the selected nodes: the images decide, and an event
    // warns the author.
    let mut overruled = Evaluation::new(on(&["arm64"]));
    let message = overruled.explain_overruled(&"arm64".parse().unwrap());
    overruled.raised.push(Notice::AuthorOverrules(message));
    let pod = pod(&[], selector);
    let plan = plan_with(&Config::default(), &pod, &overruled, None, Instant::now());
    assert_eq!(reasons(&plan.events), [EventReason::ArchitectureExcluded]);
    let PlannedChange::PodPlaced { decision, .. } = plan.patch.unwrap().change else {
        panic!("not placed");
    };
    assert_eq!(decision, "arm64");
}

/// No node can run the pod. Behind archaware's gate its affinity is not changed. Behind another
/// gate it gets affinity that no node satisfies.
#[test]
fn a_contradiction_is_written_only_where_nothing_waits_for_archaware() {
    let mut none = Evaluation::new(Verdict::Decided(Decision::NoCommonArchitecture));
    let sets = ["amd64", "arm64"].map(|name| name.parse().unwrap());
    none.conflict = Some(Conflict::Disjoint(sets.into()));
    let foreign = json!({ "schedulingGates": [{ "name": "other" }] });
    for (spec, writes_affinity) in [(json!({}), false), (gated(), false), (foreign, true)] {
        let plan = plan_with(
            &Config::default(),
            &pod(&[], spec.clone()),
            &none,
            None,
            Instant::now(),
        );
        let patch = plan.patch.unwrap().patch.into_operations().to_string();
        assert_eq!(
            patch.contains("nodeAffinity"),
            writes_affinity,
            "{spec} {patch}"
        );
        assert!(!patch.contains("schedulingGates"), "{spec} {patch}");
    }
}

/// Which pods would be better off if they were created anew.
#[test]
fn pods_without_affinity_are_found() {
    let policy = PlacementPolicy::from(&Config::default());
    let owned = |api_version: &str, kind: &str, decision: &str, spec: Value| {
        let mut pod = pod(&[("archaware.dev/decision", decision)], spec);
        let owner = json!([{ "apiVersion": api_version, "kind": kind, "name": "o", "uid": "o", "controller": true }]);
        pod.metadata.owner_references = serde_json::from_value(owner).unwrap();
        pod
    };
    let set = |decision: &str, spec: Value| owned("apps/v1", "ReplicaSet", decision, spec);
    let selects = |name: &str| json!({ "nodeSelector": { "kubernetes.io/arch": name } });
    for (pod, expected) in [
        (set("arm64", json!({})), true),
        (owned("apps/v1", "StatefulSet", "arm64", json!({})), true),
        (
            owned("apps.kruise.io/v1", "StatefulSet", "arm64", json!({})),
            false,
        ),
        (owned("batch/v1", "Job", "arm64", json!({})), false),
        (
            pod(&[("archaware.dev/decision", "arm64")], json!({})),
            false,
        ),
        (set("any", json!({})), false),
        (set("none", json!({})), false),
        (set("arm64", gated()), false),
        (set("arm64", json!({ "nodeName": "n" })), false),
        (set("arm64", selects("arm64")), false),
        // The author must tolerate the taint of amd64 nodes, or the decision would be `none`.
        (set("arm64", selects("amd64")), false),
        (set("arm64", selects("")), false),
    ] {
        let found = lacks_affinity(&pod, &policy);
        assert_eq!(found, expected, "{:?}", pod.spec);
    }
    let soft = crate::config::parse(
        "c",
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\naffinity: {required: false}\n",
    )
    .unwrap();
    assert!(!lacks_affinity(
        &set("arm64", json!({})),
        &PlacementPolicy::from(&soft)
    ));
}

/// An operator that owns the pod removes the annotation each time.
#[test]
fn a_fight_about_none_slows_down() {
    let none = Evaluation::new(Verdict::Decided(Decision::NoCommonArchitecture));
    let (mut now, mut state, mut writes) = (Instant::now(), None, 0);
    let (end, pod) = (now + 60 * MINUTE, pod(&[], json!({})));
    while now < end {
        let plan = plan_with(&Config::default(), &pod, &none, state, now);
        state = plan.state;
        match plan.patch {
            Some(_) => writes += 1,
            None => now += plan.requeue.expect("it is said again"),
        }
    }
    assert!((10..20).contains(&writes), "{writes}");
    // The tag was pushed again, and the pod has the tolerations for the new image.
    let recorded_none = |spec| super::tests::pod(&[("archaware.dev/decision", "none")], spec);
    let plan = plan_of(&recorded_none(tolerating()), on(&["arm64"]));
    assert_eq!(plan.patch.unwrap().change, placed("arm64", false));
}

/// A waiting pod always has a current event, although the API server deletes events after an hour.
#[test]
fn whoever_waits_has_a_current_event() {
    let hold = crate::config::parse(
        "c",
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\nresolution: {failure: {action: hold}}\n",
    )
    .unwrap();
    let none = Evaluation::new(Verdict::Decided(Decision::NoCommonArchitecture));
    let recorded_none = pod(&[("archaware.dev/decision", "none")], json!({}));
    for (evaluation, reason) in [
        (none, EventReason::NoCommonArchitecture),
        (Evaluation::new(unresolved()), EventReason::ImageNotResolved),
    ] {
        let (mut now, mut state, mut events) = (Instant::now(), None, Vec::new());
        let end = now + 65 * MINUTE;
        while now < end {
            let plan = plan_with(&hold, &recorded_none, &evaluation, state, now);
            assert_eq!(plan.patch, None, "nothing to write");
            assert!(!plan.decides);
            events.extend(plan.events.iter().map(|event| (event.reason, now)));
            state = plan.state;
            now += plan.requeue.expect("it is looked at again");
        }
        let pauses: Vec<u64> = events
            .windows(2)
            .map(|two| (two[1].1 - two[0].1).as_secs())
            .collect();
        assert!(
            pauses.len() >= 2 && pauses.iter().all(|pause| (1200..=1800).contains(pause)),
            "{reason:?}: {pauses:?}"
        );
        assert!(
            events
                .iter()
                .all(|(event_reason, _)| *event_reason == reason)
        );
    }
}

#[test]
fn events_are_on_the_object_that_carries_the_annotation() {
    let invalid = |on_namespace| InvalidAnnotation {
        name: "archaware.dev/mode",
        value: "never".to_owned(),
        on_namespace,
    };
    let mut evaluation = Evaluation::new(Verdict::Skip);
    evaluation.raised = [false, true]
        .map(|on_namespace| Notice::InvalidAnnotation(invalid(on_namespace)))
        .into();
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
