//! The startup sequence.

use kube::api::ListParams;

use super::*;

#[tokio::test]
async fn no_node_is_tainted_before_the_backlog_is_decided() {
    const PODS: usize = 500;
    let cluster = TestCluster::take().await;
    // There is no node yet, so all of them wait.
    let names: Vec<String> = (0..PODS).map(|n| format!("waiting-{n}")).collect();
    for chunk in names.chunks(50) {
        let images = ["amd64", "arm64", "multi", "arm64-s390x", "helm"];
        let create = chunk
            .iter()
            .enumerate()
            .map(|(n, name)| cluster.create_pod(name, std::slice::from_ref(&images[n % 5])));
        futures::future::join_all(create).await;
    }
    // Unschedulable, so that no pod is bound before archaware runs.
    for architecture in ["amd64", "arm64"] {
        cluster
            .create_cordoned_node(architecture, architecture)
            .await;
    }
    let undecided = || async {
        let pods = cluster.pods().list(&ListParams::default()).await.unwrap();
        pods.iter()
            .filter(|pod| architectures_of(pod).is_empty())
            .count()
    };
    assert_eq!(undecided().await, PODS);
    let _archaware = Controller::start(&cluster, "");
    // At any time: if a node is tainted, every pod has been decided.
    never(
        "a taint before the backlog was decided",
        cluster.wait_until_tainted(),
        || async {
            let nodes = cluster.nodes().list(&ListParams::default()).await.unwrap();
            let tainted = nodes.iter().any(|node| {
                taints(node)
                    .iter()
                    .any(|t| t.starts_with("kubernetes.io/arch"))
            });
            tainted && undecided().await > 0
        },
    )
    .await;
    assert_eq!(undecided().await, 0);
}
