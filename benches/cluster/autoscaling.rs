//! What Karpenter does with the same pods, without archaware and with each way to install it: the
//! table of docs/autoscaling.md.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use testimg::{FakeRegistry, Script};
use testsupport::cluster::{
    Controller, Karpenter, Placement, TestCluster, admission_config, demand, free_port, node_pool,
    roll_out,
};

/// How long Karpenter is observed. One that makes nodes again and again makes one every 8 s.
const OBSERVED: Duration = Duration::from_mins(1);

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Off,
    ControllerOnly,
    Default,
}

struct Case {
    name: &'static str,
    pools: fn() -> Vec<Value>,
    settings: &'static str,
    /// Whether the webhook cannot be reached while the pods are created.
    unreachable: bool,
}

fn mixed() -> Vec<Value> {
    vec![node_pool("mixed", &["amd64", "arm64"], |_| {})]
}

fn tainted() -> Vec<Value> {
    let pool = |architecture: &str| {
        node_pool(architecture, &[architecture], |spec| {
            let taint =
                json!({"key": "kubernetes.io/arch", "value": architecture, "effect": "NoSchedule"});
            spec["template"]["spec"]["taints"] = json!([taint]);
        })
    };
    vec![pool("amd64"), pool("arm64")]
}

const CASES: [Case; 6] = [
    Case {
        name: "6 pods each of three images",
        pools: mixed,
        settings: "",
        unreachable: false,
    },
    Case {
        name: "and two without common architecture",
        pools: mixed,
        settings: "",
        unreachable: false,
    },
    Case {
        name: "pools for one architecture, with the taint",
        pools: tainted,
        settings: "",
        unreachable: false,
    },
    Case {
        name: "all prefer arm64",
        pools: mixed,
        settings: "affinity: {preferred: [{architecture: arm64, weight: 100}]}\n",
        unreachable: false,
    },
    Case {
        name: "new images from a slow registry",
        pools: mixed,
        settings: "",
        unreachable: false,
    },
    Case {
        name: "created while the webhook was unreachable",
        pools: mixed,
        settings: "",
        unreachable: true,
    },
];

/// One line for each case and mode.
pub(crate) async fn table() {
    println!(
        "{:<45} {:<16} {:>6} {:>6} {:>8} {:>10}",
        "", "", "nodes", "empty", "pending", "misplaced"
    );
    for case in &CASES {
        for mode in [Mode::Off, Mode::ControllerOnly, Mode::Default] {
            let Placement {
                ref nodes,
                empty,
                pending,
                ref misplaced,
                ..
            } = run(case, mode).await;
            let nodes: usize = nodes.values().sum();
            let mode = match mode {
                Mode::Off => "no archaware",
                Mode::ControllerOnly => "controller-only",
                Mode::Default => "default",
            };
            let (name, misplaced) = (case.name, misplaced.len());
            println!("{name:<45} {mode:<16} {nodes:>6} {empty:>6} {pending:>8} {misplaced:>10}");
        }
    }
}

async fn run(case: &Case, mode: Mode) -> Placement {
    let cluster = TestCluster::start_with("SCHED_ARGS", "").await;
    let _karpenter = Karpenter::start_with(&cluster, &(case.pools)(), &[]).await;
    let webhook = admission_config(free_port(), "onMiss: gate");
    let _archaware = match mode {
        Mode::Off => None,
        Mode::ControllerOnly => Some(Controller::start_quiet(&cluster, "")),
        // It is registered when the pods are there.
        Mode::Default if case.unreachable => Some(Controller::start_quiet(&cluster, &webhook)),
        Mode::Default => {
            let settings = case.settings;
            Some(Controller::start_with_webhook(&cluster, settings, "onMiss: gate").await)
        }
    };
    if mode == Mode::ControllerOnly {
        // It taints nodes as they come.
        cluster.create_node("first", "amd64").await;
        cluster.wait_until_tainted().await;
        cluster.kubectl(&["delete", "node", "first"]);
    }
    let registry = FakeRegistry::start().await.unwrap();
    if case.name.contains("slow") {
        registry.script("/", Script::Slow(Duration::from_millis(1500)));
        for image in ["amd64", "arm64", "multi"] {
            registry.add(image, &testimg::find(image));
            for n in 0..6 {
                let pod = demand(&cluster, &format!("{image}-{n}"), image, |spec| {
                    spec["containers"][0]["image"] = json!(registry.image(image));
                });
                cluster.create::<Pod>(pod).await;
            }
        }
    } else {
        roll_out(&cluster, &["amd64", "arm64", "multi"], 6).await;
    }
    if case.name.contains("without common") {
        for n in 0..2 {
            let mut torn = demand(&cluster, &format!("torn-{n}"), "amd64", |_| {});
            torn["spec"]["initContainers"] =
                json!([{"name": "init", "image": cluster.image("arm64")}]);
            cluster.create::<Pod>(torn).await;
        }
    }
    if case.unreachable && mode == Mode::Default {
        cluster.register();
    }
    tokio::time::sleep(OBSERVED).await;
    Placement::of(&cluster).await
}
