//! A cluster of 5,000 nodes with 50,000 pods, then 10,000 new pods at once.

use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::PostParams};
use serde_json::json;

use testsupport::cluster::{Controller, TestCluster, eventually, pod, pod_spec};

use crate::{floor, process, report, speed};

pub(crate) const NODES: usize = 5000;
pub(crate) const PODS: usize = 50_000;
const ARRIVING: usize = 10_000;
/// How many of the new pods have an image that does not exist.
const FAILING: usize = 500;
pub(crate) const AT_ONCE: usize = 32;
/// Interval of reading the metrics.
const LOOK: Duration = Duration::from_millis(500);
/// No step takes this long; a hang is a failure.
pub(crate) const LONG: Duration = Duration::from_mins(10);

pub(crate) async fn scale(cluster: &TestCluster) {
    fill(cluster).await;
    let archaware = start(cluster).await;
    process::heartbeats(cluster, &archaware, NODES).await;
    let steady = process::memory(&archaware, "VmRSS");
    report("  steady memory", steady, None, "MiB", "<= 40");
    relist(cluster, &archaware).await;
    arrivals(cluster, &archaware).await;
    let peak = process::memory(&archaware, "VmHWM");
    report("  peak memory of all that", peak, None, "MiB", "<= 60");
    assert_eq!(archaware.stop().await, 0);
}

pub(crate) async fn fill(cluster: &TestCluster) {
    futures::stream::iter(0..NODES)
        .map(|n| async move {
            let architecture = ["amd64", "arm64"][n % 2];
            cluster
                .create_node(&format!("node-{n}"), architecture)
                .await;
        })
        .buffer_unordered(AT_ONCE)
        .for_each(|()| async {})
        .await;
    let api: Api<Pod> = cluster.pods();
    futures::stream::iter(0..PODS)
        .map(|n| {
            let mut spec = pod_spec(&[cluster.image("multi")]);
            spec["nodeName"] = json!(format!("node-{}", n % NODES));
            let pod = pod(&format!("bound-{n}"), spec, json!({}));
            let (api, pod) = (api.clone(), serde_json::from_value(pod).unwrap());
            async move { api.create(&PostParams::default(), &pod).await.unwrap() }
        })
        .buffer_unordered(AT_ONCE)
        .for_each(|_| async {})
        .await;
}

pub(crate) async fn tainted(archaware: &Controller) {
    eventually("taints on all nodes", LONG, || async {
        let mut tainted = 0.0;
        for architecture in ["amd64", "arm64"] {
            let of = format!("archaware_nodes{{architecture=\"{architecture}\",tainted=\"true\"}}");
            tainted += archaware.metric(&of).await;
        }
        (tainted as usize >= NODES).then_some(())
    })
    .await;
}

async fn start(cluster: &TestCluster) -> Controller {
    let started = Instant::now();
    let hold = "resolution: {failure: {action: hold}}
";
    let archaware = Controller::start_quiet(cluster, hold);
    eventually("readiness", LONG, || async {
        (archaware.http("/readyz").await.0 == 200).then_some(())
    })
    .await;
    let ready = started.elapsed().as_secs_f64();
    report(
        "5,000 nodes, 50,000 pods: from start to ready",
        ready,
        None,
        "s",
        "",
    );
    tainted(&archaware).await;
    let rate = NODES as f64 / started.elapsed().as_secs_f64();
    report("  nodes tainted, per second", rate, None, "", "");
    let peak = process::memory(&archaware, "VmHWM");
    report("  peak memory", peak, None, "MiB", "<= 60");
    archaware
}

/// The API server restarts without its watch history, so that everything is listed again.
async fn relist(cluster: &TestCluster, archaware: &Controller) {
    let before = archaware.patches().await;
    cluster.signal_component("-KILL", "kube-apiserver");
    cluster.restart_components();
    eventually("readiness", LONG, || async {
        let ready = archaware.http("/readyz").await.0 == 200;
        (ready && archaware.metric("archaware_leader").await > 0.5).then_some(())
    })
    .await;
    let pod = speed::waiting_pod(cluster, "witness", "arm64");
    cluster
        .pods()
        .create(&PostParams::default(), &pod)
        .await
        .unwrap();
    eventually("a pod that is placed after it", LONG, || async {
        let pod = cluster.pods().get("witness").await.ok()?;
        (!testsupport::cluster::architectures_of(&pod).is_empty()).then_some(())
    })
    .await;
    let anew = archaware.log().matches("too old resource version").count();
    report(
        "  watches that began anew after a restart of the API server",
        anew as f64,
        None,
        "",
        "4",
    );
    let patches = archaware.patches().await - before - 1;
    report("  patches for that", patches as f64, None, "", "0");
    let memory = process::memory(archaware, "VmHWM");
    report("  peak memory with that", memory, None, "MiB", "<= 60");
}

/// Pods created at once, compared with a minimal client in the same cluster.
async fn arrivals(cluster: &TestCluster, archaware: &Controller) {
    let images = |n: usize| ["arm64", "multi", "amd64"][n % 3].to_owned();
    let bare = speed::backlog(cluster, "bare", ARRIVING, images).await;
    let floor = floor::patch_all(&cluster.client, &bare, AT_ONCE).await;
    cluster.delete_pods(&bare).await;

    let every = ARRIVING / FAILING;
    // Each failing pod has another image, so that no cached failure helps.
    let images = |n: usize| match n % every {
        0 => format!("absent:{n}"),
        _ => images(n),
    };
    let ours = speed::backlog(cluster, "ours", ARRIVING, images).await;
    let metric = "archaware_writes_total{kind=\"Pod\",result=\"applied\"}";
    let before = archaware.metric(metric).await as usize;
    let cpu = process::cpu(archaware);
    let waiting = process::memory(archaware, "VmRSS");
    report(
        "10,000 pods that wait: resident memory",
        waiting,
        None,
        "MiB",
        "",
    );
    cluster.kubectl(&["annotate", "namespace", &ours, "archaware.dev/mode-"]);
    let started = Instant::now();
    let placed = ARRIVING - FAILING;
    eventually("all pods placed", LONG, || async {
        // Each scrape walks 15,000 objects, as one that comes every half minute does.
        tokio::time::sleep(LOOK).await;
        (archaware.metric(metric).await as usize >= before + placed).then_some(())
    })
    .await;
    let took = started.elapsed().as_secs_f64();
    let rate = placed as f64 / took;
    report(
        "10,000 pods at once, decided per second",
        rate,
        Some(floor),
        "",
        ">= 0.8x",
    );
    report(
        "  the last one, 500 failing ones beside it",
        took,
        None,
        "s",
        "",
    );
    let cpu = (process::cpu(archaware) - cpu) / placed as f64 * 1e6;
    report("  CPU for one of them", cpu, None, "us", "");
    cluster.delete_pods(&ours).await;
}
