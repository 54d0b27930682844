//! Image selection: what its tests share.

use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::Pod,
};
use serde_json::{Value, json};
use testimg::{FakeRegistry, Image, Script};

use super::*;

mod explain;
mod features;
mod images;
mod model;

pub(crate) use features::{NFD_ARTIFACT, NFD_LAYER, apply, node_feature, serve_node_features};

const OCIFIT: &str = "application/vnd.oci.image.compatibilities.v1+json";
const OWN: &str = "archaware.dev/select-image.app";
const KEY: &str = "example.com/cpu";

/// A registry with three images and a document about them.
async fn registry() -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    for (tag, image) in [("gpu", "amd64"), ("fast", "amd64"), ("any", "multi")] {
        registry.add_tag("app", tag, &testimg::find(image));
    }
    let when = |key: &str, op: &str, value: &[&str]| json!([{"matchFeatures": [{"matchExpressions": [{"key": key, "op": op, "value": value}]}]}]);
    let image = |tag: &str| format!("{}:{tag}", registry.image("app"));
    let document = json!({"version": "v1alpha1", "compatibilities": [
        {"tag": image("any"), "rules": when("example.com/old", "DoesNotExist", &[])},
        {"tag": image("gpu"), "weight": 9, "rules": when("example.com/gpu", "Gte", &["2"])},
        {"tag": image("fast"), "weight": 5, "rules": when(KEY, "In", &["fast", "faster"])},
    ]});
    let artifact = Image::artifact("application/vnd.test", OCIFIT, &document.to_string());
    registry.add_tag("app", "compatibility", &artifact);
    registry
}

/// The nodes: `fast` and `slow` for amd64, `arm` that says it is fast, and `gpu` for pods that
/// tolerate its taint.
async fn nodes(cluster: &TestCluster) {
    for (name, architecture, labels) in [
        ("fast", "amd64", vec![format!("{KEY}=fast")]),
        ("slow", "amd64", vec![]),
        ("arm", "arm64", vec![format!("{KEY}=fast")]),
        (
            "gpu",
            "amd64",
            vec![format!("{KEY}=fast"), "example.com/gpu=4".to_owned()],
        ),
    ] {
        cluster.create_cordoned_node(name, architecture).await;
        cluster.kubectl(&[
            "label",
            "node",
            name,
            &format!("kubernetes.io/hostname={name}"),
            "--overwrite",
        ]);
        for label in labels {
            cluster.kubectl(&["label", "node", name, &label]);
        }
    }
    cluster.kubectl(&["taint", "node", "gpu", "example.com/gpu=yes:NoSchedule"]);
    cluster.kubectl(&["uncordon", "fast", "slow", "arm", "gpu"]);
}

/// A pod with the container `app` and this image.
fn app(name: &str, image: &str, annotations: Value, more: &Value) -> Value {
    let mut spec = pod_spec(&[image.to_owned()]);
    spec["containers"][0]["name"] = json!("app");
    for (field, value) in more.as_object().into_iter().flatten() {
        spec[field] = value.clone();
    }
    pod(name, spec, annotations)
}

fn image_of(pod: &Pod) -> String {
    let containers = &pod.spec.as_ref().unwrap().containers;
    let app = containers.iter().find(|one| one.name == "app").unwrap();
    app.image.clone().unwrap()
}

/// The tag of the image that the pod got, and the node on which it landed.
async fn landed(cluster: &TestCluster, name: &str) -> (String, String) {
    let node = cluster.wait_until_bound(name).await;
    let image = image_of(&cluster.pods().get(name).await.unwrap());
    (image.rsplit(':').next().unwrap().to_owned(), node)
}

fn is(tag: &str, node: &str) -> (String, String) {
    (tag.to_owned(), node.to_owned())
}
