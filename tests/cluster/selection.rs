//! Images that are selected by compatibility documents, on nodes that differ by their labels.

use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::Pod,
};
use serde_json::{Value, json};
use testimg::{FakeRegistry, Image, Script};

use super::*;

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

/// The nodes: `fast` and `slow` for amd64, `arm` that says it is fast, and `gpu` for pods that tolerate its taint.
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

/// Nodes that a rule excludes do not count. Nodes whose taint a rule tolerates do.
#[tokio::test]
async fn rules_say_which_nodes_count() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let rules = "rules:\n- {name: slow, pods: speed=low, nodes: ['!example.com/cpu']}\n\
                 - {name: gpu, pods: speed=high, tolerations: [{key: example.com/gpu, operator: Exists}]}\n";
    let _archaware = Controller::start_with_webhook(&cluster, rules, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let own = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    for (speed, tag, node) in [("low", "any", "slow"), ("high", "gpu", "gpu")] {
        let mut pod = app(speed, "placeholder:latest", own.clone(), &json!({}));
        pod["metadata"]["labels"] = json!({"speed": speed});
        cluster.create::<Pod>(pod).await;
        assert_eq!(landed(&cluster, speed).await, is(tag, node));
    }
}

#[tokio::test]
async fn the_best_image_is_selected_and_its_pod_lands_where_it_fits() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let document = format!("{}:compatibility", registry.image("app"));
    let own = json!({OWN: document});
    let on = |node: &str| json!({"nodeSelector": {"kubernetes.io/hostname": node}});
    let tolerates = json!({"tolerations": [{"key": "example.com/gpu", "operator": "Exists"}]});
    // `arm` says that it is fast, but the fast image is for amd64; `gpu` is not tolerated.
    for (name, image, annotations, more, tag, node) in [
        (
            "best",
            "nowhere.invalid/app:1",
            &own,
            json!({}),
            "fast",
            "fast",
        ),
        (
            "again",
            "placeholder:latest",
            &own,
            json!({}),
            "fast",
            "fast",
        ),
        (
            "here",
            "placeholder:latest",
            &own,
            on("slow"),
            "any",
            "slow",
        ),
        ("there", "placeholder:latest", &own, on("arm"), "any", "arm"),
        (
            "gpu",
            "placeholder:latest",
            &own,
            tolerates.clone(),
            "gpu",
            "gpu",
        ),
    ] {
        let pod: Pod = cluster
            .create(app(name, image, annotations.clone(), &more))
            .await;
        assert_eq!(landed(&cluster, name).await, is(tag, node), "{pod:?}");
    }
    // Whatever the pod tolerates, the image has to run on its node: `arm` has the label, too.
    for (name, annotation, value) in [
        ("anywhere", "archaware.dev/mode", "any"),
        ("stated", "archaware.dev/architectures", "amd64,arm64"),
    ] {
        let mut annotations = own.clone();
        annotations[annotation] = json!(value);
        cluster
            .create::<Pod>(app(name, "placeholder:latest", annotations, &json!({})))
            .await;
        let pod = cluster.pods().get(name).await.unwrap();
        let affinity = json!(pod.spec.unwrap().affinity).to_string();
        assert!(affinity.contains(r#""values":["amd64"]"#), "{affinity}");
        assert_eq!(landed(&cluster, name).await, is("fast", "fast"));
    }
    // As users of ocifit-k8s write it.
    let mut pod = app(
        "ocifit",
        "placeholder:latest",
        json!({
            "oci.image.compatibilities.selection/image-ref": document,
        }),
        &json!({}),
    );
    pod["metadata"]["labels"] = json!({"oci.image.compatibilities.selection/enabled": "true"});
    cluster.create::<Pod>(pod).await;
    assert_eq!(landed(&cluster, "ocifit").await, is("fast", "fast"));
    // No selection is missed later.
    let selector = kube::api::ListParams::default().fields("reason=ImageNotSelected");
    let events = cluster.api::<k8s_openapi::api::core::v1::Event>();
    assert!(events.list(&selector).await.unwrap().items.is_empty());
    assert_eq!(archaware.stop().await, 0);
}

/// Each image of a document, and why it is passed over: before the pod is created, and as if it were created anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn explain_shows_the_candidates() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let document = format!("{}:compatibility", registry.image("app"));
    let mut pod = app(
        "p",
        "placeholder:latest",
        json!({OWN: document}),
        &json!({}),
    );
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pod.json");
    std::fs::write(&file, pod.to_string()).unwrap();
    let file = file.to_str().unwrap();
    let (status, output, error) = cluster.archaware(&["explain", "-f", file, "-o", "json"]);
    assert_eq!(status, 0, "{error}");
    let explained: Value = serde_json::from_str(&output).unwrap();
    let selection = &explained[0]["selections"][0];
    assert_eq!(selection["container"], "app");
    assert_eq!(
        selection["nodes"], 3,
        "the pod does not tolerate the taint of the fourth"
    );
    let found = |selection: &Value| -> Vec<_> {
        let candidates = selection["candidates"].as_array().unwrap().iter();
        let found = candidates.map(|one| {
            let tag = one["tag"].as_str().unwrap().rsplit(':').next().unwrap();
            let outcome = one["outcome"].as_str().unwrap();
            (tag.to_owned(), one["chosen"] == true, outcome.to_owned())
        });
        found.collect()
    };
    let candidates = [
        (
            "any",
            false,
            "fits, but an entry of a higher weight or before it does, too",
        ),
        ("gpu", false, "rule 1 fails on 3 nodes"),
        ("fast", true, "selected"),
    ];
    let candidates =
        candidates.map(|(tag, chosen, outcome)| (tag.to_owned(), chosen, outcome.to_owned()));
    assert_eq!(found(selection), candidates);
    assert_eq!(
        explained[0]["images"][0]["image"],
        format!("{}:fast", registry.image("app"))
    );
    let (_, text, _) = cluster.archaware(&["explain", "-f", file]);
    assert!(text.contains("rule 1 fails on 3 nodes"), "{text}");
    // Only the node that the image fits.
    let groups = explained[0]["nodes"].as_array().unwrap().iter();
    let fitting: Vec<_> = groups.filter(|group| group["fits"] == "yes").collect();
    assert_eq!(fitting.len(), 1, "{output}");
    assert_eq!(fitting[0]["examples"], json!(["fast"]));
    // The same for existing pods: one without a selected image, and one with it.
    let explained = |name: &str| {
        let (status, output, error) =
            cluster.archaware(&["explain", name, "-n", &cluster.namespace, "-o", "json"]);
        assert_eq!(status, 0, "{error}");
        let explained: Value = serde_json::from_str(&output).unwrap();
        found(&explained[0]["selections"][0])
    };
    let image = "placeholder:latest";
    let unselected = app("unselected", image, json!({OWN: document}), &json!({}));
    cluster.create::<Pod>(unselected).await;
    assert_eq!(explained("unselected"), candidates);
    let _archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    cluster.create::<Pod>(pod).await;
    assert_eq!(landed(&cluster, "p").await, is("fast", "fast"));
    assert_eq!(explained("p"), candidates);
}

#[tokio::test]
async fn a_replica_that_is_created_anew_may_get_another_image() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let own = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let mut template = app("x", "placeholder:latest", own.clone(), &json!({}));
    template["metadata"]["labels"] = json!({"app": "web"});
    let deployment = json!({"metadata": {"name": "web"}, "spec": {"replicas": 1,
        "selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {
            "labels": {"app": "web"}, "annotations": own}, "spec": template["spec"]}}});
    cluster.create::<Deployment>(deployment).await;
    let replica = |gone: Option<String>| {
        let cluster = &cluster;
        async move {
            let gone = &gone;
            eventually("a replica", DEADLINE, || async move {
                let selector = kube::api::ListParams::default().labels("app=web");
                let pods = cluster.pods().list(&selector).await.ok()?;
                let names = pods.items.into_iter().filter_map(|pod| pod.metadata.name);
                names.into_iter().find(|name| Some(name) != gone.as_ref())
            })
            .await
        }
    };
    let first = replica(None).await;
    assert_eq!(landed(&cluster, &first).await, is("fast", "fast"));
    let mut copy = json!(cluster.pods().get(&first).await.unwrap());
    cluster.kubectl(&["label", "node", "fast", &format!("{KEY}-")]);
    // Groups of nodes are as old as a second.
    let second = eventually("another image", DEADLINE, || async {
        let name = replica(None).await;
        cluster.kubectl(&[
            "delete",
            "pod",
            &name,
            "-n",
            &cluster.namespace,
            "--grace-period=0",
            "--force",
            "--ignore-not-found",
        ]);
        let next = replica(Some(name)).await;
        let image = image_of(&cluster.pods().get(&next).await.ok()?);
        image.ends_with(":any").then_some(next)
    })
    .await;
    assert_eq!(landed(&cluster, &second).await.0, "any");
    // So does a pod that is created from the YAML of the first one: what archaware changed comes off.
    let metadata = &mut copy["metadata"];
    *metadata = json!({"name": "copy", "annotations": metadata["annotations"]});
    copy["spec"]["nodeName"].take();
    copy["status"].take();
    let copy: Pod = cluster.create(copy).await;
    assert_eq!(landed(&cluster, "copy").await.0, "any", "{copy:?}");
    assert!(!json!(copy).to_string().contains(":fast"), "{copy:?}");
    assert_eq!(archaware.stop().await, 0);
}

// The registry answers while kubectl waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn where_nothing_fits_it_is_told_or_refused() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    for node in ["fast", "slow", "arm"] {
        cluster.kubectl(&[
            "label",
            "node",
            node,
            "example.com/old=yes",
            &format!("{KEY}-"),
        ]);
    }
    let annotations = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let own = format!("{}:any", registry.image("app"));
    let keep = Controller::start_with_webhook(&cluster, "", "budget: 2s").await;
    cluster.wait_until_tainted().await;
    let file = cluster.dir().join("pod.json");
    let apply = |name: &str, image: &str, annotations: &Value| {
        let mut manifest = app(name, image, annotations.clone(), &json!({}));
        manifest["apiVersion"] = json!("v1");
        manifest["kind"] = json!("Pod");
        std::fs::write(&file, manifest.to_string()).unwrap();
        cluster.try_kubectl(&[
            "create",
            "-n",
            &cluster.namespace,
            "-f",
            file.to_str().unwrap(),
        ])
    };
    let (created, _, said) = apply("kept", &own, &annotations);
    assert!(created, "{said}");
    let expected = "fits the 3 nodes on which the pod can land";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("rule 1 fails on 3"), "{said}");
    cluster.wait_until_bound("kept").await;
    assert_eq!(image_of(&cluster.pods().get("kept").await.unwrap()), own);
    // A request that cannot be carried out is told, too.
    let wrong = json!({"archaware.dev/select-image.other": "x"});
    let (created, _, said) = apply("wrong", &own, &wrong);
    assert!(
        created && said.contains("the pod has no container \"other\""),
        "{said}"
    );
    assert_eq!(keep.stop().await, 0);
    let deny =
        Controller::start_with_webhook(&cluster, "selection: {onNoMatch: deny}\n", "budget: 2s")
            .await;
    let (created, _, said) = apply("denied", &own, &annotations);
    assert!(!created && said.contains(expected), "{said}");
    assert!(said.contains(":gpu: rule 1 fails on 3"), "{said}");
    assert_eq!(deny.stop().await, 0);
}

/// The document is read while the pod waits behind its gate, and a pod without gate is left as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gated_pod_gets_its_image_later() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let annotations = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let archaware =
        Controller::start_with_webhook(&cluster, "", "onMiss: gate, budget: 100ms").await;
    cluster.wait_until_tainted().await;
    registry.script("/", Script::Slow(std::time::Duration::from_millis(800)));
    let terms = json!([
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["fast", "arm"]}]},
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["slow"]}]},
    ]);
    let affinity = json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
    let pod: Pod = cluster
        .create(app(
            "late",
            "placeholder:latest",
            annotations.clone(),
            &affinity,
        ))
        .await;
    assert_eq!(
        pod.spec.unwrap().scheduling_gates.unwrap_or_default().len(),
        1
    );
    assert_eq!(landed(&cluster, "late").await, is("fast", "fast"));
    assert_eq!(archaware.stop().await, 0);
    // What would be done is shown.
    registry.unscript();
    let mut gated = app(
        "gated",
        "placeholder:latest",
        annotations.clone(),
        &json!({}),
    );
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/quota"}]);
    cluster.kubectl(&[
        "label",
        "namespace",
        &cluster.namespace,
        "archaware.dev/admission=disabled",
        "--overwrite",
    ]);
    cluster.create::<Pod>(gated).await;
    let planned = tokio::task::block_in_place(|| cluster.archaware(&["plan", "-o", "json"]).1);
    let image = format!(
        "tolerates amd64; container app gets {}:fast",
        registry.image("app")
    );
    assert!(planned.contains(&image), "{planned}");
    cluster.kubectl(&["delete", "pod", "gated", "-n", &cluster.namespace]);
    cluster.kubectl(&[
        "label",
        "namespace",
        &cluster.namespace,
        "archaware.dev/admission-",
    ]);
    // Without the webhook its image is not changed, and it is said why.
    let without = Controller::start(&cluster, "");
    let own = format!("{}:any", registry.image("app"));
    cluster
        .create::<Pod>(app(
            "without",
            &own,
            annotations,
            &json!({"nodeSelector": {"nowhere": "yes"}}),
        ))
        .await;
    let note = cluster.wait_for_event("without", "ImageNotSelected").await;
    assert!(
        note.contains("no image was selected when the pod was created"),
        "{note}"
    );
    assert_eq!(image_of(&cluster.pods().get("without").await.unwrap()), own);
    assert_eq!(without.stop().await, 0);
}

/// Each pod of a `DaemonSet` gets the image that fits its node.
#[tokio::test]
async fn each_daemon_gets_the_image_for_its_node() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let annotations = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let template = app("x", "placeholder:latest", json!({}), &json!({}));
    let set = json!({"metadata": {"name": "agent"}, "spec": {"selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}, "annotations": annotations}, "spec": template["spec"]}}});
    cluster.create::<DaemonSet>(set).await;
    let found = eventually("three daemons", DEADLINE, || async {
        let pods = cluster.pods().list(&Default::default()).await.ok()?;
        let mut all = Vec::new();
        for pod in pods {
            let node = pod.spec.as_ref()?.node_name.clone()?;
            all.push((node, image_of(&pod).rsplit(':').next()?.to_owned()));
        }
        all.sort();
        (all.len() == 3).then_some(all)
    })
    .await;
    let expected = [("arm", "any"), ("fast", "fast"), ("slow", "any")];
    let expected = expected.map(|(node, tag)| (node.to_owned(), tag.to_owned()));
    assert_eq!(found, expected);
    assert_eq!(archaware.stop().await, 0);
}

/// The API of Node Feature Discovery, as far as archaware reads it.
fn serve_node_features(cluster: &TestCluster) {
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

fn apply(cluster: &TestCluster, object: &Value) {
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
fn node_feature(node: &str, flags: &[&str], modules: &[&str]) -> Value {
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

/// A document of NFD that is attached to an image, and what `NodeFeature` objects say, of which there is no label.
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
        let artifact = Image::artifact(
            "application/vnd.nfd.image-compatibility.v1alpha1",
            "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml",
            document,
        );
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
    // `fast` lacks the module; `arm` is preferred, and `slow` is possible.
    let one_each = json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "solver"}}}]}}});
    let mut found = Vec::new();
    for name in ["first", "second", "third"] {
        let mut pod = app(name, "placeholder:latest", own.clone(), &one_each);
        pod["metadata"]["labels"] = json!({"app": "solver"});
        cluster.create::<Pod>(pod).await;
        if name != "third" {
            found.push(cluster.wait_until_bound(name).await);
        }
    }
    assert_eq!(found, ["arm", "slow"]);
    let pod = cluster.pods().get("first").await.unwrap();
    assert_eq!(image_of(&pod), registry.image("app"));
    // No third node fits: the scheduler says so.
    eventually("the third cannot be scheduled", DEADLINE, || async {
        let pod = cluster.pods().get("third").await.ok()?;
        let conditions = pod.status?.conditions?;
        conditions
            .iter()
            .any(|one| one.reason.as_deref() == Some("Unschedulable"))
            .then_some(())
    })
    .await;
    assert_eq!(archaware.stop().await, 0);
    cluster.kubectl(&["delete", "crd", "nodefeatures.nfd.k8s-sigs.io"]);
}

/// Only one alternative can be added to the terms of a gated pod. It is one that some nodes satisfy.
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
    let layer = "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml";
    let artifact = Image::artifact("application/vnd.test", layer, document);
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

/// A server chooses by a model. If it fails, the rules of the document decide, or nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_model_may_choose() {
    const TYPE: &str = "node.kubernetes.io/instance-type";
    let cluster = TestCluster::take().await;
    let (registry, predictor) = (registry().await, FakeRegistry::start().await.unwrap());
    nodes(&cluster).await;
    for (node, name) in [("fast", "m7i"), ("slow", "m7i"), ("arm", "m7g")] {
        cluster.kubectl(&["label", "node", node, &format!("{TYPE}={name}")]);
    }
    let image = |tag: &str| format!("{}:{tag}", registry.image("app"));
    let models = json!({"compatibilities": [{"tag": "cost", "rules": [{"matchModel": {"model": {
        "type": "sklearn", "direction": "minimize", "name": "price", "filename": "price.pkl",
        "platforms": {"amd64": image("fast"), "arm64": image("any")},
    }}}]}]});
    let layer = "application/vnd.oci.image.model-compatibilities.v1+json";
    let artifact = Image::artifact("application/vnd.test", layer, &models.to_string());
    registry.add_tag("app", "models", &artifact);
    let answer = json!({"selected_instance": {}, "instance": "m7g", "arch": "arm64", "score": 0.1,
        "instance_index": 0, "instance-selector": TYPE});
    predictor.script("/predict", Script::OtherContent(answer.to_string().into()));
    let url = format!(
        "selection: {{predictor: {{url: \"http://{}/predict\"}}}}\n",
        predictor.address()
    );
    let archaware = Controller::start_with_webhook(&cluster, &url, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let annotations = json!({OWN: image("models")});
    cluster
        .create::<Pod>(app(
            "chosen",
            &image("gpu"),
            annotations.clone(),
            &json!({}),
        ))
        .await;
    assert_eq!(landed(&cluster, "chosen").await, is("any", "arm"));
    assert_eq!(predictor.count("POST", "/predict"), 1);
    assert_eq!(archaware.stop().await, 0);
    let config = cluster.dir().join("model.yaml");
    let text = format!("apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n{url}");
    std::fs::write(&config, text).unwrap();
    let explain = [
        "explain",
        "pod/chosen",
        "-o",
        "json",
        "-n",
        &cluster.namespace,
    ];
    let config = ["--config", config.to_str().unwrap()];
    let (status, output, error) = cluster.archaware(&[&explain[..], &config].concat());
    assert_eq!(status, 0, "{error}");
    let explained: Value = serde_json::from_str(&output).unwrap();
    let candidates = &explained[0]["selections"][0]["candidates"];
    assert!(candidates.is_array(), "{output}");
    let [fast, any] = ["fast", "any"].map(|tag| {
        let mut all = candidates.as_array().unwrap().iter();
        all.find(|one| one["tag"] == image(tag)).unwrap()
    });
    assert_eq!(
        (&fast["chosen"], &any["chosen"]),
        (&json!(false), &json!(true))
    );
    let outcome = any["outcome"].as_str().unwrap();
    assert!(outcome.contains(&format!("{TYPE}=m7g")), "{outcome}");
    // Another process has no answer in memory.
    predictor.unscript();
    predictor.script("/predict", Script::Status(500, Vec::new()));
    let archaware = Controller::start_with_webhook(&cluster, &url, "onMiss: gate").await;
    cluster
        .create::<Pod>(app("kept", &image("gpu"), annotations, &json!({})))
        .await;
    cluster.wait_until_bound("kept").await;
    assert_eq!(
        image_of(&cluster.pods().get("kept").await.unwrap()),
        image("gpu")
    );
    archaware.wait_for_log("selection.predictor failed").await;
    // Where there are rules, too, they decide then.
    let fast = json!([{"matchFeatures": [{"matchExpressions": [{"key": KEY, "op": "In", "value": ["fast"]}]}]}]);
    let rules =
        json!({"version": "v1alpha1", "compatibilities": [{"tag": image("fast"), "rules": fast}]});
    let both = artifact.with_layer(OCIFIT, &rules.to_string());
    registry.add_tag("app", "both", &both);
    let annotations = json!({OWN: image("both")});
    cluster
        .create::<Pod>(app("ruled", &image("gpu"), annotations, &json!({})))
        .await;
    assert_eq!(landed(&cluster, "ruled").await, is("fast", "fast"));
    assert_eq!(archaware.stop().await, 0);
}

/// Another webhook gives the selected image the name of a mirror: the API server asks again, and both have their way.
#[tokio::test]
async fn another_webhook_may_rename_the_selected_image() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    registry.add_tag("mirror", "fast", &testimg::find("amd64"));
    nodes(&cluster).await;
    let mirrored = format!("{}:fast", registry.image("mirror"));
    let new = mirrored.clone();
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
    // It is called after archaware: by name.
    let mirror = RecordingWebhook::start(&cluster, "zz-mirror", rule, move |pod| {
        let image = pod["spec"]["containers"][0]["image"]
            .as_str()
            .unwrap_or_default();
        if image.ends_with("/app:fast") {
            json!([{"op": "replace", "path": "/spec/containers/0/image", "value": new}])
        } else {
            json!([])
        }
    })
    .await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate, budget: 2s").await;
    cluster.wait_until_tainted().await;
    let document = format!("{}:compatibility", registry.image("app"));
    let own = app(
        "own",
        "placeholder:latest",
        json!({OWN: document}),
        &json!({}),
    );
    let reference = json!({"oci.image.compatibilities.selection/image-ref": document});
    let mut ocifit = app("ocifit", "placeholder:latest", reference, &json!({}));
    ocifit["metadata"]["labels"] = json!({"oci.image.compatibilities.selection/enabled": "true"});
    for pod in [own, ocifit] {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        cluster.create::<Pod>(pod).await;
        let node = cluster.wait_until_bound(&name).await;
        let pod = cluster.pods().get(&name).await.unwrap();
        assert_eq!((&*node, image_of(&pod)), ("fast", mirrored.clone()));
        let added = &pod.metadata.annotations.as_ref().unwrap()["archaware.dev/added"];
        assert!(added.contains(&format!("\"to\":\"{mirrored}\"")), "{added}");
        let affinity = json!(pod.spec.unwrap().affinity).to_string();
        assert!(affinity.contains(KEY), "{affinity}");
    }
    assert!(mirror.seen().len() >= 2);
    assert_eq!(archaware.stop().await, 0);
}
