//! Karpenter moves pods that ran before archaware was installed, as it would without archaware.

use std::collections::BTreeSet;

use kube::{ResourceExt, api::ListParams};

use super::*;

const IMAGES: [&str; 2] = ["amd64", "arm64"];

/// Deployments whose authors select the architecture themselves, so that Karpenter alone does
/// right, too.
async fn deploy(cluster: &TestCluster, replicas: usize) {
    for image in IMAGES {
        let template = demand(cluster, image, image, |spec| {
            spec["nodeSelector"] = json!({"kubernetes.io/arch": image});
        });
        let deployment = json!({"metadata": {"name": image}, "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": image}},
            "template": {"metadata": {"labels": {"app": image}, "annotations": template["metadata"]["annotations"]},
                "spec": template["spec"]},
        }});
        cluster.create::<Deployment>(deployment).await;
    }
    bound(cluster, IMAGES.len() * replicas).await;
}

fn change_pool(cluster: &TestCluster, spec: &Value) {
    let patch = json!({ "spec": spec }).to_string();
    cluster.kubectl(&["patch", "nodepool", "mixed", "--type=merge", "-p", &patch]);
}

/// The nodes that Karpenter made.
async fn node_names(cluster: &TestCluster) -> BTreeSet<String> {
    let nodes = cluster.nodes().list(&ListParams::default()).await.unwrap();
    nodes.iter().map(ResourceExt::name_any).collect()
}

/// Waits until none of these nodes is left, and all pods run on two others.
async fn replaced(cluster: &TestCluster, old: &BTreeSet<String>, pods: usize) -> Placement {
    eventually("other nodes", 6 * DEADLINE, || async {
        let placement = Placement::of(cluster).await;
        let is_over = node_names(cluster).await.is_disjoint(old);
        // While a node is drained there is one more.
        let settled = placement.bound == pods && placement.pending == 0 && placement.count() == 2;
        (is_over && settled).then_some(placement)
    })
    .await
}

/// Half of the pods of four nodes go; then all nodes drift, then they expire. Returns what was left
/// after each.
async fn moved(with_archaware: bool) -> Vec<Placement> {
    // 19 of these pods fit on a node.
    const BEFORE: usize = 30;
    const AFTER: usize = 15;
    let cluster = own_cluster().await;
    let _karpenter = Karpenter::start(&cluster).await;
    deploy(&cluster, BEFORE).await;
    let _archaware = if with_archaware {
        let archaware = archaware(&cluster, "").await;
        cluster.wait_until_tainted().await;
        Some(archaware)
    } else {
        None
    };
    for image in IMAGES {
        let replicas = format!("--replicas={AFTER}");
        cluster.kubectl(&[
            "scale",
            "deployment",
            image,
            &replicas,
            "-n",
            &cluster.namespace,
        ]);
    }
    let pods = IMAGES.len() * AFTER;
    bound(&cluster, pods).await;
    assert_eq!(
        Placement::of(&cluster).await.nodes,
        nodes(&[("amd64", 2), ("arm64", 2)])
    );
    let disruption =
        json!({"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"});
    change_pool(&cluster, &json!({ "disruption": disruption }));
    let consolidated = eventually("fewer nodes", 6 * DEADLINE, || async {
        let placement = Placement::of(&cluster).await;
        (placement.count() == 2 && placement.bound == pods).then_some(placement)
    })
    .await;

    let old = node_names(&cluster).await;
    let labels = json!({"test/generation": "2"});
    let template = json!({"metadata": {"labels": labels}, "spec": {"expireAfter": "60s"}});
    change_pool(&cluster, &json!({ "template": template }));
    let drifted = replaced(&cluster, &old, pods).await;
    // The pool is left as it is: a change of it would be drift.
    let old = node_names(&cluster).await;
    let expired = replaced(&cluster, &old, pods).await;
    vec![consolidated, drifted, expired]
}

#[tokio::test]
async fn pods_of_before_are_moved_as_without_archaware() {
    // Karpenter waits most of the time, so both clusters are used at once.
    let (alone, with) = tokio::join!(moved(false), moved(true));
    println!("consolidation, drift, expiry: alone {alone:?}, with archaware {with:?}");
    assert_eq!(with, alone);
}
