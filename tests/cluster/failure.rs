//! Images that cannot be resolved: the failure policy.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use testimg::{FakeRegistry, Script};

use super::*;

async fn tolerations(bed: &TestCluster, name: &str, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|name| (*name).to_owned()).collect();
    eventually(
        &format!("tolerations {expected:?} of {name}"),
        DEADLINE,
        || async {
            (architectures_of(&bed.pods().get(name).await.ok()?) == expected).then_some(())
        },
    )
    .await;
}

async fn create(bed: &TestCluster, name: &str, image: String, priority: Option<&str>) {
    let mut spec = pod_spec(&[image]);
    if let Some(class) = priority {
        spec["priorityClassName"] = json!(class);
    }
    bed.create::<Pod>(pod(name, spec, json!({}))).await;
}

#[tokio::test]
async fn tolerate_all_steps_aside_after_its_time() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let _archaware = Controller::start(&bed, "resolution: {failure: {after: 3s}}");
    bed.wait_until_tainted().await;
    create(&bed, "nowhere", bed.image("no-such-image"), None).await;
    let note = bed.wait_for_event("nowhere", "ImageNotResolved").await;
    assert!(
        note.starts_with("NotFound: ") && note.contains("no-such-image"),
        "{note}"
    );
    assert!(
        architectures_of(&bed.pods().get("nowhere").await.unwrap()).is_empty(),
        "not before its time"
    );
    tolerations(&bed, "nowhere", &["any"]).await;
    bed.wait_for_event("nowhere", "SteppedAside").await;
    bed.wait_until_bound("nowhere").await;
    // What nothing can mend comes due all the same.
    create(
        &bed,
        "nonsense",
        "Not A Reference".to_lowercase().replace(' ', ":"),
        None,
    )
    .await;
    tolerations(&bed, "nonsense", &["any"]).await;
}

#[tokio::test]
async fn what_a_registry_says_of_its_limit_is_in_the_metrics() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let headers = vec![
        header("ratelimit-limit", "100;w=21600"),
        header("ratelimit-remaining", "37;w=21600"),
        header("retry-after", "600"),
    ];
    registry.script("/", Script::Status(429, headers));
    let archaware = Controller::start(&bed, "");
    bed.wait_until_tainted().await;
    create(&bed, "limited", registry.image("app"), None).await;
    bed.wait_for_event("limited", "ImageNotResolved").await;
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
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let config = "resolution: {failure: {after: 1s, action: tolerate, architectures: [amd64]}}";
    let _archaware = Controller::start(&bed, config);
    bed.wait_until_tainted().await;
    create(&bed, "nowhere", bed.image("no-such-image"), None).await;
    tolerations(&bed, "nowhere", &["amd64"]).await;
    assert_eq!(bed.wait_until_bound("nowhere").await, "amd64");
    bed.wait_for_event("nowhere", "ToleratedByPolicy").await;
}

#[tokio::test]
async fn hold_waits_until_the_image_is_there() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Status(503, Vec::new()));
    let _archaware = Controller::start(&bed, "resolution: {failure: {after: 1s, action: hold}}");
    bed.wait_until_tainted().await;
    create(&bed, "held", registry.image("app"), None).await;
    create(
        &bed,
        "critical",
        registry.image("app"),
        Some("system-cluster-critical"),
    )
    .await;
    // The cluster's own pods do not wait, whatever the action.
    tolerations(&bed, "critical", &["any"]).await;
    bed.wait_for_event("held", "ImageNotResolved").await;
    let requests = registry.seen().len();
    eventually("further tries", DEADLINE, || async {
        (registry.seen().len() > requests).then_some(())
    })
    .await;
    assert!(architectures_of(&bed.pods().get("held").await.unwrap()).is_empty());
    registry.add("app", &testimg::find("arm64"));
    registry.unscript();
    assert_eq!(bed.wait_until_bound("held").await, "arm64");
}

#[tokio::test]
async fn a_registry_that_is_down_at_the_start_comes_up() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("arm64"));
    registry.script("/", Script::Hang);
    // Nothing may bind it before archaware is there.
    let mut spec = pod_spec(&[registry.image("app")]);
    spec["schedulingGates"] = json!([{"name": "test/wait"}]);
    bed.create::<Pod>(pod("early", spec, json!({}))).await;
    let _archaware = Controller::start(&bed, "resolution: {timeout: 1s}");
    // The pod has had its first attempt, so nodes are tainted although its registry is silent.
    bed.wait_until_tainted().await;
    bed.wait_for_event("early", "ImageNotResolved").await;
    registry.unscript();
    tolerations(&bed, "early", &["arm64"]).await;
}

#[tokio::test]
async fn pods_of_other_registries_do_not_wait_for_one_that_hangs() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Hang);
    let _archaware = Controller::start(&bed, "");
    bed.wait_until_tainted().await;
    for n in 0..60 {
        create(
            &bed,
            &format!("hung-{n}"),
            registry.image(&format!("app{n}")),
            None,
        )
        .await;
    }
    let started = std::time::Instant::now();
    bed.create_pod("quick", &["arm64"]).await;
    assert_eq!(bed.wait_until_bound("quick").await, "arm64");
    assert!(
        started.elapsed() < std::time::Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
}
