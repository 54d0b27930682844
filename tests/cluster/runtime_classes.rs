//! Runtime classes and emulation (docs/runtime-classes.md), with the real admission plugin and the
//! real scheduler.

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod, node::v1::RuntimeClass};
use kube::{Api, ResourceExt, api::DeleteParams};
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

/// The runtime class of a pod, after the real admission plugin has added its overhead, and whether
/// archaware recorded it.
fn class_of(pod: &Pod) -> (Option<&str>, bool, bool) {
    let spec = pod.spec.as_ref().unwrap();
    let recorded = pod.annotations().get("archaware.dev/added");
    (
        spec.runtime_class_name.as_deref(),
        spec.overhead.is_some(),
        recorded.is_some_and(|text| text.contains("runtimeClass")),
    )
}

/// A webhook that is called after archaware's (in the alphabetical order of names), and adds a
/// container to pods with the label `inject`.
async fn inject_sidecars(cluster: &TestCluster, image: String) -> RecordingWebhook {
    let created = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"], "scope": "Namespaced"});
    let sidecar = json!({"name": "sidecar", "image": image});
    RecordingWebhook::start(cluster, "sidecars", created, move |pod| {
        let containers = pod["spec"]["containers"].as_array().map_or(0, Vec::len);
        if containers != 1 || !pod["metadata"]["labels"]["inject"].is_string() {
            return json!([]);
        }
        json!([{"op": "add", "path": "/spec/containers/-", "value": sidecar}])
    })
    .await
}

/// What `archaware explain -f` says of a pod that does not exist.
fn explain_new(cluster: &TestCluster, config: &str, image: &str, class: Option<&str>) -> Value {
    let file = cluster.dir().join("config.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&file, format!("{head}{config}")).unwrap();
    let manifest = cluster.dir().join("pod.json");
    let mut object = pod("new", pod_spec(&[cluster.image(image)]), json!({}));
    object["apiVersion"] = json!("v1");
    object["kind"] = json!("Pod");
    object["spec"]["runtimeClassName"] = json!(class);
    std::fs::write(&manifest, object.to_string()).unwrap();
    let files = [&file, &manifest].map(|path| path.to_str().unwrap());
    let arguments = [
        "explain", "-o", "json", "--config", files[0], "-f", files[1],
    ];
    let (_, out, error) = cluster.archaware(&arguments);
    let all: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
    all[0].clone()
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
    let injector = inject_sidecars(&cluster, cluster.image("arm64")).await;
    cluster.wait_until_tainted().await;
    // The API server runs its plugin again after the webhook: the class's overhead and nodes are
    // merged.
    let module = create_pod(&cluster, "module", "wasi", None).await;
    assert_eq!(class_of(&module), (Some("wasmtime"), true, true));
    assert_eq!(cluster.wait_until_bound("module").await, "wasm-1");
    // Before a pod is created, `explain` says the same, with the nodes that the class selects.
    let admission = "admission: {enabled: true}\n";
    for class in [None, Some("wasmtime")] {
        let explained = explain_new(&cluster, &format!("{admission}{config}"), "wasi", class);
        let assigned = class.is_none().then_some("wasmtime");
        assert_eq!(
            explained["pending"]["runtimeClass"],
            json!(assigned),
            "{explained}"
        );
        let groups = explained["nodes"].as_array().unwrap();
        let of = |fits: &str| groups.iter().find(|one| one["fits"] == fits).unwrap();
        assert_eq!(of("yes")["examples"], json!(["wasm-1"]), "{explained}");
        assert_eq!(of("no")["reason"], "node selector wasm=yes", "{explained}");
    }
    let unknown = explain_new(&cluster, "", "wasi", Some("nowhere")).to_string();
    assert!(
        unknown.contains("there is no RuntimeClass nowhere"),
        "{unknown}"
    );
    // A CPU runs it; its author chose a class.
    let plain = create_pod(&cluster, "plain", "amd64", None).await;
    assert_eq!(class_of(&plain), (None, false, false));
    let chosen = create_pod(&cluster, "chosen", "wasi", Some("sandbox")).await;
    assert_eq!(class_of(&chosen), (Some("sandbox"), false, false));
    // Another webhook adds a sidecar, so that archaware is asked again: the class stays, and the
    // sidecar limits the pod.
    let mut meshed = pod("meshed", pod_spec(&[cluster.image("wasi")]), json!({}));
    meshed["metadata"]["labels"] = json!({"inject": "yes"});
    let meshed: Pod = cluster.create(meshed).await;
    assert_eq!(class_of(&meshed), (Some("wasmtime"), true, true));
    assert_eq!(meshed.annotations()["archaware.dev/decision"], "arm64");
    assert!(injector.seen().len() >= 2, "once for the probe");
    // A copy keeps its class, which is its own now.
    let mut copy = json!(module);
    copy["metadata"] = json!({"name": "copy", "annotations": copy["metadata"]["annotations"]});
    copy["spec"].as_object_mut().unwrap().remove("nodeName");
    copy["status"] = Value::Null;
    let copy: Pod = cluster.create(copy).await;
    assert_eq!(class_of(&copy), (Some("wasmtime"), true, true));
    // A rule's class is set although the images are not known in time; one for the images cannot be
    // set later.
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
        told.contains("RuntimeClass wasmtime runs all of these images")
            && told.contains("delete the pod"),
        "{told}"
    );
    cluster.wait_until_bound("ruled").await;
    // A template is not changed, and its pods are not gated.
    let labels = json!({"app": "modules"});
    let set = json!({"metadata": {"name": "modules"}, "spec": {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod_spec(&[cluster.image("wasi")])}}});
    cluster.create::<DaemonSet>(set).await;
    let told = cluster
        .wait_for_event("modules", "NoCommonArchitecture")
        .await;
    assert!(
        told.contains("set runtimeClassName in the template"),
        "{told}"
    );
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
    // Its author selects nodes that do not emulate: the pod waits, and keeps waiting when the
    // controller looks at it.
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": "plain"});
    let waiting: Pod = cluster.create(pod("waiting", spec, json!({}))).await;
    let metric = archaware.metric("archaware_pods_undecided").await;
    assert!(metric < 0.5, "{metric}");
    cluster.wait_for_event("waiting", "FailedScheduling").await;
    let explained = explain_new(&cluster, config, "arm64", None).to_string();
    for said in [
        "its images run by emulation on amd64 nodes with qemu=arm64; nodes that need no emulation are preferred",
        "these nodes do not emulate its images",
    ] {
        assert!(explained.contains(said), "{explained}");
    }
    let now = cluster.pods().get("waiting").await.unwrap();
    assert_eq!(now.annotations(), waiting.annotations());
    // Behind a gate, an affinity with terms can only be narrowed to one alternative: the native
    // nodes.
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    let os = json!({"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]});
    let terms = json!({"nodeSelectorTerms": [{"matchExpressions": [os]}]});
    spec["affinity"] =
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}});
    spec["schedulingGates"] = json!([{"name": "test/wait"}]);
    // Created where the webhook does not see it.
    let excluded = json!({"metadata": {"labels": {"archaware.dev/admission": "disabled"}}});
    let excluded = excluded.to_string();
    cluster.kubectl(&["patch", "namespace", &cluster.namespace, "-p", &excluded]);
    let gated = pod("gated", spec, json!({}));
    eventually("a pod that the webhook does not see", DEADLINE, || async {
        let made: Pod = cluster.create(gated.clone()).await;
        let seen = decision(&made).is_some();
        if seen {
            let now = DeleteParams::default().grace_period(0);
            let _ = cluster.pods().delete("gated", &now).await;
        }
        (!seen).then_some(())
    })
    .await;
    let decided = eventually("a decision", DEADLINE, || async {
        decision(&cluster.pods().get("gated").await.ok()?)
    });
    assert_eq!(decided.await, "arm64");
    // Without the webhook nothing keeps a pod from other nodes, so that it is not emulated.
    assert_eq!(archaware.stop().await, 0);
    let controller = Controller::start(&cluster, config);
    create_pod(&cluster, "late", "arm64", None).await;
    assert_eq!(cluster.wait_until_bound("late").await, "native");
    let late = cluster.pods().get("late").await.unwrap();
    assert_eq!(decision(&late).as_deref(), Some("arm64"));
    // What was added to this one is no reason for another decision.
    let gated = cluster.pods().get("gated").await.unwrap();
    assert_eq!(decision(&gated).as_deref(), Some("arm64"));
    assert_eq!(controller.stop().await, 0);
}
