//! Pods are bound to nodes with an architecture of their images, and to no others.

use std::collections::BTreeSet;

use k8s_openapi::api::{
    apps::v1::{Deployment, StatefulSet},
    batch::v1::{CronJob, Job},
    core::v1::Pod,
};
use kube::{ResourceExt, api::ListParams};
use serde_json::{Value, json};

use super::*;

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn decision(pod: &Pod) -> Option<String> {
    pod.annotations().get("archaware.dev/decision").cloned()
}

#[tokio::test]
async fn every_kind_of_image_lands_on_its_architectures_only() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    for (image, decided, may_run_on) in [
        ("amd64", "amd64", &["amd64"][..]),
        ("arm64", "arm64", &["arm64"]),
        ("s390x", "s390x", &["s390x"]),
        ("docker-amd64", "amd64", &["amd64"]),
        ("multi", "amd64,arm64,s390x", &["amd64", "arm64", "s390x"]),
        ("arm64-s390x", "arm64,s390x", &["arm64", "s390x"]),
        ("docker-list", "amd64,arm64", &["amd64", "arm64"]),
        ("unnamed", "amd64,arm64,s390x", &["amd64", "arm64", "s390x"]),
        ("nested", "amd64,arm64", &["amd64", "arm64"]),
        ("attested", "amd64", &["amd64"]),
        ("386", "386,amd64", &["amd64"]),
        ("windows", "amd64", &["amd64"]),
        ("index-wins", "arm64", &["arm64"]),
        ("no-os", "arm64", &["arm64"]),
        ("helm", "any", &["amd64", "arm64", "s390x"]),
        // The pod does not say its OS: it may select Windows nodes in its own way.
        ("windows-only", "any", &["amd64", "arm64", "s390x"]),
        // WebAssembly, and nothing is known of runtime classes.
        ("wasi", "any", &["amd64", "arm64", "s390x"]),
    ] {
        cluster.create_pod(image, &[image]).await;
        let node = cluster.wait_until_bound(image).await;
        assert!(may_run_on.contains(&node.as_str()), "{image} on {node}");
        let pod = cluster.pods().get(image).await.unwrap();
        assert_eq!(decision(&pod).as_deref(), Some(decided), "{image}");
    }
    let mut spec = pod_spec(&[cluster.image("windows-only")]);
    spec["nodeSelector"] = json!({ "kubernetes.io/os": "linux" });
    cluster.create::<Pod>(pod("stated", spec, json!({}))).await;
    cluster
        .wait_for_event("stated", "NoCommonArchitecture")
        .await;
}

#[tokio::test]
async fn all_images_of_a_pod_count() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let image = |name: &str| cluster.image(name);
    let main = || json!([{"name": "main", "image": image("multi")}]);
    let other = |restart: Option<&str>| json!([{"name": "other", "image": image("arm64-s390x"), "restartPolicy": restart}]);
    let spec = |extra: Value| {
        let mut spec = json!({"containers": main(), "terminationGracePeriodSeconds": 0});
        spec.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        spec
    };
    let volume = json!([{"name": "data", "image": {"reference": image("arm64-s390x")}}]);
    for (name, spec) in [
        ("init", spec(json!({"initContainers": other(None)}))),
        (
            "sidecar",
            spec(json!({"initContainers": other(Some("Always"))})),
        ),
        ("volume", spec(json!({"volumes": volume}))),
    ] {
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
        let node = cluster.wait_until_bound(name).await;
        assert!(
            ["arm64", "s390x"].contains(&node.as_str()),
            "{name} on {node}"
        );
        assert_eq!(
            architectures_of(&cluster.pods().get(name).await.unwrap()),
            set(&["arm64", "s390x"]),
            "{name}"
        );
    }
    cluster
        .create_pod("two", &["amd64-arm64", "arm64-s390x"])
        .await;
    assert_eq!(cluster.wait_until_bound("two").await, "arm64");
}

/// An author who selects another architecture and tolerates its taint has decided so, and is told
/// that the images cannot meet it.
#[tokio::test]
async fn a_tolerated_selection_is_told() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let selecting_amd64 = || {
        let mut spec = pod_spec(&[cluster.image("arm64")]);
        spec["nodeSelector"] = json!({ "kubernetes.io/arch": "amd64" });
        spec
    };
    // Gated: without webhook, the scheduler may bind an ungated pod before archaware sees it, and
    // then there is no event.
    let gate = json!([{ "name": "example.com/wait" }]);
    let mut spec = selecting_amd64();
    spec["tolerations"] =
        json!([{ "key": "kubernetes.io/arch", "operator": "Equal", "value": "amd64" }]);
    let landing = pod("landed", spec.clone(), json!({}));
    spec["schedulingGates"] = gate.clone();
    cluster.create::<Pod>(pod("forced", spec, json!({}))).await;
    let event = cluster
        .wait_for_event("forced", "ArchitectureExcluded")
        .await;
    assert!(event.contains("run its images: arm64"), "{event}");
    cluster.create::<Pod>(landing).await;
    assert_eq!(cluster.wait_until_bound("landed").await, "amd64");
    // The same where the selected nodes have no taint.
    assert_eq!(archaware.stop().await, 0);
    let _archaware = Controller::start(&cluster, "taint: {architectures: [arm64]}\n");
    let mut spec = selecting_amd64();
    spec["schedulingGates"] = gate;
    cluster
        .create::<Pod>(pod("untainted", spec, json!({})))
        .await;
    let event = cluster
        .wait_for_event("untainted", "ArchitectureExcluded")
        .await;
    assert!(event.contains("No taint keeps the pod away"), "{event}");
}

#[tokio::test]
async fn ephemeral_containers_count() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    // No node has this label yet, so the pod waits until it has an ephemeral container.
    let mut spec = pod_spec(&[cluster.image("no-such-image")]);
    spec["nodeSelector"] = json!({"later": "yes"});
    cluster
        .create::<Pod>(pod("debugged", spec, json!({})))
        .await;
    let ephemeral = json!({"spec": {"ephemeralContainers": [
        {"name": "debug", "image": cluster.image("arm64"), "targetContainerName": "c0"}]}});
    let patch = kube::api::Patch::Strategic(ephemeral);
    let parameters = kube::api::PatchParams::default();
    cluster
        .pods()
        .patch_ephemeral_containers("debugged", &parameters, &patch)
        .await
        .unwrap();
    // The user corrects the first image.
    let image = json!([{"op": "replace", "path": "/spec/containers/0/image", "value": cluster.image("multi")}]);
    let patch = kube::api::Patch::<()>::Json(serde_json::from_value(image).unwrap());
    cluster
        .pods()
        .patch("debugged", &parameters, &patch)
        .await
        .unwrap();
    let tolerated = eventually("tolerations", DEADLINE, || async {
        let set = architectures_of(&cluster.pods().get("debugged").await.ok()?);
        (!set.is_empty()).then_some(set)
    })
    .await;
    assert_eq!(tolerated, set(&["arm64"]));
}

#[tokio::test]
async fn a_pod_without_a_common_architecture_stays_pending_and_says_why() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster.create_pod("torn", &["amd64", "arm64"]).await;
    let note = cluster.wait_for_event("torn", "NoCommonArchitecture").await;
    for part in [
        cluster.image("amd64"),
        cluster.image("arm64"),
        "(amd64)".to_owned(),
        "(arm64)".to_owned(),
    ] {
        assert!(note.contains(&part), "{note}");
    }
    let pod = cluster.pods().get("torn").await.unwrap();
    assert!(pod.spec.as_ref().unwrap().node_name.is_none());
    assert!(architectures_of(&pod).is_empty());
    eventually("an annotation that says it", DEADLINE, || async {
        let pod = cluster.pods().get("torn").await.ok()?;
        (decision(&pod).as_deref() == Some("none")).then_some(())
    })
    .await;
    let waits = archaware.metric("archaware_pods_undecided{}").await;
    assert!((waits - 1.0).abs() < 0.5, "{waits} pods wait");
}

#[tokio::test]
async fn every_kind_of_workload_is_placed() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let template = |labels: &str, restart: &str| {
        let mut spec = pod_spec(&[cluster.image("arm64")]);
        spec["restartPolicy"] = json!(restart);
        json!({"metadata": {"labels": {"app": labels}}, "spec": spec})
    };
    let selected = |name: &str| json!({"matchLabels": {"app": name}});
    cluster.create::<Deployment>(json!({"metadata": {"name": "deployment"}, "spec": {
        "replicas": 3, "selector": selected("deployment"), "template": template("deployment", "Always")}})).await;
    cluster
        .create::<StatefulSet>(json!({"metadata": {"name": "statefulset"}, "spec": {
        "serviceName": "none", "replicas": 2, "podManagementPolicy": "Parallel",
        "selector": selected("statefulset"), "template": template("statefulset", "Always")}}))
        .await;
    cluster
        .create::<Job>(json!({"metadata": {"name": "job"}, "spec": {
        "parallelism": 2, "template": template("job", "Never")}}))
        .await;
    cluster.create::<CronJob>(json!({"metadata": {"name": "cronjob"}, "spec": {
        "schedule": "* * * * *", "jobTemplate": {"spec": {"template": template("cronjob", "Never")}}}})).await;
    // A CronJob creates a Job from its template every minute; this creates it at once.
    cluster.kubectl(&[
        "-n",
        &cluster.namespace,
        "create",
        "job",
        "from-cronjob",
        "--from=cronjob/cronjob",
    ]);
    for (app, count) in [
        ("deployment", 3),
        ("statefulset", 2),
        ("job", 2),
        ("cronjob", 1),
    ] {
        let selector = ListParams::default().labels(&format!("app={app}"));
        eventually(&format!("pods of the {app} on arm64"), DEADLINE, || async {
            let pods = cluster.pods().list(&selector).await.ok()?;
            let nodes: Vec<_> = pods
                .iter()
                .filter_map(|pod| pod.spec.as_ref()?.node_name.clone())
                .collect();
            assert!(nodes.iter().all(|node| node == "arm64"), "{app}: {nodes:?}");
            (nodes.len() >= count).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn the_nearest_mode_wins() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let exempt = format!("{}-exempt", cluster.namespace);
    let _archaware =
        Controller::start(&cluster, &format!("pods: {{exemptNamespaces: [{exempt}]}}"));
    cluster.wait_until_tainted().await;
    cluster.create_namespace(&exempt, json!({})).await;
    let ignored = format!("{}-ignored", cluster.namespace);
    cluster
        .create_namespace(&ignored, json!({"archaware.dev/mode": "ignore"}))
        .await;
    let invalid = format!("{}-invalid", cluster.namespace);
    cluster
        .create_namespace(&invalid, json!({"archaware.dev/mode": "often"}))
        .await;
    for (name, namespace, annotations, expected) in [
        ("plain", &cluster.namespace, json!({}), set(&["arm64"])),
        (
            "any",
            &cluster.namespace,
            json!({"archaware.dev/mode": "any"}),
            set(&["any"]),
        ),
        (
            "override",
            &cluster.namespace,
            json!({"archaware.dev/architectures": "s390x, amd64"}),
            set(&["amd64", "s390x"]),
        ),
        ("exempt", &exempt, json!({}), set(&["any"])),
        (
            "inspected",
            &exempt,
            json!({"archaware.dev/mode": "inspect"}),
            set(&["arm64"]),
        ),
        (
            "nonsense",
            &cluster.namespace,
            json!({"archaware.dev/mode": "x", "archaware.dev/architectures": "a b"}),
            set(&["arm64"]),
        ),
        ("invalid-above", &invalid, json!({}), set(&["arm64"])),
    ] {
        let pods: kube::Api<Pod> = kube::Api::namespaced(cluster.client.clone(), namespace);
        let object = pod(name, pod_spec(&[cluster.image("arm64")]), annotations);
        pods.create(
            &Default::default(),
            &serde_json::from_value(object).unwrap(),
        )
        .await
        .unwrap();
        let tolerated = eventually(&format!("tolerations of {name}"), DEADLINE, || async {
            let set = architectures_of(&pods.get(name).await.ok()?);
            (!set.is_empty()).then_some(set)
        })
        .await;
        assert_eq!(tolerated, expected, "{name}");
    }
    assert!(
        cluster
            .wait_for_event("nonsense", "InvalidAnnotation")
            .await
            .contains("archaware.dev/")
    );
    let on_namespace = cluster.kubectl(&[
        "get",
        "events",
        "-A",
        "--field-selector",
        "reason=InvalidAnnotation",
        "-o",
        "jsonpath={range .items[*]}{.involvedObject.kind}/{.involvedObject.name} {end}",
    ]);
    assert!(
        on_namespace.contains(&format!("Namespace/{invalid}")),
        "{on_namespace}"
    );
    // An ignored pod is unchanged while others are decided.
    let pods: kube::Api<Pod> = kube::Api::namespaced(cluster.client.clone(), &ignored);
    let object = pod("ignored", pod_spec(&[cluster.image("arm64")]), json!({}));
    pods.create(
        &Default::default(),
        &serde_json::from_value(object).unwrap(),
    )
    .await
    .unwrap();
    cluster.create_pod("after", &["arm64"]).await;
    cluster.wait_until_bound("after").await;
    assert!(architectures_of(&pods.get("ignored").await.unwrap()).is_empty());
    // The mode of the namespace changes, which affects the pod without a change of its own.
    cluster.kubectl(&["annotate", "namespace", &ignored, "archaware.dev/mode-"]);
    eventually(
        "tolerations of the pod that was ignored",
        DEADLINE,
        || async {
            (architectures_of(&pods.get("ignored").await.ok()?) == set(&["arm64"])).then_some(())
        },
    )
    .await;
}

#[tokio::test]
async fn a_pod_whose_image_changes_is_decided_again() {
    let cluster = TestCluster::take().await;
    cluster.create_node("s390x", "s390x").await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster.create_pod("app", &["arm64"]).await;
    eventually("the first decision", DEADLINE, || async {
        (architectures_of(&cluster.pods().get("app").await.ok()?) == set(&["arm64"])).then_some(())
    })
    .await;
    let image = json!([{"op": "replace", "path": "/spec/containers/0/image", "value": cluster.image("s390x")}]);
    let patch = kube::api::Patch::<()>::Json(serde_json::from_value(image).unwrap());
    cluster
        .pods()
        .patch("app", &Default::default(), &patch)
        .await
        .unwrap();
    assert_eq!(cluster.wait_until_bound("app").await, "s390x");
    let pod = cluster.pods().get("app").await.unwrap();
    assert_eq!(
        architectures_of(&pod),
        set(&["arm64", "s390x"]),
        "tolerations only ever grow"
    );
    assert_eq!(decision(&pod).as_deref(), Some("s390x"));
}

#[tokio::test]
async fn with_no_execute_bound_pods_are_placed_before_nodes_are_tainted() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    cluster.create_pod("right", &["amd64"]).await;
    cluster.create_pod("wrong", &["arm64"]).await;
    // It does not say its OS, so nothing is known of where it may run.
    cluster.create_pod("windows", &["windows-only"]).await;
    for name in ["right", "wrong", "windows"] {
        cluster.wait_until_bound(name).await;
    }
    let config = "taint: {effect: NoExecute}";
    let file = cluster.dir().join("noexecute.yaml");
    std::fs::write(
        &file,
        format!("apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n{config}"),
    )
    .unwrap();
    let (status, plan, error) =
        cluster.archaware(&["plan", "-o", "json", "--config", file.to_str().unwrap()]);
    assert_eq!(status, 0, "{error}");
    let plan: Vec<Value> = serde_json::from_str(&plan).unwrap();
    let of_pods: Vec<_> = plan
        .iter()
        .filter(|step| step["kind"] == "Pod")
        .map(|step| (step["action"].as_str().unwrap(), &step["name"]))
        .collect();
    assert_eq!(of_pods, [("evict", &json!("wrong"))], "{plan:?}");
    let _archaware = Controller::start(&cluster, config);
    cluster.wait_until_tainted().await;
    eventually("the eviction of the wrong pod", DEADLINE, || async {
        let gone = cluster
            .pods()
            .get_opt("wrong")
            .await
            .ok()?
            .is_none_or(|pod| pod.metadata.deletion_timestamp.is_some());
        gone.then_some(())
    })
    .await;
    for name in ["right", "windows"] {
        let pod = cluster.pods().get(name).await.unwrap();
        assert!(pod.metadata.deletion_timestamp.is_none());
        assert_eq!(architectures_of(&pod), set(&["amd64"]), "{name}");
    }
}
