//! DaemonSets: no pod of theirs exists before the template tolerates the node.

use std::collections::BTreeSet;

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::*;

fn daemon_set(
    bed: &TestCluster,
    name: &str,
    image: &str,
    tolerations: Value,
    annotations: Value,
) -> Value {
    let mut spec = pod_spec(&[bed.image(image)]);
    spec["tolerations"] = tolerations;
    json!({"metadata": {"name": name}, "spec": {
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}, "annotations": annotations}, "spec": spec}}})
}

async fn lands_on(bed: &TestCluster, name: &str, expected: &[&str]) {
    let expected: BTreeSet<String> = expected.iter().map(|node| (*node).to_owned()).collect();
    let selector = ListParams::default().labels(&format!("app={name}"));
    eventually(
        &format!("pods of {name} on {expected:?}"),
        DEADLINE,
        || async {
            let pods = bed.pods().list(&selector).await.ok()?;
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

async fn generation(bed: &TestCluster, name: &str) -> i64 {
    bed.api::<DaemonSet>()
        .get(name)
        .await
        .unwrap()
        .metadata
        .generation
        .unwrap()
}

#[tokio::test]
async fn templates_get_what_their_images_allow() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let _archaware = Controller::start(&bed, "");
    bed.wait_until_tainted().await;
    let foreign = json!([{"key": "gpu", "operator": "Exists"}]);
    bed.create::<DaemonSet>(daemon_set(
        &bed,
        "bare",
        "arm64-s390x",
        json!(null),
        json!({}),
    ))
    .await;
    bed.create::<DaemonSet>(daemon_set(&bed, "some", "amd64", foreign, json!({})))
        .await;
    bed.create::<DaemonSet>(daemon_set(
        &bed,
        "all",
        "multi",
        json!([{"operator": "Exists"}]),
        json!({}),
    ))
    .await;
    let any = json!({"archaware.dev/mode": "any"});
    bed.create::<DaemonSet>(daemon_set(&bed, "any", "nothing", json!(null), any))
        .await;
    let ignored = json!({"archaware.dev/mode": "ignore"});
    bed.create::<DaemonSet>(daemon_set(&bed, "ignored", "multi", json!(null), ignored))
        .await;
    lands_on(&bed, "bare", &["arm64", "s390x"]).await;
    lands_on(&bed, "some", &["amd64"]).await;
    lands_on(&bed, "all", &["amd64", "arm64", "s390x"]).await;
    lands_on(&bed, "any", &["amd64", "arm64", "s390x"]).await;
    lands_on(&bed, "ignored", &[]).await;
    bed.wait_for_event("bare", "TolerationsChanged").await;
    assert_eq!(generation(&bed, "bare").await, 2, "one write");
    assert_eq!(
        generation(&bed, "all").await,
        1,
        "a template that tolerates all is untouched"
    );
    // Other images: what is owned follows, what is foreign stays.
    let image = json!([{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": bed.image("arm64")}]);
    let patch = Patch::<()>::Json(serde_json::from_value(image).unwrap());
    bed.api::<DaemonSet>()
        .patch("some", &PatchParams::default(), &patch)
        .await
        .unwrap();
    lands_on(&bed, "some", &["arm64"]).await;
    let some = bed.api::<DaemonSet>().get("some").await.unwrap();
    let tolerations = some.spec.template.spec.unwrap().tolerations.unwrap();
    let keys: Vec<_> = tolerations
        .iter()
        .map(|t| t.key.as_deref().unwrap())
        .collect();
    assert_eq!(keys, ["gpu", "kubernetes.io/arch"]);
}

#[tokio::test]
async fn a_node_that_joins_gets_its_daemons() {
    let bed = TestCluster::take().await;
    bed.create_node("amd64", "amd64").await;
    let _archaware = Controller::start(&bed, "");
    bed.wait_until_tainted().await;
    bed.create::<DaemonSet>(daemon_set(&bed, "cni", "multi", json!(null), json!({})))
        .await;
    lands_on(&bed, "cni", &["amd64"]).await;
    bed.create_node("arm64", "arm64").await;
    lands_on(&bed, "cni", &["amd64", "arm64"]).await;
    assert_eq!(generation(&bed, "cni").await, 2);
}

#[tokio::test]
async fn report_only_reports() {
    let bed = TestCluster::take().await;
    bed.create_node("amd64", "amd64").await;
    let _archaware = Controller::start(&bed, "daemonSets: report");
    bed.create::<DaemonSet>(daemon_set(
        &bed,
        "reported",
        "amd64",
        json!(null),
        json!({}),
    ))
    .await;
    bed.wait_for_event("reported", "TolerationsMissing").await;
    assert_eq!(generation(&bed, "reported").await, 1);
}

#[tokio::test]
async fn a_template_that_was_stepped_aside_for_is_not_rolled_twice() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let archaware = Controller::start(&bed, "resolution: {failure: {after: 1s}}");
    bed.wait_until_tainted().await;
    bed.create::<DaemonSet>(daemon_set(
        &bed,
        "blind",
        "not-there-yet",
        json!(null),
        json!({}),
    ))
    .await;
    bed.wait_for_event("blind", "SteppedAside").await;
    lands_on(&bed, "blind", &["amd64", "arm64", "s390x"]).await;
    assert_eq!(generation(&bed, "blind").await, 2);
    // The image can be resolved now, and archaware starts anew.
    bed.push("not-there-yet", "arm64").await;
    assert_eq!(archaware.stop().await, 0);
    let _archaware = Controller::start(&bed, "");
    bed.create::<DaemonSet>(daemon_set(&bed, "witness", "arm64", json!(null), json!({})))
        .await;
    lands_on(&bed, "witness", &["arm64"]).await;
    assert_eq!(generation(&bed, "blind").await, 2);
    let set = bed.api::<DaemonSet>().get("blind").await.unwrap();
    assert!(set.annotations()["archaware.dev/tolerations"].contains("\"steppedAside\":true"));
}

#[tokio::test]
async fn a_decision_stands_while_its_images_cannot_be_resolved() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let registry = testimg::FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("arm64"));
    let archaware = Controller::start(&bed, "");
    bed.wait_until_tainted().await;
    let mut set = daemon_set(&bed, "agent", "multi", json!(null), json!({}));
    set["spec"]["template"]["spec"]["containers"][0]["image"] = json!(registry.image("app"));
    bed.create::<DaemonSet>(set).await;
    lands_on(&bed, "agent", &["arm64"]).await;
    assert_eq!(archaware.stop().await, 0);
    // The image is gone, nothing is remembered, and the failure policy is impatient.
    registry.script("/", testimg::Script::Status(404, Vec::new()));
    let _archaware = Controller::start(&bed, "resolution: {failure: {after: 1s}}");
    bed.create::<DaemonSet>(daemon_set(
        &bed,
        "blind",
        "no-such-image",
        json!(null),
        json!({}),
    ))
    .await;
    bed.wait_for_event("agent", "ImageNotResolved").await;
    bed.wait_for_event("blind", "SteppedAside").await;
    let asked = registry.seen().len();
    eventually("a further try", DEADLINE, || async {
        (registry.seen().len() > asked).then_some(())
    })
    .await;
    assert_eq!(generation(&bed, "agent").await, 2, "no rollout");
}

#[tokio::test]
async fn who_takes_tolerations_out_again_is_not_fought() {
    let bed = TestCluster::take().await;
    bed.create_three_nodes().await;
    let _archaware = Controller::start(&bed, "");
    bed.wait_until_tainted().await;
    bed.create::<DaemonSet>(daemon_set(&bed, "agent", "arm64", json!(null), json!({})))
        .await;
    let revert = || async {
        let tolerations = json!([{"op": "remove", "path": "/spec/template/spec/tolerations"}]);
        let patch = Patch::<()>::Json(serde_json::from_value(tolerations).unwrap());
        eventually("tolerations to take out", DEADLINE, || async {
            bed.api::<DaemonSet>()
                .patch("agent", &PatchParams::default(), &patch)
                .await
                .ok()
        })
        .await;
    };
    // Created, changed; taken out, changed once more; taken out, and left.
    revert().await;
    revert().await;
    bed.wait_for_event("agent", "TolerationsReverted").await;
    let before = generation(&bed, "agent").await;
    bed.create::<DaemonSet>(daemon_set(&bed, "witness", "arm64", json!(null), json!({})))
        .await;
    lands_on(&bed, "witness", &["arm64"]).await;
    assert_eq!(generation(&bed, "agent").await, before);
}
