//! Latency and throughput of decisions.

use std::time::{Duration, Instant};

use archaware::cluster::objects::Pod as SlimPod;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::PostParams};
use kube_runtime::{WatchStreamExt, watcher};
use serde_json::json;

use testsupport::cluster::{Controller, TestCluster, eventually, pod, pod_spec};

use crate::{floor, median, process, report};

/// Samples of each, in turns of [`TURN`].
const SAMPLES: usize = 200;
const TURN: usize = 25;
const BACKLOG: usize = 2000;
/// The value of `concurrency.writes`.
const CONNECTIONS: usize = 32;

/// A pod that no scheduler handles, so that only the API server is measured.
pub(crate) fn waiting_pod(cluster: &TestCluster, name: &str, image: &str) -> Pod {
    let mut spec = pod_spec(&[cluster.image(image)]);
    spec["schedulerName"] = json!("none");
    serde_json::from_value(pod(name, spec, json!({}))).unwrap()
}

fn is_tolerating(pod: &SlimPod) -> bool {
    let tolerations = pod.spec.tolerations.as_deref().unwrap_or_default();
    tolerations
        .iter()
        .any(|toleration| toleration["key"] == "kubernetes.io/arch")
}

/// Creates pods one after the other: milliseconds from the API server's response to the toleration
/// on a watch.
async fn latencies(cluster: &TestCluster, namespace: &str, turn: usize) -> Vec<f64> {
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let slim: Api<SlimPod> = Api::namespaced(cluster.client.clone(), namespace);
    let seen = watcher(slim, watcher::Config::default()).applied_objects();
    futures::pin_mut!(seen);
    let mut values = Vec::new();
    for n in 0..TURN {
        let name = format!("latency-{turn}-{n}");
        let started = Instant::now();
        api.create(
            &PostParams::default(),
            &waiting_pod(cluster, &name, "arm64"),
        )
        .await
        .unwrap();
        while let Some(pod) = seen.try_next().await.unwrap() {
            if pod.name_any() == name && is_tolerating(&pod) {
                break;
            }
        }
        values.push(started.elapsed().as_secs_f64() * 1000.0);
    }
    values
}

/// Two namespaces: archaware decides about the pods of one, the minimal client about the other.
async fn namespaces(cluster: &TestCluster) -> (String, String) {
    let bare = format!("{}-bare", cluster.namespace);
    cluster
        .create_namespace(&bare, json!({"archaware.dev/mode": "ignore"}))
        .await;
    (cluster.namespace.clone(), bare)
}

pub(crate) async fn latency(cluster: &TestCluster) {
    let (ours, bare) = namespaces(cluster).await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start_quiet(cluster, "");
    cluster.wait_until_tainted().await;
    // The image and all connections are warm.
    cluster.create_pod("warm", &["arm64"]).await;
    cluster.wait_until_bound("warm").await;
    let client = floor::watch_and_patch(cluster.client.clone(), &bare);
    let (mut of_bare, mut of_ours) = (Vec::new(), Vec::new());
    for turn in 0..SAMPLES / TURN {
        of_bare.extend(latencies(cluster, &bare, turn).await);
        of_ours.extend(latencies(cluster, &ours, turn).await);
    }
    client.abort();
    let p50 = (median(&mut of_ours), median(&mut of_bare));
    report(
        "pod created to toleration on a watch, warm, p50",
        p50.0,
        Some(p50.1),
        "ms",
        "<= 1.5x",
    );
    let p99 = (of_ours[SAMPLES * 99 / 100], of_bare[SAMPLES * 99 / 100]);
    report("  the same, p99", p99.0, Some(p99.1), "ms", "");
}

/// Creates waiting pods in a namespace that archaware ignores.
pub(crate) async fn backlog(
    cluster: &TestCluster,
    name: &str,
    count: usize,
    image: impl Fn(usize) -> String,
) -> String {
    let namespace = format!("{}-{name}", cluster.namespace);
    cluster
        .create_namespace(&namespace, json!({"archaware.dev/mode": "ignore"}))
        .await;
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), &namespace);
    let create = futures::stream::iter(0..count).map(|n| {
        let pod = waiting_pod(cluster, &format!("backlog-{n}"), &image(n));
        let api = api.clone();
        async move { api.create(&PostParams::default(), &pod).await.unwrap() }
    });
    create
        .buffer_unordered(CONNECTIONS)
        .for_each(|_| async {})
        .await;
    namespace
}

/// Three rounds each, alternating, because the load of the machine varies.
pub(crate) async fn throughput(cluster: &TestCluster) {
    cluster.create_three_nodes().await;
    let archaware = Controller::start_quiet(cluster, "");
    cluster.wait_until_tainted().await;
    let (mut floors, mut rates, mut cpus) = (Vec::new(), Vec::new(), Vec::new());
    let images = |n: usize| ["arm64", "multi", "amd64"][n % 3].to_owned();
    for round in 0..3 {
        let bare = backlog(cluster, &format!("bare-{round}"), BACKLOG, images).await;
        floors.push(floor::patch_all(&cluster.client, &bare, CONNECTIONS).await);
        cluster.delete_pods(&bare).await;

        let ours = backlog(cluster, &format!("ours-{round}"), BACKLOG, images).await;
        let metric = "archaware_writes_total{kind=\"Pod\",result=\"applied\"}";
        let before = archaware.metric(metric).await as usize;
        let cpu = process::cpu(&archaware);
        cluster.kubectl(&["annotate", "namespace", &ours, "archaware.dev/mode-"]);
        let started = Instant::now();
        eventually("all pods placed", Duration::from_mins(2), || async {
            (archaware.metric(metric).await as usize >= before + BACKLOG).then_some(())
        })
        .await;
        rates.push(BACKLOG as f64 / started.elapsed().as_secs_f64());
        cpus.push((process::cpu(&archaware) - cpu) / BACKLOG as f64 * 1e6);
        cluster.delete_pods(&ours).await;
    }
    let (rate, floor) = (median(&mut rates), median(&mut floors));
    report(
        "2,000 waiting pods decided and patched, per second",
        rate,
        Some(floor),
        "",
        ">= 0.8x",
    );
    report(
        "  CPU of archaware for one of them",
        median(&mut cpus),
        None,
        "us",
        "",
    );
    assert_eq!(archaware.stop().await, 0);
}
