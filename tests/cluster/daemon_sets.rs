//! DaemonSets: no pod is created before the template tolerates the node.

use std::collections::BTreeSet;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::*;

fn daemon_set(
    cluster: &TestCluster,
    name: &str,
    image: &str,
    tolerations: Value,
    annotations: Value,
) -> Value {
    let mut spec = pod_spec(&[cluster.image(image)]);
    spec["tolerations"] = tolerations;
    json!({"metadata": {"name": name}, "spec": {
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}, "annotations": annotations}, "spec": spec}}})
}

async fn lands_on(cluster: &TestCluster, name: &str, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|node| (*node).to_owned()).collect();
    let selector = ListParams::default().labels(&format!("app={name}"));
    eventually(
        &format!("pods of {name} on {expected:?}"),
        DEADLINE,
        || async {
            let pods = cluster.pods().list(&selector).await.ok()?;
            let live = pods
                .iter()
                .filter(|pod: &&Pod| pod.metadata.deletion_timestamp.is_none());
            let nodes: BTreeSet<String> = live
                .filter_map(|pod| pod.spec.as_ref()?.node_name.clone())
                .collect();
            (nodes == expected).then_some(())
        },
    )
    .await;
}

async fn generation(cluster: &TestCluster, name: &str) -> i64 {
    cluster
        .api::<DaemonSet>()
        .get(name)
        .await
        .unwrap()
        .metadata
        .generation
        .unwrap()
}

#[tokio::test]
async fn templates_get_what_their_images_allow() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let foreign = json!([{"key": "gpu", "operator": "Exists"}]);
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "bare",
            "arm64-s390x",
            json!(null),
            json!({}),
        ))
        .await;
    cluster
        .create::<DaemonSet>(daemon_set(&cluster, "some", "amd64", foreign, json!({})))
        .await;
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "all",
            "multi",
            json!([{"operator": "Exists"}]),
            json!({}),
        ))
        .await;
    let any = json!({"archaware.dev/mode": "any"});
    cluster
        .create::<DaemonSet>(daemon_set(&cluster, "any", "nothing", json!(null), any))
        .await;
    let ignored = json!({"archaware.dev/mode": "ignore"});
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "ignored",
            "multi",
            json!(null),
            ignored,
        ))
        .await;
    lands_on(&cluster, "bare", &["arm64", "s390x"]).await;
    lands_on(&cluster, "some", &["amd64"]).await;
    lands_on(&cluster, "all", &["amd64", "arm64", "s390x"]).await;
    lands_on(&cluster, "any", &["amd64", "arm64", "s390x"]).await;
    lands_on(&cluster, "ignored", &[]).await;
    cluster.wait_for_event("bare", "TolerationsChanged").await;
    assert_eq!(generation(&cluster, "bare").await, 2, "one write");
    assert_eq!(
        generation(&cluster, "all").await,
        1,
        "a template that tolerates all is untouched"
    );
    // With other images, owned tolerations follow and foreign ones stay.
    let image = json!([{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": cluster.image("arm64")}]);
    let patch = Patch::<()>::Json(serde_json::from_value(image).unwrap());
    cluster
        .api::<DaemonSet>()
        .patch("some", &PatchParams::default(), &patch)
        .await
        .unwrap();
    lands_on(&cluster, "some", &["arm64"]).await;
    let some = cluster.api::<DaemonSet>().get("some").await.unwrap();
    let tolerations = some.spec.template.spec.unwrap().tolerations.unwrap();
    let keys: Vec<_> = tolerations
        .iter()
        .map(|t| t.key.as_deref().unwrap())
        .collect();
    assert_eq!(keys, ["gpu", "kubernetes.io/arch"]);
}

#[tokio::test]
async fn a_node_that_joins_gets_its_daemons() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster
        .create::<DaemonSet>(daemon_set(&cluster, "cni", "multi", json!(null), json!({})))
        .await;
    lands_on(&cluster, "cni", &["amd64"]).await;
    cluster.create_node("arm64", "arm64").await;
    lands_on(&cluster, "cni", &["amd64", "arm64"]).await;
    assert_eq!(generation(&cluster, "cni").await, 2);
}

#[tokio::test]
async fn report_only_reports() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    let _archaware = Controller::start(&cluster, "daemonSets: report");
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "reported",
            "amd64",
            json!(null),
            json!({}),
        ))
        .await;
    cluster
        .wait_for_event("reported", "TolerationsMissing")
        .await;
    assert_eq!(generation(&cluster, "reported").await, 1);
}

#[tokio::test]
async fn a_template_that_was_stepped_aside_for_is_not_rolled_twice() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "resolution: {failure: {after: 1s}}");
    cluster.wait_until_tainted().await;
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "blind",
            "not-there-yet",
            json!(null),
            json!({}),
        ))
        .await;
    cluster.wait_for_event("blind", "SteppedAside").await;
    lands_on(&cluster, "blind", &["amd64", "arm64", "s390x"]).await;
    assert_eq!(generation(&cluster, "blind").await, 2);
    // The image exists now, and archaware restarts.
    cluster.push("not-there-yet", "arm64").await;
    assert_eq!(archaware.stop().await, 0);
    let _archaware = Controller::start(&cluster, "");
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "witness",
            "arm64",
            json!(null),
            json!({}),
        ))
        .await;
    lands_on(&cluster, "witness", &["arm64"]).await;
    assert_eq!(generation(&cluster, "blind").await, 2);
    let set = cluster.api::<DaemonSet>().get("blind").await.unwrap();
    assert!(set.annotations()["archaware.dev/tolerations"].contains("\"steppedAside\":true"));
}

#[tokio::test]
async fn a_decision_stands_while_its_images_cannot_be_resolved() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = testimg::FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("arm64"));
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let mut set = daemon_set(&cluster, "agent", "multi", json!(null), json!({}));
    set["spec"]["template"]["spec"]["containers"][0]["image"] = json!(registry.image("app"));
    cluster.create::<DaemonSet>(set).await;
    lands_on(&cluster, "agent", &["arm64"]).await;
    assert_eq!(archaware.stop().await, 0);
    // The image is gone, nothing is cached, and the failure policy applies at once.
    registry.script("/", testimg::Script::Status(404, Vec::new()));
    let _archaware = Controller::start(&cluster, "resolution: {failure: {after: 1s}}");
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "blind",
            "no-such-image",
            json!(null),
            json!({}),
        ))
        .await;
    cluster.wait_for_event("agent", "ImageNotResolved").await;
    cluster.wait_for_event("blind", "SteppedAside").await;
    let asked = registry.seen().len();
    eventually("a further try", DEADLINE, || async {
        (registry.seen().len() > asked).then_some(())
    })
    .await;
    assert_eq!(generation(&cluster, "agent").await, 2, "no rollout");
}

#[tokio::test]
async fn a_writer_that_reverts_tolerations_is_not_fought() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "agent",
            "arm64",
            json!(null),
            json!({}),
        ))
        .await;
    let revert = || async {
        let tolerations = json!([{"op": "remove", "path": "/spec/template/spec/tolerations"}]);
        let patch = Patch::<()>::Json(serde_json::from_value(tolerations).unwrap());
        eventually("tolerations to take out", DEADLINE, || async {
            cluster
                .api::<DaemonSet>()
                .patch("agent", &PatchParams::default(), &patch)
                .await
                .ok()
        })
        .await;
    };
    // Created and changed; reverted and changed again; reverted and left unchanged.
    revert().await;
    revert().await;
    cluster.wait_for_event("agent", "TolerationsReverted").await;
    let before = generation(&cluster, "agent").await;
    cluster
        .create::<DaemonSet>(daemon_set(
            &cluster,
            "witness",
            "arm64",
            json!(null),
            json!({}),
        ))
        .await;
    lands_on(&cluster, "witness", &["arm64"]).await;
    assert_eq!(generation(&cluster, "agent").await, before);
}
