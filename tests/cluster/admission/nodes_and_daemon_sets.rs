//! Nodes and DaemonSets.

use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};

use super::*;

const ARM: &str = "kubernetes.io/arch=arm64:NoSchedule";

/// What `create` answers is what is stored: there is no moment without the taint.
#[tokio::test]
async fn nodes_are_tainted_as_they_register() {
    let cluster = TestCluster::take().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let node = cluster.create_node("arm", "arm64").await;
    assert_eq!(taints(&node), set(&[ARM]));
    assert_eq!(node.annotations()["archaware.dev/taint"], ARM);
    // Like the reconciler: ignored ones stay free, foreign taints stay, what is unknown is not
    // guessed.
    for (name, architecture, change, expected) in [
        (
            "ignored",
            "arm64",
            json!({"metadata": {"labels": {"archaware.dev/ignore": "true"}}}),
            &[][..],
        ),
        (
            "foreign",
            "arm64",
            json!({"spec": {"taints": [{"key": "kubernetes.io/arch", "value": "mine", "effect": "NoSchedule"}, {"key": "other", "effect": "NoSchedule"}]}}),
            &["kubernetes.io/arch=mine:NoSchedule", "other=:NoSchedule"],
        ),
        (
            "beside",
            "arm64",
            json!({"spec": {"taints": [{"key": "other", "effect": "NoExecute"}]}}),
            &[ARM, "other=:NoExecute"],
        ),
        ("unknown", "", json!({}), &[]),
    ] {
        let node = cluster.create_node_with(name, architecture, change).await;
        assert_eq!(taints(&node), set(expected), "{name}");
    }
    let written = "archaware_writes_total{kind=\"Node\",result=\"applied\"}";
    assert!(
        archaware.metric(written).await < 0.5,
        "the reconciler finds nothing to do"
    );
    assert_eq!(archaware.stop().await, 0);
}

async fn revisions(cluster: &TestCluster) -> usize {
    cluster
        .api::<ControllerRevision>()
        .list(&ListParams::default())
        .await
        .unwrap()
        .items
        .len()
}

fn daemon_set(image: &str) -> Value {
    json!({"metadata": {"name": "agent"}, "spec": {
        "selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}}, "spec": pod_spec(&[image.to_owned()])},
    }})
}

fn template_architectures(set: &DaemonSet) -> std::collections::BTreeSet<String> {
    let spec = set.spec.template.spec.clone();
    architectures_of(&Pod {
        spec,
        ..Pod::default()
    })
}

/// The template is right in the same write that brings it, so there is one revision for each of the
/// author's own changes.
#[tokio::test]
async fn daemon_sets_are_rolled_once() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    cluster.wait_until_tainted().await;
    let created: DaemonSet = cluster
        .create(daemon_set(&cluster.image("amd64-arm64")))
        .await;
    assert_eq!(template_architectures(&created), set(&["amd64", "arm64"]));
    let running = |number: usize| {
        let cluster = &cluster;
        async move {
            let all = cluster.pods().list(&ListParams::default()).await.ok()?;
            let bound = all
                .iter()
                .filter(|pod| pod.spec.as_ref().unwrap().node_name.is_some());
            (bound.count() == number).then_some(())
        }
    };
    eventually("pods on two nodes", DEADLINE, || running(2)).await;
    assert_eq!(revisions(&cluster).await, 1);
    let image = json!([{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": cluster.image("arm64")}]);
    let image = Patch::<()>::Json(serde_json::from_value(image).unwrap());
    let sets = cluster.api::<DaemonSet>();
    let changed = sets
        .patch("agent", &PatchParams::default(), &image)
        .await
        .unwrap();
    assert_eq!(
        template_architectures(&changed),
        set(&["arm64"]),
        "what is not allowed any more is gone"
    );
    // GitOps tools write the whole list, again and again: the template stays as it is, and nothing
    // rolls.
    let back = Patch::Merge(json!({"spec": {"template": {"spec": {"tolerations": null}}}}));
    let again = sets
        .patch("agent", &PatchParams::default(), &back)
        .await
        .unwrap();
    assert_eq!(again.metadata.generation, changed.metadata.generation);
    assert_eq!(template_architectures(&again), set(&["arm64"]));
    eventually("pods of the new image", DEADLINE, || running(1)).await;
    assert_eq!(revisions(&cluster).await, 2);
    let written = "archaware_writes_total{kind=\"DaemonSet\",result=\"applied\"}";
    assert!(
        archaware.metric(written).await < 0.5,
        "the reconciler finds nothing to do"
    );
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn the_webhook_leaves_reported_daemon_sets_alone() {
    let cluster = TestCluster::take().await;
    let _archaware = Controller::start_with_webhook(&cluster, "daemonSets: report\n", "").await;
    let created: DaemonSet = cluster.create(daemon_set(&cluster.image("arm64"))).await;
    assert!(template_architectures(&created).is_empty());
}
