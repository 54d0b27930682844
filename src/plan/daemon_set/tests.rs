use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};

use super::*;
use crate::{
    cluster::objects::DaemonSet,
    config::Config,
    evaluate::Verdict,
    image::ImageError,
    placement::{
        ConfiguredKeys,
        failure::{FailureAction, FailurePolicy},
    },
    plan::Written,
};

fn arch(name: &str) -> Value {
    json!({ "key": "kubernetes.io/arch", "operator": "Equal", "value": name, "effect": "NoSchedule" })
}

/// A DaemonSet whose template has these tolerations, of which the owned ones are recorded.
fn set(tolerations: &[Value], owned: &[Value], is_by_policy: bool) -> DaemonSet {
    let names: Vec<&str> = owned
        .iter()
        .map(|toleration| toleration["value"].as_str().unwrap_or("any"))
        .collect();
    let record = json!({ "version": 1, "tolerations": owned, "images": ["a"],
        "steppedAside": is_by_policy, "decision": names.join(",") });
    let annotations = json!({ "archaware.dev/tolerations": record.to_string() });
    serde_json::from_value(json!({
        "metadata": { "name": "d", "namespace": "ns", "uid": "u",
            "annotations": if owned.is_empty() { json!({}) } else { annotations } },
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
    remembered: Remembered,
    now: Instant,
) -> Plan {
    let evaluation = Evaluation {
        by_policy,
        ..Evaluation::new(verdict)
    };
    plan_by(&Config::default(), set, &evaluation, mode, remembered, now)
}

fn plan_by(
    config: &Config,
    set: &DaemonSet,
    evaluation: &Evaluation,
    mode: DaemonSets,
    remembered: Remembered,
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
    let template = Template::new(set, &ConfiguredKeys::from(config));
    plan(&template, evaluation, policies, mode, remembered, now)
}

/// What is remembered after a plan that was applied.
fn after(plan: &Plan) -> Remembered {
    Remembered {
        state: plan.state.clone(),
        written: plan.patch.as_ref().and_then(|write| write.written),
    }
}

fn managed(set: &DaemonSet, verdict: Verdict) -> Plan {
    plan_of(
        set,
        (verdict, false),
        DaemonSets::Manage,
        Remembered::default(),
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
    let without_record = set(std::slice::from_ref(&arm), &[], false);
    assert_eq!(managed(&without_record, on(&["arm64"])).patch, None);
}

/// A decision by the images stands while the images cannot be resolved. A decision of the failure
/// policy stands until the images change. Each change of a template causes a rollout.
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
        Remembered::default(),
        Instant::now(),
    );
    let second = plan_of(&decided, verdict(), DaemonSets::Manage, after(&first), late);
    assert_eq!(second.patch, None);
    let any = PlacementPolicy::from(&Config::default())
        .taint
        .toleration_of_all();
    let aside = set(std::slice::from_ref(&any), std::slice::from_ref(&any), true);
    let kept_decision = (Verdict::Decided(Decision::TolerateAll), true);
    let plan = plan_of(
        &aside,
        kept_decision,
        DaemonSets::Manage,
        Remembered::default(),
        Instant::now(),
    );
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
    let new = Remembered::default();
    let first = plan_of(&set, verdict(), DaemonSets::Manage, new, start);
    assert_eq!(first.patch, None);
    let second = plan_of(&set, verdict(), DaemonSets::Manage, after(&first), late);
    let write = second.patch.unwrap();
    let reasons: Vec<_> = write.events.iter().map(|event| event.reason).collect();
    let expected = [
        EventReason::TolerationsChanged,
        EventReason::ToleratesEveryArchitecture,
    ];
    assert_eq!(reasons, expected);
    assert!(
        write
            .patch
            .into_operations()
            .to_string()
            .contains("steppedAside")
    );
}

/// Each repair rolls the DaemonSet. So the first repair is immediate, and further repairs follow at
/// most once an hour, even if the other tool also removes the annotation.
#[test]
fn a_fight_about_a_template_slows_down() {
    let start = Instant::now();
    let owned = [arch("amd64")];
    for (reverted, expected) in [
        (set(&[], &owned, false), vec![0, 60, 120]),
        (set(&[], &[], false), vec![0, 0, 60, 120]),
    ] {
        let (mut now, mut remembered, mut writes) = (start, Remembered::default(), Vec::new());
        let mut reasons = BTreeSet::new();
        while now < start + Duration::from_mins(179) {
            let (verdict, before) = ((on(&["amd64"]), false), remembered.written);
            let plan = plan_of(&reverted, verdict, DaemonSets::Manage, remembered, now);
            let of_patch = plan.patch.iter().flat_map(|write| &write.events);
            let events = plan.events.iter().chain(of_patch);
            reasons.extend(events.map(|event| event.reason.as_str()));
            remembered = after(&plan);
            remembered.written = remembered.written.or(before);
            match plan.patch {
                Some(_) => writes.push((now - start).as_secs() / 60),
                None => now += plan.requeue.expect("it is looked at again"),
            }
        }
        assert_eq!(writes, expected);
        assert_eq!(
            reasons,
            ["TolerationsChanged", "TolerationsReverted"].into()
        );
    }
}

/// A new image is no repair.
#[test]
fn other_images_are_decided_at_once() {
    let now = Instant::now();
    let mut wanted = Remembered::default();
    let mut fought = set(&[], &[], false);
    for _ in 0..2 {
        let verdict = (on(&["amd64"]), false);
        wanted = after(&plan_of(&fought, verdict, DaemonSets::Manage, wanted, now));
    }
    fought.spec.template.spec.containers[0].image = Some("b".to_owned());
    let verdict = (on(&["amd64"]), false);
    let plan = plan_of(&fought, verdict, DaemonSets::Manage, wanted, now);
    assert!(plan.patch.is_some());
}

/// archaware's patch would take the field, and the next apply would end with a conflict.
#[test]
fn tolerations_of_a_server_side_applier_are_reported() {
    let mut applied = set(&[arch("amd64")], &[], false);
    let fields = json!({ "f:spec": { "f:template": { "f:spec": { "f:tolerations": {} } } } });
    applied.managers = serde_json::from_value(json!([{ "manager": "argocd", "operation": "Apply",
        "fieldsV1": fields }]))
    .unwrap();
    let plan = managed(&applied, on(&["amd64", "arm64"]));
    assert_eq!(plan.patch, None);
    let [event] = plan.events.as_slice() else {
        panic!("{:?}", plan.events)
    };
    assert_eq!(event.reason, EventReason::TolerationsMissing);
    assert!(event.note.contains("argocd"), "{}", event.note);
    assert_eq!(managed(&applied, on(&["amd64"])).patch, None);
}

/// The annotation says that archaware added the toleration; the author's manifest has it too by
/// now.
#[test]
fn an_author_takes_a_toleration_over() {
    let amd = [arch("amd64")];
    let mut taken = set(&amd, &amd, false);
    taken.applied_tolerations = amd.to_vec();
    let plan = managed(&taken, on(&["arm64"]));
    let write = plan.patch.unwrap();
    let operations = write.patch.into_operations();
    let removes: Vec<&Value> = operations
        .as_array()
        .unwrap()
        .iter()
        .filter(|operation| operation["op"] == "remove")
        .collect();
    assert!(removes.is_empty(), "{operations}");
}

/// After an upgrade, or when the author took a toleration over, only the annotation changes: that
/// is no repair.
#[test]
fn a_record_alone_is_no_repair() {
    let (amd, now) = ([arch("amd64")], Instant::now());
    let mut old = set(&amd, &amd, false);
    let record = json!({ "version": 1, "tolerations": amd, "images": ["a"] }).to_string();
    old.metadata.annotations = Some([("archaware.dev/tolerations".to_owned(), record)].into());
    let written = Some(Written {
        wanted: 1,
        repairs: 3,
        at: now,
    });
    let remembered = Remembered {
        state: None,
        written,
    };
    let verdict = || (on(&["amd64"]), false);
    let plan = plan_of(&old, verdict(), DaemonSets::Manage, remembered, now);
    let write = plan.patch.unwrap();
    assert_eq!(
        (write.change, write.written),
        (PlannedChange::RecordChanged, None)
    );
    assert!(write.events.is_empty() && plan.events.is_empty());
    let plan = plan_of(
        &old,
        verdict(),
        DaemonSets::Report,
        Remembered::default(),
        now,
    );
    assert!(plan.patch.is_none() && plan.events.is_empty());
}

/// The tolerations were lost while a registry is down: the record knows what the images decided.
#[test]
fn a_recorded_decision_is_applied_again() {
    let amd = arch("amd64");
    let record =
        json!({ "version": 1, "tolerations": [amd], "images": ["a"], "decision": "amd64" });
    let mut lost = set(&[], &[], false);
    let text = record.to_string();
    lost.metadata.annotations = Some([("archaware.dev/tolerations".to_owned(), text)].into());
    let write = managed(&lost, unresolved()).patch.unwrap();
    let changed = PlannedChange::TemplateChanged {
        decision: "amd64".to_owned(),
        by_policy: false,
    };
    assert_eq!(write.change, changed);
}

/// A decision of `action: tolerate` holds until the images are resolved. A restart, after which
/// fewer images may be resolved, does not widen it.
#[test]
fn what_tolerate_decides_is_only_narrowed() {
    let mut config = Config::default();
    config.resolution.failure.after = Duration::ZERO;
    config.resolution.failure.action = FailureAction::Tolerate;
    config.resolution.failure.architectures =
        ["amd64", "arm64"].map(|name| name.parse().unwrap()).into();
    let set_of = |record: &Value| {
        let mut set = set(record["tolerations"].as_array().unwrap(), &[], false);
        let text = record.to_string();
        set.metadata.annotations = Some([("archaware.dev/tolerations".to_owned(), text)].into());
        set
    };
    let plan_for = |set: &DaemonSet, verdict: Verdict| {
        let (mode, now) = (DaemonSets::Manage, Instant::now());
        let evaluation = Evaluation::new(verdict);
        plan_by(&config, set, &evaluation, mode, Remembered::default(), now)
    };
    let known = |names: &[&str]| match (unresolved(), on(names)) {
        (Verdict::Unresolved { failed, .. }, Verdict::Decided(Decision::Architectures(set))) => {
            Verdict::Unresolved {
                failed,
                known: Some(set),
            }
        }
        other => panic!("{other:?}"),
    };
    let first = plan_for(&set(&[], &[], false), known(&["amd64"]));
    let written = format!("{:?}", first.patch.unwrap());
    assert!(written.contains("untilKnown"), "{written}");
    assert!(first.requeue.is_some_and(|wait| wait < RECHECK_INTERVAL));
    let record = json!({"version": 1, "tolerations": [arch("amd64")], "images": ["a"], "untilKnown": true, "decision": "amd64"});
    let decided = set_of(&record);
    assert_eq!(plan_for(&decided, unresolved()).patch, None);
    let changes = |verdict: Verdict| plan_for(&decided, verdict).patch.map(|write| write.change);
    let changed = |decision: &str, by_policy: bool| PlannedChange::TemplateChanged {
        decision: decision.to_owned(),
        by_policy,
    };
    assert_eq!(changes(known(&["arm64"])), Some(changed("arm64", true)));
    assert_eq!(changes(on(&["amd64"])), Some(PlannedChange::RecordChanged));
    let both = Some(changed("amd64,arm64", false));
    assert_eq!(changes(on(&["amd64", "arm64"])), both);
}

#[test]
fn a_report_changes_nothing_and_is_made_once() {
    let set = set(&[], &[], false);
    let verdict = || (on(&["amd64"]), false);
    let (new, now) = (Remembered::default(), Instant::now());
    let first = plan_of(&set, verdict(), DaemonSets::Report, new, now);
    assert_eq!(first.patch, None);
    assert_eq!(first.events[0].reason, EventReason::TolerationsMissing);
    let note = &first.events[0].note;
    assert!(
        note.contains("should tolerate kubernetes.io/arch=amd64, but"),
        "{note}"
    );
    let second = plan_of(&set, verdict(), DaemonSets::Report, after(&first), now);
    assert!(second.events.is_empty());
}
