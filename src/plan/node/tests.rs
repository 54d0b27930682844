use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::{config::Config, plan::Written};

fn node(architecture: &str, annotation: Option<&str>, taints: Value) -> Node {
    let annotations = annotation.map(|taint| json!({ "archaware.dev/taint": taint }));
    serde_json::from_value(json!({
        "metadata": { "name": "a", "uid": "u", "annotations": annotations, "labels": { "kubernetes.io/arch": architecture } },
        "spec": { "taints": taints },
        "status": { "nodeInfo": { "architecture": architecture } },
    }))
    .unwrap()
}

fn taint(value: &str) -> Value {
    json!({ "key": "kubernetes.io/arch", "value": value, "effect": "NoSchedule" })
}

fn plan_of(node: &Node, config: &Config, written: Option<Written>, now: Instant) -> Plan {
    let mut keys = ConfiguredKeys::from(config);
    keys.taints.insert("old".to_owned());
    let remembered = Remembered {
        state: None,
        written,
    };
    plan(node, &TaintPolicy::from(config), &keys, &remembered, now)
}

/// Another controller takes the taint away again and again, with or without the annotation.
#[test]
fn a_fight_about_a_taint_slows_down() {
    let owned = "kubernetes.io/arch=arm64:NoSchedule";
    let foreign = json!([{ "key": "cloud", "effect": "NoSchedule" }]);
    for annotation in [None, Some(owned)] {
        let mut reverted = node("arm64", annotation, foreign.clone());
        reverted.managers = serde_json::from_value(json!([{ "manager": "cloud-sync",
            "operation": "Update", "fieldsV1": { "f:spec": { "f:taints": {} } } }]))
        .unwrap();
        let start = Instant::now();
        let (mut now, mut last, mut writes, mut notes) = (start, None, 0, Vec::new());
        while now < start + Duration::from_hours(1) {
            let plan = plan_of(&reverted, &Config::default(), last, now);
            notes.extend(plan.events.into_iter().map(|event| event.note));
            match plan.patch {
                Some(write) => {
                    last = write.written;
                    writes += 1;
                }
                None => now += plan.requeue.expect("it is repaired again"),
            }
        }
        assert!(
            (12..20).contains(&writes),
            "{annotation:?}: {writes} writes"
        );
        notes.dedup();
        let [note] = notes.as_slice() else {
            panic!("{notes:?}")
        };
        assert!(
            note.contains("cloud-sync") && note.contains(owned),
            "{note}"
        );
    }
}

/// The change of a node and what is reported about it.
#[test]
fn every_node_has_its_plan() {
    let owned = Some("kubernetes.io/arch=arm64:NoSchedule");
    let moved = Some("old=arm64:NoSchedule");
    let old = json!([{ "key": "old", "value": "arm64", "effect": "NoSchedule" }]);
    let tainted = |removed| {
        Some(PlannedChange::NodeTainted {
            taint: "kubernetes.io/arch=arm64:NoSchedule".parse().unwrap(),
            removed,
        })
    };
    for (node, change, event) in [
        (node("arm64", None, Value::Null), tainted(false), None),
        (node("arm64", owned, json!([taint("arm64")])), None, None),
        (node("arm64", owned, json!([])), tainted(false), None),
        (
            node("arm64", owned, json!([taint("amd64")])),
            tainted(false),
            None,
        ),
        (node("arm64", moved, old), tainted(true), None),
        (node("arm64", None, json!([taint("arm64")])), None, None),
        (
            node("arm64", None, json!([taint("amd64")])),
            None,
            Some(EventReason::TaintConflict),
        ),
        (
            node(
                "arm64",
                Some("gone=arm64:NoSchedule"),
                json!([{ "key": "gone", "value": "arm64", "effect": "NoSchedule" }]),
            ),
            None,
            Some(EventReason::TaintConflict),
        ),
        (
            node("", None, Value::Null),
            None,
            Some(EventReason::UnknownArchitecture),
        ),
    ] {
        let plan = plan_of(&node, &Config::default(), None, Instant::now());
        assert_eq!(plan.patch.map(|write| write.change), change, "{node:?}");
        let reason = plan.events.first().map(|event| event.reason);
        assert_eq!(reason, event, "{node:?}");
    }
    for label in [None, Some("amd64")] {
        let mut node = node("arm64", owned, json!([taint("arm64")]));
        let label = label.map(|value| ("kubernetes.io/arch".to_owned(), value.to_owned()));
        node.metadata.labels = Some(label.into_iter().collect());
        let plan = plan_of(&node, &Config::default(), None, Instant::now());
        assert!(plan.patch.is_none(), "{node:?}");
        let reasons: Vec<_> = plan.events.iter().map(|event| event.reason).collect();
        assert_eq!(reasons, [EventReason::ArchitectureLabelDiffers], "{node:?}");
    }
    let config = Config {
        taint: crate::config::TaintConfig {
            manage: false,
            ..Config::default().taint
        },
        ..Config::default()
    };
    let owned = node("arm64", owned, json!([taint("arm64")]));
    let plan = plan_of(&owned, &config, None, Instant::now());
    let released = PlannedChange::NodeUntainted { removed: true };
    assert_eq!(plan.patch.map(|write| write.change), Some(released));
}
