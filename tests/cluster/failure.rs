//! Images that cannot be resolved: the failure policy.

use std::collections::BTreeSet;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::api::{Patch, PatchParams};
use serde_json::json;
use testimg::{FakeRegistry, Script};

use super::*;

async fn tolerations(cluster: &TestCluster, name: &str, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|name| (*name).to_owned()).collect();
    eventually(
        &format!("tolerations {expected:?} of {name}"),
        DEADLINE,
        || async {
            (architectures_of(&cluster.pods().get(name).await.ok()?) == expected).then_some(())
        },
    )
    .await;
}

async fn create(cluster: &TestCluster, name: &str, image: String, priority: Option<&str>) {
    let mut spec = pod_spec(&[image]);
    if let Some(class) = priority {
        spec["priorityClassName"] = json!(class);
    }
    cluster.create::<Pod>(pod(name, spec, json!({}))).await;
}

#[tokio::test]
async fn tolerate_all_steps_aside_after_its_time() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "resolution: {failure: {after: 3s}}");
    cluster.wait_until_tainted().await;
    create(&cluster, "nowhere", cluster.image("no-such-image"), None).await;
    let note = cluster.wait_for_event("nowhere", "ImageNotResolved").await;
    assert!(
        note.starts_with("NotFound: ") && note.contains("no-such-image"),
        "{note}"
    );
    assert!(
        architectures_of(&cluster.pods().get("nowhere").await.unwrap()).is_empty(),
        "not before its time"
    );
    tolerations(&cluster, "nowhere", &["any"]).await;
    cluster
        .wait_for_event("nowhere", "ToleratesEveryArchitecture")
        .await;
    cluster.wait_until_bound("nowhere").await;
    // The policy applies although no retry can succeed.
    create(
        &cluster,
        "nonsense",
        "Not A Reference".to_lowercase().replace(' ', ":"),
        None,
    )
    .await;
    tolerations(&cluster, "nonsense", &["any"]).await;
}

/// Nothing is known of an image, but which nodes hold it.
#[tokio::test]
async fn nodes_that_hold_an_unknown_image_are_preferred() {
    let cluster = TestCluster::take().await;
    let image = "registry.invalid/app:1";
    // Small, so that the scheduler's own preference for such nodes does not count.
    let held = json!({"status": {"images": [{"names": ["registry.invalid/other:1", image], "sizeBytes": 1}]}});
    cluster.create_three_nodes().await;
    cluster.create_node("arm64-b", "arm64").await;
    let nodes = cluster.nodes();
    let patch = PatchParams::default();
    nodes
        .patch_status("arm64", &patch, &Patch::Strategic(&held))
        .await
        .unwrap();
    let label = json!({"metadata": {"labels": {"kubernetes.io/hostname": "arm64"}}});
    nodes
        .patch("arm64", &patch, &Patch::Merge(&label))
        .await
        .unwrap();
    let config = "resolution: {failure: {after: 2s}}\n";
    let archaware = Controller::start_with_webhook(&cluster, config, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    create(&cluster, "held", image.to_owned(), None).await;
    create(
        &cluster,
        "unheld",
        "registry.invalid/app:2".to_owned(),
        None,
    )
    .await;
    let said = "one node (arm64) holds registry.invalid/app:1";
    let explained = |name: &str| {
        let pod = format!("pod/{name}");
        cluster
            .archaware(&["explain", &pod, "-n", &cluster.namespace])
            .1
    };
    eventually("an explanation", DEADLINE, || async {
        let text: String = explained("held").split_whitespace().collect();
        let said: String = said.split_whitespace().collect();
        text.contains(&said).then_some(())
    })
    .await;
    assert_eq!(cluster.wait_until_bound("held").await, "arm64");
    let note = cluster
        .wait_for_event("held", "ToleratesEveryArchitecture")
        .await;
    assert!(note.ends_with(said), "{note}");
    let weights = |pod: Pod| {
        let affinity = pod.spec?.affinity?.node_affinity?;
        let preferred = affinity.preferred_during_scheduling_ignored_during_execution?;
        Some(preferred.iter().map(|term| term.weight).collect::<Vec<_>>())
    };
    let held = cluster.pods().get("held").await.unwrap();
    assert_eq!(weights(held), Some(vec![100, 50]));
    cluster.wait_until_bound("unheld").await;
    let unheld = cluster.pods().get("unheld").await.unwrap();
    assert_eq!(weights(unheld), None);
    assert_eq!(archaware.stop().await, 0);
}

/// An app for one architecture with a sidecar that cannot be read.
#[tokio::test]
async fn the_images_that_are_known_count() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    let sidecar = registry.image("sidecar");
    let _archaware = Controller::start(&cluster, "resolution: {failure: {after: 2s}}");
    cluster.wait_until_tainted().await;
    let images = |names: &[&str]| {
        let known = names.iter().map(|name| cluster.image(name));
        known.chain([sidecar.clone()]).collect::<Vec<_>>()
    };
    let critical = json!("system-node-critical");
    for (name, known, priority, expected) in [
        ("app", &["amd64"][..], None, "amd64"),
        ("critical", &["arm64"], Some(&critical), "arm64"),
    ] {
        let mut spec = pod_spec(&images(known));
        if let Some(class) = priority {
            spec["priorityClassName"] = class.clone();
        }
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
        tolerations(&cluster, name, &[expected]).await;
        cluster.wait_for_event(name, "ToleratedByPolicy").await;
        assert_eq!(cluster.wait_until_bound(name).await, expected);
    }
    // Two images that share nothing need no third one to be known.
    let spec = pod_spec(&images(&["amd64", "arm64"]));
    cluster.create::<Pod>(pod("nowhere", spec, json!({}))).await;
    cluster
        .wait_for_event("nowhere", "NoCommonArchitecture")
        .await;
    // A template keeps the decision when the sidecar turns up: no second rollout.
    let set = json!({"metadata": {"name": "set"}, "spec": {
        "selector": {"matchLabels": {"app": "set"}},
        "template": {"metadata": {"labels": {"app": "set"}}, "spec": pod_spec(&images(&["multi"]))},
    }});
    cluster.create::<DaemonSet>(set).await;
    let sets = cluster.api::<DaemonSet>();
    let generation = || async { sets.get("set").await.ok()?.metadata.generation };
    let after = eventually("tolerations of the template", DEADLINE, || async {
        generation().await.filter(|generation| *generation > 1)
    })
    .await;
    registry.add("sidecar", &testimg::find("amd64"));
    // Another pod with that image is decided, so the image is known now.
    let spec = pod_spec(std::slice::from_ref(&sidecar));
    cluster.create::<Pod>(pod("later", spec, json!({}))).await;
    cluster.wait_until_bound("later").await;
    cluster.kubectl(&[
        "-n",
        &cluster.namespace,
        "annotate",
        "daemonset",
        "set",
        "touched=yes",
    ]);
    never(
        "a second rollout",
        tokio::time::sleep(std::time::Duration::from_secs(3)),
        || async { generation().await != Some(after) },
    )
    .await;
}

#[tokio::test]
async fn what_a_registry_says_of_its_limit_is_in_the_metrics() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let headers = vec![
        header("ratelimit-limit", "100;w=21600"),
        header("ratelimit-remaining", "37;w=21600"),
        header("retry-after", "600"),
    ];
    registry.script("/", Script::Status(429, headers));
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    create(&cluster, "limited", registry.image("app"), None).await;
    cluster.wait_for_event("limited", "ImageNotResolved").await;
    let (_, metrics) = archaware.http("/metrics").await;
    let of = format!("{{registry=\"{}\"}}", registry.address());
    for line in [
        format!("archaware_registry_rate_limit_remaining{of} 37"),
        format!("archaware_registry_rate_limit{of} 100"),
        "archaware_registries_gated{} 1".to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
}

#[tokio::test]
async fn tolerate_uses_the_configured_architectures() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let config = "resolution: {failure: {after: 1s, action: tolerate, architectures: [amd64]}}";
    let _archaware = Controller::start(&cluster, config);
    cluster.wait_until_tainted().await;
    create(&cluster, "nowhere", cluster.image("no-such-image"), None).await;
    tolerations(&cluster, "nowhere", &["amd64"]).await;
    assert_eq!(cluster.wait_until_bound("nowhere").await, "amd64");
    cluster.wait_for_event("nowhere", "ToleratedByPolicy").await;
}

#[tokio::test]
async fn hold_waits_until_the_image_is_there() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Status(503, Vec::new()));
    let _archaware =
        Controller::start(&cluster, "resolution: {failure: {after: 1s, action: hold}}");
    cluster.wait_until_tainted().await;
    create(&cluster, "held", registry.image("app"), None).await;
    create(
        &cluster,
        "critical",
        registry.image("app"),
        Some("system-cluster-critical"),
    )
    .await;
    // System-critical pods do not wait, whatever the action.
    tolerations(&cluster, "critical", &["any"]).await;
    cluster.wait_for_event("held", "ImageNotResolved").await;
    let requests = registry.seen().len();
    eventually("further tries", DEADLINE, || async {
        (registry.seen().len() > requests).then_some(())
    })
    .await;
    assert!(architectures_of(&cluster.pods().get("held").await.unwrap()).is_empty());
    registry.add("app", &testimg::find("arm64"));
    registry.unscript();
    assert_eq!(cluster.wait_until_bound("held").await, "arm64");
}

#[tokio::test]
async fn a_registry_that_is_down_at_the_start_comes_up() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("arm64"));
    registry.script("/", Script::Hang);
    // It must not be bound before archaware runs.
    let mut spec = pod_spec(&[registry.image("app")]);
    spec["schedulingGates"] = json!([{"name": "test/wait"}]);
    cluster.create::<Pod>(pod("early", spec, json!({}))).await;
    let _archaware = Controller::start(&cluster, "resolution: {timeout: 1s}");
    // The pod has been attempted once, so nodes are tainted although its registry does not answer.
    cluster.wait_until_tainted().await;
    cluster.wait_for_event("early", "ImageNotResolved").await;
    registry.unscript();
    tolerations(&cluster, "early", &["arm64"]).await;
}

#[tokio::test]
async fn pods_of_other_registries_do_not_wait_for_one_that_hangs() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Hang);
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    for n in 0..60 {
        create(
            &cluster,
            &format!("hung-{n}"),
            registry.image(&format!("app{n}")),
            None,
        )
        .await;
    }
    let started = std::time::Instant::now();
    cluster.create_pod("quick", &["arm64"]).await;
    assert_eq!(cluster.wait_until_bound("quick").await, "arm64");
    assert!(
        started.elapsed() < std::time::Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
}
