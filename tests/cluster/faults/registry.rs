//! Registries that do not answer, are slow, or return wrong content.

use std::time::Duration;

use testimg::{FakeRegistry, Script};

use super::*;

/// Meanwhile pods of another registry are decided, and the pods of this one when it recovers; with
/// failure policy `hold` nothing is guessed.
#[tokio::test]
async fn registry_dead_slow_or_lying() {
    let cluster = TestCluster::take().await;
    let hold = "resolution: {timeout: 1s, failure: {action: hold}}\n";
    let scene = Scene::set(cluster, |cluster| Controller::start(cluster, hold)).await;
    let cluster = &scene.cluster;
    let other = testimg::find("amd64");
    let faults = [
        ("dead", Script::Status(503, Vec::new())),
        ("hung", Script::Hang),
        ("trickles", Script::Trickle(Duration::from_millis(100))),
        ("lies", Script::OtherContent(other.blobs[0].bytes.clone())),
        ("cut", Script::CutShort),
        ("forbids", Script::Status(403, Vec::new())),
        (
            "limits",
            Script::Status(429, vec![("retry-after".into(), "2".into())]),
        ),
    ];
    let mut registries = Vec::new();
    for (name, script) in faults {
        let registry = FakeRegistry::start().await.unwrap();
        registry.add("app", &testimg::find("arm64"));
        registry.script("/", script);
        let spec = pod_spec(&[registry.image("app")]);
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
        registries.push((name, registry));
    }
    for (name, _) in &registries {
        cluster.wait_for_event(name, "ImageNotResolved").await;
    }
    scene.places("meanwhile").await;
    for (name, registry) in &registries {
        let pod = cluster.pods().get(name).await.unwrap();
        assert!(architectures_of(&pod).is_empty(), "{name} is not known");
        registry.unscript();
    }
    for (name, _) in &registries {
        // A denied image is retried after 5 s, 10 s, 20 s; a corrupt one after 1 min, 2 min. On a
        // machine so slow that requests time out before that, these failures count, and the delay
        // is as long as it gets: 10 min.
        let bound = async || cluster.pods().get(name).await.ok()?.spec?.node_name;
        let node = eventually(&format!("pod {name} bound"), Duration::from_mins(12), bound).await;
        assert_eq!(node, "arm64", "{name}");
    }
    scene.ends_well().await;
}

#[tokio::test]
async fn sigterm_ends_at_once_even_while_a_registry_hangs() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Hang);
    // Longer than `stop` waits, which would fail if shutdown waited for the registry.
    let archaware = Controller::start(&cluster, "resolution: {timeout: 10m, budget: 10m}\n");
    cluster.wait_until_tainted().await;
    let spec = pod_spec(&[registry.image("app")]);
    cluster.create::<Pod>(pod("hung", spec, json!({}))).await;
    eventually("a request to the registry", DEADLINE, || async {
        (!registry.seen().is_empty()).then_some(())
    })
    .await;
    assert_eq!(archaware.stop().await, 0);
}
