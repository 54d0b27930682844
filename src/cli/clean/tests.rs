//! `archaware clean` against a scripted API server with a virtual clock.

use serde_json::{Value, json};

use super::*;
use crate::scripted_api::{ScriptedApi, ScriptedResponse};

const NODE: &str = "/api/v1/nodes/a";
const POD: &str = "/api/v1/namespaces/ns/pods/p";
const DAEMON_SET: &str = "/apis/apps/v1/namespaces/ns/daemonsets/d";
const DEPLOYMENT: &str = "/apis/apps/v1/namespaces/archaware/deployments/archaware";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/archaware/leases/archaware";
const SECRET: &str = "/api/v1/namespaces/archaware/secrets/archaware-admission";
const WEBHOOK: &str =
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/archaware";

const CLEAN: CleanCommand = CleanCommand {
    dry_run: false,
    stop_controller: false,
    recreate_pods: false,
};

/// A cluster with one of everything that archaware leaves.
fn cluster() -> ScriptedApi {
    let api = ScriptedApi::default();
    let labels = json!({ "app.kubernetes.io/name": "archaware", "app.kubernetes.io/managed-by": "archaware" });
    let arch = |value: &str| json!({ "key": "kubernetes.io/arch", "value": value, "effect": "NoSchedule" });
    let owned =
        json!({ "key": "kubernetes.io/arch", "operator": "Exists", "effect": "NoSchedule" });
    let foreign = json!({ "key": "gpu", "operator": "Exists" });
    let record = json!({ "tolerations": [owned], "images": ["a"] }).to_string();
    api.put(
        "/api/v1/namespaces/archaware",
        json!({ "metadata": { "name": "archaware", "uid": "n" } }),
    );
    api.put(
        WEBHOOK,
        json!({ "metadata": { "name": "archaware", "uid": "w", "labels": labels } }),
    );
    api.put(
        SECRET,
        json!({ "metadata": {
        "name": "archaware-admission", "namespace": "archaware", "uid": "s", "labels": labels } }),
    );
    api.put(
        DEPLOYMENT,
        json!({
            "metadata": { "name": "archaware", "namespace": "archaware", "uid": "c" },
            "spec": { "replicas": 2, "selector": {}, "template": {} },
        }),
    );
    api.put(
        NODE,
        json!({
            "metadata": { "name": "a", "uid": "node", "annotations": {
                "archaware.dev/taint": "kubernetes.io/arch=arm64:NoSchedule", "other": "stays" } },
            "spec": { "taints": [{ "key": "gpu", "effect": "NoSchedule" }, arch("arm64")] },
            "status": { "nodeInfo": { "architecture": "arm64" } },
        }),
    );
    api.put(
        DAEMON_SET,
        json!({
            "metadata": { "name": "d", "namespace": "ns", "uid": "set",
                "annotations": { "archaware.dev/tolerations": record } },
            "spec": { "template": { "spec": { "tolerations": [foreign, owned] } } },
        }),
    );
    api.put(POD, json!({
        "metadata": { "name": "p", "namespace": "ns", "uid": "pod",
            "annotations": { "archaware.dev/decision": "arm64" },
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true }] },
        "spec": { "schedulingGates": [{ "name": "other" }, { "name": "archaware.dev/inspect" }] },
    }));
    api
}

async fn clean(api: &ScriptedApi, clean: CleanCommand) -> anyhow::Result<CommandStatus> {
    let namespace = "archaware".to_owned();
    let run = clean.run(api.client(), namespace, Metrics::default());
    let ended = tokio::time::timeout(Duration::from_mins(10), run).await;
    ended.expect("it ends")
}

fn held_by(holder: &str, transitions: u32) -> Value {
    json!({
        "metadata": { "name": "archaware", "namespace": "archaware", "uid": "lease" },
        "spec": { "holderIdentity": holder, "leaseDurationSeconds": 15,
            "leaseTransitions": transitions, "renewTime": jiff::Timestamp::now().to_string() },
    })
}

/// The changes in order, without renewals of the Lease.
fn changes(api: &ScriptedApi) -> Vec<String> {
    let calls = api.calls(&["PATCH", "POST", "DELETE"]);
    calls.iter().map(ToString::to_string).collect()
}

#[tokio::test(start_paused = true)]
async fn everything_owned_is_removed_and_nothing_else() {
    let api = cluster();
    assert_eq!(clean(&api, CLEAN).await.unwrap(), CommandStatus::Done);
    let lease = LEASE.strip_suffix("/archaware").unwrap();
    let mut made = changes(&api);
    made.retain(|call| *call != format!("PATCH {LEASE}"));
    assert_eq!(
        made,
        [
            format!("POST {lease}"),
            format!("DELETE {WEBHOOK}"),
            format!("PATCH {POD}"),
            format!("PATCH {NODE}"),
            format!("PATCH {DAEMON_SET}"),
            format!("DELETE {SECRET}"),
            format!("DELETE {LEASE}"),
        ]
    );
    let left = |path: &str, pointer: &str| api.get(path).unwrap().pointer(pointer).cloned();
    let gpu = json!([{ "key": "gpu", "effect": "NoSchedule" }]);
    assert_eq!(left(NODE, "/spec/taints"), Some(gpu));
    assert_eq!(
        left(NODE, "/metadata/annotations"),
        Some(json!({ "other": "stays" }))
    );
    let gates = json!([{ "name": "other" }]);
    assert_eq!(left(POD, "/spec/schedulingGates"), Some(gates));
    let tolerations = json!([{ "key": "gpu", "operator": "Exists" }]);
    assert_eq!(
        left(DAEMON_SET, "/spec/template/spec/tolerations"),
        Some(tolerations)
    );
    assert_eq!(left(DAEMON_SET, "/metadata/annotations"), Some(json!({})));
    // A second run has nothing to do.
    assert_eq!(clean(&api, CLEAN).await.unwrap(), CommandStatus::Done);
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_changes_nothing() {
    let api = cluster();
    let dry = CleanCommand {
        dry_run: true,
        recreate_pods: true,
        ..CLEAN
    };
    assert_eq!(clean(&api, dry).await.unwrap(), CommandStatus::Done);
    assert_eq!(changes(&api), Vec::<String>::new());
}

/// What follows from each answer to the first patch of a node: whether the node is clean at the end, and the exit
/// status.
#[tokio::test(start_paused = true)]
async fn every_answer_to_a_patch() {
    let status = |code, message| ScriptedResponse::Status(code, message, Value::Null);
    for (answers, is_clean, expected) in [
        (vec![status(409, "modified")], true, CommandStatus::Done),
        (
            vec![status(422, "test failed"); 4],
            true,
            CommandStatus::Done,
        ),
        (
            vec![status(422, "test failed"); 5],
            false,
            CommandStatus::Failed,
        ),
        (
            vec![ScriptedResponse::RetryAfter(429, 2)],
            true,
            CommandStatus::Done,
        ),
        (
            vec![status(403, "cannot patch")],
            false,
            CommandStatus::Failed,
        ),
        (vec![status(500, "down")], false, CommandStatus::Failed),
        (vec![ScriptedResponse::Broken], false, CommandStatus::Failed),
        // The call hung once.
        (
            vec![ScriptedResponse::Silence],
            false,
            CommandStatus::Failed,
        ),
        (vec![ScriptedResponse::Lost], true, CommandStatus::Failed),
    ] {
        let api = cluster();
        let name = format!("{answers:?}");
        api.script(&format!("PATCH {NODE}"), answers);
        assert_eq!(clean(&api, CLEAN).await.unwrap(), expected, "{name}");
        let node = api.get(NODE).unwrap();
        let taint = node.pointer("/metadata/annotations/archaware.dev~1taint");
        assert_eq!(taint.is_none(), is_clean, "{name}");
        // A failure with one object does not affect the others, and the Lease is deleted.
        assert!(
            api.get(WEBHOOK).is_none() && api.get(LEASE).is_none(),
            "{name}"
        );
    }
}

/// No call may hang: a list without an answer ends the command, and the Lease is released.
#[tokio::test(start_paused = true)]
async fn a_list_that_hangs_ends_in_time() {
    for list in ["/api/v1/pods", "/api/v1/nodes", "/apis/apps/v1/daemonsets"] {
        let api = cluster();
        api.script(&format!("GET {list}"), [ScriptedResponse::Silence]);
        let started = Instant::now();
        let error = clean(&api, CLEAN).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot list"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(45));
        let lease = api.get(LEASE).unwrap();
        assert_eq!(lease["spec"].get("holderIdentity"), None, "{list}");
    }
}

/// A running controller would restore everything.
#[tokio::test(start_paused = true)]
async fn a_running_controller_is_in_the_way() {
    let api = cluster();
    api.put(LEASE, held_by("pod_1", 1));
    assert_eq!(clean(&api, CLEAN).await.unwrap(), CommandStatus::Refused);
    assert_eq!(changes(&api), Vec::<String>::new());
    // The controller is told to stop and releases the Lease a little later.
    let stopping = api.clone();
    let stops = tokio::spawn(async move {
        let call = format!("PATCH {DEPLOYMENT}");
        stopping.wait_for(&call, 1).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        stopping.put(LEASE, held_by("", 1));
    });
    let stop = CleanCommand {
        stop_controller: true,
        ..CLEAN
    };
    assert_eq!(clean(&api, stop).await.unwrap(), CommandStatus::Done);
    stops.await.unwrap();
    assert_eq!(api.get(DEPLOYMENT).unwrap()["spec"]["replicas"], 0);
}

#[tokio::test(start_paused = true)]
async fn every_answer_to_an_eviction() {
    let budget = json!({ "causes": [{ "reason": "DisruptionBudget" }] });
    let status = |code, details| ScriptedResponse::Status(code, "m", details);
    for (answer, expected) in [
        (None, CommandStatus::Done),
        (Some(status(404, Value::Null)), CommandStatus::Done),
        (Some(status(409, Value::Null)), CommandStatus::Done),
        // A disruption budget is not waited for; a rate limit is.
        (Some(status(429, budget)), CommandStatus::Failed),
        (
            Some(ScriptedResponse::RetryAfter(429, 3)),
            CommandStatus::Done,
        ),
        (Some(status(500, Value::Null)), CommandStatus::Failed),
        (Some(ScriptedResponse::Silence), CommandStatus::Failed),
    ] {
        let api = cluster();
        let call = format!("POST {POD}/eviction");
        api.script(&call, answer.clone());
        let recreate = CleanCommand {
            recreate_pods: true,
            ..CLEAN
        };
        assert_eq!(clean(&api, recreate).await.unwrap(), expected, "{answer:?}");
        let body = &api.calls(&[&call])[0].body;
        assert_eq!(body["deleteOptions"]["preconditions"]["uid"], "pod");
    }
}
