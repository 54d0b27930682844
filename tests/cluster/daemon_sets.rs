//! DaemonSets: no pod is created before the template tolerates the node.

use std::collections::BTreeSet;

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Pod, Toleration},
};
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
    cluster
        .wait_for_event("blind", "ToleratesEveryArchitecture")
        .await;
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
    cluster
        .wait_for_event("blind", "ToleratesEveryArchitecture")
        .await;
    let asked = registry.seen().len();
    eventually("a further try", DEADLINE, || async {
        (registry.seen().len() > asked).then_some(())
    })
    .await;
    assert_eq!(generation(&cluster, "agent").await, 2, "no rollout");
}

/// A tool that removes the tolerations, and one that writes its whole object back, the annotation
/// too.
#[tokio::test]
async fn a_writer_that_reverts_tolerations_is_not_fought() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let own = json!([{"key": "own", "operator": "Exists"}]);
    let tolerations = json!({"template": {"spec": {"tolerations": own}}});
    let record = json!({"annotations": {"archaware.dev/tolerations": null}});
    let tools = [
        ("list", json!({"spec": tolerations})),
        ("object", json!({"spec": tolerations, "metadata": record})),
    ];
    for (name, change) in &tools {
        let set = daemon_set(&cluster, name, "arm64", json!(null), json!({}));
        cluster.create::<DaemonSet>(set).await;
        let parameters = PatchParams {
            field_manager: Some("gitops".to_owned()),
            ..PatchParams::default()
        };
        // Created and changed; reverted and changed again; reverted and left unchanged.
        for _ in 0..2 {
            eventually("tolerations to take out", DEADLINE, || async {
                let sets = cluster.api::<DaemonSet>();
                let set = sets.get(name).await.ok()?;
                let tolerations = set.spec.template.spec?.tolerations.unwrap_or_default();
                let is_ours = |one: &&Toleration| one.key.as_deref() == Some("kubernetes.io/arch");
                tolerations.iter().find(is_ours)?;
                sets.patch(name, &parameters, &Patch::Merge(change))
                    .await
                    .ok()
            })
            .await;
        }
        let note = cluster.wait_for_event(name, "TolerationsReverted").await;
        assert!(
            note.contains("gitops") && note.contains("spec.template.spec.tolerations"),
            "{note}"
        );
    }
    let witness = daemon_set(&cluster, "witness", "arm64", json!(null), json!({}));
    cluster.create::<DaemonSet>(witness).await;
    lands_on(&cluster, "witness", &["arm64"]).await;
    for (name, _) in &tools {
        assert_eq!(generation(&cluster, name).await, 5, "{name}");
    }
    // A restart does not begin the fight anew.
    eventually(
        "repairs that are stored with the Lease",
        DEADLINE,
        || async {
            let lease =
                cluster.kubectl(&["-n", "archaware", "get", "lease", "archaware", "-o", "yaml"]);
            (lease.matches("daemonsets").count() == 2).then_some(())
        },
    )
    .await;
    assert_eq!(archaware.stop().await, 0);
    let _archaware = Controller::start(&cluster, "");
    let later = daemon_set(&cluster, "later", "arm64", json!(null), json!({}));
    cluster.create::<DaemonSet>(later).await;
    lands_on(&cluster, "later", &["arm64"]).await;
    for (name, _) in &tools {
        assert_eq!(generation(&cluster, name).await, 5, "{name}");
    }
}

/// `kubectl apply --server-side` of a DaemonSet, with or without tolerations of its own, works
/// again and again beside archaware, with the webhook and without.
#[tokio::test]
async fn server_side_apply_meets_no_conflict() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    for webhook in [false, true] {
        let archaware = if webhook {
            Controller::start_with_webhook(&cluster, "", "").await
        } else {
            Controller::start(&cluster, "")
        };
        cluster.wait_until_tainted().await;
        let apply = |name: &str, image: &str, tolerations: Value| {
            let is_bare = tolerations.is_null();
            let mut set = daemon_set(&cluster, name, image, tolerations, json!({}));
            if is_bare {
                let spec = set["spec"]["template"]["spec"].as_object_mut().unwrap();
                spec.remove("tolerations");
            }
            set["apiVersion"] = json!("apps/v1");
            set["kind"] = json!("DaemonSet");
            set["metadata"]["namespace"] = json!(cluster.namespace);
            let file = cluster.dir().join(format!("{name}.json"));
            std::fs::write(&file, set.to_string()).unwrap();
            cluster.try_kubectl(&["apply", "--server-side", "-f", file.to_str().unwrap()])
        };
        let (own, none) = (format!("own-{webhook}"), format!("none-{webhook}"));
        let gpu = || json!([{"key": "gpu", "operator": "Exists"}]);
        let (done, out, error) = apply(&own, "multi", gpu());
        assert!(done, "{out}{error}");
        let note = cluster.wait_for_event(&own, "TolerationsMissing").await;
        assert!(note.contains("kubectl"), "{note}");
        // What is not in the manifest stays archaware's.
        for image in ["arm64-s390x", "amd64"] {
            let (done, out, error) = apply(&own, image, gpu());
            assert!(done, "{own} {image}: {out}{error}");
            let (done, out, error) = apply(&none, image, json!(null));
            assert!(done, "{none} {image}: {out}{error}");
            let nodes: &[&str] = if image == "amd64" {
                &["amd64"]
            } else {
                &["arm64", "s390x"]
            };
            lands_on(&cluster, &none, nodes).await;
        }
        let set = cluster.api::<DaemonSet>().get(&own).await.unwrap();
        let left = set.spec.template.spec.unwrap().tolerations.unwrap();
        assert_eq!(left.len(), 1, "{left:?}");
        assert_eq!(archaware.stop().await, 0);
    }
}
