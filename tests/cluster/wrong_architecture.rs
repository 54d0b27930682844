//! Pods that cannot run on their node: found by what the kubelet says of them, and evicted where
//! that helps.

use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment, StatefulSet},
    core::v1::{Event, PersistentVolume, PersistentVolumeClaim, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::*;

/// What the kubelet says of a container that ends again and again.
pub(crate) const RESTARTS: &str = "Back-off restarting failed container";

/// A container that ends as soon as it starts, as the kubelet reports it.
pub(crate) fn crashing(code: i32, message: &str) -> Value {
    json!({
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}},
        "lastState": {"terminated": {
            "exitCode": code, "reason": "Error", "message": message,
            "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z",
        }},
    })
}

/// Sets the status of a pod's only container.
pub(crate) async fn set_status(cluster: &TestCluster, name: &str, phase: &str, container: &Value) {
    let pods = cluster.pods();
    let image = pods.get(name).await.unwrap().spec.unwrap().containers[0]
        .image
        .clone()
        .unwrap();
    let mut status =
        json!({"name": "c0", "image": image, "imageID": "", "ready": false, "restartCount": 3});
    json_patch::merge(&mut status, container);
    let status = json!({"status": {"phase": phase, "containerStatuses": [status]}});
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
}

/// Publishes an event about a pod, as the kubelet does.
pub(crate) async fn publish(cluster: &TestCluster, name: &str, reason: &str, note: &str) {
    // It may have been evicted.
    let Some(pod) = cluster.pods().get_opt(name).await.unwrap() else {
        return;
    };
    let event = json!({
        "metadata": {"generateName": "kubelet-"},
        "involvedObject": {
            "kind": "Pod", "apiVersion": "v1", "namespace": cluster.namespace, "name": name,
            "uid": pod.uid().unwrap(), "fieldPath": "spec.containers{c0}",
        },
        "reason": reason, "message": note, "type": "Warning", "source": {"component": "kubelet"},
    });
    cluster.create::<Event>(event).await;
}

/// A pod that its author bound to a node.
pub(crate) async fn create_bound(cluster: &TestCluster, name: &str, image: &str, node: &str) {
    let mut spec = pod_spec(&[cluster.image(image)]);
    spec["nodeName"] = json!(node);
    cluster.create::<Pod>(pod(name, spec, json!({}))).await;
}

#[tokio::test]
async fn they_are_found_and_told() {
    let cluster = TestCluster::take().await;
    // The variant says nothing of images for another architecture.
    let labels = json!({"kubernetes.io/arch": "arm64", "archaware.dev/variant": "v9"});
    let labels = json!({"metadata": {"labels": labels}});
    cluster.create_node_with("arm64-1", "arm64", labels).await;
    for (name, image) in [
        ("fits", "multi"),
        ("lacks", "amd64"),
        ("lies", "multi"),
        ("pulls", "amd64"),
        ("ended", "amd64"),
    ] {
        create_bound(&cluster, name, image, "arm64-1").await;
    }
    // Fails for another reason.
    set_status(&cluster, "fits", "Running", &crashing(1, "")).await;
    publish(&cluster, "fits", "BackOff", RESTARTS).await;
    // Before archaware starts, and while it runs.
    set_status(&cluster, "lacks", "Running", &crashing(1, "")).await;
    publish(&cluster, "lacks", "BackOff", RESTARTS).await;
    let archaware = Controller::start(&cluster, "");
    let told = cluster.wait_for_event("lacks", "WrongArchitecture").await;
    let image = cluster.image("amd64");
    assert_eq!(
        told,
        format!(
            "container c0 cannot run on node arm64-1 (arm64): image {image} is for amd64. Build the image for arm64, or keep the pod away from such nodes"
        )
    );
    set_status(
        &cluster,
        "lies",
        "Running",
        &crashing(1, "exec /app: exec format error"),
    )
    .await;
    publish(&cluster, "lies", "BackOff", RESTARTS).await;
    let told = cluster.wait_for_event("lies", "WrongArchitecture").await;
    assert!(
        told.contains("exec format error, although image")
            && told.contains("archaware.dev/architectures"),
        "{told}"
    );
    // Only the event says why.
    let waits = json!({"state": {"waiting": {"reason": "ImagePullBackOff"}}});
    set_status(&cluster, "pulls", "Pending", &waits).await;
    let note = "Failed to pull image: no match for platform in manifest: not found";
    publish(&cluster, "pulls", "Failed", note).await;
    let told = cluster.wait_for_event("pulls", "WrongArchitecture").await;
    assert!(
        told.contains("no match for the platform of the node"),
        "{told}"
    );
    // No event says it: the container is not started again.
    let ended = json!({"state": crashing(255, "")["lastState"]});
    set_status(&cluster, "ended", "Failed", &ended).await;
    cluster.wait_for_event("ended", "WrongArchitecture").await;
    archaware
        .wait_for_metric("archaware_pods_wrong_architecture{} 4")
        .await;
    let events: Api<Event> = cluster.api();
    let all = events.list(&Default::default()).await.unwrap();
    let about_fitting = |event: &&Event| {
        event.involved_object.name.as_deref() == Some("fits")
            && event.reason.as_deref() == Some("WrongArchitecture")
    };
    assert_eq!(all.iter().filter(about_fitting).count(), 0);
    let (_, report, _) = cluster.archaware(&["report", "-n", &cluster.namespace, "-o", "json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    let workloads = report["workloads"].as_array().unwrap().iter();
    let failures: Vec<Value> = workloads
        .flat_map(|one| one["misplaced"].as_array().unwrap())
        .map(|one| json!([one["pod"], one["failure"]]))
        .collect();
    assert_eq!(
        json!(failures),
        json!([
            ["lacks", "it does not start, or ends at once"],
            ["lies", "exec format error"],
            ["pulls", "it does not start, or ends at once"],
        ])
    );
    assert_eq!(archaware.stop().await, 0);
}

/// The kubelet publishes its event while the status still says that the container runs, and no
/// other event for minutes.
#[tokio::test]
async fn a_status_that_comes_after_its_event_is_read() {
    let cluster = TestCluster::take().await;
    cluster.create_node("arm64-1", "arm64").await;
    create_bound(&cluster, "late", "amd64", "arm64-1").await;
    let running =
        json!({"ready": true, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}});
    set_status(&cluster, "late", "Running", &running).await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    publish(&cluster, "late", "BackOff", RESTARTS).await;
    archaware
        .wait_for_log("the status lags behind the event")
        .await;
    set_status(&cluster, "late", "Running", &crashing(1, "")).await;
    let told = cluster.wait_for_event("late", "WrongArchitecture").await;
    assert!(told.contains("is for amd64"), "{told}");
    assert_eq!(archaware.stop().await, 0);
}

/// A claim `data` of a volume that is in this zone. Returns the name of the volume.
async fn create_volume(cluster: &TestCluster, zone: &str) -> String {
    let volume = format!("volume-{}", cluster.namespace);
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    let in_zone = json!({"key": "zone", "operator": "In", "values": [zone]});
    let size = json!({"storage": "1Mi"});
    let object = json!({"metadata": {"name": volume}, "spec": {
        "capacity": size, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "local": {"path": "/tmp"},
        "claimRef": {"namespace": cluster.namespace, "name": "data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [in_zone]}]}},
    }});
    let object = serde_json::from_value(object).unwrap();
    volumes.create(&Default::default(), &object).await.unwrap();
    cluster
        .create::<PersistentVolumeClaim>(json!({"metadata": {"name": "data"}, "spec": {
            "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
            "resources": {"requests": size},
        }}))
        .await;
    volume
}

/// The pods of a workload that have a node.
async fn bound_pods(cluster: &TestCluster, workload: &str) -> Vec<String> {
    let all = cluster.pods().list(&Default::default()).await.unwrap();
    let bound = all.iter().filter(|pod| {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
        pod.name_any().starts_with(workload)
            && pod.metadata.deletion_timestamp.is_none()
            && node.is_some()
    });
    bound.map(ResourceExt::name_any).collect()
}

/// Lets a pod fail as the kubelet reports it.
async fn crash(cluster: &TestCluster, name: &str) {
    set_status(cluster, name, "Running", &crashing(1, "")).await;
    publish(cluster, name, "BackOff", RESTARTS).await;
}

/// Has the API server ask the webhook some seconds after the last pod was created: whether it asks
/// since then is told by times in whole seconds.
async fn ask_webhook_later(cluster: &TestCluster) {
    let all = cluster.pods().list(&Default::default()).await.unwrap();
    let created = all.iter().filter_map(ResourceExt::creation_timestamp);
    let newest = created.map(|time| time.0.as_second()).max().unwrap_or(0);
    eventually("a webhook that is asked", DEADLINE, || async {
        let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let is_later = i64::try_from(now).unwrap() > newest + 3;
        (is_later && cluster.is_called().await).then_some(())
    })
    .await;
}

/// Waits until this is told of a pod, of which the kubelet goes on to say that it fails.
async fn wait_until_told(cluster: &TestCluster, name: &str, part: &str) {
    let events: Api<Event> = cluster.api();
    eventually(&format!("{name}: {part}"), 3 * DEADLINE, || async {
        publish(cluster, name, "BackOff", RESTARTS).await;
        let all = events.list(&Default::default()).await.ok()?;
        let mut told = all.iter().filter(|event| {
            event.involved_object.name.as_deref() == Some(name)
                && event.reason.as_deref() == Some("WrongArchitecture")
        });
        let says_it = |event: &Event| {
            event
                .message
                .as_deref()
                .is_some_and(|note| note.contains(part))
        };
        let is_told = told.any(says_it);
        // Each round is an event.
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        is_told.then_some(())
    })
    .await;
}

/// With owners of several kinds, on a node of the wrong architecture that everything tolerates.
#[tokio::test]
async fn they_are_evicted_where_that_helps() {
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    cluster.kubectl(&["apply", "-f", "manifests/evict-misplaced/permissions.yaml"]);
    let labels = |architecture: &str, zone: &str| json!({"metadata": {"labels": {"kubernetes.io/arch": architecture, "zone": zone}}});
    cluster
        .create_node_with("arm64-1", "arm64", labels("arm64", "a"))
        .await;
    let mut spec = pod_spec(&[cluster.image("amd64")]);
    spec["tolerations"] = json!([{"operator": "Exists"}]);
    let workload = |name: &str, more: Value| {
        let mut object = json!({"metadata": {"name": name}, "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
        }});
        json_patch::merge(&mut object, &more);
        object
    };
    cluster
        .create::<Deployment>(workload("moves", json!({"spec": {"replicas": 2}})))
        .await;
    cluster
        .create::<DaemonSet>(workload("daemon", json!({})))
        .await;
    let volume = create_volume(&cluster, "a").await;
    let claim = json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]);
    let more = json!({"spec": {"serviceName": "stays", "template": {"spec": {"volumes": claim}}}});
    cluster.create::<StatefulSet>(workload("stays", more)).await;
    let names = |of: &'static str| bound_pods(&cluster, of);
    eventually("four pods on the node", DEADLINE, || async {
        let all = [
            names("moves").await,
            names("daemon").await,
            names("stays").await,
        ];
        (all.iter().map(Vec::len).sum::<usize>() == 4).then_some(())
    })
    .await;
    // A DaemonSet gets a pod on the next node, too.
    let unmoved = [
        names("daemon").await.remove(0),
        names("stays").await.remove(0),
    ];
    let first = names("moves").await;
    for of in ["moves", "daemon", "stays"] {
        for name in names(of).await {
            crash(&cluster, &name).await;
        }
    }
    cluster
        .create_node_with("amd64-1", "amd64", labels("amd64", "b"))
        .await;
    let archaware = Controller::start_with_webhook(&cluster, "misplaced: evict\n", "").await;
    ask_webhook_later(&cluster).await;
    let reasons = [
        "its DaemonSet would replace it on the same node",
        "no node that its images run on can take it",
    ];
    for (name, why) in unmoved.iter().zip(reasons) {
        let why = format!("archaware does not evict the pod: {why}");
        cluster
            .wait_for_event_with(name, "WrongArchitecture", &why)
            .await;
    }
    // One of the two, because its controller's pods go one after the other.
    let moved = |count: usize| {
        let cluster = &cluster;
        async move {
            let all = cluster.pods().list(&Default::default()).await.ok()?;
            let on = all.iter().filter(|pod| {
                let spec = pod.spec.as_ref();
                let node = spec.and_then(|spec| spec.node_name.as_deref());
                pod.name_any().starts_with("moves") && node == Some("amd64-1")
            });
            (on.count() == count).then_some(())
        }
    };
    eventually("a pod that moved", 2 * DEADLINE, || async {
        // Once the webhook works, as the kubelet goes on to say so.
        for name in &first {
            publish(&cluster, name, "BackOff", RESTARTS).await;
        }
        moved(1).await
    })
    .await;
    let left: Vec<String> = names("moves").await;
    let left: Vec<&String> = left.iter().filter(|name| first.contains(name)).collect();
    assert_eq!(left.len(), 1, "{left:?} of {first:?}");
    let after =
        "archaware evicts the pod later: pods of a controller are evicted one after the other";
    wait_until_told(&cluster, left[0], after).await;
    let evicted = "archaware_evictions_total{reason=\"wrong_architecture\",result=\"evicted\"}";
    assert!((archaware.metric(evicted).await - 1.0).abs() < 0.5);
    // The kubelet goes on to say so.
    eventually("the other one moved", 3 * DEADLINE, || async {
        publish(&cluster, left[0], "BackOff", RESTARTS).await;
        moved(2).await
    })
    .await;
    assert_eq!(archaware.stop().await, 0);
    let volumes: Api<PersistentVolume> = Api::all(cluster.client.clone());
    volumes.delete(&volume, &Default::default()).await.unwrap();
}

/// The new pod lands on such a node again, so its controller is left alone.
#[tokio::test]
async fn a_controller_s_pods_are_not_evicted_in_vain() {
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    cluster.kubectl(&["apply", "-f", "manifests/evict-misplaced/permissions.yaml"]);
    cluster.create_node("arm64-1", "arm64").await;
    // A node that could take it by all that archaware looks at, and has no room.
    let none = json!({"cpu": "0", "memory": "0", "pods": "0"});
    let full = json!({"status": {"allocatable": none, "capacity": none}});
    cluster.create_node_with("amd64-1", "amd64", full).await;
    let mut spec = pod_spec(&[cluster.image("amd64")]);
    spec["tolerations"] = json!([{"operator": "Exists"}]);
    cluster
        .create::<Deployment>(json!({"metadata": {"name": "app"}, "spec": {
            "selector": {"matchLabels": {"app": "app"}},
            "template": {"metadata": {"labels": {"app": "app"}}, "spec": spec},
        }}))
        .await;
    let current = |other: Option<String>| {
        let cluster = &cluster;
        async move {
            eventually("a bound pod", DEADLINE, || async {
                let all = cluster.pods().list(&Default::default()).await.ok()?;
                let mut names = all.iter().filter(|pod| {
                    pod.metadata.deletion_timestamp.is_none()
                        && pod
                            .spec
                            .as_ref()
                            .is_some_and(|spec| spec.node_name.is_some())
                });
                let name = names.next()?.name_any();
                (Some(&name) != other.as_ref()).then_some(name)
            })
            .await
        }
    };
    let first = current(None).await;
    // The API server asks the webhook, and then no more: nothing keeps a pod away that tolerates
    // everything.
    let archaware = Controller::start_with_webhook(&cluster, "misplaced: evict\n", "").await;
    ask_webhook_later(&cluster).await;
    cluster.kubectl(&["delete", "mutatingwebhookconfiguration", "archaware"]);
    set_status(&cluster, &first, "Running", &crashing(1, "")).await;
    eventually("an eviction", 2 * DEADLINE, || async {
        publish(&cluster, &first, "BackOff", RESTARTS).await;
        let events: Api<Event> = cluster.api();
        let all = events.list(&Default::default()).await.ok()?;
        let mut reasons = all.iter().filter_map(|event| event.reason.as_deref());
        reasons.any(|reason| reason == "Recreated").then_some(())
    })
    .await;
    let second = current(Some(first)).await;
    set_status(&cluster, &second, "Running", &crashing(1, "")).await;
    publish(&cluster, &second, "BackOff", RESTARTS).await;
    let why =
        "archaware does not evict the pod: a new pod of its controller failed in the same way";
    wait_until_told(&cluster, &second, why).await;
    // A restart does not forget it.
    assert_eq!(archaware.stop().await, 0);
    let archaware = Controller::start_with_webhook(&cluster, "misplaced: evict\n", "").await;
    archaware
        .wait_for_metric("archaware_pods_wrong_architecture{} 1")
        .await;
    assert!(
        cluster
            .pods()
            .get(&second)
            .await
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_none()
    );
    let evicted = "archaware_evictions_total{reason=\"wrong_architecture\",result=\"evicted\"}";
    assert!(archaware.metric(evicted).await < 0.5);
    assert_eq!(archaware.stop().await, 0);
}

/// A real kubelet with containerd and runc, which get programs for arm64 on an amd64 machine.
#[tokio::test]
async fn a_real_kubelet_says_enough() {
    let cluster = TestCluster::take_with_node().await;
    let config = format!(
        "containerd: {{socket: {}}}\nregistries: {{plainHttp: [reg.local], rewrites: [{{prefix: reg.local, replacement: \"{}\"}}]}}\n",
        cluster.socket(),
        cluster.registry()
    );
    let archaware = Controller::start(&cluster, &config);
    cluster.wait_until_tainted().await;
    for (name, image) in [
        ("single", "arm64"),
        ("index", "index-only-arm64"),
        ("mislabelled", "mislabelled"),
        ("once", "arm64"),
    ] {
        let mut spec = pod_spec(&[format!("reg.local/testimg/{image}:latest")]);
        spec["hostNetwork"] = json!(true);
        spec["nodeName"] = json!("localhost");
        if name == "mislabelled" {
            spec["containers"][0]["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
        }
        if name == "once" {
            spec["restartPolicy"] = json!("Never");
        }
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
    }
    for (name, parts) in [
        (
            "single",
            [
                "cannot run on node localhost (amd64): image",
                "is for arm64",
            ],
        ),
        (
            "index",
            ["no match for the platform of the node", "is for arm64"],
        ),
        (
            "mislabelled",
            ["exec format error", "claims to be for amd64"],
        ),
        (
            "once",
            [
                "cannot run on node localhost (amd64): image",
                "is for arm64",
            ],
        ),
    ] {
        let [first, second] = parts;
        let told = cluster
            .wait_for_event_with(name, "WrongArchitecture", second)
            .await;
        println!("{name}: {told}");
        assert!(told.contains(first), "{name}: {told}");
    }
    assert_eq!(archaware.stop().await, 0);
}
