//! The normal sequence, the startup sequence, and events in unusual order.

use super::*;
use crate::scripted_api::ScriptedResponse;

#[tokio::test(start_paused = true)]
async fn every_call_of_the_normal_way() {
    let api = cluster();
    api.put(POD, pod());
    api.put(DAEMON_SET, daemon_set());
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    api.until("the event of the rollout", || events(&api).first().cloned())
        .await;
    controller.stop().await;

    // Permissions are checked first, then the Lease is created.
    let calls = api.calls(&[""]);
    let is_review = |call: &&RecordedCall| call.path.ends_with("/selfsubjectaccessreviews");
    let reviews = calls.iter().take_while(is_review).count();
    assert!(reviews > 15, "{reviews}");
    let lease_calls = calls.iter().filter(|call| call.path.contains("/leases"));
    let lease_methods: Vec<_> = lease_calls.map(|call| call.method.as_str()).collect();
    assert_eq!(
        lease_methods,
        ["GET", "POST", "GET", "PATCH"],
        "taken, given back"
    );
    assert_eq!(api.get(LEASE).unwrap()["spec"].get("holderIdentity"), None);

    // One patch for each object, the node last.
    let patches: Vec<_> = writes(&api)
        .into_iter()
        .filter(|call| call.method == "PATCH")
        .collect();
    let mut paths: Vec<_> = patches.iter().map(|call| call.path.as_str()).collect();
    assert_eq!(paths.pop(), Some(NODE));
    paths.sort_unstable();
    assert_eq!(paths, [POD, DAEMON_SET]);
    for call in &patches {
        assert!(call.query.contains("fieldManager=archaware"), "{call}");
    }
    let body = |path: &str| &patches.iter().find(|call| call.path == path).unwrap().body;
    let added = format!(r#"{{"version":1,"tolerations":[{}]}}"#, toleration("arm64"));
    assert_eq!(
        body(POD),
        &json!([
            { "op": "test", "path": "/metadata/uid", "value": "pod" },
            { "op": "test", "path": "/spec/containers/0/image", "value": "a" },
            { "op": "test", "path": "/spec/tolerations", "value": null },
            { "op": "add", "path": "/spec/tolerations", "value": [toleration("arm64")] },
            { "op": "test", "path": "/metadata/annotations/archaware.dev~1decision", "value": null },
            { "op": "add", "path": "/metadata/annotations/archaware.dev~1decision", "value": "arm64" },
            { "op": "test", "path": "/metadata/annotations/archaware.dev~1added", "value": null },
            { "op": "add", "path": "/metadata/annotations/archaware.dev~1added", "value": added },
        ])
    );
    let set = body(DAEMON_SET);
    let record = set[4]["value"]["archaware.dev/tolerations"].clone();
    assert_eq!(
        set,
        &json!([
            { "op": "test", "path": "/metadata/uid", "value": "set" },
            { "op": "test", "path": "/spec/template/spec/tolerations", "value": null },
            { "op": "add", "path": "/spec/template/spec/tolerations", "value": [toleration("amd64")] },
            { "op": "test", "path": "/metadata/annotations", "value": null },
            { "op": "add", "path": "/metadata/annotations",
              "value": { "archaware.dev/tolerations": record } },
        ])
    );
    let record: Value = serde_json::from_str(record.as_str().unwrap()).unwrap();
    let expected = json!({ "version": 1, "tolerations": [toleration("amd64")], "images": ["a"],
        "decision": "amd64" });
    assert_eq!(record, expected);
    assert_eq!(
        body(NODE),
        &json!([
            { "op": "test", "path": "/metadata/uid", "value": "node" },
            { "op": "test", "path": "/metadata/annotations", "value": null },
            { "op": "add", "path": "/metadata/annotations",
              "value": { "archaware.dev/taint": "kubernetes.io/arch=arm64:NoSchedule" } },
            { "op": "test", "path": "/spec/taints", "value": null },
            { "op": "add", "path": "/spec/taints",
              "value": [{ "key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule" }] },
        ])
    );
    let expected = ("TolerationsChanged".to_owned(), "d".to_owned());
    assert_eq!(events(&api), [expected]);
}

#[tokio::test(start_paused = true)]
async fn heartbeats_and_what_is_as_it_should_be_cost_no_call() {
    let api = cluster();
    api.put(POD, pod());
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let before = writes(&api).len();
    for beat in 0..20 {
        for path in [NODE, POD] {
            let mut object = api.get(path).unwrap();
            object["status"]["conditions"] = json!([{ "lastHeartbeatTime": beat }]);
            api.put(path, object);
        }
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert_eq!(writes(&api).len(), before);
    controller.stop().await;
}

/// Startup waits for the pod's attempt, at most `startup.timeout`.
#[tokio::test(start_paused = true)]
async fn nodes_wait_for_pods_and_not_for_ever() {
    let api = cluster();
    api.put(POD, pod());
    let silences = std::iter::repeat_n(ScriptedResponse::Silence, 100);
    api.script(&format!("PATCH {POD}"), silences);
    let controller = Controller::start(&api, "startup: {timeout: 90s}");
    let tainted = api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let first = api.calls(&[&format!("PATCH {POD}")])[0].at;
    let waited = tainted[0].at - first;
    assert!((89..=91).contains(&waited.as_secs()), "{waited:?}");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nodes_do_not_wait_for_a_pod_that_is_deleted() {
    let api = cluster();
    api.put(POD, pod());
    api.script(&format!("PATCH {POD}"), [ScriptedResponse::Silence]);
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {POD}"), 1).await;
    api.delete(POD);
    let tainted = api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let first = api.calls(&[&format!("PATCH {POD}")])[0].at;
    assert!(tainted[0].at - first < Duration::from_secs(1));
    controller.stop().await;
}

/// The patch is answered with 404 before the watch reports the deletion: no further call and no
/// event follow.
#[tokio::test(start_paused = true)]
async fn a_pod_is_deleted_while_it_is_being_patched() {
    let api = cluster();
    api.put(POD, pod());
    let gone = ScriptedResponse::Status(404, "not found", Value::Null);
    api.script(&format!("PATCH {POD}"), [gone]);
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {POD}"), 1).await;
    api.delete(POD);
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    tokio::time::sleep(Duration::from_mins(30)).await;
    let paths: Vec<_> = writes(&api).iter().map(ToString::to_string).collect();
    assert_eq!(paths.len(), 2, "{:?}", paths.get(..4));
    controller.stop().await;
}

/// The list is read again while the patch is in progress: the pod is reconciled again and needs no
/// change.
#[tokio::test(start_paused = true)]
async fn a_relist_in_the_middle_makes_no_second_patch() {
    let api = cluster();
    api.put(POD, pod());
    api.script(&format!("PATCH {POD}"), [ScriptedResponse::Lost]);
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {POD}"), 1).await;
    api.expire("/api/v1/pods");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    tokio::time::sleep(Duration::from_mins(30)).await;
    assert_eq!(api.calls(&[&format!("PATCH {POD}")]).len(), 1);
    controller.stop().await;
}

/// The watch lags behind, so the object in the store is older than the object that is patched. The
/// patch's `test` operation fails, nothing is added twice, and the pod is not patched again once
/// the watch has caught up.
#[tokio::test(start_paused = true)]
async fn a_stale_store_adds_nothing_twice() {
    let api = cluster();
    api.put(POD, pod());
    api.script(&format!("PATCH {POD}"), [ScriptedResponse::Unwatched]);
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {POD}"), 1).await;
    // A change of the namespace reconciles every pod again, from the stale store.
    let annotations = json!({ "archaware.dev/mode": "inspect" });
    api.put(
        "/api/v1/namespaces/ns",
        json!({ "metadata": { "name": "ns", "uid": "n", "annotations": annotations } }),
    );
    api.wait_for(&format!("PATCH {POD}"), 3).await;
    let now = api.get(POD).unwrap();
    assert_eq!(now["spec"]["tolerations"], json!([toleration("arm64")]));
    api.put(POD, now);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let patches = api.calls(&[&format!("PATCH {POD}")]).len();
    tokio::time::sleep(Duration::from_mins(30)).await;
    assert_eq!(api.calls(&[&format!("PATCH {POD}")]).len(), patches);
    assert_eq!(events(&api), []);
    controller.stop().await;
}

/// The image name is invalid, so no registry is asked. The failure policy decides when it is due.
#[tokio::test(start_paused = true)]
async fn the_failure_policy_decides_when_it_is_due() {
    let api = cluster();
    let mut pod = pod();
    pod["metadata"]["annotations"] = json!({});
    pod["spec"]["containers"][0]["image"] = json!("No Image");
    api.put(POD, pod);
    let controller = Controller::start(&api, "");
    let patches = api.wait_for(&format!("PATCH {POD}"), 1).await;
    let node = &api.calls(&[&format!("PATCH {NODE}")])[0];
    let waited = patches[0].at - node.at;
    assert!((58..=61).contains(&waited.as_secs()), "{waited:?}");
    api.until("two events", || (events(&api).len() == 2).then_some(()))
        .await;
    let reasons: Vec<_> = events(&api).into_iter().map(|(reason, _)| reason).collect();
    assert_eq!(reasons, ["ImageNotResolved", "ToleratesEveryArchitecture"]);
    let line = "archaware_decisions_total{kind=\"Pod\",result=\"by_policy\"}";
    assert_eq!(controller.metric(line).as_deref(), Some("1"));
    controller.stop().await;
}

/// A pod that no architecture can run gets its annotation in one write. Its event is repeated as
/// long as the pod waits.
#[tokio::test(start_paused = true)]
async fn a_pod_that_waits_is_said_to_wait() {
    let api = cluster();
    api.put(POD, pod());
    let controller = Controller::start(&api, "schedulableArchitectures: [amd64]");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    tokio::time::sleep(Duration::from_mins(65)).await;
    let pod = api.get(POD).unwrap();
    assert_eq!(
        pod["metadata"]["annotations"]["archaware.dev/decision"],
        "none"
    );
    assert_eq!(api.calls(&[&format!("PATCH {POD}")]).len(), 1);
    let waits = controller.metric("archaware_pods_undecided{}");
    assert_eq!(waits.as_deref(), Some("1"));
    let created = api.calls(&[EVENTS]);
    assert_eq!(created.len(), 1, "one event");
    assert_eq!(created[0].body["reason"], "NoCommonArchitecture");
    let name = created[0].body["metadata"]["name"].as_str().unwrap();
    let path = format!("/apis/events.k8s.io/v1/namespaces/ns/events/{name}");
    let repeated = api.calls(&[&format!("PATCH {path}")]);
    let counts: Vec<i64> = repeated
        .iter()
        .map(|call| call.body[0]["value"]["count"].as_i64().unwrap())
        .collect();
    assert_eq!(counts, [2, 3, 4]);
    // Somebody deleted it, or it has expired.
    api.delete(&path);
    tokio::time::sleep(Duration::from_mins(30)).await;
    assert_eq!(api.calls(&[EVENTS]).len(), 2, "it is there again");
    controller.stop().await;
}

/// Before a node gets its taint, the pod that runs there gets its toleration. Shutdown does not
/// wait for the remaining checks.
#[tokio::test(start_paused = true)]
async fn the_end_comes_while_bound_pods_are_looked_at() {
    let api = cluster();
    for n in 0..30 {
        let labels = json!({ "kubernetes.io/arch": "arm64" });
        let metadata = json!({ "name": format!("n{n}"), "uid": format!("n{n}"), "labels": labels });
        let info = json!({ "architecture": "arm64" });
        api.put(
            &format!("/api/v1/nodes/n{n}"),
            json!({ "metadata": metadata, "spec": {}, "status": { "nodeInfo": info } }),
        );
    }
    let mut bound = pod();
    bound["spec"]["nodeName"] = json!("n1");
    api.put(POD, bound);
    let slow = ScriptedResponse::Slow(Duration::from_secs(1));
    api.script(&format!("PATCH {POD}"), [slow]);
    let controller = Controller::start(&api, "");
    let patches = api.wait_for(&format!("PATCH {POD}"), 1).await;
    let added = &patches[0].body[3]["value"];
    assert_eq!(added, &json!([toleration("arm64")]));
    controller.stop().await;
    assert!(api.calls(&["PATCH /api/v1/nodes"]).is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_node_is_tainted_after_its_pods() {
    let api = cluster();
    let mut bound = pod();
    bound["spec"]["nodeName"] = json!("a");
    api.put(POD, bound);
    let controller = Controller::start(&api, "");
    api.wait_for(&format!("PATCH {NODE}"), 1).await;
    let order: Vec<_> = api.calls(&["PATCH /api/v1/n"]);
    let paths: Vec<_> = order.iter().map(|call| call.path.as_str()).collect();
    assert_eq!(paths, [POD, NODE]);
    controller.stop().await;
}
