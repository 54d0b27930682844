//! Runtime classes and emulation (docs/runtime-classes.md), with the real admission plugin and the real scheduler.

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod, node::v1::RuntimeClass};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};
use testimg::{FakeRegistry, Script};

use super::*;

const CLASSES: &str =
    "runtimeClasses: {wasmtime: {platforms: [wasi/wasm]}, qemu: {platforms: [linux/arm64]}}\n";

/// Creates a `RuntimeClass` with these further fields.
async fn create_class(cluster: &TestCluster, name: &str, more: Value) {
    let classes: Api<RuntimeClass> = Api::all(cluster.client.clone());
    let mut class = json!({"metadata": {"name": name}, "handler": name});
    json_patch::merge(&mut class, &more);
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

/// The node `wasm-1` and the class that selects it.
async fn create_wasm(cluster: &TestCluster) {
    let labelled = |more: Value, taints: Value| {
        let mut labels = json!({"kubernetes.io/arch": "arm64"});
        json_patch::merge(&mut labels, &more);
        json!({"metadata": {"labels": labels}, "spec": {"taints": taints}})
    };
    let dedicated = json!([{"key": "wasm", "value": "only", "effect": "NoSchedule"}]);
    cluster
        .create_node_with(
            "wasm-1",
            "arm64",
            labelled(json!({"wasm": "yes"}), dedicated),
        )
        .await;
    let class = json!({
        "overhead": {"podFixed": {"cpu": "10m"}},
        "scheduling": {
            "nodeSelector": {"wasm": "yes"},
            "tolerations": [{"key": "wasm", "operator": "Exists", "effect": "NoSchedule"}],
        },
    });
    create_class(cluster, "wasmtime", class).await;
}

#[tokio::test]
async fn images_run_where_their_class_runs_them() {
    // Its classes would outlive the namespace of the test.
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    cluster.create_node("amd64-1", "amd64").await;
    cluster.create_node("arm64-1", "arm64").await;
    create_wasm(&cluster).await;
    create_class(&cluster, "qemu", json!({})).await;
    create_class(&cluster, "spin", json!({})).await;
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

/// The runtime class of a pod, after the real admission plugin has added its overhead, and whether archaware recorded it.
fn class_of(pod: &Pod) -> (Option<&str>, bool, bool) {
    let spec = pod.spec.as_ref().unwrap();
    let recorded = pod.annotations().get("archaware.dev/added");
    (
        spec.runtime_class_name.as_deref(),
        spec.overhead.is_some(),
        recorded.is_some_and(|text| text.contains("runtimeClass")),
    )
}

#[tokio::test]
async fn a_class_is_assigned_when_a_pod_is_created() {
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    cluster.create_node("amd64-1", "amd64").await;
    create_wasm(&cluster).await;
    create_class(&cluster, "sandbox", json!({})).await;
    let slow = FakeRegistry::start().await.unwrap();
    for tag in ["ruled", "late"] {
        slow.add_tag("app", tag, &testimg::find("wasi"));
    }
    slow.script("/", Script::Slow(std::time::Duration::from_millis(1500)));
    let config = format!(
        "{CLASSES}assignRuntimeClass: true\nrules: [{{name: sandboxed, pods: trust=none, runtimeClass: sandbox}}]\n"
    );
    let archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    // The API server runs its plugin again after the webhook: the class's overhead and nodes are merged.
    let module = create_pod(&cluster, "module", "wasi", None).await;
    assert_eq!(class_of(&module), (Some("wasmtime"), true, true));
    assert_eq!(cluster.wait_until_bound("module").await, "wasm-1");
    // A CPU runs it; its author chose a class.
    let plain = create_pod(&cluster, "plain", "amd64", None).await;
    assert_eq!(class_of(&plain), (None, false, false));
    let chosen = create_pod(&cluster, "chosen", "wasi", Some("sandbox")).await;
    assert_eq!(class_of(&chosen), (Some("sandbox"), false, false));
    // A copy keeps its class, which is its own now.
    let mut copy = json!(module);
    copy["metadata"] = json!({"name": "copy", "annotations": copy["metadata"]["annotations"]});
    copy["spec"].as_object_mut().unwrap().remove("nodeName");
    copy["status"] = Value::Null;
    let copy: Pod = cluster.create(copy).await;
    assert_eq!(class_of(&copy), (Some("wasmtime"), true, true));
    // A rule's class is set although the images are not known in time; one for the images cannot be set later.
    for (name, trust) in [("ruled", "none"), ("late", "full")] {
        let spec = pod_spec(&[format!("{}:{name}", slow.image("app"))]);
        let mut late = pod(name, spec, json!({}));
        late["metadata"]["labels"] = json!({"trust": trust});
        let created: Pod = cluster.create(late).await;
        let class = (trust == "none").then_some("sandbox");
        assert_eq!(
            class_of(&created),
            (class, false, class.is_some()),
            "{name}"
        );
    }
    let told = cluster.wait_for_event("late", "NoCommonArchitecture").await;
    assert!(
        told.contains("Runtime class wasmtime runs them") && told.contains("delete the pod"),
        "{told}"
    );
    cluster.wait_until_bound("ruled").await;
    // The template of a DaemonSet tolerates the nodes on which its pods run by their class.
    let labels = json!({"app": "modules"});
    let mut spec = pod_spec(&[cluster.image("wasi")]);
    spec["nodeSelector"] = json!({"wasm": "yes"});
    spec["tolerations"] = json!([{"key": "wasm", "operator": "Exists"}]);
    let set = json!({"metadata": {"name": "modules"}, "spec": {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": spec}}});
    cluster.create::<DaemonSet>(set).await;
    let selector = ListParams::default().labels("app=modules");
    let of_set = eventually("a pod of the DaemonSet that runs", DEADLINE, || async {
        let pods = cluster.pods().list(&selector).await.ok()?.items;
        let is_bound = |pod: &Pod| {
            pod.spec
                .as_ref()
                .is_some_and(|spec| spec.node_name.is_some())
        };
        pods.into_iter().find(is_bound)
    });
    assert_eq!(class_of(&of_set.await), (Some("wasmtime"), true, true));
    assert_eq!(archaware.stop().await, 0);
}

/// Nodes that emulate say so by a label. A pod is not decided anew when it exists.
#[tokio::test]
async fn nodes_that_emulate_come_after_native_ones() {
    let cluster = TestCluster::take().await;
    cluster.create_node("plain", "amd64").await;
    let qemu = json!({"metadata": {"labels": {"kubernetes.io/arch": "amd64", "qemu": "arm64"}}});
    cluster.create_node_with("qemu", "amd64", qemu).await;
    let config = "emulation: [{nodes: qemu=arm64, architecture: amd64, runs: [arm64]}]\n";
    let archaware = Controller::start_with_webhook(&cluster, config, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let decision = |pod: &Pod| pod.annotations().get("archaware.dev/decision").cloned();
    // There is no native node yet.
    let emulated = create_pod(&cluster, "emulated", "arm64", None).await;
    assert_eq!(decision(&emulated).as_deref(), Some("amd64,arm64"));
    assert_eq!(cluster.wait_until_bound("emulated").await, "qemu");
    cluster.create_node("native", "arm64").await;
    cluster.wait_until_tainted().await;
    // The scheduler knows the node when it has placed a pod there.
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    spec["nodeSelector"] = json!({"kubernetes.io/arch": "arm64"});
    cluster.create::<Pod>(pod("first", spec, json!({}))).await;
    assert_eq!(cluster.wait_until_bound("first").await, "native");
    create_pod(&cluster, "native", "arm64", None).await;
    assert_eq!(cluster.wait_until_bound("native").await, "native");
    // No node emulates it.
    let other = create_pod(&cluster, "other", "s390x", None).await;
    assert_eq!(decision(&other).as_deref(), Some("s390x"));
    // Its author selects nodes that do not emulate: the pod waits, and keeps waiting when the controller looks at it.
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": "plain"});
    let waiting: Pod = cluster.create(pod("waiting", spec, json!({}))).await;
    let metric = archaware.metric("archaware_pods_undecided").await;
    assert!(metric < 0.5, "{metric}");
    cluster.wait_for_event("waiting", "FailedScheduling").await;
    let file = cluster.dir().join("emulation.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&file, format!("{head}{config}")).unwrap();
    let manifest = cluster.dir().join("pod.json");
    let mut object = pod("new", pod_spec(&[cluster.image("arm64")]), json!({}));
    object["apiVersion"] = json!("v1");
    object["kind"] = json!("Pod");
    std::fs::write(&manifest, object.to_string()).unwrap();
    let files = [&file, &manifest].map(|path| path.to_str().unwrap());
    let (_, text, _) = cluster.archaware(&["explain", "--config", files[0], "-f", files[1]]);
    for said in [
        "its images run by emulation on amd64 nodes with qemu=arm64, after nodes that need none",
        "these nodes do not emulate its images",
    ] {
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words(&text).contains(said), "{text}");
    }
    let now = cluster.pods().get("waiting").await.unwrap();
    assert_eq!(now.annotations(), waiting.annotations());
    // Without the webhook nothing keeps a pod from other nodes, so that it is not emulated.
    assert_eq!(archaware.stop().await, 0);
    let controller = Controller::start(&cluster, config);
    create_pod(&cluster, "late", "arm64", None).await;
    assert_eq!(cluster.wait_until_bound("late").await, "native");
    let late = cluster.pods().get("late").await.unwrap();
    assert_eq!(decision(&late).as_deref(), Some("arm64"));
    assert_eq!(controller.stop().await, 0);
}
