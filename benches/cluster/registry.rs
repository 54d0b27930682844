//! Requests to registries, and how a silent registry affects pods of others.

use std::time::Instant;

use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use testimg::{FakeRegistry, Script};

use testsupport::cluster::{
    Controller, DEADLINE, TestCluster, architectures_of, eventually, pod, pod_spec,
};

use crate::{median, report};

/// Milliseconds from creation to toleration, for pods with a new image each.
async fn decide(cluster: &TestCluster, registry: &FakeRegistry, names: &str) -> f64 {
    let mut values = Vec::new();
    for n in 0..20 {
        let name = format!("{names}-{n}");
        registry.add(&name, &testimg::find("arm64"));
        let started = Instant::now();
        cluster
            .create::<Pod>(pod(&name, pod_spec(&[registry.image(&name)]), json!({})))
            .await;
        eventually("a decision", DEADLINE, || async {
            (!architectures_of(&cluster.pods().get(&name).await.ok()?).is_empty()).then_some(())
        })
        .await;
        values.push(started.elapsed().as_secs_f64() * 1000.0);
    }
    median(&mut values)
}

pub(crate) async fn hang(cluster: &TestCluster) {
    let (good, silent) = (
        FakeRegistry::start().await.unwrap(),
        FakeRegistry::start().await.unwrap(),
    );
    silent.script("/", Script::Hang);
    cluster.create_three_nodes().await;
    let _archaware = Controller::start_quiet(cluster, "");
    cluster.wait_until_tainted().await;
    let alone = decide(cluster, &good, "alone").await;
    let hung = (0..60).map(|n| {
        let image = silent.image(&format!("app{n}"));
        async move {
            cluster
                .create::<Pod>(pod(&format!("hung-{n}"), pod_spec(&[image]), json!({})))
                .await
        }
    });
    join_all(hung).await;
    let beside = decide(cluster, &good, "beside").await;
    report(
        "new image decided, 60 pods of a silent registry beside it",
        beside,
        Some(alone),
        "ms",
        "~ 1x",
    );
}

pub(crate) async fn requests(cluster: &TestCluster) {
    let registry = FakeRegistry::start().await.unwrap();
    cluster.create_three_nodes().await;
    let _archaware = Controller::start_quiet(cluster, "");
    cluster.wait_until_tainted().await;
    for (image, pods, target) in [
        ("multi", 1, "1 + 1"),
        ("arm64", 1, "1 + 2"),
        ("amd64-arm64", 64, "1 + 1"),
    ] {
        registry.add(image, &testimg::find(image));
        registry.forget();
        let names: Vec<String> = (0..pods).map(|n| format!("requests-{image}-{n}")).collect();
        let create = names.iter().map(|name| {
            cluster.create::<Pod>(pod(name, pod_spec(&[registry.image(image)]), json!({})))
        });
        join_all(create).await;
        for name in &names {
            cluster.wait_until_bound(name).await;
        }
        let (heads, gets) = (registry.count("HEAD", ""), registry.count("GET", ""));
        println!(
            "{:<58} {:>10} {:>10} {:>8} {target:>9}",
            format!("requests for {image}, {pods} pods at once (HEAD + GET)"),
            format!("{heads} + {gets}"),
            "-",
            "-"
        );
    }
}
