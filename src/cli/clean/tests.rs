//! `archaware clean` against a scripted API server with a virtual clock.

use serde_json::{Value, json};

use super::*;
use crate::{
    config::Config,
    scripted_api::{ScriptedApi, ScriptedResponse},
};

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

/// A cluster with archaware's own objects, and with a node, a DaemonSet and a pod that it changed.
fn cluster() -> ScriptedApi {
    let api = ScriptedApi::default();
    let labels = json!({ "app.kubernetes.io/name": "archaware", "app.kubernetes.io/managed-by": "archaware" });
    let arch = |value: &str| json!({ "key": "kubernetes.io/arch", "value": value, "effect": "NoSchedule" });
    let owned =
        json!({ "key": "kubernetes.io/arch", "operator": "Exists", "effect": "NoSchedule" });
    let foreign = json!({ "key": "gpu", "operator": "Exists" });
    let record = json!({ "version": 1, "tolerations": [owned], "images": ["a"] }).to_string();
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
            "spec": { "replicas": 0, "selector": {}, "template": {} },
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
    let outcome = clean_from(api, clean, false).await;
    outcome.map(|outcome| outcome.status())
}

fn remaining(outcome: CleanResult) -> Vec<String> {
    match outcome {
        CleanResult::Refused => panic!("refused"),
        CleanResult::Cleaned { remaining } => remaining,
    }
}

async fn clean_from(
    api: &ScriptedApi,
    clean: CleanCommand,
    is_inside: bool,
) -> anyhow::Result<CleanResult> {
    let installation = Installation {
        namespace: "archaware".to_owned(),
        is_inside,
        keys: KnownKeys::new(&Config::default()),
        evictions_per_minute: Config::default().concurrency.evictions_per_minute,
    };
    let run = clean.run(api.client(), installation, Metrics::default());
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

/// The changes in order, as `METHOD path`.
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

/// For each list of answers to the patches of a node: whether the node is clean at the end, and the
/// exit status.
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
        // A failure with one object does not affect the others. The Lease is deleted unless the
        // next run needs it.
        let done = expected == CommandStatus::Done;
        assert!(
            api.get(WEBHOOK).is_none() && api.get(LEASE).is_none() == done,
            "{name}"
        );
    }
}

/// If a list call gets no answer, the command ends in time and releases the Lease.
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

/// `clean` refuses while a controller runs, because the controller would restore everything.
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

/// In one of archaware's own pods, `clean` takes the Lease over and stops the Deployment last,
/// because that ends its own pod.
#[tokio::test(start_paused = true)]
async fn it_stops_its_own_pod_last() {
    let api = cluster();
    api.put(LEASE, held_by("pod_1", 1));
    let mut running = api.get(DEPLOYMENT).unwrap();
    running["spec"]["replicas"] = json!(2);
    api.put(DEPLOYMENT, running);
    // `clean` first checks that it may scale the Deployment. Without the permission it removes
    // nothing.
    let scale = format!("PATCH {DEPLOYMENT}/scale");
    api.script(&scale, [ScriptedResponse::Status(403, "no", Value::Null)]);
    let error = clean_from(&api, CLEAN, true).await.unwrap_err();
    assert!(
        error.to_string().contains("to 0 to stop archaware"),
        "{error}"
    );
    assert_eq!(changes(&api), [scale]);
    let number_before = changes(&api).len();
    api.script(
        &format!("GET {DEPLOYMENT}"),
        [ScriptedResponse::Status(403, "no", Value::Null)],
    );
    let error = clean_from(&api, CLEAN, true).await.unwrap_err();
    assert!(
        error.to_string().contains("to 0 to stop archaware"),
        "{error}"
    );
    assert_eq!(changes(&api).len(), number_before);
    // An object could not be cleaned: archaware goes on running, so that `clean` can be repeated.
    api.script(&format!("PATCH {NODE}"), [ScriptedResponse::Broken]);
    let failed = clean_from(&api, CLEAN, true).await.unwrap();
    assert_eq!(failed.status(), CommandStatus::Failed);
    assert_eq!(api.get(DEPLOYMENT).unwrap()["spec"]["replicas"], 2);
    api.put(LEASE, held_by("pod_1", 1));
    let before = api.calls(&["PATCH", "POST", "DELETE"]).len();
    let done = clean_from(&api, CLEAN, true).await.unwrap();
    assert_eq!(done.status(), CommandStatus::Done);
    let mut made = api.calls(&["PATCH", "POST", "DELETE"]).split_off(before);
    assert!(made.remove(0).query.contains("dryRun=All"));
    let is_other = |call: &&crate::scripted_api::RecordedCall| call.path != LEASE;
    let first = made.iter().find(is_other).unwrap();
    assert_eq!(first.to_string(), format!("PATCH {NODE}"));
    let waited = first.at - made[0].at;
    assert!(waited >= Duration::from_secs(15), "{waited:?}");
    let last = made.iter().rfind(is_other).unwrap();
    assert_eq!(last.to_string(), format!("PATCH {DEPLOYMENT}/scale"));
    assert_eq!(api.get(DEPLOYMENT).unwrap()["spec"]["replicas"], 0);
    // `clean` keeps the Lease: another replica, which ends later, would restore everything.
    let lease = api.get(LEASE).unwrap();
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap();
    assert!(holder != "pod_1" && api.get(SECRET).is_none(), "{holder}");
    assert_eq!(lease["spec"]["leaseDurationSeconds"], 60);
}

/// `clean` reports objects that come back while it works, or after it released the Lease.
#[tokio::test(start_paused = true)]
async fn what_comes_back_remains() {
    let tainted = cluster().get(NODE).unwrap();
    let recorded = cluster().get(DAEMON_SET).unwrap();
    let registered = cluster().get(WEBHOOK).unwrap();
    let mut scaled = cluster().get(DEPLOYMENT).unwrap();
    scaled["spec"]["replicas"] = json!(3);
    let mut other_node = tainted.clone();
    other_node["metadata"]["name"] = json!("a0");
    for (path, object, message) in [
        (NODE, tainted, "Node a (its taint came back"),
        // Its name begins like that of a node that could not be cleaned.
        (
            "/api/v1/nodes/a0",
            other_node,
            "Node a0 (its taint came back",
        ),
        (
            DAEMON_SET,
            recorded,
            "DaemonSet ns/d (its tolerations came back",
        ),
        (
            WEBHOOK,
            registered,
            "MutatingWebhookConfiguration archaware (came back",
        ),
        (
            DEPLOYMENT,
            scaled,
            "Deployment archaware/archaware (replicas: 3",
        ),
        (
            LEASE,
            held_by("pod_2", 9),
            "Lease archaware/archaware (pod_2 holds it",
        ),
    ] {
        let api = cluster();
        if path.ends_with("a0") {
            let refused = ScriptedResponse::Status(403, "no", Value::Null);
            api.script(&format!("PATCH {NODE}"), [refused]);
        }
        let later = api.clone();
        let comes_back = tokio::spawn(async move {
            later.wait_for(&format!("DELETE {SECRET}"), 1).await;
            // After the Lease is released.
            tokio::time::sleep(Duration::from_secs(2)).await;
            later.put(path, object);
        });
        let outcome = clean_from(&api, CLEAN, false).await.unwrap();
        assert_eq!(outcome.status(), CommandStatus::Failed, "{path}");
        let remaining = remaining(outcome);
        assert!(
            remaining.iter().any(|line| line.starts_with(message)),
            "{remaining:?}"
        );
        comes_back.await.unwrap();
    }
}

/// `clean` reports a webhook configuration that is created while it works, also if none existed
/// before. If it cannot remove the webhook configuration, it reports that only once.
#[tokio::test(start_paused = true)]
async fn the_registration_is_looked_for_again() {
    let registered = cluster().get(WEBHOOK).unwrap();
    let api = cluster();
    api.delete(WEBHOOK);
    let later = api.clone();
    let made = tokio::spawn(async move {
        later.wait_for(&format!("DELETE {SECRET}"), 1).await;
        later.put(WEBHOOK, registered);
    });
    let left = remaining(clean_from(&api, CLEAN, false).await.unwrap());
    made.await.unwrap();
    let message = "MutatingWebhookConfiguration archaware (came back";
    assert!(left.len() == 1 && left[0].starts_with(message), "{left:?}");
    let api = cluster();
    let refused = ScriptedResponse::Status(403, "no", Value::Null);
    api.script(&format!("DELETE {WEBHOOK}"), [refused]);
    let left = remaining(clean_from(&api, CLEAN, false).await.unwrap());
    assert_eq!(left.len(), 1, "{left:?}");
}

/// Annotations prove nothing: a kubelet can write those of its node.
#[tokio::test(start_paused = true)]
async fn forged_records_remove_nothing_of_others() {
    let api = cluster();
    let mut node = api.get(NODE).unwrap();
    let secure = json!([{ "key": "dedicated", "value": "secure", "effect": "NoSchedule" }]);
    node["spec"]["taints"] = secure.clone();
    node["metadata"]["annotations"]["archaware.dev/taint"] = json!("dedicated=secure:NoSchedule");
    api.put(NODE, node);
    let mut set = api.get(DAEMON_SET).unwrap();
    let gpu = json!([{ "key": "gpu", "operator": "Exists" }]);
    let record = json!({ "version": 1, "tolerations": gpu, "images": ["a"] }).to_string();
    set["spec"]["template"]["spec"]["tolerations"] = gpu.clone();
    set["metadata"]["annotations"]["archaware.dev/tolerations"] = json!(record);
    api.put(DAEMON_SET, set);
    assert_eq!(clean(&api, CLEAN).await.unwrap(), CommandStatus::Done);
    let left = |path: &str, pointer: &str| api.get(path).unwrap().pointer(pointer).cloned();
    assert_eq!(left(NODE, "/spec/taints"), Some(secure));
    assert_eq!(
        left(DAEMON_SET, "/spec/template/spec/tolerations"),
        Some(gpu)
    );
    assert_eq!(left(DAEMON_SET, "/metadata/annotations"), Some(json!({})));
}

/// A controller takes the Lease while `clean` cannot renew it.
#[tokio::test(start_paused = true)]
async fn a_lost_lease_ends_it() {
    let api = cluster();
    api.script(
        &format!("PATCH {POD}"),
        [ScriptedResponse::Slow(Duration::from_secs(9))],
    );
    let other_replica = api.clone();
    let taken = tokio::spawn(async move {
        other_replica.wait_for(&format!("PATCH {POD}"), 1).await;
        other_replica.put(LEASE, held_by("pod_3", 2));
    });
    let error = clean(&api, CLEAN).await.unwrap_err();
    assert!(error.to_string().contains("took the Lease"), "{error}");
    taken.await.unwrap();
}

/// The Lease that stored the keys of an earlier configuration is gone. Records with such keys are
/// kept for a run with that configuration.
#[tokio::test(start_paused = true)]
async fn what_may_be_of_an_earlier_configuration_remains() {
    let api = cluster();
    let mut node = api.get(NODE).unwrap();
    node["spec"]["taints"] =
        json!([{ "key": "old/key", "value": "arm64", "effect": "NoSchedule" }]);
    node["metadata"]["annotations"]["archaware.dev/taint"] = json!("old/key=arm64:NoSchedule");
    api.put(NODE, node.clone());
    let outcome = clean_from(&api, CLEAN, false).await.unwrap();
    assert_eq!(outcome.status(), CommandStatus::Failed);
    let remaining = remaining(outcome);
    assert!(remaining[0].contains("--config"), "{remaining:?}");
    let left = api.get(NODE).unwrap();
    assert_eq!(left["spec"], node["spec"]);
    assert_eq!(
        left["metadata"]["annotations"],
        node["metadata"]["annotations"]
    );
}

/// The key of an earlier configuration is known from the Lease.
#[tokio::test(start_paused = true)]
async fn the_key_of_an_earlier_configuration_is_known() {
    let api = cluster();
    let mut node = api.get(NODE).unwrap();
    node["spec"]["taints"] =
        json!([{ "key": "old/key", "value": "arm64", "effect": "NoSchedule" }]);
    node["metadata"]["annotations"]["archaware.dev/taint"] = json!("old/key=arm64:NoSchedule");
    api.put(NODE, node);
    let mut lease = held_by("", 1);
    let state = json!({ "version": 1, "keys": { "taints": ["old/key"] } }).to_string();
    lease["metadata"]["annotations"] = json!({ "archaware.dev/state": state });
    api.put(LEASE, lease);
    assert_eq!(clean(&api, CLEAN).await.unwrap(), CommandStatus::Done);
    assert_eq!(api.get(NODE).unwrap()["spec"]["taints"], json!([]));
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
