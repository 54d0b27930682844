//! Two replicas: one writes, the other takes over, and both write at most for the duration of one
//! patch.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use k8s_openapi::api::{core::v1::Pod, policy::v1::PodDisruptionBudget};
use kube::{Api, api::ListParams};
use serde_json::json;

use super::*;

/// Two ready replicas: the leader and the other.
async fn pair(cluster: &TestCluster) -> (Controller, Controller) {
    let first = Controller::start(cluster, "");
    first.wait_until_leading(true).await;
    let second = Controller::start(cluster, "");
    eventually("readiness of both", DEADLINE, || async {
        let ready = first.http("/readyz").await.0 == 200 && second.http("/readyz").await.0 == 200;
        ready.then_some(())
    })
    .await;
    cluster.wait_until_tainted().await;
    (first, second)
}

#[tokio::test]
async fn sigterm_hands_over_within_two_seconds() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let (first, second) = pair(&cluster).await;
    assert!(!second.log().contains("node tainted"));
    let told = Instant::now();
    first.signal("-TERM");
    second.wait_until_leading(true).await;
    let took = told.elapsed();
    // As documented in docs/reliability.md.
    assert!(took < Duration::from_secs(2), "{took:?}");
    cluster.create_pod("after", &["arm64"]).await;
    assert_eq!(cluster.wait_until_bound("after").await, "arm64");
    cluster.create_node("late", "arm64").await;
    cluster.wait_until_tainted().await;
    // The node has its taint before the response to the patch arrives and is logged.
    second.wait_for_log("node tainted").await;
    assert_eq!(first.stop().await, 0);
}

#[tokio::test]
async fn a_crash_is_made_up_for_within_twenty_seconds() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let (first, second) = pair(&cluster).await;
    let killed = Instant::now();
    first.signal("-KILL");
    cluster.create_pod("meanwhile", &["arm64"]).await;
    assert_eq!(cluster.wait_until_bound("meanwhile").await, "arm64");
    let took = killed.elapsed();
    // As documented in docs/reliability.md.
    assert!(took < Duration::from_secs(20), "{took:?}");
    assert_eq!(second.stop().await, 0);
}

/// A paused process still believes that it leads; its monotonic clock shows that it does not.
#[tokio::test]
async fn a_leader_that_was_stopped_writes_nothing_when_it_wakes_up() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let (first, second) = pair(&cluster).await;
    let before = first.patches().await;
    first.signal("-STOP");
    // Work that it finds when it resumes.
    for n in 0..40 {
        cluster
            .create_pod(&format!("stopped-{n}"), &["s390x"])
            .await;
    }
    second.wait_until_leading(true).await;
    first.signal("-CONT");
    for n in 0..40 {
        cluster.create_pod(&format!("woken-{n}"), &["arm64"]).await;
    }
    first.wait_until_leading(false).await;
    for n in 0..40 {
        assert_eq!(
            cluster.wait_until_bound(&format!("stopped-{n}")).await,
            "s390x"
        );
        assert_eq!(
            cluster.wait_until_bound(&format!("woken-{n}")).await,
            "arm64"
        );
    }
    let after = first.patches().await;
    assert_eq!(after, before, "patches of the one that was stopped");
    assert_eq!(first.stop().await, 0);
    assert_eq!(second.stop().await, 0);
}

/// New replicas start before old ones stop: there is always a leader, and pods created meanwhile
/// are decided.
#[tokio::test]
async fn a_rolling_update_has_no_gap() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let (mut first, mut second) = pair(&cluster).await;
    for round in 0..3 {
        let next = Controller::start(&cluster, "");
        eventually("a new replica that is ready", DEADLINE, || async {
            (next.http("/readyz").await.0 == 200).then_some(())
        })
        .await;
        let old = std::mem::replace(&mut first, std::mem::replace(&mut second, next));
        let (status, ()) = futures::future::join(old.stop(), async {
            let name = format!("round-{round}");
            cluster.create_pod(&name, &["arm64"]).await;
            assert_eq!(cluster.wait_until_bound(&name).await, "arm64");
        })
        .await;
        assert_eq!(status, 0);
    }
    assert_eq!(first.stop().await, 0);
    assert_eq!(second.stop().await, 0);
}

/// Two installations in different namespaces: both write, and nothing is done twice.
#[tokio::test]
async fn two_that_write_at_once_do_no_harm() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let elsewhere = format!("{}-elsewhere", cluster.namespace);
    cluster.create_namespace(&elsewhere, json!({})).await;
    let admin = cluster.kubeconfig("admin");
    let first = Controller::start_as(&admin, "");
    let second = Controller::start_elsewhere(&admin, &elsewhere);
    first.wait_until_leading(true).await;
    second.wait_until_leading(true).await;
    cluster.wait_until_tainted().await;
    for n in 0..60 {
        cluster.create_pod(&format!("pod-{n}"), &["arm64"]).await;
    }
    for n in 0..60 {
        assert_eq!(cluster.wait_until_bound(&format!("pod-{n}")).await, "arm64");
    }
    for pod in cluster.pods().list(&ListParams::default()).await.unwrap() {
        let tolerations = pod.spec.unwrap().tolerations.unwrap();
        let key = |one: &&k8s_openapi::api::core::v1::Toleration| {
            one.key.as_deref() == Some("kubernetes.io/arch")
        };
        assert_eq!(tolerations.iter().filter(key).count(), 1, "{tolerations:?}");
    }
    for node in cluster.nodes().list(&ListParams::default()).await.unwrap() {
        assert_eq!(node.spec.unwrap().taints.unwrap().len(), 1);
    }
    assert_eq!(first.stop().await, 0);
    assert_eq!(second.stop().await, 0);
}

/// The shipped Deployment as the scheduler and the controllers see it; no kubelet starts it here.
#[tokio::test]
async fn the_shipped_deployment_is_spread_and_protected() {
    let cluster = TestCluster::take().await;
    cluster.create_node("one", "amd64").await;
    cluster.create_node("two", "arm64").await;
    cluster.create_node("three", "s390x").await;
    cluster.kubectl(&["apply", "-f", "manifests/archaware.yaml"]);
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), "archaware");
    let (placed, nodes) = eventually("two pods that have nodes", DEADLINE, || async {
        let pods = pods.list(&ListParams::default()).await.ok()?.items;
        let node = |pod: &Pod| pod.spec.as_ref()?.node_name.clone();
        let nodes: BTreeSet<String> = pods.iter().filter_map(node).collect();
        (nodes.len() == 2).then_some((pods, nodes))
    })
    .await;
    // Its image supports amd64 and arm64, and no node is tainted yet.
    assert_eq!(nodes, ["one".to_owned(), "two".to_owned()].into());
    for pod in placed {
        assert_eq!(pod.spec.unwrap().priority, Some(2_000_000_000));
    }
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(cluster.client.clone(), "archaware");
    eventually("a budget that knows its pods", DEADLINE, || async {
        let status = budgets.get("archaware").await.ok()?.status?;
        (status.expected_pods == Some(2) && status.desired_healthy == Some(1)).then_some(())
    })
    .await;
    let all = ["deployment/archaware", "pdb/archaware", "quota/archaware"];
    cluster.kubectl(&[&["-n", "archaware", "delete"], &all[..]].concat());
}
