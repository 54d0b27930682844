//! The cost of one evaluation, as the webhook makes it, with and without image selection, on 5,000
//! nodes in 20 groups.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use archaware::{
    cluster::{
        api::ApiClient,
        cluster_nodes::ClusterNodes,
        objects::{Namespace, Node, Pod, annotations, labels},
    },
    config::Config,
    evaluate::{Evaluator, KnownKeys, Stage, Subject, Verdict, pull_secrets::PullSecrets},
    sources::sources,
};
use serde_json::{Value, json};
use testimg::{FakeRegistry, Image};

use crate::resolving::{resolver, settings};

use super::{median, report};

const NODES: usize = 5000;
const GROUPS: usize = 20;
/// More than the time for which the groups are cached: their renewal is part of the cost.
const SECONDS: f64 = 4.0;
const LAYER: &str = "application/vnd.oci.image.compatibilities.v1+json";

/// Nodes as large as real ones.
fn nodes() -> impl Iterator<Item = Node> {
    (0..NODES).map(|n| {
        let group = n % GROUPS;
        let mut labels = BTreeMap::new();
        for key in 0..30 {
            labels.insert(
                format!("feature.node.kubernetes.io/cpu-cpuid.F{key}"),
                "true".to_owned(),
            );
        }
        labels.insert("kubernetes.io/hostname".to_owned(), format!("node-{n}"));
        labels.insert("example.com/memory".to_owned(), format!("{}", group * 4));
        labels.insert("example.com/gpu".to_owned(), format!("{}", group % 4));
        let arch = ["amd64", "arm64"][group % 2];
        let taint = json!({"key": "kubernetes.io/arch", "value": arch, "effect": "NoSchedule"});
        serde_json::from_value(json!({
            "metadata": {"name": format!("node-{n}"), "labels": labels},
            "spec": {"taints": [taint]},
            "status": {"nodeInfo": {"architecture": arch}},
        }))
        .unwrap()
    })
}

fn pod(image: &str, selection: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "labels": {"app": "web"}, "annotations": selection},
        "spec": {
            "containers": [{"name": "app", "image": image}],
            "imagePullSecrets": [],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
        },
    }))
    .unwrap()
}

/// Milliseconds of each evaluation.
async fn time(evaluator: &Evaluator, pod: &Pod) -> Vec<f64> {
    let (mut times, begin) = (Vec::new(), Instant::now());
    while begin.elapsed().as_secs_f64() < SECONDS {
        let started = Instant::now();
        let subject = Subject {
            spec: &pod.spec,
            annotations: annotations(&pod.metadata),
            labels: labels(&pod.metadata),
            namespace: "default",
            stage: Stage::Creation,
            decided_by_policy: None,
        };
        let evaluation = evaluator.evaluate(subject, &Namespace::default()).await;
        let Verdict::Decided(decision) = &evaluation.verdict else {
            panic!("{evaluation:?}");
        };
        std::hint::black_box(subject.change(&evaluator.policy, decision, &evaluation));
        times.push(started.elapsed().as_secs_f64() * 1000.0);
    }
    times
}

pub(crate) async fn selection() {
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("multi"));
    let entries = (0..10).map(|n| {
        let rules = json!([{"matchFeatures": [{"matchExpressions": [
            {"key": "example.com/memory", "op": "Gte", "value": [(n * 8).to_string()]},
            {"key": "example.com/gpu", "op": "In", "value": ["2", "3", "7"]},
        ]}]}]);
        json!({"tag": registry.image("app"), "weight": n, "rules": rules})
    });
    let document = json!({"compatibilities": entries.collect::<Vec<_>>()}).to_string();
    registry.add(
        "document",
        &Image::artifact("application/vnd.test", LAYER, &document),
    );
    let config = Arc::new(Config::default());
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let api = ApiClient::new(kube::Client::try_from(nowhere).unwrap());
    let nodes = ClusterNodes::from_nodes(nodes());
    let evaluator = Evaluator {
        resolver: resolver(settings()),
        pull_secrets: PullSecrets::new(api),
        policy: Arc::new((&*config).into()),
        keys: KnownKeys::new(&*config),
        sources: sources(&config.selection, &nodes).unwrap(),
        nodes,
        explains: false,
        config,
    };
    let image = registry.image("app");
    let plain = pod(&image, json!({}));
    let asking = pod(
        "placeholder:latest",
        json!({"archaware.dev/select-image.app": registry.image("document")}),
    );
    time(&evaluator, &asking).await;
    let (mut without, mut with) = (
        time(&evaluator, &plain).await,
        time(&evaluator, &asking).await,
    );
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    for (what, with, without) in [
        (
            "image selection of 5,000 nodes in 20 groups, mean",
            mean(&with),
            mean(&without),
        ),
        (
            "image selection of 5,000 nodes in 20 groups, median",
            median(&mut with),
            median(&mut without),
        ),
        (
            "the same, worst of all (groups are renewed)",
            with[with.len() - 1],
            without[without.len() - 1],
        ),
    ] {
        report(
            what,
            &format!("{with:.4} ms"),
            &format!("{without:.4} ms"),
            "0.3 ms",
        );
    }
}
