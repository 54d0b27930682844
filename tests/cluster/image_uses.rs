//! Images that are not pulled and run in the usual way: mounted as a volume, or never pulled.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use testimg::FakeRegistry;

use super::*;

async fn registry(images: &[&str]) -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    for image in images {
        registry.add(image, &testimg::find(image));
    }
    registry
}

/// containerd unpacks a single manifest for a volume whatever its platform is, and looks for the
/// node's platform in an index.
#[tokio::test]
async fn a_mounted_image_limits_a_pod_only_if_it_is_an_index() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = registry(&["arm64", "multi", "amd64", "docker-amd64", "arm64-s390x"]).await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    for (name, run, mounted, expected) in [
        ("manifest", "arm64", "amd64", "arm64"),
        ("docker", "arm64", "docker-amd64", "arm64"),
        ("index", "multi", "arm64-s390x", "arm64,s390x"),
        // The same image is run, too.
        ("both", "amd64", "amd64", "amd64"),
    ] {
        let mut spec = pod_spec(&[registry.image(run)]);
        spec["volumes"] =
            json!([{"name": "data", "image": {"reference": registry.image(mounted)}}]);
        spec["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
        let node = cluster.wait_until_bound(name).await;
        assert!(
            expected.split(',').any(|one| one == node),
            "{name} on {node}"
        );
        let pod = cluster.pods().get(name).await.unwrap();
        let decision = &pod.annotations()["archaware.dev/decision"];
        assert_eq!(decision, expected, "{name}");
    }
    assert_eq!(archaware.stop().await, 0);
}

/// The registry has another image under the name of an image that is on the nodes.
#[tokio::test]
async fn an_image_that_is_never_pulled_runs_where_nodes_hold_it() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = registry(&["amd64", "s390x"]).await;
    let held = format!("{}:latest", registry.image("amd64"));
    let images = json!({"status": {"images": [{"names": [held], "sizeBytes": 1}]}});
    let nodes = cluster.nodes();
    let patch = Patch::Merge(images);
    nodes
        .patch_status("arm64", &PatchParams::default(), &patch)
        .await
        .unwrap();
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let create = async |name: &str, images: &[(&str, &str)]| {
        let names: Vec<_> = images
            .iter()
            .map(|(image, _)| registry.image(image))
            .collect();
        let mut spec = pod_spec(&names);
        for (number, (_, policy)) in images.iter().enumerate() {
            spec["containers"][number]["imagePullPolicy"] = json!(policy);
        }
        cluster.create::<Pod>(pod(name, spec, json!({}))).await
    };
    create("held", &[("amd64", "Never")]).await;
    assert_eq!(cluster.wait_until_bound("held").await, "arm64");
    // No node is known to hold it: kubelets report only some of their images.
    create("unknown", &[("s390x", "Never")]).await;
    cluster.wait_until_bound("unknown").await;
    let pod = cluster.pods().get("unknown").await.unwrap();
    assert_eq!(pod.annotations()["archaware.dev/decision"], "any");
    assert_eq!(
        registry.seen().len(),
        0,
        "a registry says nothing about them"
    );
    let explained = explain::explained(&cluster, &["pod/held"]);
    assert_eq!(explained["images"][0]["source"], "nodes", "{explained}");
    // Another container pulls it.
    create("pulled", &[("amd64", "Never"), ("amd64", "IfNotPresent")]).await;
    assert_eq!(cluster.wait_until_bound("pulled").await, "amd64");
    assert_eq!(archaware.stop().await, 0);
}
