//! Pods that run on a node before it is tainted.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use k8s_openapi::api::{apps::v1::Deployment, core::v1::Pod};
use kube::{
    ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::net::UdpSocket;

use super::*;

/// A pod that was bound by somebody else than the scheduler; `change` its `spec`.
async fn run_on(cluster: &TestCluster, node: &str, name: &str, change: impl FnOnce(&mut Value)) {
    let mut spec = pod_spec(&[cluster.image("amd64")]);
    spec["nodeName"] = json!(node);
    change(&mut spec);
    cluster.create::<Pod>(pod(name, spec, json!({}))).await;
}

/// `key=value:effect` of the tolerations of archaware's taints.
fn tolerations_of(pod: &Pod) -> Vec<String> {
    let all = pod.spec.as_ref().unwrap().tolerations.clone();
    let ours = all
        .unwrap_or_default()
        .into_iter()
        .filter(|one| one.key.as_deref().is_some_and(|key| key.ends_with("/arch")));
    ours.map(|one| {
        format!(
            "{}={}:{}",
            one.key.unwrap(),
            one.value.unwrap_or_default(),
            one.effect.unwrap_or_default()
        )
    })
    .collect()
}

async fn tolerations(cluster: &TestCluster, name: &str) -> Vec<String> {
    tolerations_of(&cluster.pods().get(name).await.unwrap())
}

/// Waits until the pod tolerates exactly this.
async fn tolerates(cluster: &TestCluster, name: &str, expected: &[&str]) {
    eventually(&format!("{expected:?} of {name}"), DEADLINE, || async {
        (tolerations(cluster, name).await == expected).then_some(())
    })
    .await;
}

async fn set_status(cluster: &TestCluster, name: &str, status: Value) {
    let status = Patch::Merge(json!({ "status": status }));
    let parameters = PatchParams::default();
    let pods = cluster.pods();
    pods.patch_status(name, &parameters, &status).await.unwrap();
}

/// Whether a node has archaware's taint while a pod on it does not tolerate it.
async fn is_early(cluster: &TestCluster) -> bool {
    let nodes = cluster.nodes().list(&ListParams::default()).await.unwrap();
    let taints: BTreeMap<String, Option<String>> = nodes
        .iter()
        .map(|node| {
            let ours = taints(node).into_iter().find(|one| one.contains("/arch="));
            (node.name_any(), ours)
        })
        .collect();
    // Read later: a toleration is never removed.
    for pod in cluster.pods().list(&ListParams::default()).await.unwrap() {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        if !pod.name_any().starts_with("runs-") {
            continue;
        }
        if let Some(taint) = taints[&node.unwrap()].as_ref()
            && !tolerations_of(&pod).contains(taint)
        {
            return true;
        }
    }
    false
}

const AMD64: &str = "kubernetes.io/arch=amd64:NoSchedule";
const ARM64: &str = "kubernetes.io/arch=arm64:NoSchedule";

/// Installed beside pods that run; then the key and the effect change; then an earlier version
/// without tolerations is replaced.
#[tokio::test]
async fn running_pods_tolerate_the_taint_before_it_comes() {
    let cluster = TestCluster::take().await;
    for architecture in ["amd64", "arm64"] {
        cluster.create_node(architecture, architecture).await;
    }
    for n in 0..40 {
        let node = ["amd64", "arm64"][n % 2];
        run_on(&cluster, node, &format!("runs-{n}"), |_| {}).await;
    }
    let exists = json!([{"key": "kubernetes.io/arch", "operator": "Exists"}]);
    run_on(&cluster, "arm64", "tolerant", |spec| {
        spec["tolerations"] = exists;
    })
    .await;
    run_on(&cluster, "amd64", "finished", |_| {}).await;
    set_status(&cluster, "finished", json!({"phase": "Succeeded"})).await;
    let mut ignored = pod_spec(&[cluster.image("amd64")]);
    ignored["nodeName"] = json!("arm64");
    let ignored = pod("ignored", ignored, json!({"archaware.dev/mode": "ignore"}));
    cluster.create::<Pod>(ignored).await;
    let mut mirror = pod_spec(&[cluster.image("amd64")]);
    mirror["nodeName"] = json!("arm64");
    let mirror = pod(
        "mirror",
        mirror,
        json!({"kubernetes.io/config.mirror": "x"}),
    );
    cluster.create::<Pod>(mirror).await;

    // What runs on arm64 is an image for amd64.
    let (status, plan, error) = cluster.archaware(&["plan", "-o", "json"]);
    assert_eq!(status, 0, "{error}");
    let plan: Vec<Value> = serde_json::from_str(&plan).unwrap();
    let of = |action: &'static str| plan.iter().filter(move |row| row["action"] == action);
    let details: Vec<_> = of("taint")
        .map(|row| row["detail"].as_str().unwrap())
        .collect();
    assert_eq!(
        details,
        [
            "kubernetes.io/arch=amd64:NoSchedule; before, 20 pods that run there get a toleration",
            "kubernetes.io/arch=arm64:NoSchedule; before, 20 pods that run there get a toleration"
        ]
    );
    // One tolerates the taint whatever its images are, and is on the wrong node all the same.
    let misplaced: BTreeSet<_> = of("misplaced").map(|row| row["name"].as_str()).collect();
    assert!(
        misplaced.len() == 21 && misplaced.contains(&Some("tolerant")),
        "{plan:?}"
    );

    let archaware = Controller::start(&cluster, "");
    never(
        "a taint before its pods tolerate it",
        cluster.wait_until_tainted(),
        || is_early(&cluster),
    )
    .await;
    for n in 0..40 {
        let expected = [AMD64, ARM64][n % 2];
        assert_eq!(
            tolerations(&cluster, &format!("runs-{n}")).await,
            [expected]
        );
    }
    for untouched in ["finished", "ignored", "mirror"] {
        assert_eq!(
            tolerations(&cluster, untouched).await,
            [""; 0],
            "{untouched}"
        );
    }
    // A pod created from the YAML of one that runs is decided without the addition.
    let one = cluster.pods().get("runs-1").await.unwrap();
    let added = one.annotations()["archaware.dev/added"].clone();
    assert!(added.contains("arm64"), "{added}");
    assert_eq!(one.metadata.generation, Some(2), "one change of its spec");
    assert_eq!(archaware.stop().await, 0);
}

/// With another key, and after a version that gave running pods nothing.
#[tokio::test]
async fn a_taint_moves_when_running_pods_tolerate_it() {
    const OTHER: &str = "example.com/arch=arm64:NoSchedule";
    let cluster = TestCluster::take().await;
    cluster.create_node("arm64", "arm64").await;
    for n in 0..20 {
        run_on(&cluster, "arm64", &format!("runs-{n}"), |_| {}).await;
    }
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    assert_eq!(archaware.stop().await, 0);
    let config = "taint: {key: example.com/arch}\n";
    let archaware = Controller::start(&cluster, config);
    let moved = eventually("a taint with the new key", DEADLINE, || async {
        let node = cluster.nodes().get("arm64").await.ok()?;
        taints(&node).contains(OTHER).then_some(())
    });
    never("a moved taint before its pods tolerate it", moved, || {
        is_early(&cluster)
    })
    .await;
    assert_eq!(tolerations(&cluster, "runs-1").await, [ARM64, OTHER]);
    assert_eq!(archaware.stop().await, 0);

    // As an earlier version left it: the node is tainted, and the pod tolerates nothing.
    run_on(&cluster, "arm64", "late", |_| {}).await;
    let config_file = cluster.dir().join("other-key.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&config_file, format!("{head}{config}")).unwrap();
    let config_file = config_file.to_str().unwrap();
    let (_, plan, _) = cluster.archaware(&["plan", "-o", "json", "--config", config_file]);
    assert!(
        plan.contains("1 pod that runs there gets a toleration"),
        "{plan}"
    );
    let archaware = Controller::start(&cluster, config);
    tolerates(&cluster, "late", &[OTHER]).await;
    // Nothing is written twice.
    archaware
        .wait_for_metric("archaware_bound_pods_total{result=\"tolerated\"} 1")
        .await;
    assert_eq!(tolerations(&cluster, "runs-1").await, [ARM64, OTHER]);
}

/// The webhook taints a node when it registers; pods may be bound to it already, for example when
/// its kubelet made its Node anew. And the taint may be removed by somebody, and pods come
/// meanwhile.
#[tokio::test]
async fn nodes_that_come_with_pods_are_looked_at() {
    let cluster = TestCluster::take().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    cluster.create_node("arm64", "arm64").await;
    cluster.wait_until_tainted().await;
    // Excluded from the webhook, as if it had been created before.
    let out = cluster.create_opted_out_namespace().await;
    let run = |name: &'static str, node: &'static str| {
        let (mut spec, out) = (pod_spec(&[cluster.image("amd64")]), &out);
        spec["nodeName"] = json!(node);
        let pods: kube::Api<Pod> = kube::Api::namespaced(cluster.client.clone(), out);
        async move {
            let pod = serde_json::from_value(pod(name, spec, json!({}))).unwrap();
            pods.create(&Default::default(), &pod).await.unwrap();
        }
    };
    let pods: kube::Api<Pod> = kube::Api::namespaced(cluster.client.clone(), &out);
    let become_tolerant = |name: &'static str| {
        let pods = pods.clone();
        async move {
            eventually(&format!("the toleration of {name}"), DEADLINE, || async {
                let pod = pods.get(name).await.ok()?;
                architectures_of(&pod).contains("arm64").then_some(())
            })
            .await;
        }
    };
    run("early", "new").await;
    cluster.create_node("new", "arm64").await;
    become_tolerant("early").await;
    run("meanwhile", "arm64").await;
    cluster.kubectl(&["taint", "node", "arm64", "kubernetes.io/arch-"]);
    eventually("the taint again", DEADLINE, || async {
        let node = cluster.nodes().get("arm64").await.ok()?;
        taints(&node).contains(ARM64).then_some(())
    })
    .await;
    // It came first.
    let pod = pods.get("meanwhile").await.unwrap();
    assert_eq!(architectures_of(&pod), ["arm64".to_owned()].into());
    assert_eq!(archaware.stop().await, 0);
}

/// Their author set `spec.nodeName`: they run there whatever their images are, and only the webhook
/// sees them before.
#[tokio::test]
async fn pods_that_are_created_on_a_node_come_with_their_toleration() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    let _archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let ignore = json!({"archaware.dev/mode": "ignore"});
    for (name, annotations, expected) in [
        ("decided", json!({}), vec!["any".to_owned()]),
        ("ignored", ignore, vec![]),
    ] {
        let mut spec = pod_spec(&["registry.invalid/absent".to_owned()]);
        spec["nodeName"] = json!("amd64");
        let pod: Pod = cluster.create(pod(name, spec, annotations)).await;
        let tolerated: Vec<_> = architectures_of(&pod).into_iter().collect();
        assert_eq!(tolerated, expected, "{name}");
        let spec = pod.spec.unwrap();
        assert!(
            spec.affinity.is_none() && spec.scheduling_gates.is_none(),
            "{name}"
        );
    }
}

/// Killed while it works, and begun again: every pod gets its toleration once.
#[tokio::test]
async fn what_was_begun_is_finished_by_the_next() {
    const PODS: usize = 1500;
    let cluster = TestCluster::take().await;
    for n in 0..20 {
        cluster.create_node(&format!("node-{n}"), "arm64").await;
    }
    let names: Vec<String> = (0..PODS).map(|n| format!("runs-{n}")).collect();
    for some in names.chunks(32) {
        let all = some.iter().enumerate().map(|(n, name)| {
            let node = format!("node-{}", n % 20);
            let cluster = &cluster;
            async move { run_on(cluster, &node, name, |_| {}).await }
        });
        futures::future::join_all(all).await;
    }
    let tolerant = || async {
        let pods = cluster.pods().list(&ListParams::default()).await.unwrap();
        let has = |pod: &&Pod| !architectures_of(pod).is_empty();
        pods.iter().filter(has).count()
    };
    let mut kills = 0;
    loop {
        let archaware = Controller::start(&cluster, "concurrency: {writes: 2}\n");
        let before = tolerant().await;
        let (enough, done) = ((before + PODS / 4).min(PODS), kills == 2);
        if done {
            cluster.wait_until_tainted().await;
            break;
        }
        eventually("some pods", DEADLINE, || async {
            (tolerant().await >= enough).then_some(())
        })
        .await;
        assert!(tolerant().await < PODS, "it was killed too late");
        let nodes = cluster.nodes().list(&ListParams::default()).await.unwrap();
        assert!(nodes.iter().all(|node| taints(node).is_empty()));
        drop(archaware);
        kills += 1;
    }
    let pods = cluster.pods().list(&ListParams::default()).await.unwrap();
    for pod in &pods {
        assert_eq!(pod.metadata.generation, Some(2), "{}", pod.name_any());
    }
    assert_eq!(tolerant().await, PODS);
}

/// A policy of the cluster forbids changes of pods. A taint that evicts nobody comes all the same;
/// another one waits.
#[tokio::test]
async fn pods_that_cannot_be_changed() {
    for (effect, is_tainted) in [("NoSchedule", true), ("NoExecute", false)] {
        let cluster = TestCluster::take().await;
        cluster.create_node("amd64", "amd64").await;
        run_on(&cluster, "amd64", "protected", |_| {}).await;
        let policy = cluster.forbid_tolerations().await;
        let archaware = Controller::start(&cluster, &format!("taint: {{effect: {effect}}}\n"));
        if is_tainted {
            archaware
                .wait_for_log("the pod gets no toleration for the taint of its node")
                .await;
            cluster.wait_until_tainted().await;
        } else {
            archaware
                .wait_for_log("its taint would evict a pod that cannot be patched")
                .await;
            let waiting = "archaware_nodes_waiting_for_bound_pods{} 1";
            archaware.wait_for_metric(waiting).await;
            let node = cluster.nodes().get("amd64").await.unwrap();
            assert_eq!(taints(&node).len(), 0);
        }
        // It is tried again, before and after the taint.
        drop(policy);
        let taint = format!("kubernetes.io/arch=amd64:{effect}");
        tolerates(&cluster, "protected", &[&taint]).await;
        cluster.wait_until_tainted().await;
        let pod = cluster.pods().get("protected").await.unwrap();
        assert!(pod.metadata.deletion_timestamp.is_none());
    }
}

/// `taint.boundPods: leave`, and then the default, for a node that was not selected before.
#[tokio::test]
async fn pods_may_be_left_as_they_are() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    run_on(&cluster, "amd64", "runs-1", |_| {}).await;
    let leave = Controller::start(&cluster, "taint: {boundPods: leave}\n");
    cluster.wait_until_tainted().await;
    assert_eq!(leave.stop().await, 0);
    assert_eq!(tolerations(&cluster, "runs-1").await, [""; 0]);

    let selected = |selector| format!("taint: {{nodeSelector: \"{selector}\"}}\n");
    let other = Controller::start(&cluster, &selected("pool=other"));
    other
        .wait_for_log("taint or its record removed from node")
        .await;
    assert_eq!(other.stop().await, 0);
    assert_eq!(tolerations(&cluster, "runs-1").await, [""; 0]);
    let _all = Controller::start(&cluster, &selected(""));
    never(
        "a taint before its pods tolerate it",
        cluster.wait_until_tainted(),
        || is_early(&cluster),
    )
    .await;
    assert_eq!(tolerations(&cluster, "runs-1").await, [AMD64]);
}

/// Deployments whose pods run on nodes that are not tainted.
async fn deploy(cluster: &TestCluster, replicas: usize) {
    for architecture in ["amd64", "arm64"] {
        cluster.create_node(architecture, architecture).await;
        let mut spec = pod_spec(&[cluster.image(architecture)]);
        // Their authors did what was needed before.
        spec["nodeSelector"] = json!({"kubernetes.io/arch": architecture});
        let deployment = json!({"metadata": {"name": architecture}, "spec": {
            "replicas": replicas / 2,
            "selector": {"matchLabels": {"app": architecture}},
            "template": {"metadata": {"labels": {"app": architecture}}, "spec": spec},
        }});
        cluster.create::<Deployment>(deployment).await;
    }
    eventually("pods that run", 2 * DEADLINE, || async {
        let pods = cluster.pods().list(&ListParams::default()).await.ok()?;
        let bound = pods
            .iter()
            .filter(|pod| pod.spec.as_ref().unwrap().node_name.is_some());
        (bound.count() == replicas).then_some(())
    })
    .await;
}

/// The pods by their uid.
async fn uids(cluster: &TestCluster) -> BTreeSet<String> {
    let pods = cluster.pods().list(&ListParams::default()).await.unwrap();
    let stays = |pod: &&Pod| pod.metadata.deletion_timestamp.is_none();
    pods.iter()
        .filter(stays)
        .map(|pod| pod.uid().unwrap())
        .collect()
}

/// A tenant runs pods whose registries never answer. With `NoExecute` the images of each matter.
#[tokio::test]
async fn registries_that_hang_delay_no_taint_for_long() {
    const PODS: usize = 512;
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    // No name is ever answered.
    let _name_server = UdpSocket::bind("127.53.53.54:53").await.unwrap();
    let resolv_conf = cluster.dir().join("resolv.conf");
    std::fs::write(&resolv_conf, "nameserver 127.53.53.54\n").unwrap();
    for number in 0..PODS {
        // Each at a domain of its own: what is known of one host says nothing of another.
        run_on(&cluster, "amd64", &format!("runs-{number}"), |spec| {
            spec["containers"][0]["image"] = json!(format!("r.silent{number}.test/app"));
        })
        .await;
    }
    let config = "taint: {effect: NoExecute}\nresolution: {budget: 8s}\n";
    let started = Instant::now();
    let archaware = Controller::start_with_resolv_conf(&cluster, config, &resolv_conf);
    cluster.wait_until_tainted().await;
    let took = started.elapsed();
    println!("{PODS} pods with registries that hang: tainted after {took:.0?}");
    // It would be eight times the budget, and more, if each pod waited for its registry.
    assert!(took < Duration::from_secs(50), "{took:?}");
    assert!(!is_early(&cluster).await);
    assert_eq!(archaware.stop().await, 0);
}

/// The descheduler with the default policy of its chart evicts pods that do not tolerate a taint
/// with `NoSchedule` of their node. With `NoExecute` it is Kubernetes itself that would. After an
/// installation, an upgrade, another key and another effect.
#[tokio::test]
async fn the_descheduler_evicts_no_running_pod() {
    const PODS: u16 = 500;
    let cluster = TestCluster::take().await;
    deploy(&cluster, PODS.into()).await;
    let before = uids(&cluster).await;
    let log = cluster.deschedule();
    assert_eq!(uids(&cluster).await, before, "{log}");
    // Each group begins where no node is tainted, with a key that no pod tolerates.
    for group in [
        &[
            "taint: {key: example.com/a}\n",
            "taint: {key: example.com/b}\n",
        ][..],
        // An installation by a version that left running pods as they were, its upgrade, and
        // another effect.
        &[
            "taint: {key: example.com/c, boundPods: leave}\n",
            "taint: {key: example.com/c}\n",
            "taint: {key: example.com/c, effect: NoExecute}\n",
        ],
        &[
            "taint: {key: example.com/d, effect: NoExecute}\n",
            "taint: {key: example.com/e, effect: NoExecute}\n",
        ],
    ] {
        let mut was_left = false;
        for config in group {
            let archaware = Controller::start(&cluster, config);
            if config.contains("leave") {
                cluster.wait_until_tainted().await;
            } else {
                // In an upgrade the taint is there; otherwise the pods are looked at again after
                // it.
                let last = if was_left { "tolerated" } else { "unchanged" };
                let looked_at = format!("archaware_bound_pods_total{{result=\"{last}\"}}");
                eventually("looks at all pods", 2 * DEADLINE, || async {
                    (archaware.metric(&looked_at).await >= f64::from(PODS)).then_some(())
                })
                .await;
                let log = cluster.deschedule();
                assert_eq!(uids(&cluster).await, before, "{config}: {log}");
            }
            was_left = config.contains("leave");
            assert_eq!(archaware.stop().await, 0);
        }
        let (status, output, error) = cluster.archaware(&["clean"]);
        assert_eq!(status, 0, "{output}{error}");
    }
}

/// Without their toleration it evicts them, so that the test above can fail.
#[tokio::test]
async fn the_descheduler_evicts_pods_that_are_left_as_they_are() {
    let cluster = TestCluster::take().await;
    deploy(&cluster, 10).await;
    let before = uids(&cluster).await;
    let archaware = Controller::start(&cluster, "taint: {boundPods: leave}\n");
    cluster.wait_until_tainted().await;
    assert_eq!(archaware.stop().await, 0);
    cluster.deschedule();
    let stay = uids(&cluster).await.intersection(&before).count();
    assert_eq!(stay, 0);
}
