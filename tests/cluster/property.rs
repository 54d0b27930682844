//! Random pods, images and nodes with a real scheduler: no pod is bound to a node that one of its
//! images does not support, and every pod that fits on a node is bound.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use serde_json::json;

use super::*;

/// Images and the architectures that run them.
const IMAGES: &[(&str, &[&str])] = &[
    ("amd64", &["amd64"]),
    ("arm64", &["arm64"]),
    ("s390x", &["s390x"]),
    ("multi", &["amd64", "arm64", "s390x"]),
    ("amd64-arm64", &["amd64", "arm64"]),
    ("arm64-s390x", &["arm64", "s390x"]),
    ("docker-list", &["amd64", "arm64"]),
    ("unnamed", &["amd64", "arm64", "s390x"]),
    ("386", &["amd64", "386"]),
    ("helm", &["amd64", "arm64", "s390x", "386"]),
];

#[derive(Clone, Debug)]
struct Case {
    nodes: Vec<&'static str>,
    /// For each pod: indexes into [`IMAGES`] for containers and init containers.
    pods: Vec<(Vec<usize>, Vec<usize>)>,
}

fn case() -> impl Strategy<Value = Case> {
    let nodes = prop::collection::vec(
        prop::sample::select(vec!["amd64", "arm64", "s390x", "386"]),
        1..5,
    );
    let images = |range| prop::collection::vec(0..IMAGES.len(), range);
    let pods = prop::collection::vec((images(1..4), images(0..2)), 1..25);
    (nodes, pods).prop_map(|(nodes, pods)| Case { nodes, pods })
}

#[tokio::test]
async fn no_pod_is_misplaced_and_none_is_starved() {
    let cluster = TestCluster::take().await;
    let archaware = Controller::start(&cluster, "");
    let mut runner = TestRunner::default();
    for round in 0..6 {
        let case = case().new_tree(&mut runner).unwrap().current();
        for (n, architecture) in case.nodes.iter().enumerate() {
            cluster
                .create_node(&format!("node-{round}-{n}"), architecture)
                .await;
        }
        cluster.wait_until_tainted().await;
        let mut allowed: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        for (n, (containers, init)) in case.pods.iter().enumerate() {
            let name = format!("pod-{round}-{n}");
            let containers: Vec<_> = containers.iter().map(|i| IMAGES[*i]).collect();
            let init: Vec<_> = init.iter().map(|i| IMAGES[*i]).collect();
            let sets = containers
                .iter()
                .chain(&init)
                .map(|(_, set)| set.iter().copied().collect::<BTreeSet<_>>());
            allowed.insert(name.clone(), sets.reduce(|a, b| &a & &b).unwrap());
            let image = |(name, _): &(&str, &[&str])| cluster.image(name);
            let mut spec = pod_spec(&containers.iter().map(image).collect::<Vec<_>>());
            spec["initContainers"] = init
                .iter()
                .enumerate()
                .map(|(n, i)| json!({"name": format!("i{n}"), "image": image(i)}))
                .collect();
            cluster.create::<Pod>(pod(&name, spec, json!({}))).await;
        }
        let there: BTreeSet<&str> = case.nodes.iter().copied().collect();
        for (name, allowed) in &allowed {
            let fits = allowed.intersection(&there).next().is_some();
            if fits {
                let node = cluster.wait_until_bound(name).await;
                let node = cluster.nodes().get(&node).await.unwrap();
                let architecture = &node.labels()["kubernetes.io/arch"];
                assert!(
                    allowed.contains(architecture.as_str()),
                    "{name} on {architecture}, not in {allowed:?}: {case:?}"
                );
            }
        }
        // By now, those that fit nowhere have been decided too, and are pending.
        for (name, allowed) in &allowed {
            if allowed.intersection(&there).next().is_none() {
                let pod = cluster.pods().get(name).await.unwrap();
                assert!(
                    pod.spec.unwrap().node_name.is_none(),
                    "{name} is bound: {case:?}\n{}",
                    cluster.kubectl(&["get", "pod", name, "-n", &cluster.namespace, "-o", "yaml"])
                );
            }
        }
        cluster.clear().await;
    }
    assert_eq!(archaware.stop().await, 0);
}
