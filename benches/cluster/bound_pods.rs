//! The first start in a cluster of 5,000 nodes with 50,000 pods that run: they get their
//! tolerations, then the nodes their taints.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Config,
    api::PostParams,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle};

use testsupport::cluster::{Controller, TestCluster, eventually, pod, pod_spec};

use crate::{floor, median, process, report, scale};

/// Pods that a bare client patches.
const BARE: usize = 10_000;
/// Interval of reading the metrics.
const LOOK: Duration = Duration::from_millis(500);

pub(crate) async fn bound_pods(cluster: &TestCluster) {
    scale::fill(cluster).await;
    let other = somebody_else(cluster).await;
    let (floor, mut beside_floor) = floor(cluster, &other).await;
    let (beside, done) = latencies(other);

    let started = Instant::now();
    let archaware = Controller::start_quiet(cluster, "");
    let tolerated = "archaware_bound_pods_total{result=\"tolerated\"}";
    eventually("the first toleration", scale::LONG, || async {
        tokio::time::sleep(LOOK / 10).await;
        (archaware.metric(tolerated).await > 0.5).then_some(())
    })
    .await;
    let began = started.elapsed().as_secs_f64();
    eventually("tolerations of all pods", scale::LONG, || async {
        tokio::time::sleep(LOOK).await;
        (archaware.metric(tolerated).await as usize >= scale::PODS).then_some(())
    })
    .await;
    let took = started.elapsed().as_secs_f64();
    report(
        "50,000 bound pods: until all tolerate the taint",
        took,
        None,
        "s",
        "",
    );
    let rate = scale::PODS as f64 / (took - began);
    report(
        "  tolerations per second, from the first one",
        rate,
        Some(floor),
        "",
        ">= 0.9x",
    );
    done.send_replace(true);
    let mut beside = beside.await.unwrap();
    report(
        "  median of another client's request meanwhile",
        median(&mut beside),
        Some(median(&mut beside_floor)),
        "ms",
        "",
    );
    scale::tainted(&archaware).await;
    let taints = started.elapsed().as_secs_f64();
    report("  5,000 taints after that", taints - took, None, "s", "");
    let unchanged = "archaware_bound_pods_total{result=\"unchanged\"}";
    eventually("the second look", scale::LONG, || async {
        tokio::time::sleep(LOOK).await;
        (archaware.metric(unchanged).await as usize >= scale::PODS).then_some(())
    })
    .await;
    requests(&archaware, "  ").await;
    let peak = process::memory(&archaware, "VmHWM");
    report("  peak memory", peak, None, "MiB", "<= 60");
    assert_eq!(archaware.stop().await, 0);

    let archaware = Controller::start_quiet(cluster, "");
    eventually("another look", scale::LONG, || async {
        tokio::time::sleep(LOOK).await;
        (archaware.metric(unchanged).await as usize >= scale::PODS).then_some(())
    })
    .await;
    requests(&archaware, "  the next start: ").await;
    assert_eq!(archaware.patches().await, 0, "nothing is left to do");
    assert_eq!(archaware.stop().await, 0);
}

async fn requests(archaware: &Controller, prefix: &str) {
    let of = |kind: &str| format!("archaware_writes_total{{kind=\"{kind}\",result=\"applied\"}}");
    let lists = "archaware_api_requests_total{verb=\"list\",result=\"2xx\"}".to_owned();
    for (what, name) in [
        ("lists", lists),
        ("patches of pods", of("Pod")),
        ("patches of nodes", of("Node")),
    ] {
        let count = archaware.metric(&name).await;
        report(&format!("{prefix}{what}"), count, None, "", "");
    }
}

/// Patches per second of a client that knows its pods, and the latencies of another client
/// meanwhile.
async fn floor(cluster: &TestCluster, other: &Api<Node>) -> (f64, Vec<f64>) {
    let name = "bare";
    cluster.create_namespace(name, json!({})).await;
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), name);
    futures::stream::iter(0..BARE)
        .map(|n| {
            let mut spec = pod_spec(&[cluster.image("multi")]);
            spec["nodeName"] = json!(format!("node-{}", n % scale::NODES));
            let pod = pod(&format!("bare-{n}"), spec, json!({}));
            let (api, pod) = (api.clone(), serde_json::from_value(pod).unwrap());
            async move { api.create(&PostParams::default(), &pod).await.unwrap() }
        })
        .buffer_unordered(scale::AT_ONCE)
        .for_each(|_| async {})
        .await;
    let (beside, done) = latencies(other.clone());
    let floor = floor::patch_all(&cluster.client, name, scale::AT_ONCE).await;
    done.send_replace(true);
    cluster.delete_pods(name).await;
    (floor, beside.await.unwrap())
}

/// A client that shares the priority level of the API server (`workload-low`) with archaware, as
/// every `ServiceAccount` does.
async fn somebody_else(cluster: &TestCluster) -> Api<Node> {
    cluster.kubectl(&["-n", "archaware", "create", "serviceaccount", "other"]);
    cluster.kubectl(&[
        "create",
        "clusterrolebinding",
        "other",
        "--clusterrole=cluster-admin",
        "--serviceaccount=archaware:other",
    ]);
    let kubeconfig = cluster.service_account("other");
    let kubeconfig = Kubeconfig::read_from(Path::new(&kubeconfig)).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options);
    Api::all(Client::try_from(config.await.unwrap()).unwrap())
}

/// Milliseconds of its requests, until it is told to stop.
fn latencies(nodes: Api<Node>) -> (JoinHandle<Vec<f64>>, watch::Sender<bool>) {
    let (done, is_done) = watch::channel(false);
    let task = tokio::spawn(async move {
        let mut values = Vec::new();
        while !*is_done.borrow() {
            values.push(latency(&nodes).await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        values
    });
    (task, done)
}

/// Milliseconds of one request.
async fn latency(nodes: &Api<Node>) -> f64 {
    let started = Instant::now();
    nodes.get("node-7").await.unwrap();
    started.elapsed().as_secs_f64() * 1000.0
}
