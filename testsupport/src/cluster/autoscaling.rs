//! Pods for an autoscaler, and what became of them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

use super::{TestCluster, pod, pod_spec};

/// On pods: the architectures of their images, separated by commas.
const RUNS_ON: &str = "test/runs-on";

/// The architectures of the images that the pods here have.
fn architectures(image: &str) -> &'static str {
    match image {
        "amd64" => "amd64",
        "arm64" => "arm64",
        _ => "amd64,arm64",
    }
}

/// A pod with this image, a fifth of a CPU, and changes of its `spec`.
pub fn demand(
    cluster: &TestCluster,
    name: &str,
    image: &str,
    change: impl FnOnce(&mut Value),
) -> Value {
    let mut spec = pod_spec(&[cluster.image(image)]);
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": "200m"}});
    change(&mut spec);
    pod(name, spec, json!({RUNS_ON: architectures(image)}))
}

/// Creates `count` pods of each image at once.
pub async fn roll_out(cluster: &TestCluster, images: &[&str], count: usize) {
    let pods = images.iter().flat_map(|image| {
        (0..count).map(move |n| demand(cluster, &format!("{image}-{n}"), image, |_| {}))
    });
    let pods: Vec<_> = pods.collect();
    for some in pods.chunks(32) {
        let all = some.iter().map(|pod| cluster.create::<Pod>(pod.clone()));
        futures::future::join_all(all).await;
    }
}

/// What became of the pods of the cluster's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Nodes by architecture.
    pub nodes: BTreeMap<String, usize>,
    /// Nodes without any of these pods.
    pub empty: usize,
    /// Pods that are bound.
    pub bound: usize,
    /// Pods that are not.
    pub pending: usize,
    /// Pods on nodes that their images do not exist for.
    pub misplaced: Vec<String>,
}

impl Placement {
    /// The present state.
    pub async fn of(cluster: &TestCluster) -> Self {
        let all = ListParams::default();
        let made = ListParams::default().labels("kwok.x-k8s.io/node=fake");
        let nodes = cluster.nodes().list(&made).await.unwrap();
        let of_node: BTreeMap<String, String> = nodes
            .iter()
            .map(|node| (node.name_any(), node.labels()["kubernetes.io/arch"].clone()))
            .collect();
        let pods: Api<Pod> = cluster.pods();
        let mut placement = Self::default();
        for architecture in of_node.values() {
            *placement.nodes.entry(architecture.clone()).or_default() += 1;
        }
        let mut used = BTreeSet::new();
        for pod in pods.list(&all).await.unwrap() {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            let Some(node) = node else {
                placement.pending += 1;
                continue;
            };
            placement.bound += 1;
            let runs_on = pod.annotations().get(RUNS_ON).cloned();
            if let (Some(runs_on), Some(architecture)) = (runs_on, of_node.get(&node))
                && !runs_on.split(',').any(|one| one == architecture)
            {
                let what = format!("{} ({runs_on}) on {architecture}", pod.name_any());
                placement.misplaced.push(what);
            }
            used.insert(node);
        }
        placement.empty = of_node.keys().filter(|name| !used.contains(*name)).count();
        placement
    }

    /// The number of nodes.
    pub fn count(&self) -> usize {
        self.nodes.values().sum()
    }
}
