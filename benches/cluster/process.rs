//! Memory and CPU of the process.

use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use testsupport::cluster::{Controller, DEADLINE, TestCluster, eventually, pod, pod_spec};

use crate::report;

const NODES: usize = 1000;
const PODS: usize = 20_000;
const AT_ONCE: usize = 32;

/// A field of `/proc/PID/status`, in MiB.
pub(crate) fn memory(controller: &Controller, field: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", controller.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<f64>()
        .unwrap()
        / 1024.0
}

/// CPU time used so far, in seconds.
pub(crate) fn cpu(controller: &Controller) -> f64 {
    controller.cpu_time().as_secs_f64()
}

async fn ready(controller: &Controller) {
    eventually("readiness", DEADLINE, || async {
        (controller.http("/readyz").await.0 == 200).then_some(())
    })
    .await;
}

pub(crate) async fn memory_idle(cluster: &TestCluster) {
    cluster.create_three_nodes().await;
    let archaware = Controller::start_quiet(cluster, "");
    ready(&archaware).await;
    cluster.wait_until_tainted().await;
    cluster.create_pod("one", &["arm64"]).await;
    cluster.wait_until_bound("one").await;
    report(
        "resident memory, idle",
        memory(&archaware, "VmRSS"),
        None,
        "MiB",
        "<= 28",
    );
    report("  peak", memory(&archaware, "VmHWM"), None, "MiB", "");
    assert_eq!(archaware.stop().await, 0);
}

pub(crate) async fn large_cluster(cluster: &TestCluster) {
    let nodes = futures::stream::iter(0..NODES).map(|n| async move {
        cluster
            .create_node(&format!("node-{n}"), ["amd64", "arm64"][n % 2])
            .await;
    });
    nodes
        .buffer_unordered(AT_ONCE)
        .for_each(|()| async {})
        .await;
    let api: Api<Pod> = cluster.pods();
    let pods = futures::stream::iter(0..PODS).map(|n| {
        let mut spec = pod_spec(&[cluster.image("multi")]);
        spec["nodeName"] = json!(format!("node-{}", n % NODES));
        let (api, pod) = (
            api.clone(),
            serde_json::from_value(pod(&format!("bound-{n}"), spec, json!({}))).unwrap(),
        );
        async move { api.create(&PostParams::default(), &pod).await.unwrap() }
    });
    pods.buffer_unordered(AT_ONCE).for_each(|_| async {}).await;
    let archaware = Controller::start_quiet(cluster, "");
    ready(&archaware).await;
    cluster.wait_until_tainted().await;
    report(
        "resident memory, 20,000 bound pods and 1,000 nodes",
        memory(&archaware, "VmRSS"),
        None,
        "MiB",
        "idle + 5",
    );
    report("  peak", memory(&archaware, "VmHWM"), None, "MiB", "");
    heartbeats(cluster, &archaware, NODES).await;
    assert_eq!(archaware.stop().await, 0);
}

/// A thousand heartbeats per second, or as many as the API server accepts; CPU is scaled to a
/// thousand.
pub(crate) async fn heartbeats(cluster: &TestCluster, archaware: &Controller, among: usize) {
    let requests = "archaware_writes_total{kind=\"Node\",result=\"applied\"}";
    let (before, patches) = (cpu(archaware), archaware.metric(requests).await);
    let (started, time) = (Instant::now(), Duration::from_secs(10));
    let nodes: Api<Node> = cluster.nodes();
    let beats = futures::stream::iter(0..).take_while(|_| std::future::ready(started.elapsed() < time)).map(|n| {
        let beat = json!({"status": {"conditions": [{"type": "Ready", "status": "True", "message": format!("beat {n}")}]}});
        let (nodes, patch) = (nodes.clone(), Patch::Strategic(beat));
        async move {
            nodes.patch_status(&format!("node-{}", n % among), &PatchParams::default(), &patch).await.unwrap();
        }
    });
    let count = beats.buffer_unordered(AT_ONCE).count().await;
    let rate = count as f64 / started.elapsed().as_secs_f64();
    let used = (cpu(archaware) - before) / count as f64 * 1000.0 * 100.0;
    let written = archaware.metric(requests).await - patches;
    report("heartbeats sent, per second", rate, None, "", "");
    report(
        "  CPU for 1,000 heartbeats a second, % of a core",
        used,
        None,
        "%",
        "< 5%",
    );
    report("  patches that they caused", written, None, "", "0");
}
