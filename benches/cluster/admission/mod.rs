//! Cost of the webhook: requests over TLS as the API server sends them, and requests through a real
//! API server.
//!
//! The floor is a server with the same library that reads the request and answers "allowed".

mod client;

use std::time::{Duration, Instant};

use futures::future::join_all;
use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::Secret};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::json;
use testimg::{FakeRegistry, Script};

use testsupport::cluster::{
    Controller, DEADLINE, TestCluster, admission_config, eventually, free_port, pod_spec,
};

use crate::{median, process, report};

use client::{Target, floor, question};

const SAMPLES: usize = 20_000;
const WARM_UP: usize = 2000;
const CONNECTIONS: usize = 16;
const IMAGES: usize = 20_000;
const REPLICAS: usize = 300;

/// Milliseconds of each request over this many connections, and requests per second.
async fn ask_all(target: &Target, connections: usize, question: &Bytes) -> (Vec<f64>, f64) {
    let all = (0..connections).map(|_| async {
        let mut connection = target.connect().await;
        let mut times = Vec::with_capacity(SAMPLES / connections);
        for _ in 0..WARM_UP / connections {
            connection.ask(question).await;
        }
        let started = Instant::now();
        for _ in 0..SAMPLES / connections {
            times.push(connection.ask(question).await.0);
        }
        (times, started.elapsed())
    });
    let all = join_all(all).await;
    let longest = all.iter().map(|(_, time)| *time).max().unwrap();
    let mut times: Vec<f64> = all.into_iter().flat_map(|(times, _)| times).collect();
    times.sort_by(f64::total_cmp);
    let rate = times.len() as f64 / longest.as_secs_f64();
    (times, rate)
}

/// A thousand requests per second for ten seconds. A request that is sent late because the previous
/// one was answered late counts from the time at which it was due.
async fn paced(target: &Target, question: &Bytes) -> Vec<f64> {
    let connections = join_all((0..CONNECTIONS).map(|_| target.connect())).await;
    let started = tokio::time::Instant::now();
    let asking = connections
        .into_iter()
        .enumerate()
        .map(|(n, mut connection)| async move {
            let mut times = Vec::new();
            for turn in 0..10_000 / CONNECTIONS {
                let due = started + Duration::from_millis((turn * CONNECTIONS + n) as u64);
                let late = due.elapsed().as_secs_f64() * 1000.0;
                tokio::time::sleep_until(due).await;
                times.push(connection.ask(question).await.0 + late);
            }
            times
        });
    let mut times: Vec<f64> = join_all(asking).await.into_iter().flatten().collect();
    times.sort_by(f64::total_cmp);
    times
}

/// One HTTP/2 connection with 16 concurrent requests.
async fn multiplexed(target: &Target, question: &Bytes) -> (Vec<f64>, f64) {
    let stream = target.stream(&[b"h2"]).await;
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (sender, connection) = handshake.await.unwrap();
    tokio::spawn(connection);
    let started = Instant::now();
    let all = (0..CONNECTIONS).map(|_| {
        let mut sender = sender.clone();
        async move {
            let mut times = Vec::new();
            for _ in 0..SAMPLES / CONNECTIONS {
                let request = Request::post("https://127.0.0.1/pods")
                    .header("content-type", "application/json")
                    .body(Full::new(question.clone()))
                    .unwrap();
                let started = Instant::now();
                sender.ready().await.unwrap();
                let answer = sender.send_request(request).await.unwrap();
                assert_eq!(answer.status(), 200);
                answer.into_body().collect().await.unwrap();
                times.push(started.elapsed().as_secs_f64() * 1000.0);
            }
            times
        }
    });
    let mut times: Vec<f64> = join_all(all).await.into_iter().flatten().collect();
    times.sort_by(f64::total_cmp);
    let rate = times.len() as f64 / started.elapsed().as_secs_f64();
    (times, rate)
}

fn at(times: &[f64], percent: usize) -> f64 {
    times[(times.len() - 1) * percent / 100]
}

async fn start(cluster: &TestCluster, more: &str) -> (Controller, Target) {
    cluster.register();
    let port = free_port();
    let archaware = Controller::start_quiet(cluster, &admission_config(port, more));
    cluster.wait_until_called().await;
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), "archaware");
    let secret = secrets.get("archaware-admission").await.unwrap();
    let target = Target::new(port, &secret.data.unwrap()["ca.crt"].0);
    (archaware, target)
}

/// The image is cached, as in a rollout.
pub(crate) async fn warm(cluster: &TestCluster) {
    let (archaware, target) = start(cluster, "").await;
    let floor = floor();
    let question = question(&cluster.image("multi"));
    let (_, answer) = target.connect().await.ask(&question).await;
    assert!(String::from_utf8_lossy(&answer).contains("JSONPatch"));
    for connections in [1, CONNECTIONS] {
        let (bare, bare_rate) = ask_all(&floor, connections, &question).await;
        let cpu = process::cpu(&archaware);
        let (times, rate) = ask_all(&target, connections, &question).await;
        let used = (process::cpu(&archaware) - cpu) / (SAMPLES + WARM_UP) as f64 * 1e6;
        let what = format!("warm admission of an 8 KB pod, {connections} connections");
        let target_p50 = if connections == 1 { "<= 0.3ms" } else { "" };
        report(
            &format!("{what}, p50"),
            at(&times, 50),
            Some(at(&bare, 50)),
            "ms",
            target_p50,
        );
        report("  p99", at(&times, 99), Some(at(&bare, 99)), "ms", "");
        report("  a second", rate, Some(bare_rate), "", "");
        report("  CPU of one", used, None, "us", "<= 100us");
    }
    let cpu = process::cpu(&archaware);
    let (times, rate) = multiplexed(&target, &question).await;
    let used = (process::cpu(&archaware) - cpu) / SAMPLES as f64 * 1e6;
    report(
        "one HTTP/2 connection, 16 at once, p50",
        at(&times, 50),
        None,
        "ms",
        "",
    );
    report("  p99", at(&times, 99), None, "ms", "");
    report("  a second", rate, None, "", "");
    report("  CPU of one", used, None, "us", "<= 100us");
    let (bare, times) = (
        paced(&floor, &question).await,
        paced(&target, &question).await,
    );
    report(
        "at 1,000 admissions a second, p50",
        at(&times, 50),
        Some(at(&bare, 50)),
        "ms",
        "",
    );
    report("  p99", at(&times, 99), Some(at(&bare, 99)), "ms", "< 2ms");
    report(
        "  resident memory",
        process::memory(&archaware, "VmRSS"),
        None,
        "MiB",
        "",
    );
    report(
        "  peak",
        process::memory(&archaware, "VmHWM"),
        None,
        "MiB",
        "",
    );
    assert_eq!(archaware.stop().await, 0);
}

/// The image is new, and its registry takes 50 ms per response.
pub(crate) async fn cold(cluster: &TestCluster) {
    let (archaware, target) = start(cluster, "").await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Slow(Duration::from_millis(50)));
    let mut connection = target.connect().await;
    let mut times = Vec::new();
    for n in 0..20 {
        let name = format!("new-{n}");
        registry.add(&name, &testimg::numbered(n));
        registry.forget();
        times.push(connection.ask(&question(&registry.image(&name))).await.0);
        let asked = (registry.count("HEAD", ""), registry.count("GET", ""));
        assert_eq!(asked, (1, 1), "{:?}", registry.seen());
    }
    report(
        "new image, 50 ms from its registry, p50",
        median(&mut times),
        Some(100.0),
        "ms",
        "~ 2 RTT",
    );
    registry.add("crowd", &testimg::numbered(1000));
    registry.forget();
    let crowd = question(&registry.image("crowd"));
    let mut connections = join_all((0..64).map(|_| target.connect())).await;
    let asking = connections
        .iter_mut()
        .map(|connection| connection.ask(&crowd));
    let mut times: Vec<f64> = join_all(asking)
        .await
        .into_iter()
        .map(|(time, _)| time)
        .collect();
    let (heads, gets) = (registry.count("HEAD", ""), registry.count("GET", ""));
    report(
        "  64 at once, the last one",
        {
            median(&mut times);
            times[63]
        },
        Some(100.0),
        "ms",
        "the same",
    );
    report("  requests of the 64", (heads + gets) as f64, None, "", "2");
    assert_eq!(archaware.stop().await, 0);
}

/// Memory for many images that the webhook resolved.
pub(crate) async fn images(cluster: &TestCluster) {
    let config = "resolution: {cache: {images: 20000}}\nconcurrency: {perRegistry: 32}\n";
    cluster.register();
    let port = free_port();
    let archaware = Controller::start_quiet(
        cluster,
        &format!("{config}{}", admission_config(port, "budget: 10s")),
    );
    cluster.wait_until_called().await;
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), "archaware");
    let secret = secrets.get("archaware-admission").await.unwrap();
    let target = Target::new(port, &secret.data.unwrap()["ca.crt"].0);
    let registry = FakeRegistry::start().await.unwrap();
    // Separates the memory of connections and buffers from that of images.
    let ask = |range: std::ops::Range<usize>| {
        let (registry, target) = (&registry, &target);
        let lanes = (0..32).map(move |lane| {
            let range = range.clone();
            async move {
                let mut connection = target.connect().await;
                for n in range.skip(lane).step_by(32) {
                    let name = format!("image-{n}");
                    registry.add(&name, &testimg::numbered(n));
                    let (_, answer) = connection.ask(&question(&registry.image(&name))).await;
                    assert!(
                        String::from_utf8_lossy(&answer).contains("JSONPatch"),
                        "{n}"
                    );
                }
            }
        });
        join_all(lanes)
    };
    ask(0..500).await;
    registry.forget();
    let before = process::memory(&archaware, "VmRSS");
    ask(500..500 + IMAGES).await;
    let after = process::memory(&archaware, "VmRSS");
    report(
        "20,000 images learnt by the webhook",
        after - before,
        None,
        "MiB",
        "<= 8MiB",
    );
    report("  resident memory then", after, None, "MiB", "");
    assert_eq!(archaware.stop().await, 0);
}

/// Seconds until all pods of a Deployment exist, and how many of them the webhook completed.
async fn rollout(cluster: &TestCluster, namespace: &str, name: &str) -> (f64, usize) {
    let api: Api<Deployment> = Api::namespaced(cluster.client.clone(), namespace);
    let pods: Api<k8s_openapi::api::core::v1::Pod> =
        Api::namespaced(cluster.client.clone(), namespace);
    let mut spec = pod_spec(&[cluster.image("multi")]);
    spec["schedulerName"] = json!("none");
    let labels = json!({"app": name});
    let deployment = json!({
        "metadata": {"name": name},
        "spec": {"replicas": REPLICAS, "selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    });
    let deployment = serde_json::from_value(deployment).unwrap();
    let started = Instant::now();
    api.create(&Default::default(), &deployment).await.unwrap();
    let selector = ListParams::default().labels(&format!("app={name}"));
    let found = eventually("all pods", DEADLINE, || async {
        let found = pods.list_metadata(&selector).await.ok()?.items;
        (found.len() == REPLICAS).then_some(found)
    })
    .await;
    let seconds = started.elapsed().as_secs_f64();
    let placed = found
        .iter()
        .filter(|pod| pod.annotations().contains_key("archaware.dev/added"));
    let placed = placed.count();
    api.delete(name, &Default::default()).await.unwrap();
    cluster.delete_pods(namespace).await;
    (seconds, placed)
}

/// The same rollout through a real API server with and without the webhook, alternating.
pub(crate) async fn rollouts(cluster: &TestCluster) {
    let bare = format!("{}-bare", cluster.namespace);
    cluster
        .create_namespace(&bare, json!({"archaware.dev/mode": "ignore"}))
        .await;
    cluster.kubectl(&[
        "label",
        "namespace",
        &bare,
        "archaware.dev/admission=disabled",
    ]);
    let (archaware, _) = start(cluster, "").await;
    let (mut with, mut without, mut least) = (Vec::new(), Vec::new(), REPLICAS);
    for round in 0..5 {
        without.push(rollout(cluster, &bare, &format!("bare-{round}")).await.0);
        let (seconds, placed) =
            rollout(cluster, &cluster.namespace, &format!("ours-{round}")).await;
        with.push(seconds);
        least = least.min(placed);
    }
    report(
        "a Deployment of 300 pods, until all are there",
        median(&mut with),
        Some(median(&mut without)),
        "s",
        "",
    );
    report(
        "  pods that were created as they should be, at least",
        least as f64,
        Some(REPLICAS as f64),
        "",
        "1.00x",
    );
    assert_eq!(archaware.stop().await, 0);
}
