//! The webhook dead, hung, or not to be trusted: pods are created, and placed when it is back.

use std::time::{Duration, Instant};

use testimg::{FakeRegistry, Script};

use super::*;

#[tokio::test]
async fn a_dead_or_hung_webhook_delays_no_pod() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let port = free_port();
    let config = admission_config(port, "");
    cluster.register();
    let archaware = Controller::start(&cluster, &config);
    cluster.wait_until_called().await;
    cluster.wait_until_tainted().await;
    archaware.signal("-STOP");
    let started = Instant::now();
    let hung = cluster.create_pod("hung", &["arm64"]).await;
    let took = started.elapsed();
    assert!(architectures_of(&hung).is_empty());
    // The budget of a second and two more are what the API server is told to wait.
    assert!(took < Duration::from_secs(5), "{took:?}");
    archaware.signal("-CONT");
    assert_eq!(cluster.wait_until_bound("hung").await, "arm64");
    assert!(cluster.is_called().await);
    archaware.signal("-KILL");
    drop(archaware);
    let started = Instant::now();
    let dead = cluster.create_pod("dead", &["arm64"]).await;
    assert!(architectures_of(&dead).is_empty());
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "a closed door is no time-out"
    );
    // A node that joins meanwhile is tainted when archaware is back.
    let late = cluster.create_node("late", "arm64").await;
    assert!(taints(&late).is_empty());
    let _archaware = Controller::start(&cluster, &config);
    cluster.wait_until_called().await;
    cluster.wait_until_bound("dead").await;
    cluster.wait_until_tainted().await;
}

/// Requests in progress are answered before the process ends, and later ones reach the other
/// replica.
#[tokio::test]
async fn sigterm_drains() {
    let cluster = TestCluster::take().await;
    let slow = FakeRegistry::start().await.unwrap();
    slow.add("arm64", &testimg::find("arm64"));
    slow.script("/", Script::Slow(Duration::from_millis(200)));
    let archaware = Controller::start_with_webhook(&cluster, "", "budget: 2s").await;
    let mut waiting = pod("waiting", pod_spec(&[slow.image("arm64")]), json!({}));
    waiting["spec"]["schedulerName"] = json!("none");
    let create = cluster.create::<Pod>(waiting);
    let stop = async {
        eventually(
            "a question on its way to the registry",
            DEADLINE,
            || async { (!slow.seen().is_empty()).then_some(()) },
        )
        .await;
        let started = Instant::now();
        assert_eq!(archaware.stop().await, 0);
        started.elapsed()
    };
    let (created, took) = tokio::join!(create, stop);
    assert_eq!(architectures_of(&created), set(&["arm64"]));
    assert!(took < Duration::from_secs(10), "{took:?}");
}
