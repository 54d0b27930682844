//! The first start in a cluster of 5,000 nodes with 50,000 pods that run: they get their tolerations, then the nodes their taints.

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
use tokio::sync::watch;

use testsupport::cluster::{Controller, TestCluster, eventually, pod, pod_spec};

use crate::{floor, median, process, report, scale};

/// Pods that a bare client patches.
const BARE: usize = 10_000;
/// Interval of reading the metrics.
const LOOK: Duration = Duration::from_millis(500);

pub(crate) async fn bound_pods(cluster: &TestCluster) {
    scale::fill(cluster).await;
    let floor = floor(cluster).await;
    let other = somebody_else(cluster).await;
    let mut alone = Vec::new();
    for _ in 0..200 {
        alone.push(latency(&other).await);
    }
    let (done, is_done) = watch::channel(false);
    let beside = tokio::spawn(async move {
        let mut values = Vec::new();
        while !*is_done.borrow() {
            values.push(latency(&other).await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        values
    });

    let started = Instant::now();
    let archaware = Controller::start_quiet(cluster, "");
    let tolerated = "archaware_bound_pods_total{result=\"tolerated\"}";
    eventually("tolerations of all pods", scale::LONG, || async {
        tokio::time::sleep(LOOK).await;
        (archaware.metric(tolerated).await as usize >= scale::PODS).then_some(())
    })
    .await;
    let took = started.elapsed().as_secs_f64();
    let rate = scale::PODS as f64 / took;
    report(
        "50,000 pods that run: tolerations per second",
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
        Some(median(&mut alone)),
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
    assert_eq!(archaware.stop().await, 0);
}

async fn requests(archaware: &Controller, prefix: &str) {
    for (what, verb, result) in [("lists", "list", "2xx"), ("patches", "patch", "2xx")] {
        let name = format!("archaware_api_requests_total{{verb=\"{verb}\",result=\"{result}\"}}");
        let count = archaware.metric(&name).await;
        report(&format!("{prefix}{what}"), count, None, "", "");
    }
}

/// Patches per second of a client that knows its pods.
async fn floor(cluster: &TestCluster) -> f64 {
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
    let floor = floor::patch_all(&cluster.client, name, scale::AT_ONCE).await;
    cluster.delete_pods(name).await;
    floor
}

/// A client that shares the priority level of the API server (`workload-low`) with archaware, as every `ServiceAccount` does.
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

/// Milliseconds of one request.
async fn latency(nodes: &Api<Node>) -> f64 {
    let started = Instant::now();
    nodes.get("node-7").await.unwrap();
    started.elapsed().as_secs_f64() * 1000.0
}
