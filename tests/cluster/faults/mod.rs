//! Faults of the environment. After each the same must hold: no pod is misplaced or left waiting,
//! foreign objects are unchanged, archaware recovers by itself, and its memory is bounded.
//! docs/reliability.md has the table.

mod api_server;
mod credentials;
mod objects;
mod registry;
mod time;

use std::time::Instant;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{ResourceExt, api::ListParams};
use serde_json::{Value, json};

use super::*;

/// Limit in MiB for a debug build, which needs more than a release build.
const MEMORY: f64 = 96.0;

/// A cluster with nodes of three architectures, foreign objects, and a running archaware.
struct Scene {
    cluster: TestCluster,
    archaware: Controller,
    foreign: (Value, Value),
}

impl Scene {
    /// Prepares a cluster; `start` starts archaware.
    async fn set(cluster: TestCluster, start: impl FnOnce(&TestCluster) -> Controller) -> Self {
        let taint = json!([{"key": "foreign", "value": "taint", "effect": "PreferNoSchedule"}]);
        let annotations = json!({"foreign.example/annotation": "stays"});
        for architecture in ["amd64", "arm64", "s390x"] {
            cluster
                .create_node_with(
                    architecture,
                    architecture,
                    json!({"spec": {"taints": taint}, "metadata": {"annotations": annotations}}),
                )
                .await;
        }
        // Tolerations by its author and a gate: archaware does not decide about it.
        let mut spec = pod_spec(&[cluster.image("arm64")]);
        spec["schedulingGates"] = json!([{"name": "foreign/gate"}]);
        spec["tolerations"] = json!([{"operator": "Exists"}]);
        cluster
            .create::<Pod>(pod("foreign", spec, annotations))
            .await;
        let archaware = start(&cluster);
        cluster.wait_until_tainted().await;
        let foreign = foreign(&cluster).await;
        let scene = Self {
            cluster,
            archaware,
            foreign,
        };
        scene.places("before").await;
        scene
    }

    /// With default configuration on a control plane that may be manipulated; `None` (and a
    /// message) otherwise.
    async fn begin() -> Option<Self> {
        let cluster = TestCluster::take().await;
        if cluster.is_existing() {
            eprintln!("not run: the machinery of an existing cluster is not ours to break");
            return None;
        }
        Some(Self::set(cluster, |cluster| Controller::start(cluster, "")).await)
    }

    /// A pod of each architecture is bound to a node that can run it.
    async fn places(&self, name: &str) {
        for image in ["amd64", "arm64", "s390x"] {
            self.cluster
                .create_pod(&format!("{name}-{image}"), &[image])
                .await;
        }
        for image in ["amd64", "arm64", "s390x"] {
            assert_eq!(
                self.cluster
                    .wait_until_bound(&format!("{name}-{image}"))
                    .await,
                image
            );
        }
    }

    /// The conditions that hold after every fault.
    async fn ends_well(self) {
        let since = Instant::now();
        self.places("after").await;
        let took = since.elapsed();
        self.cluster.create_node("late", "arm64").await;
        self.cluster.wait_until_tainted().await;
        eventually("readiness", DEADLINE, || async {
            (self.archaware.http("/readyz").await.0 == 200).then_some(())
        })
        .await;
        assert_eq!(
            foreign(&self.cluster).await,
            self.foreign,
            "foreign objects"
        );
        for pod in self
            .cluster
            .pods()
            .list(&ListParams::default())
            .await
            .unwrap()
        {
            let (name, tolerated) = (pod.name_any(), architectures_of(&pod));
            let Some(node) = pod.spec.and_then(|spec| spec.node_name) else {
                continue;
            };
            let node = self.cluster.nodes().get(&node).await.unwrap();
            let architecture = node.status.unwrap().node_info.unwrap().architecture;
            assert!(tolerated.contains(&architecture), "{name} is misplaced");
        }
        let peak = self.archaware.peak_memory();
        assert!(peak < MEMORY, "{peak} MiB");
        let test = std::thread::current();
        let name = test.name().unwrap_or_default();
        println!("{name}: placed again after {took:.1?}; at most {peak:.0} MiB");
        assert_eq!(self.archaware.stop().await, 0);
    }
}

/// Foreign state: taints and annotations of nodes except archaware's own, and a whole pod.
async fn foreign(cluster: &TestCluster) -> (Value, Value) {
    let node: Node = cluster.nodes().get("s390x").await.unwrap();
    let taints = taints(&node)
        .into_iter()
        .filter(|taint| taint.contains("foreign"));
    let annotations = node.metadata.annotations.unwrap_or_default();
    let kept = annotations.get("foreign.example/annotation");
    let pod = cluster.pods().get("foreign").await.unwrap();
    let version = pod.metadata.resource_version.clone();
    let pod =
        json!({"version": version, "spec": pod.spec, "annotations": pod.metadata.annotations});
    (
        json!({"taints": taints.collect::<Vec<_>>(), "annotation": kept}),
        pod,
    )
}
