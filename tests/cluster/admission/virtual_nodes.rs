//! Virtual nodes, whose provider does not set the label for the architecture.

use super::*;

const TYPE: &str = "type";

/// A node as the virtual kubelet makes it: without `kubernetes.io/arch`, and with a taint of its
/// own.
async fn virtual_node(cluster: &TestCluster, name: &str, architecture: &str) {
    let labels = json!({"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", TYPE: "virtual-kubelet"});
    let taint =
        json!({"key": "virtual-kubelet.io/provider", "value": "azure", "effect": "NoSchedule"});
    let more = json!({"metadata": {"labels": labels}, "spec": {"taints": [taint]}});
    cluster.create_node_with(name, architecture, more).await;
}

/// Pods that select virtual nodes land on the virtual node of their architecture: by node selector
/// or affinity, decided at their creation or behind the gate.
#[tokio::test]
async fn pods_land_on_virtual_nodes_of_their_architecture() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    for architecture in ["amd64", "arm64"] {
        virtual_node(&cluster, &format!("virtual-{architecture}"), architecture).await;
    }
    let selector = json!({"nodeSelector": {TYPE: "virtual-kubelet"}});
    let term = json!({"matchExpressions": [{"key": TYPE, "operator": "In", "values": ["virtual-kubelet"]}]});
    let affinity = json!({"affinity": {"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}});
    for on_miss in ["wait", "gate"] {
        let admission = format!("onMiss: {on_miss}, budget: 10ms");
        let archaware = Controller::start_with_webhook(&cluster, "", &admission).await;
        cluster.wait_until_tainted().await;
        let note = cluster
            .wait_for_event("virtual-amd64", "ArchitectureLabelDiffers")
            .await;
        assert!(note.contains("kubernetes.io/arch=amd64"), "{note}");
        for (selects, more) in [("selector", &selector), ("affinity", &affinity)] {
            for image in ["amd64", "386", "arm64"] {
                let name = format!("{on_miss}-{selects}-{image}");
                let mut spec = pod_spec(&[cluster.image(image)]);
                for (field, value) in more.as_object().unwrap() {
                    spec[field] = value.clone();
                }
                spec["tolerations"] =
                    json!([{"key": "virtual-kubelet.io/provider", "operator": "Exists"}]);
                cluster.create::<Pod>(pod(&name, spec, json!({}))).await;
                let expected = if image == "arm64" { "arm64" } else { "amd64" };
                let node = cluster.wait_until_bound(&name).await;
                assert_eq!(node, format!("virtual-{expected}"), "{name}");
            }
        }
        // A pod that selects nothing lands on a node with the label, as before.
        let name = format!("{on_miss}-plain");
        cluster.create_pod(&name, &["s390x"]).await;
        assert_eq!(cluster.wait_until_bound(&name).await, "s390x");
        assert_eq!(archaware.stop().await, 0);
    }
}
