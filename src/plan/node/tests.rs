use serde_json::{Value, json};

use super::*;
use crate::config::Config;

fn node(architecture: &str, annotation: Option<&str>, taints: Value) -> Node {
    let annotations = annotation.map(|taint| json!({ "archaware.dev/taint": taint }));
    serde_json::from_value(json!({
        "metadata": { "name": "a", "uid": "u", "annotations": annotations },
        "spec": { "taints": taints },
        "status": { "nodeInfo": { "architecture": architecture } },
    }))
    .unwrap()
}

fn taint(value: &str) -> Value {
    json!({ "key": "kubernetes.io/arch", "value": value, "effect": "NoSchedule" })
}

/// The change of a node and what is reported about it.
#[test]
fn every_node_has_its_plan() {
    let owned = Some("kubernetes.io/arch=arm64:NoSchedule");
    let moved = Some("old=arm64:NoSchedule");
    let old = json!([{ "key": "old", "value": "arm64", "effect": "NoSchedule" }]);
    let tainted = |removed| {
        Some(PlannedChange::NodeTainted {
            taint: "kubernetes.io/arch=arm64:NoSchedule".to_owned(),
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
            node("", None, Value::Null),
            None,
            Some(EventReason::UnknownArchitecture),
        ),
    ] {
        let plan = plan(&node, &TaintPolicy::from(&Config::default()));
        assert_eq!(plan.patch.map(|write| write.change), change, "{node:?}");
        let reason = plan.events.first().map(|event| event.reason);
        assert_eq!(reason, event, "{node:?}");
    }
    let config = Config {
        taint: crate::config::TaintConfig {
            manage: false,
            ..Config::default().taint
        },
        ..Config::default()
    };
    let plan = plan(
        &node("arm64", owned, json!([taint("arm64")])),
        &TaintPolicy::from(&config),
    );
    let released = PlannedChange::NodeUntainted { removed: true };
    assert_eq!(plan.patch.map(|write| write.change), Some(released));
}
