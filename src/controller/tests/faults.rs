//! Every answer that a call can get, for each kind of object.

use super::*;
use tokio::time::Instant;

use crate::scripted_api::ScriptedResponse;

/// The expected effects of an answer to a patch.
struct Case {
    answer: ScriptedResponse,
    /// When the patch is repeated, in seconds with jitter.
    repeated: Option<std::ops::RangeInclusive<u64>>,
    /// Whether an event is published.
    event: bool,
}

fn cases() -> Vec<Case> {
    let status = |code, message| ScriptedResponse::Status(code, message, Value::Null);
    let field = json!({ "reason": "FieldValueInvalid", "field": "spec" });
    let details = json!({ "kind": "Pod", "causes": [field] });
    let denied = "admission webhook \"a\" denied the request: no";
    let case = |answer, repeated, event| Case {
        answer,
        repeated,
        event,
    };
    vec![
        case(status(409, "has been modified"), Some(2..=2), false),
        case(status(422, "testing value failed"), Some(2..=2), false),
        case(
            ScriptedResponse::Status(422, "Invalid value", details),
            None,
            true,
        ),
        case(status(403, "cannot patch"), Some(30..=30), true),
        case(status(403, denied), Some(30..=30), true),
        case(status(404, "not found"), None, false),
        // The client itself waits and retries, because `Retry-After` is within the timeout of the
        // call.
        case(ScriptedResponse::RetryAfter(429, 3), Some(3..=3), false),
        // Longer than the timeout of a call: the object is requeued with the server's delay.
        case(ScriptedResponse::RetryAfter(429, 20), Some(22..=24), false),
        case(ScriptedResponse::RetryAfter(503, 2), Some(2..=2), false),
        case(status(429, "slow down"), Some(2..=4), false),
        case(status(500, "etcd: leader changed"), Some(2..=4), false),
        case(ScriptedResponse::Broken, Some(2..=4), false),
        // The call times out after ten seconds.
        case(ScriptedResponse::Silence, Some(12..=14), false),
    ]
}

async fn run_cases(path: &str, object: Option<Value>) {
    for Case {
        answer,
        repeated,
        event,
    } in cases()
    {
        let api = cluster();
        if let Some(object) = &object {
            api.put(path, object.clone());
        }
        let call = format!("PATCH {path}");
        api.script(&call, [answer.clone()]);
        let controller = Controller::start(&api, "");
        api.wait_for(&call, 1).await;
        tokio::time::sleep(Duration::from_mins(30)).await;
        let times: Vec<Instant> = api.calls(&[&call]).iter().map(|call| call.at).collect();
        match (&repeated, times.as_slice()) {
            (None, [_]) => {}
            (Some(range), [first, second]) => {
                let pause = (*second - *first).as_secs();
                assert!(range.contains(&pause), "{path} {answer:?}: after {pause} s");
                let object = api.get(path).unwrap().to_string();
                assert!(
                    object.contains("archaware.dev/"),
                    "{path} {answer:?}: {object}"
                );
            }
            (_, times) => panic!(
                "{path} {answer:?}: patched {} times, first at {:?}",
                times.len(),
                times.get(..3)
            ),
        }
        let is_refusal = |(reason, _): &&(String, String)| reason == "ChangeRefused";
        let refused = events(&api).iter().filter(is_refusal).count();
        assert_eq!(refused, usize::from(event), "{path} {answer:?}");
        // Nodes are tainted whatever happens to a pod or DaemonSet.
        let nodes = api.calls(&[&format!("PATCH {NODE}")]);
        assert!(!nodes.is_empty(), "{path} {answer:?}");
        controller.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn every_answer_to_the_patch_of_a_pod() {
    run_cases(POD, Some(pod())).await;
}

#[tokio::test(start_paused = true)]
async fn every_answer_to_the_patch_of_a_daemon_set() {
    run_cases(DAEMON_SET, Some(daemon_set())).await;
}

#[tokio::test(start_paused = true)]
async fn every_answer_to_the_patch_of_a_node() {
    run_cases(NODE, None).await;
}

/// The policy that denies a change may be changed meanwhile.
#[tokio::test(start_paused = true)]
async fn a_denied_change_is_tried_again_with_growing_pauses() {
    let denied = ScriptedResponse::Status(
        403,
        "admission webhook \"a\" denied the request: no",
        Value::Null,
    );
    for path in [POD, NODE] {
        let api = cluster();
        if path == POD {
            api.put(POD, pod());
        }
        let call = format!("PATCH {path}");
        api.script(&call, vec![denied.clone(); 7]);
        let controller = Controller::start(&api, "");
        let calls = api.wait_for(&call, 8).await;
        let pauses: Vec<u64> = calls
            .windows(2)
            .map(|two| (two[1].at - two[0].at).as_secs())
            .collect();
        assert_eq!(pauses, [30, 60, 120, 240, 480, 600, 600], "{path}");
        let object = api.get(path).unwrap().to_string();
        assert!(object.contains("archaware.dev/"), "{path}: {object}");
        controller.stop().await;
    }
}

/// The change is rejected. The pod must not wait behind archaware's gate, so the gate is removed
/// alone.
#[tokio::test(start_paused = true)]
async fn a_refused_pod_loses_its_gate() {
    let api = cluster();
    let mut gated = pod();
    gated["spec"]["schedulingGates"] = json!([{ "name": "archaware.dev/inspect" }]);
    api.put(POD, gated);
    let call = format!("PATCH {POD}");
    let message = "admission webhook \"a\" denied the request";
    let denied = ScriptedResponse::Status(400, message, Value::Null);
    // The API server restarts during the removal of the gate.
    let restart = ScriptedResponse::Status(500, "shutting down", Value::Null);
    api.script(&call, [denied.clone(), restart, denied]);
    let controller = Controller::start(&api, "");
    let calls = api.wait_for(&call, 4).await;
    let gate = json!([
        { "op": "test", "path": "/metadata/uid", "value": "pod" },
        { "op": "test", "path": "/spec/containers/0/image", "value": "a" },
        { "op": "test", "path": "/spec/schedulingGates/0/name", "value": "archaware.dev/inspect" },
        { "op": "remove", "path": "/spec/schedulingGates/0" },
    ]);
    assert_eq!((&calls[1].body, &calls[3].body), (&gate, &gate));
    assert_eq!((calls[2].at - calls[1].at).as_secs(), 15);
    let released = api.get(POD).unwrap();
    assert_eq!(released["spec"]["schedulingGates"], json!([]));
    controller.stop().await;
}

/// The API server may not know a role or the keys of tokens for a moment. The gate stays meanwhile,
/// because without it the pod would be scheduled without the decision.
#[tokio::test(start_paused = true)]
async fn a_rejected_client_keeps_the_gate() {
    for code in [401, 403] {
        let api = cluster();
        let mut gated = pod();
        gated["spec"]["schedulingGates"] = json!([{ "name": "archaware.dev/inspect" }]);
        api.put(POD, gated);
        let call = format!("PATCH {POD}");
        let rejected =
            ScriptedResponse::Status(code, "User \"archaware\" cannot patch", Value::Null);
        api.script(&call, [rejected.clone(), rejected]);
        let controller = Controller::start(&api, "");
        let calls = api.wait_for(&call, 3).await;
        let mut bodies = calls.iter().map(|call| call.body.to_string());
        assert!(
            bodies.all(|body| body.contains("/spec/tolerations")),
            "{code}: {calls:?}"
        );
        for pair in calls.windows(2) {
            assert_eq!((pair[1].at - pair[0].at).as_secs(), 15, "{code}");
        }
        let released = api.get(POD).unwrap();
        assert_eq!(released["spec"]["schedulingGates"], json!([]));
        assert_ne!(released["spec"]["tolerations"], Value::Null);
        controller.stop().await;
    }
}

/// An event that cannot be written is not retried and delays nothing.
#[tokio::test(start_paused = true)]
async fn events_are_best_effort() {
    for answer in [
        ScriptedResponse::Silence,
        ScriptedResponse::Broken,
        ScriptedResponse::Status(403, "cannot create", Value::Null),
        ScriptedResponse::Status(404, "namespace not found", Value::Null),
    ] {
        let api = cluster();
        api.put(DAEMON_SET, daemon_set());
        let call = "POST /apis/events.k8s.io/v1/namespaces/ns/events";
        api.script(call, [answer]);
        let controller = Controller::start(&api, "");
        api.wait_for(call, 1).await;
        api.wait_for(&format!("PATCH {NODE}"), 1).await;
        tokio::time::sleep(Duration::from_mins(5)).await;
        assert_eq!(api.calls(&[call]).len(), 1);
        controller.stop().await;
    }
}

/// Missing permissions, and permissions that cannot be checked, end the start.
#[tokio::test(start_paused = true)]
async fn the_start_ends_without_permissions() {
    let call = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let denied = json!({ "spec": {}, "status": { "allowed": false } });
    let down = ScriptedResponse::Status(500, "down", Value::Null);
    for (answer, expected) in [
        (
            ScriptedResponse::Body(denied),
            "archaware lacks permissions",
        ),
        (
            ScriptedResponse::Silence,
            "cannot check archaware's own permissions",
        ),
        (
            ScriptedResponse::Broken,
            "cannot check archaware's own permissions",
        ),
        (down, "cannot check archaware's own permissions"),
    ] {
        let api = cluster();
        api.script(call, [answer]);
        let controller = Controller::start(&api, "");
        let ended = tokio::time::timeout(Duration::from_mins(1), controller.running);
        let error = ended.await.unwrap().unwrap().unwrap_err();
        assert!(error.to_string().starts_with(expected), "{error}");
        assert_eq!(writes(&api).len(), 0);
    }
}
