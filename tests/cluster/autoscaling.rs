//! A real Karpenter beside archaware: a pending pod says by itself on which nodes it can run.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt, api::ListParams};
use serde_json::json;
use testsupport::cluster::Karpenter;

use super::*;

/// Creates six pods of each image, which together fit on one node of each architecture.
async fn create_pods(cluster: &TestCluster) {
    for image in ["amd64", "arm64", "multi"] {
        for number in 0..6 {
            let mut spec = pod_spec(&[cluster.image(image)]);
            spec["containers"][0]["resources"] = json!({"requests": {"cpu": "200m"}});
            let name = format!("{image}-{number}");
            cluster.create::<Pod>(pod(&name, spec, json!({}))).await;
        }
    }
}

/// The architecture of the node of each bound pod.
async fn placed(cluster: &TestCluster) -> BTreeMap<String, String> {
    let all = ListParams::default();
    let nodes = cluster.nodes().list(&all).await.unwrap();
    let architectures: BTreeMap<String, String> = nodes
        .iter()
        .map(|node| (node.name_any(), node.labels()["kubernetes.io/arch"].clone()))
        .collect();
    let pods = cluster.pods().list(&all).await.unwrap();
    pods.iter()
        .filter_map(|pod| {
            let node = pod.spec.as_ref()?.node_name.as_ref()?;
            Some((pod.name_any(), architectures.get(node)?.clone()))
        })
        .collect()
}

/// With the webhook and required affinity Karpenter makes one node of each architecture, though arm64 is cheaper for all.
#[tokio::test]
async fn karpenter_makes_the_nodes_that_images_need() {
    // A cluster of its own, without further flags: Karpenter's objects have finalizers that nobody else removes.
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    let karpenter = Karpenter::start(&cluster).await;
    let _archaware =
        Controller::start_with_webhook(&cluster, "affinity: {required: true}\n", "").await;
    create_pods(&cluster).await;
    let placed = eventually("18 placed pods", DEADLINE, || async {
        let placed = placed(&cluster).await;
        (placed.len() == 18).then_some(placed)
    })
    .await;
    for (pod, architecture) in &placed {
        let fits = pod.starts_with(architecture.as_str()) || pod.starts_with("multi");
        assert!(fits, "{pod} is on {architecture}");
    }
    let claims = karpenter.node_claims(&cluster);
    assert_eq!(claims.len(), 2, "{claims:?}");
}
