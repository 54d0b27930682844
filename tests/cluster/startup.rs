//! The order at start.

use kube::api::ListParams;

use super::*;

#[tokio::test]
async fn no_node_is_tainted_before_the_backlog_is_decided() {
    const PODS: usize = 500;
    let bed = Bed::take().await;
    // There is no node yet, so all of them wait.
    let names: Vec<String> = (0..PODS).map(|n| format!("waiting-{n}")).collect();
    for chunk in names.chunks(50) {
        let images = ["amd64", "arm64", "multi", "arm64-s390x", "helm"];
        let create = chunk
            .iter()
            .enumerate()
            .map(|(n, name)| bed.create_pod(name, std::slice::from_ref(&images[n % 5])));
        futures::future::join_all(create).await;
    }
    // Cordoned from birth: no pod may be bound before archaware is there.
    for architecture in ["amd64", "arm64"] {
        bed.cordoned_node(architecture, architecture).await;
    }
    let undecided = || async {
        let pods = bed.pods().list(&ListParams::default()).await.unwrap();
        pods.iter()
            .filter(|pod| architectures_of(pod).is_empty())
            .count()
    };
    assert_eq!(undecided().await, PODS);
    let _archaware = Controller::start(&bed, "");
    // At each moment: a tainted node means that every pod has been decided.
    never(
        "a taint before the backlog was decided",
        bed.tainted(),
        || async {
            let nodes = bed.nodes().list(&ListParams::default()).await.unwrap();
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

#[tokio::test]
async fn a_second_process_waits_for_the_lease_and_takes_over() {
    let bed = Bed::take().await;
    bed.node("first", "amd64").await;
    let first = Controller::start(&bed, "");
    first.logged("\"leading\"").await;
    let second = Controller::start(&bed, "");
    second.logged("archaware starts").await;
    eventually("readiness of both", DEADLINE, || async {
        let ready = first.http("/readyz").await.0 == 200 && second.http("/readyz").await.0 == 200;
        ready.then_some(())
    })
    .await;
    bed.tainted().await;
    assert!(!second.log().contains("node tainted"));
    assert_eq!(first.stop().await, 0);
    bed.node("second", "arm64").await;
    bed.tainted().await;
    // The node shows its taint before the answer to the patch has come back and is logged.
    second.logged("node tainted").await;
}
