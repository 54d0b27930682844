//! Documents of Node Feature Discovery (NFD), on nodes that differ by what it found on them.

use super::*;

pub(crate) const NFD_ARTIFACT: &str = "application/vnd.nfd.image-compatibility.v1alpha1";
pub(crate) const NFD_LAYER: &str = "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml";

/// The API of Node Feature Discovery, as far as archaware reads it.
pub(crate) fn serve_node_features(cluster: &TestCluster) {
    let definition = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "nodefeatures.nfd.k8s-sigs.io"},
        "spec": {
            "group": "nfd.k8s-sigs.io", "scope": "Namespaced",
            "names": {"kind": "NodeFeature", "plural": "nodefeatures", "singular": "nodefeature"},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true}}}],
        },
    });
    apply(cluster, &definition);
    cluster.kubectl(&[
        "wait",
        "--for=condition=established",
        "crd/nodefeatures.nfd.k8s-sigs.io",
        "--timeout=60s",
    ]);
}

pub(crate) fn apply(cluster: &TestCluster, object: &Value) {
    let file = cluster.dir().join("object.json");
    std::fs::write(&file, object.to_string()).unwrap();
    cluster.kubectl(&[
        "apply",
        "-n",
        &cluster.namespace,
        "-f",
        file.to_str().unwrap(),
    ]);
}

/// What NFD found on a node.
pub(crate) fn node_feature(node: &str, flags: &[&str], modules: &[&str]) -> Value {
    let elements = |all: &[&str]| {
        let all = all.iter().map(|one| ((*one).to_owned(), json!({})));
        json!({ "elements": all.collect::<serde_json::Map<_, _>>() })
    };
    json!({
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1", "kind": "NodeFeature",
        "metadata": {"name": node, "labels": {"nfd.node.kubernetes.io/node-name": node}},
        "spec": {"features": {
            "flags": {"cpu.cpuid": elements(flags), "kernel.loadedmodule": elements(modules)},
        }},
    })
}

/// Creates three pods that ask for the same, each for a node of its own. Returns the nodes of the
/// first two.
async fn places_of_two(cluster: &TestCluster, own: &Value) -> [String; 2] {
    let one_each = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "solver"}}}]}}});
    for name in ["first", "second", "third"] {
        let mut pod = app(name, "placeholder:latest", own.clone(), &one_each);
        pod["metadata"]["labels"] = json!({"app": "solver"});
        cluster.create::<Pod>(pod).await;
        if name != "third" {
            cluster.wait_until_bound(name).await;
        }
    }
    eventually("the third cannot be scheduled", DEADLINE, || async {
        let pod = cluster.pods().get("third").await.ok()?;
        is_unschedulable(&pod).then_some(())
    })
    .await;
    [
        cluster.wait_until_bound("first").await,
        cluster.wait_until_bound("second").await,
    ]
}

/// A document of NFD that is attached to an image, and what `NodeFeature` objects say, of which
/// there is no label.
#[tokio::test]
async fn what_nfd_found_on_nodes_counts() {
    let cluster = TestCluster::take().await;
    let registry = FakeRegistry::start().await.unwrap();
    nodes(&cluster).await;
    serve_node_features(&cluster);
    apply(&cluster, &node_feature("fast", &["AVX2"], &["other"]));
    apply(&cluster, &node_feature("slow", &["AVX2"], &["vfio-pci"]));
    apply(&cluster, &node_feature("arm", &["SVE"], &["vfio-pci"]));
    let image = testimg::find("multi");
    registry.add("app", &image);
    let attach = |document: &str| {
        let artifact = Image::artifact(NFD_ARTIFACT, NFD_LAYER, document);
        let artifact = artifact.attached_to(&image.root, "2026-01-01T00:00:00Z");
        registry.add_tag("app", "attached", &artifact);
        registry.set_referrers("app", &image.root.digest, Some(&[&artifact]));
    };
    attach(
        r"
compatibilities:
- weight: 10
  rules:
  - matchFeatures:
    - feature: kernel.loadedmodule
      matchName: {op: InRegexp, value: [^vfio]}
- weight: 90
  rules:
  - matchFeatures:
    - feature: kernel.loadedmodule
      matchExpressions: {vfio-pci: {op: Exists}}
    - feature: cpu.cpuid
      matchExpressions: {SVE: {op: Exists}}
",
    );
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let own = json!({OWN: registry.image("app")});
    // `fast` lacks the module; `arm` is preferred, and `slow` is possible. No third node fits.
    assert_eq!(places_of_two(&cluster, &own).await, ["arm", "slow"]);
    let pod = cluster.pods().get("first").await.unwrap();
    assert_eq!(image_of(&pod), registry.image("app"));
    assert_eq!(archaware.stop().await, 0);
    cluster.kubectl(&["delete", "crd", "nodefeatures.nfd.k8s-sigs.io"]);
}

/// A document that is attached to the image of one platform limits the nodes of this platform only.
#[tokio::test]
async fn a_document_of_one_platform_limits_its_nodes() {
    let cluster = TestCluster::take().await;
    let registry = FakeRegistry::start().await.unwrap();
    nodes(&cluster).await;
    let avx2 = "feature.node.kubernetes.io/cpu-cpuid.AVX2=true";
    cluster.kubectl(&["label", "node", "fast", avx2]);
    let image = testimg::find("multi");
    registry.add("app", &image);
    let index: Value = serde_json::from_slice(&image.root.bytes).unwrap();
    let mut entries = index["manifests"].as_array().unwrap().iter();
    let amd64 = entries.position(|entry| entry["platform"]["architecture"] == "amd64");
    let amd64 = &image.manifests[amd64.unwrap()];
    let document = "compatibilities:\n- weight: 90\n  rules:\n  - matchFeatures:\n    - feature: cpu.cpuid\n      matchExpressions: {AVX2: {op: Exists}}\n";
    let artifact = Image::artifact(NFD_ARTIFACT, NFD_LAYER, document).attached_to(amd64, "2026");
    registry.add_tag("app", "attached", &artifact);
    registry.set_referrers("app", &amd64.digest, Some(&[&artifact]));
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    // `fast` has the higher weight, `slow` lacks the feature, and nothing is said of arm64.
    let own = json!({OWN: registry.image("app")});
    assert_eq!(places_of_two(&cluster, &own).await, ["fast", "arm"]);
    assert_eq!(archaware.stop().await, 0);
}

/// The weights of the nodes that a pod prefers.
fn weights_of(pod: &Pod) -> Vec<i32> {
    let affinity = pod.spec.as_ref().unwrap().affinity.as_ref().unwrap();
    let node = affinity.node_affinity.as_ref().unwrap();
    let terms = &node.preferred_during_scheduling_ignored_during_execution;
    let terms = terms.iter().flatten();
    terms.map(|term| term.weight).collect()
}

/// What `archaware explain` says of a pod with a configuration.
fn explained(cluster: &TestCluster, pod: &str, config: &str) -> String {
    let file = cluster.dir().join("explained.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&file, format!("{head}{config}")).unwrap();
    let namespace = &cluster.namespace;
    let file = file.to_str().unwrap();
    let arguments = ["explain", pod, "-n", namespace, "--config", file];
    let (status, text, error) = cluster.archaware(&arguments);
    assert_eq!(status, 0, "{error}");
    text
}

/// Pods that ask for nothing, where it is configured: the weights of what is attached to their
/// images are preferences, and nothing is required. A registry that cannot say what is attached
/// keeps no pod from its decision.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn weights_of_what_is_attached_are_preferences() {
    let cluster = TestCluster::take().await;
    let registry = FakeRegistry::start().await.unwrap();
    nodes(&cluster).await;
    for (node, flag) in [("arm", "SVE"), ("fast", "AVX2")] {
        let label = format!("feature.node.kubernetes.io/cpu-cpuid.{flag}=true");
        cluster.kubectl(&["label", "node", node, &label]);
    }
    let image = testimg::find("multi");
    for name in ["app", "broken"] {
        registry.add(name, &image);
    }
    let document = r"
compatibilities:
- tag: slowest
  weight: 10
  rules: [{matchFeatures: [{feature: cpu.cpuid, matchExpressions: {AVX2: {op: Exists}}}]}]
- tag: fastest
  weight: 90
  rules: [{matchFeatures: [{feature: cpu.cpuid, matchExpressions: {SVE: {op: Exists}}}]}]
- tag: others
  rules: [{matchFeatures: [{feature: cpu.cpuid, matchExpressions: {SVE: {op: DoesNotExist}}}]}]
- tag: nowhere
  weight: 100
  rules: [{name: large, matchFeatures: [{feature: cpu.cpuid, matchExpressions: {AMX: {op: Exists}}}]}]
";
    let artifact = Image::artifact(NFD_ARTIFACT, NFD_LAYER, document);
    let artifact = artifact.attached_to(&image.root, "2026");
    registry.add_tag("app", "attached", &artifact);
    registry.set_referrers("app", &image.root.digest, Some(&[&artifact]));
    registry.script("/v2/broken/referrers/", Script::Hang);
    // More than half of the budget is used before that.
    let slow = Script::Slow(std::time::Duration::from_millis(1300));
    registry.script("/v2/broken/manifests/", slow);
    let config = "selection: {attached: prefer}\n";
    // A part of it is enough for what is attached, also on a busy machine.
    let webhook = "onMiss: gate, budget: 2400ms";
    let archaware = Controller::start_with_webhook(&cluster, config, webhook).await;
    cluster.wait_until_tainted().await;
    let one_each = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "solver"}}}]}}});
    let mut places = Vec::new();
    for name in ["first", "second", "third"] {
        let mut pod = app(name, &registry.image("app"), json!({}), &one_each);
        pod["metadata"]["labels"] = json!({"app": "solver"});
        let created: Pod = cluster.create(pod).await;
        assert_eq!(image_of(&created), registry.image("app"));
        places.push(cluster.wait_until_bound(name).await);
    }
    assert_eq!(places, ["arm", "fast", "slow"]);
    let pod = cluster.pods().get("third").await.unwrap();
    assert_eq!(weights_of(&pod), [90, 10]);
    let broken = app("broken", &registry.image("broken"), json!({}), &json!({}));
    let broken: Pod = cluster.create(broken).await;
    assert_eq!(weights_of(&broken), [0; 0]);
    assert_eq!(
        broken.spec.unwrap().scheduling_gates.unwrap_or_default(),
        []
    );
    // The controller adds them to a pod that waits behind the gate.
    registry.add("late", &image);
    registry.add_tag("late", "attached", &artifact);
    registry.set_referrers("late", &image.root.digest, Some(&[&artifact]));
    let slow = Script::Slow(std::time::Duration::from_millis(2600));
    registry.script("/v2/late/manifests/", slow);
    let late = app("late", &registry.image("late"), json!({}), &json!({}));
    let late: Pod = cluster.create(late).await;
    assert_eq!(late.spec.unwrap().scheduling_gates.unwrap().len(), 1);
    cluster.wait_until_bound("late").await;
    assert_eq!(
        weights_of(&cluster.pods().get("late").await.unwrap()),
        [90, 10]
    );
    // `explain` shows it of pods that exist.
    let text = explained(&cluster, "first", config);
    for (tag, outcome) in [
        ("slowest", "its nodes are preferred by its weight"),
        ("fastest", "its nodes are preferred by its weight"),
        ("others", "without a weight nothing is preferred"),
        ("nowhere", "large fails on 3 nodes"),
    ] {
        let mut lines = text.lines();
        assert!(
            lines.any(|line| line.contains(tag) && line.contains(outcome)),
            "{text}"
        );
    }
    let preferred = text.lines().filter(|line| line.starts_with("yes "));
    let preferred = preferred.filter(|line| line.contains("its nodes are preferred"));
    assert_eq!(preferred.count(), 2, "{text}");
    assert_eq!(archaware.stop().await, 0);
}

/// Only one alternative can be added to the terms of a gated pod. It is one that some nodes
/// satisfy.
#[tokio::test]
async fn a_gated_pod_gets_an_alternative_that_nodes_satisfy() {
    let cluster = TestCluster::take().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add_tag("app", "any", &testimg::find("multi"));
    nodes(&cluster).await;
    cluster.kubectl(&[
        "label",
        "node",
        "slow",
        "feature.node.kubernetes.io/cpu-cpuid.SVE=true",
    ]);
    let document = r"
compatibilities:
- rules:
  - matchAny:
    - matchFeatures: [{feature: cpu.cpuid, matchExpressions: {AVX2: {op: Exists}}}]
    - matchFeatures: [{feature: cpu.cpuid, matchExpressions: {SVE: {op: Exists}}}]
";
    let artifact = Image::artifact("application/vnd.test", NFD_LAYER, document);
    let artifact = artifact.attached_to(&testimg::find("multi").root, "2026");
    registry.add_tag("app", "compatibility", &artifact);
    let archaware =
        Controller::start_with_webhook(&cluster, "", "onMiss: gate, budget: 100ms").await;
    cluster.wait_until_tainted().await;
    registry.script("/", Script::Slow(std::time::Duration::from_millis(800)));
    let terms =
        json!([{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["x"]}]}]);
    let more = json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
    let own = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let pod: Pod = cluster
        .create(app("sve", "placeholder:latest", own, &more))
        .await;
    assert_eq!(
        pod.spec.unwrap().scheduling_gates.unwrap_or_default().len(),
        1
    );
    assert_eq!(cluster.wait_until_bound("sve").await, "slow");
    assert_eq!(archaware.stop().await, 0);
}
