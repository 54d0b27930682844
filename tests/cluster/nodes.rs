//! The taint of nodes.

use std::collections::BTreeSet;

use kube::{
    ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::*;

const ARM: &str = "kubernetes.io/arch=arm64:NoSchedule";

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

async fn patch(cluster: &TestCluster, node: &str, operations: Value) {
    let patch = Patch::<()>::Json(serde_json::from_value(operations).unwrap());
    cluster
        .nodes()
        .patch(node, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Removes a single taint; kubectl would replace the whole list.
async fn untaint(cluster: &TestCluster, node: &str, key: &str) {
    eventually("the removal of a taint", DEADLINE, || async {
        let taints = cluster.nodes().get(node).await.ok()?.spec?.taints?;
        let index = taints.iter().position(|taint| taint.key == key)?;
        let operations = json!([
            {"op": "test", "path": format!("/spec/taints/{index}/key"), "value": key},
            {"op": "remove", "path": format!("/spec/taints/{index}")},
        ]);
        let patch = Patch::<()>::Json(serde_json::from_value(operations).unwrap());
        cluster
            .nodes()
            .patch(node, &PatchParams::default(), &patch)
            .await
            .ok()
            .map(drop)
    })
    .await;
}

async fn taints_become(cluster: &TestCluster, node: &str, expected: &[&str]) {
    let expected = set(expected);
    eventually(
        &format!("taints {expected:?} on {node}"),
        DEADLINE,
        || async { (taints(&cluster.nodes().get(node).await.ok()?) == expected).then_some(()) },
    )
    .await;
}

#[tokio::test]
async fn nodes_join_and_are_replaced() {
    let cluster = TestCluster::take().await;
    cluster.create_node("first", "amd64").await;
    let _archaware = Controller::start(&cluster, "");
    taints_become(&cluster, "first", &["kubernetes.io/arch=amd64:NoSchedule"]).await;
    cluster.create_node("later", "arm64").await;
    taints_become(&cluster, "later", &[ARM]).await;
    cluster
        .nodes()
        .delete("first", &DeleteParams::default())
        .await
        .unwrap();
    cluster.create_node("first", "arm64").await;
    taints_become(&cluster, "first", &[ARM]).await;
    let node = cluster.nodes().get("first").await.unwrap();
    assert_eq!(node.annotations()["archaware.dev/taint"], ARM);
}

#[tokio::test]
async fn an_owned_taint_is_put_back_and_put_right() {
    let cluster = TestCluster::take().await;
    cluster.create_node("node", "arm64").await;
    let _archaware = Controller::start(&cluster, "");
    taints_become(&cluster, "node", &[ARM]).await;
    cluster.kubectl(&["taint", "node", "node", "kubernetes.io/arch-"]);
    taints_become(&cluster, "node", &[ARM]).await;
    cluster.kubectl(&[
        "taint",
        "node",
        "node",
        "--overwrite",
        "kubernetes.io/arch=amd64:NoSchedule",
    ]);
    taints_become(&cluster, "node", &[ARM]).await;
}

#[tokio::test]
async fn foreign_taints_are_neither_claimed_nor_touched() {
    let cluster = TestCluster::take().await;
    for (node, architecture) in [("same", "arm64"), ("other", "arm64"), ("odd", "")] {
        cluster.create_node(node, architecture).await;
    }
    cluster.kubectl(&["taint", "node", "same", ARM]);
    cluster.kubectl(&[
        "taint",
        "node",
        "other",
        "kubernetes.io/arch=amd64:NoSchedule",
    ]);
    let archaware = Controller::start(&cluster, "");
    cluster.wait_for_event("other", "TaintConflict").await;
    cluster.wait_for_event("odd", "UnknownArchitecture").await;
    cluster.create_node("witness", "amd64").await;
    taints_become(
        &cluster,
        "witness",
        &["kubernetes.io/arch=amd64:NoSchedule"],
    )
    .await;
    for (node, expected) in [
        ("same", &[ARM][..]),
        ("other", &["kubernetes.io/arch=amd64:NoSchedule"]),
        ("odd", &[]),
    ] {
        let node = cluster.nodes().get(node).await.unwrap();
        assert_eq!(taints(&node), set(expected));
        assert!(
            !node.annotations().contains_key("archaware.dev/taint"),
            "{} was claimed",
            node.name_any()
        );
    }
    assert_eq!(archaware.stop().await, 0);
    let (status, out, _) = cluster.archaware(&["clean"]);
    assert_eq!(status, 0, "{out}");
    taints_become(&cluster, "same", &[ARM]).await;
}

#[tokio::test]
async fn nodes_can_opt_out() {
    let cluster = TestCluster::take().await;
    for node in ["label", "annotation"] {
        cluster.create_node(node, "arm64").await;
    }
    let _archaware = Controller::start(&cluster, "");
    for node in ["label", "annotation"] {
        taints_become(&cluster, node, &[ARM]).await;
    }
    cluster.kubectl(&["label", "node", "label", "archaware.dev/ignore=true"]);
    cluster.kubectl(&[
        "annotate",
        "node",
        "annotation",
        "archaware.dev/ignore=true",
    ]);
    for node in ["label", "annotation"] {
        taints_become(&cluster, node, &[]).await;
        assert!(
            !cluster
                .nodes()
                .get(node)
                .await
                .unwrap()
                .annotations()
                .contains_key("archaware.dev/taint")
        );
    }
    cluster.kubectl(&["label", "node", "label", "archaware.dev/ignore-"]);
    taints_become(&cluster, "label", &[ARM]).await;
}

#[tokio::test]
async fn a_changed_configuration_moves_taints() {
    let cluster = TestCluster::take().await;
    cluster.create_node("arm", "arm64").await;
    cluster.create_node("amd", "amd64").await;
    cluster.kubectl(&["taint", "node", "arm", "foreign=1:NoSchedule"]);
    let foreign = "foreign=1:NoSchedule";
    for (config, arm, amd) in [
        (
            "",
            &[ARM, foreign][..],
            &["kubernetes.io/arch=amd64:NoSchedule"][..],
        ),
        (
            "taint: {key: example.com/cpu}",
            &["example.com/cpu=arm64:NoSchedule", foreign],
            &["example.com/cpu=amd64:NoSchedule"],
        ),
        (
            "taint: {effect: NoExecute}",
            &["kubernetes.io/arch=arm64:NoExecute", foreign],
            &["kubernetes.io/arch=amd64:NoExecute"],
        ),
        ("taint: {architectures: [arm64]}", &[ARM, foreign], &[]),
        (
            "taint: {nodeSelector: 'kubernetes.io/arch in (amd64)'}",
            &[foreign],
            &["kubernetes.io/arch=amd64:NoSchedule"],
        ),
        ("taint: {manage: false}", &[foreign], &[]),
    ] {
        let archaware = Controller::start(&cluster, config);
        taints_become(&cluster, "arm", arm).await;
        taints_become(&cluster, "amd", amd).await;
        assert_eq!(archaware.stop().await, 0, "{config}");
    }
}

/// Twenty clients edit the same lists concurrently; none of their changes may be lost.
#[tokio::test]
async fn foreign_taints_and_tolerations_survive_concurrent_editors() {
    let cluster = TestCluster::take().await;
    cluster.create_node("node", "arm64").await;
    // It is not scheduled, so its tolerations can be edited during the whole test.
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    spec["nodeSelector"] = json!({"never": "true"});
    cluster
        .create::<k8s_openapi::api::core::v1::Pod>(pod("pod", spec, json!({})))
        .await;
    let archaware = Controller::start(&cluster, "");
    let editors = (0..20).map(|n| {
        let cluster = &cluster;
        async move {
            let key = format!("editor/{n}");
            let taint = json!([{"op": "add", "path": "/spec/taints/-", "value": {"key": key, "effect": "NoSchedule"}}]);
            let toleration = json!([{"op": "add", "path": "/spec/tolerations/-", "value": {"key": key, "operator": "Exists"}}]);
            // The list of taints exists once the first taint is set.
            eventually("a list of taints", DEADLINE, || async {
                (!taints(&cluster.nodes().get("node").await.ok()?).is_empty()).then_some(())
            })
            .await;
            patch(cluster, "node", taint).await;
            let edit = Patch::<()>::Json(serde_json::from_value(toleration).unwrap());
            cluster.pods().patch("pod", &PatchParams::default(), &edit).await.unwrap();
            // As often as archaware repairs at once.
            if n < 5 {
                untaint(cluster, "node", "kubernetes.io/arch").await;
            }
        }
    });
    // Some clients also remove archaware's taint, so that archaware writes meanwhile.
    futures::future::join_all(editors).await;
    let node = eventually("archaware's taint", DEADLINE, || async {
        let node = cluster.nodes().get("node").await.ok()?;
        taints(&node).contains(ARM).then_some(node)
    })
    .await;
    assert_eq!(taints(&node).len(), 21, "{:?}", taints(&node));
    let pod = eventually("archaware's toleration", DEADLINE, || async {
        let pod = cluster.pods().get("pod").await.ok()?;
        (architectures_of(&pod) == set(&["arm64"])).then_some(pod)
    })
    .await;
    let tolerations = pod.spec.unwrap().tolerations.unwrap();
    let of_editors = tolerations
        .iter()
        .filter(|t| t.key.as_deref().is_some_and(|k| k.starts_with("editor/")));
    assert_eq!(of_editors.count(), 20);
    let ours = tolerations
        .iter()
        .filter(|t| t.key.as_deref() == Some("kubernetes.io/arch"));
    assert_eq!(ours.count(), 1, "added once");
    assert_eq!(archaware.stop().await, 0);
}

/// Another controller writes its own list of taints whenever it sees another one, with archaware's
/// annotation or without.
#[tokio::test]
async fn a_controller_that_rewrites_taints_is_not_fought() {
    let cluster = TestCluster::take().await;
    cluster.create_node("node", "arm64").await;
    let archaware = Controller::start(&cluster, "");
    let reverts = std::sync::atomic::AtomicUsize::new(0);
    let fight = async {
        let rewrite = json!({"metadata": {"annotations": {"archaware.dev/taint": null}},
            "spec": {"taints": [{"key": "cloud", "effect": "NoSchedule"}]}});
        let parameters = PatchParams {
            field_manager: Some("cloud-sync".to_owned()),
            ..PatchParams::default()
        };
        loop {
            let node = cluster.nodes().get("node").await.unwrap();
            if taints(&node).contains(ARM) {
                let patch = Patch::Merge(&rewrite);
                cluster
                    .nodes()
                    .patch("node", &parameters, &patch)
                    .await
                    .unwrap();
                reverts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            }
            tokio::task::yield_now().await;
        }
    };
    let told = cluster.wait_for_event("node", "TaintReverted");
    let note = tokio::select! {
        () = fight => unreachable!(),
        note = told => note,
    };
    assert!(
        note.contains("cloud-sync") && note.contains("spec.taints"),
        "{note}"
    );
    let reverts = reverts.into_inner();
    assert!((5..=7).contains(&reverts), "{reverts}");
    // The next process knows of it.
    let lease = eventually(
        "repairs that are stored with the Lease",
        DEADLINE,
        || async {
            let lease =
                cluster.kubectl(&["-n", "archaware", "get", "lease", "archaware", "-o", "yaml"]);
            lease.contains("repairs\":[{").then_some(lease)
        },
    )
    .await;
    assert!(lease.contains("kubernetes.io/arch"), "{lease}");
    assert_eq!(archaware.stop().await, 0);
    let mut lists = cluster.nodes().get("node").await.unwrap();
    if taints(&lists).contains(ARM) {
        untaint(&cluster, "node", "kubernetes.io/arch").await;
        lists = cluster.nodes().get("node").await.unwrap();
    }
    assert!(!taints(&lists).contains(ARM));
    let archaware = Controller::start(&cluster, "");
    cluster.create_node("witness", "amd64").await;
    taints_become(
        &cluster,
        "witness",
        &["kubernetes.io/arch=amd64:NoSchedule"],
    )
    .await;
    for line in ["again and again", "node tainted"] {
        archaware.wait_for_log(line).await;
    }
    assert_eq!(
        archaware.log().matches("node tainted").count(),
        1,
        "only the witness"
    );
}

/// A kubelet can write its node's annotations, not its taints.
#[tokio::test]
async fn a_forged_record_removes_no_taint_of_others() {
    let cluster = TestCluster::take().await;
    cluster.create_node("node", "arm64").await;
    let secure = "dedicated=secure:NoSchedule";
    cluster.kubectl(&["taint", "node", "node", secure]);
    let forged = format!("archaware.dev/taint={secure}");
    cluster.kubectl(&["annotate", "node", "node", &forged]);
    let archaware = Controller::start(&cluster, "");
    taints_become(&cluster, "node", &[ARM, secure]).await;
    cluster.kubectl(&["annotate", "--overwrite", "node", "node", &forged]);
    // That archaware forgets its own taint is the most that it can do.
    eventually("a record that is not believed", DEADLINE, || async {
        let node = cluster.nodes().get("node").await.ok()?;
        let record = node.annotations().get("archaware.dev/taint");
        record.is_none().then_some(())
    })
    .await;
    taints_become(&cluster, "node", &[ARM, secure]).await;
    assert_eq!(archaware.stop().await, 0);
    cluster.kubectl(&["annotate", "--overwrite", "node", "node", &forged]);
    let (status, out, error) = cluster.archaware(&["clean"]);
    assert_eq!(status, 0, "{out}{error}");
    assert!(out.contains("the taint stays"), "{out}");
    let node = cluster.nodes().get("node").await.unwrap();
    assert!(taints(&node).contains(secure), "{:?}", taints(&node));
}

#[tokio::test]
async fn heartbeats_cost_no_api_call() {
    const APPLIED: &str = "archaware_writes_total{kind=\"Node\",result=\"applied\"}";
    let cluster = TestCluster::take().await;
    cluster.create_node("node", "arm64").await;
    let archaware = Controller::start(&cluster, "");
    taints_become(&cluster, "node", &[ARM]).await;
    // The node has its taint before the response to the patch arrives and is counted.
    let counted = async |expected: f64| {
        eventually("patches that are counted", DEADLINE, || async {
            let logged: f64 = archaware.log().matches("node tainted").map(|_| 1.0).sum();
            let applied = archaware.metric(APPLIED).await;
            (applied > expected - 0.5 && logged > expected - 0.5).then_some(applied)
        })
        .await
    };
    counted(1.0).await;
    for n in 0..50 {
        let time = format!("2026-01-01T00:00:{n:02}Z");
        let heartbeat = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": time}]}});
        let beat = Patch::Strategic(heartbeat);
        cluster
            .nodes()
            .patch_status("node", &PatchParams::default(), &beat)
            .await
            .unwrap();
    }
    // A relevant change after them shows that the heartbeats have been processed.
    cluster.create_node("witness", "amd64").await;
    taints_become(
        &cluster,
        "witness",
        &["kubernetes.io/arch=amd64:NoSchedule"],
    )
    .await;
    // One per node. (Guards may have failed: the node controller changes taints of new nodes too.)
    assert!(counted(2.0).await < 2.5, "patches for 50 heartbeats");
    assert_eq!(archaware.log().matches("node tainted").count(), 2);
}
