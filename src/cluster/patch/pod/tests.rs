use std::{collections::BTreeMap, slice};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::*;
use crate::{placement::author_selection::AuthorSelection, platform::Architecture};

fn subject(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

fn tolerating(tolerations: &[Value]) -> PodChange {
    PodChange {
        tolerations: tolerations.to_vec(),
        ..PodChange::default()
    }
}

#[test]
fn a_pod_with_and_without_a_list() {
    let toleration = json!({"key": "k"});
    let decision = Decision::TolerateAll;
    let bare = subject(json!({"metadata": {"uid": "u"}}));
    assert_eq!(
        apply(
            &bare,
            tolerating(slice::from_ref(&toleration)),
            &decision,
            false
        )
        .into_operations(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/tolerations", "value": null},
            {"op": "add", "path": "/spec/tolerations", "value": [{"key": "k"}]},
            {"op": "test", "path": "/metadata/annotations", "value": null},
            {"op": "add", "path": "/metadata/annotations", "value": {
                "archaware.dev/decision": "any", "archaware.dev/added": r#"{"version":1,"tolerations":[{"key":"k"}]}"#,
            }},
        ])
    );
    let full = subject(json!({
        "metadata": {"uid": "u", "annotations": {}},
        "spec": {"tolerations": [{"key": "other", "unknown": 1}]},
    }));
    assert_eq!(
        apply(
            &full,
            tolerating(&[toleration.clone(), toleration]),
            &decision,
            false
        )
        .into_operations(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/tolerations", "value": [{"key": "other", "unknown": 1}]},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "k"}},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "k"}},
            {"op": "test", "path": "/metadata/annotations/archaware.dev~1decision", "value": null},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1decision", "value": "any"},
            {"op": "test", "path": "/metadata/annotations/archaware.dev~1added", "value": null},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1added", "value": r#"{"version":1,"tolerations":[{"key":"k"},{"key":"k"}]}"#},
        ])
    );
}

#[test]
fn the_decision_removes_the_gate_and_keeps_foreign_gates() {
    let gated = subject(json!({
        "metadata": {"uid": "u", "annotations": {}},
        "spec": {"schedulingGates": [{"name": "other"}, {"name": GATE}]},
    }));
    assert_eq!(
        remove_gate(&gated).into_operations(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/schedulingGates/1/name", "value": GATE},
            {"op": "remove", "path": "/spec/schedulingGates/1"},
        ])
    );
    assert!(remove_gate(&subject(json!({"metadata": {"uid": "u"}}))).is_empty());
}

/// Every shape of affinity that a pod can have, with what is added to it.
#[test]
fn affinity_is_added_to_what_is_there() {
    let policy = |affinity: Option<&Affinity>| {
        let arm64: Architecture = "arm64".parse().unwrap();
        let preferred = vec![affinity::Preference {
            architecture: arm64.clone(),
            weight: 5,
        }];
        let author = AuthorSelection {
            node_selector: &BTreeMap::new(),
            affinity,
        };
        affinity::decide(&[[arm64].into()], preferred, author)
    };
    let arch = json!({"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]});
    let required = json!({"nodeSelectorTerms": [{"matchExpressions": [arch]}]});
    let preferred = json!({"weight": 5, "preference": {"matchExpressions": [arch]}});
    let zone = json!({"key": "zone", "operator": "Exists"});
    let r = format!("{NODE_AFFINITY}/{REQUIRED}");
    let p = format!("{NODE_AFFINITY}/{PREFERRED}");
    let both = json!({REQUIRED: required, PREFERRED: [preferred]});
    for (affinity, expected) in [
        (
            json!(null),
            json!([
                {"op": "test", "path": AFFINITY, "value": null},
                {"op": "add", "path": AFFINITY, "value": {"nodeAffinity": both}},
            ]),
        ),
        (
            json!({"podAffinity": {}}),
            json!([
                {"op": "test", "path": NODE_AFFINITY, "value": null},
                {"op": "add", "path": NODE_AFFINITY, "value": both},
            ]),
        ),
        (
            json!({"nodeAffinity": {}}),
            json!([
                {"op": "test", "path": r, "value": null},
                {"op": "add", "path": r, "value": required},
                {"op": "test", "path": p, "value": null},
                {"op": "add", "path": p, "value": [preferred]},
            ]),
        ),
        (
            json!({"nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchExpressions": [zone]}]},
                PREFERRED: [{"weight": 1, "preference": {"matchExpressions": [zone]}}],
            }}),
            json!([
                {"op": "add", "path": format!("{r}/nodeSelectorTerms/0/matchExpressions/-"), "value": arch},
                {"op": "add", "path": format!("{r}/nodeSelectorTerms/1/matchExpressions/-"), "value": arch},
                {"op": "add", "path": format!("{p}/-"), "value": preferred},
            ]),
        ),
    ] {
        let pod = subject(json!({"spec": {"affinity": affinity}}));
        let mut patch = JsonPatch::for_object(&ObjectMeta::default());
        let change = policy(pod.spec.affinity.as_ref());
        patch.affinity(pod.spec.affinity.as_ref(), &change);
        assert_eq!(patch.into_operations(), expected, "{affinity}");
    }
}

#[test]
fn an_earlier_call_is_undone_before_the_next_one() {
    let (ours, theirs) = (json!({"key": "a"}), json!({"key": "b"}));
    let pod = subject(json!({
        "metadata": {"annotations": {annotation::ADDED: r#"{"tolerations":[{"key":"a"}]}"#}},
        "spec": {"tolerations": [ours, theirs]},
    }));
    let mut without_owned = pod.clone();
    let recorded = reinvocation::recorded_change(pod.metadata.annotations.as_ref().unwrap());
    let undo = reinvocation::undo(&recorded, without_owned.spec.tolerations.as_mut(), None);
    let decision = Decision::TolerateAll;
    let admission = AdmissionPatch {
        undo,
        change: tolerating(&[json!({"key": "c"})]),
        decision: Some(&decision),
        gate: true,
    };
    assert_eq!(
        admit(&pod, &without_owned, admission).into_operations(),
        json!([
            {"op": "remove", "path": "/spec/tolerations/0"},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "c"}},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1decision", "value": "any"},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1added", "value": r#"{"version":1,"tolerations":[{"key":"c"}]}"#},
            {"op": "add", "path": "/spec/schedulingGates", "value": [{"name": GATE}]},
        ])
    );
}
