//! Runtime classes (docs/runtime-classes.md), with the real admission plugin and the real scheduler.

use k8s_openapi::api::{core::v1::Pod, node::v1::RuntimeClass};
use kube::Api;
use serde_json::{Value, json};

use super::*;

const CLASSES: &str =
    "runtimeClasses: {wasmtime: {platforms: [wasi/wasm]}, qemu: {platforms: [linux/arm64]}}\n";

/// Creates a `RuntimeClass`.
async fn create_class(cluster: &TestCluster, name: &str, scheduling: Value) {
    let classes: Api<RuntimeClass> = Api::all(cluster.client.clone());
    let mut class = json!({"metadata": {"name": name}, "handler": name});
    if !scheduling.is_null() {
        class["scheduling"] = scheduling;
    }
    let class = serde_json::from_value(class).unwrap();
    classes.create(&Default::default(), &class).await.unwrap();
}

async fn create_pod(cluster: &TestCluster, name: &str, image: &str, class: Option<&str>) -> Pod {
    let mut spec = pod_spec(&[cluster.image(image)]);
    if let Some(class) = class {
        spec["runtimeClassName"] = json!(class);
    }
    cluster.create(pod(name, spec, json!({}))).await
}

#[tokio::test]
async fn images_run_where_their_class_runs_them() {
    // Its classes would outlive the namespace of the test.
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    let labelled = |more: Value, taints: Value| {
        let mut labels = json!({"kubernetes.io/arch": "arm64"});
        json_patch::merge(&mut labels, &more);
        json!({"metadata": {"labels": labels}, "spec": {"taints": taints}})
    };
    let dedicated = json!([{"key": "wasm", "value": "only", "effect": "NoSchedule"}]);
    cluster.create_node("amd64-1", "amd64").await;
    cluster.create_node("arm64-1", "arm64").await;
    cluster
        .create_node_with(
            "wasm-1",
            "arm64",
            labelled(json!({"wasm": "yes"}), dedicated),
        )
        .await;
    let scheduling = json!({
        "nodeSelector": {"wasm": "yes"},
        "tolerations": [{"key": "wasm", "operator": "Exists", "effect": "NoSchedule"}],
    });
    create_class(&cluster, "wasmtime", scheduling).await;
    create_class(&cluster, "qemu", Value::Null).await;
    create_class(&cluster, "spin", Value::Null).await;
    let archaware = Controller::start_with_webhook(&cluster, CLASSES, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    // The node that the class selects, whatever its architecture is.
    create_pod(&cluster, "module", "wasi", Some("wasmtime")).await;
    assert_eq!(cluster.wait_until_bound("module").await, "wasm-1");
    // No CPU runs it.
    create_pod(&cluster, "bare", "wasi", None).await;
    let told = cluster.wait_for_event("bare", "NoCommonArchitecture").await;
    assert!(told.contains("wasi/wasm"), "{told}");
    // Nothing is known of this class, so the pod is not kept from running.
    create_pod(&cluster, "other", "wasi", Some("spin")).await;
    cluster.wait_until_bound("other").await;
    // Native nodes first; by emulation where its author selects other ones.
    create_pod(&cluster, "native", "arm64", Some("qemu")).await;
    assert_eq!(cluster.wait_until_bound("native").await, "arm64-1");
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    spec["runtimeClassName"] = json!("qemu");
    spec["nodeSelector"] = json!({"kubernetes.io/arch": "amd64"});
    cluster
        .create::<Pod>(pod("emulated", spec, json!({})))
        .await;
    assert_eq!(cluster.wait_until_bound("emulated").await, "amd64-1");
    // The class does not emulate this architecture.
    create_pod(&cluster, "plain", "amd64", Some("qemu")).await;
    assert_eq!(cluster.wait_until_bound("plain").await, "amd64-1");
    assert_eq!(archaware.stop().await, 0);
}
