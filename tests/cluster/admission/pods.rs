//! What the webhook does to pods.

use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api, ResourceExt,
    api::{ListParams, PostParams},
};

use super::*;

#[tokio::test]
async fn pods_are_created_with_what_they_need() {
    let cluster = TestCluster::take().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let created = create(&cluster, "both", &["multi", "amd64-arm64"], |_| {}).await;
    assert_eq!(architectures_of(&created), set(&["amd64", "arm64"]));
    assert_eq!(
        created.annotations()["archaware.dev/decision"],
        "amd64,arm64"
    );
    // The name is generated after the webhook was called.
    let named = create(&cluster, "", &["arm64"], |pod| {
        pod["metadata"] = json!({"generateName": "generated-"});
    })
    .await;
    assert_eq!(architectures_of(&named), set(&["arm64"]));
    // An existing decision is made again, without duplicates.
    let copy = |name: &str| {
        let mut copy = created.clone();
        copy.metadata = serde_json::from_value(json!({
            "name": name, "annotations": created.annotations(),
        }))
        .unwrap();
        copy
    };
    let again = cluster
        .pods()
        .create(&PostParams::default(), &copy("again"))
        .await
        .unwrap();
    assert_eq!(
        again.spec.as_ref().unwrap().tolerations,
        created.spec.as_ref().unwrap().tolerations
    );
    assert_eq!(again.annotations(), created.annotations());
    // With another image, archaware's additions are removed.
    let mut other = copy("other");
    other.spec.as_mut().unwrap().containers[0].image = Some(cluster.image("arm64"));
    let other = cluster
        .pods()
        .create(&PostParams::default(), &other)
        .await
        .unwrap();
    assert_eq!(architectures_of(&other), set(&["arm64"]));
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn mirrors_and_ignored_pods_are_left_alone() {
    let cluster = TestCluster::take().await;
    cluster.create_cordoned_node("somewhere", "amd64").await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let mirror = create(&cluster, "mirror", &["arm64"], |pod| {
        pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
        pod["spec"]["nodeName"] = json!("somewhere");
    })
    .await;
    let ignored = create(&cluster, "ignored", &["arm64"], |pod| {
        pod["metadata"]["annotations"] = json!({"archaware.dev/mode": "ignore"});
    })
    .await;
    for pod in [mirror, ignored] {
        assert!(architectures_of(&pod).is_empty(), "{pod:?}");
        assert!(!pod.annotations().contains_key("archaware.dev/decision"));
    }
    let asked = "archaware_admission_requests_total{resource=\"pods\",result=\"skipped\"}";
    let skipped = archaware.metric(asked).await;
    assert!(
        skipped.abs() < 0.5,
        "the API server does not even ask: {skipped}"
    );
}

/// A rollout without any patch of the controller.
#[tokio::test]
async fn a_rollout_is_placed_as_it_is_created() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    cluster.wait_until_tainted().await;
    let template = json!({
        "metadata": {"labels": {"app": "a"}},
        "spec": pod_spec(&[cluster.image("arm64")]),
    });
    cluster.create::<Deployment>(json!({
        "metadata": {"name": "rollout"},
        "spec": {"replicas": 60, "selector": {"matchLabels": {"app": "a"}}, "template": template},
    }))
    .await;
    let pods = eventually("sixty pods on arm64", DEADLINE, || async {
        let pods = cluster
            .pods()
            .list(&ListParams::default())
            .await
            .ok()?
            .items;
        let on_arm = |pod: &Pod| pod.spec.as_ref().unwrap().node_name.as_deref() == Some("arm64");
        (pods.len() == 60 && pods.iter().all(on_arm)).then_some(pods)
    })
    .await;
    for pod in &pods {
        assert_eq!(pod.annotations()["archaware.dev/decision"], "arm64");
        assert!(
            pod.annotations().contains_key("archaware.dev/added"),
            "not by the controller"
        );
    }
    for result in ["applied", "stale", "refused"] {
        let metric = format!("archaware_writes_total{{kind=\"Pod\",result=\"{result}\"}}");
        assert!(archaware.metric(&metric).await < 0.5, "{metric}");
    }
}

/// A dry run gets the same response, which never writes anything.
#[tokio::test]
async fn a_dry_run_leaves_no_trace() {
    let cluster = TestCluster::take().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let torn = pod(
        "dry",
        pod_spec(&[cluster.image("arm64"), cluster.image("amd64")]),
        json!({}),
    );
    let torn = serde_json::from_value(torn).unwrap();
    cluster.pods().create(&dry_run, &torn).await.unwrap();
    // The same pod without dry run is created after it, and has its event.
    cluster
        .pods()
        .create(&PostParams::default(), &torn)
        .await
        .unwrap();
    cluster.wait_for_event("dry", "NoCommonArchitecture").await;
    let events: Api<k8s_openapi::api::events::v1::Event> = Api::all(cluster.client.clone());
    let about = ListParams::default().fields("reason=NoCommonArchitecture");
    let about = events.list(&about).await.unwrap().items;
    let here = about
        .iter()
        .filter(|event| event.metadata.namespace.as_deref() == Some(&cluster.namespace));
    assert_eq!(here.count(), 1);
    drop(archaware);
}

#[tokio::test]
async fn a_pod_without_common_architecture_is_refused_or_warned_about() {
    let cluster = TestCluster::take().await;
    let file = cluster.dir().join("torn.yaml");
    let torn = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "torn", "namespace": cluster.namespace},
        "spec": pod_spec(&[cluster.image("arm64"), cluster.image("amd64")]),
    });
    std::fs::write(&file, torn.to_string()).unwrap();
    let apply = || {
        let (created, _, says) = cluster.try_kubectl(&["apply", "-f", file.to_str().unwrap()]);
        (created, says)
    };
    {
        let archaware =
            Controller::start_with_webhook(&cluster, "", "onNoCommonArchitecture: deny").await;
        let (created, says) = apply();
        assert!(!created && says.contains("share no architecture"), "{says}");
        let (arm, amd) = (cluster.image("arm64"), cluster.image("amd64"));
        assert!(
            says.contains(&format!("{amd} (amd64)")) && says.contains(&format!("{arm} (arm64)")),
            "{says}"
        );
        assert_eq!(archaware.stop().await, 0);
    }
    let _archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let (created, says) = apply();
    assert!(
        created && says.contains("Warning: archaware: the images of the pod share no architecture"),
        "{says}"
    );
}

#[tokio::test]
async fn invalid_annotations_are_warned_about() {
    let cluster = TestCluster::take().await;
    let _archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let image = cluster.image("arm64");
    let annotation = "archaware.dev/preferred-architectures=arm64:80";
    let run = ["-n", &cluster.namespace, "run", "odd", "--image", &image];
    let (_, _, says) = cluster.try_kubectl(&[&run[..], &["--annotations", annotation]].concat());
    assert!(
        says.contains("Warning: archaware: annotation archaware.dev/preferred-architectures"),
        "{says}"
    );
    // Of a template, too, once, also where nothing is decided.
    for (mode, stated) in [("always", "arm64"), ("ignore", "arm 64")] {
        let annotations =
            json!({"archaware.dev/mode": mode, "archaware.dev/architectures": stated});
        let labels = json!({"app": mode});
        let set = json!({
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": mode, "namespace": cluster.namespace},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels, "annotations": annotations},
                    "spec": pod_spec(&[cluster.image("arm64")]),
                },
            },
        });
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("set.json");
        std::fs::write(&file, set.to_string()).unwrap();
        let (created, _, says) = cluster.try_kubectl(&["apply", "-f", file.to_str().unwrap()]);
        let warnings = says.matches("Warning: archaware: annotation").count();
        assert!(created && warnings == 1, "{says}");
    }
}

#[tokio::test]
async fn further_tolerations_follow_the_platforms() {
    let cluster = TestCluster::take().await;
    let rules = "tolerations:\n- platforms: [linux/arm64]\n  toleration: {key: pool, operator: Equal, value: graviton, effect: NoSchedule}\n- toleration: {key: example.com/spot, value: \"spot-{arch}\"}\ntaint: {manage: false}\n";
    cluster.create_three_nodes().await;
    for (node, taint) in [
        ("amd64", "example.com/spot=spot-amd64:NoSchedule"),
        ("arm64", "pool=graviton:NoSchedule"),
        ("s390x", "other=x:NoSchedule"),
    ] {
        cluster.kubectl(&["taint", "node", node, taint]);
    }
    let archaware = Controller::start_with_webhook(&cluster, rules, "").await;
    cluster.create_pod("arm", &["arm64"]).await;
    cluster.create_pod("amd", &["amd64"]).await;
    assert_eq!(cluster.wait_until_bound("arm").await, "arm64");
    assert_eq!(cluster.wait_until_bound("amd").await, "amd64");
    let arm = cluster.pods().get("arm").await.unwrap();
    let keys: Vec<String> = arm
        .spec
        .unwrap()
        .tolerations
        .unwrap()
        .into_iter()
        .filter_map(|one| one.value)
        .collect();
    assert_eq!(keys, ["arm64", "graviton", "spot-arm64"]);
    for node in cluster.nodes().list(&ListParams::default()).await.unwrap() {
        assert!(
            !node.annotations().contains_key("archaware.dev/taint"),
            "no node is tainted"
        );
    }
    assert_eq!(archaware.stop().await, 0);
}

/// Another webhook adds a sidecar after archaware's: the API server calls again, and the first
/// decision is revised.
#[tokio::test]
async fn a_sidecar_that_comes_later_counts() {
    let cluster = TestCluster::take().await;
    let sidecar = cluster.image("arm64");
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"], "scope": "Namespaced"});
    // Webhooks are called in the alphabetical order of their names.
    let injector = RecordingWebhook::start(&cluster, "sidecars", rule, move |pod| {
        let has = pod["spec"]["containers"].as_array().is_some_and(|all| all.len() > 1);
        let sidecar = json!({"name": "sidecar", "image": sidecar});
        if has || !pod["metadata"]["labels"]["inject"].is_string() {
            return json!([]);
        }
        json!([
            {"op": "add", "path": "/spec/containers/-", "value": sidecar},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "mesh", "operator": "Exists"}},
        ])
    })
    .await;
    let affinity = "affinity: {required: true, preferred: [{architecture: amd64, weight: 10}]}\n";
    let _archaware = Controller::start_with_webhook(&cluster, affinity, "").await;
    let own = json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": "s390x", "effect": "NoSchedule"});
    let created = create(&cluster, "meshed", &["multi"], |pod| {
        pod["metadata"]["labels"] = json!({"inject": "yes"});
        pod["spec"]["tolerations"] = json!([own]);
    })
    .await;
    assert!(
        injector.seen().len() >= 2,
        "once for the probe, once for the pod"
    );
    assert_eq!(created.annotations()["archaware.dev/decision"], "arm64");
    // The author's own toleration stays, although it was also part of the first decision.
    assert_eq!(architectures_of(&created), set(&["arm64", "s390x"]));
    let spec = json!(created.spec.unwrap());
    let node = &spec["affinity"]["nodeAffinity"];
    let terms = &node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let expression = json!({"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]});
    assert_eq!(*terms, json!([{"matchExpressions": [expression]}]));
    let preferred = &node["preferredDuringSchedulingIgnoredDuringExecution"];
    assert!(
        preferred.is_null() || *preferred == json!([]),
        "{preferred}"
    );
    let keys = spec["tolerations"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["key"] == "mesh");
    assert_eq!(keys.count(), 1);
}

#[tokio::test]
async fn namespaces_opt_out_and_prefer() {
    let cluster = TestCluster::take().await;
    let out = cluster.create_opted_out_namespace().await;
    cluster.kubectl(&[
        "annotate",
        "namespace",
        &cluster.namespace,
        "archaware.dev/preferred-architectures=arm64=70",
    ]);
    let preferred = "affinity: {preferred: [{architecture: arm64, weight: 5}, {architecture: s390x, weight: 6}]}\n";
    let archaware = Controller::start_with_webhook(&cluster, preferred, "").await;
    let weights = |pod: &Pod| {
        let spec = json!(pod.spec);
        let all =
            spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
                .clone();
        let all: Vec<Value> = serde_json::from_value(all).unwrap_or_default();
        let one = |term: &Value| {
            let values = &term["preference"]["matchExpressions"][0]["values"];
            format!("{}={}", values[0].as_str().unwrap(), term["weight"])
        };
        all.iter().map(one).collect::<Vec<_>>().join(" ")
    };
    let pod = create(&cluster, "near", &["multi"], |pod| {
        pod["metadata"]["annotations"] =
            json!({"archaware.dev/preferred-architectures": "s390x=0,amd64=1"});
    })
    .await;
    assert_eq!(weights(&pod), "amd64=1 arm64=70");
    let pod = create(&cluster, "far", &["multi"], |_| {}).await;
    assert_eq!(weights(&pod), "arm64=70 s390x=6");
    let pod = create(&cluster, "only", &["amd64"], |_| {}).await;
    assert_eq!(weights(&pod), "");
    // In an excluded namespace and in archaware's own, the webhook is not called.
    let asked = || async {
        archaware
            .metric("archaware_admission_duration_seconds_count")
            .await
    };
    let before = asked().await;
    for namespace in [&out, "archaware"] {
        let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
        let mut spec = pod_spec(&[cluster.image("arm64")]);
        spec["schedulerName"] = json!("none");
        let pod = serde_json::from_value(super::pod("outside", spec, json!({}))).unwrap();
        let pod = pods.create(&PostParams::default(), &pod).await.unwrap();
        assert!(architectures_of(&pod).is_empty());
    }
    assert!((asked().await - before).abs() < 0.5);
}

/// The YAML of a pod that the controller decided does not determine the next pod's decision.
#[tokio::test]
async fn a_copy_of_a_placed_pod_is_decided_anew() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let out = cluster.create_opted_out_namespace().await;
    let _archaware = Controller::start_with_webhook(&cluster, "", "").await;
    cluster.wait_until_tainted().await;
    let elsewhere: Api<Pod> = Api::namespaced(cluster.client.clone(), &out);
    for (name, image, annotations, copied, expected) in [
        ("multi", "multi", json!({}), "arm64", set(&["arm64"])),
        (
            "any",
            "multi",
            json!({"archaware.dev/mode": "any"}),
            "amd64-arm64",
            set(&["amd64", "arm64"]),
        ),
    ] {
        let original = pod(name, pod_spec(&[cluster.image(image)]), annotations);
        let original = serde_json::from_value(original).unwrap();
        elsewhere
            .create(&PostParams::default(), &original)
            .await
            .unwrap();
        let mut placed = eventually("a placed pod", DEADLINE, || async {
            let pod = elsewhere.get(name).await.ok()?;
            (!architectures_of(&pod).is_empty()).then_some(pod)
        })
        .await;
        let mut annotations = placed.annotations().clone();
        annotations.remove("archaware.dev/mode");
        placed.metadata =
            serde_json::from_value(json!({"name": name, "annotations": annotations})).unwrap();
        placed.status = None;
        let spec = placed.spec.as_mut().unwrap();
        spec.node_name = None;
        spec.volumes = None;
        spec.containers[0].volume_mounts = None;
        spec.containers[0].image = Some(cluster.image(copied));
        let copy = cluster
            .pods()
            .create(&PostParams::default(), &placed)
            .await
            .unwrap();
        assert_eq!(architectures_of(&copy), expected, "{name}");
    }
}

/// The scheduler follows preferences and schedulable architectures.
#[tokio::test]
async fn the_scheduler_follows() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let config = "affinity: {required: true, preferred: [{architecture: arm64, weight: 100}]}\nschedulableArchitectures: [amd64, arm64]\n";
    let _archaware = Controller::start_with_webhook(&cluster, config, "").await;
    cluster.wait_until_tainted().await;
    for n in 0..6 {
        cluster
            .create_pod(&format!("preferred-{n}"), &["multi"])
            .await;
    }
    for n in 0..6 {
        assert_eq!(
            cluster.wait_until_bound(&format!("preferred-{n}")).await,
            "arm64"
        );
    }
    let unschedulable = cluster.create_pod("unschedulable", &["s390x"]).await;
    assert!(architectures_of(&unschedulable).is_empty());
    let why = cluster
        .wait_for_event("unschedulable", "NoCommonArchitecture")
        .await;
    assert!(
        why.contains("schedulableArchitectures are amd64, arm64"),
        "{why}"
    );
}
