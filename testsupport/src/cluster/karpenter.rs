//! A real Karpenter with its kwok provider, and a stand-in for the kubelets of the nodes that it
//! makes.

use std::{
    fs::File,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::{DEADLINE, RecordingWebhook, TestCluster, eventually, free_port};

/// How often the stand-in looks for new nodes.
const KUBELET_PERIOD: Duration = Duration::from_millis(100);

/// What it logs after a computation.
const COMPUTED: &str = "computed new nodeclaim(s) to fit pod(s)";

/// A computation of Karpenter.
#[derive(Debug, Deserialize)]
pub struct Computation {
    /// How many nodes it asks for.
    #[serde(rename = "nodeclaims")]
    pub nodes: usize,
    /// How many pods these are for.
    pub pods: usize,
}

/// Karpenter, in a cluster of its own. Ends when it is dropped.
pub struct Karpenter {
    child: Child,
    kubelets: JoinHandle<()>,
    _registration: RecordingWebhook,
    log: PathBuf,
}

/// A `NodePool` for nodes of these architectures; `change` its `spec`.
pub fn node_pool(name: &str, architectures: &[&str], change: impl FnOnce(&mut Value)) -> Value {
    let any = |key: &str, values: &[&str]| json!({"key": key, "operator": "In", "values": values});
    let mut pool = json!({
        "apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": {"name": name},
        "spec": {
            "template": {"spec": {
                "nodeClassRef": {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
                "expireAfter": "Never",
                "requirements": [any("kubernetes.io/arch", architectures), any("kubernetes.io/os", &["linux"])],
            }},
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "Never"},
        },
    });
    change(&mut pool["spec"]);
    pool
}

/// An instance type with 4 CPUs.
fn instance_type(architecture: &str, price: f64) -> Value {
    let is = |key: &str, value: &str| json!({"key": key, "operator": "In", "values": [value]});
    json!({
        "name": format!("{architecture}.4"),
        "architecture": architecture,
        "operatingSystems": ["linux"],
        "resources": {"cpu": "4", "memory": "16Gi", "pods": "110", "ephemeral-storage": "20Gi"},
        "offerings": [{"Price": price, "Available": true, "Requirements": [
            is("karpenter.sh/capacity-type", "on-demand"),
            is("topology.kubernetes.io/zone", "a"),
        ]}],
    })
}

impl Karpenter {
    /// Starts it with one `NodePool` for amd64 and arm64, of which arm64 is cheaper.
    pub async fn start(cluster: &TestCluster) -> Self {
        let mixed = node_pool("mixed", &["amd64", "arm64"], |_| {});
        Self::start_with(cluster, &[mixed], &[]).await
    }

    /// Starts it with these `NodePool`s and environment variables.
    pub async fn start_with(
        cluster: &TestCluster,
        pools: &[Value],
        environment: &[(&str, &str)],
    ) -> Self {
        let folder = std::env::var("ARCHAWARE_TEST_KARPENTER")
            .expect("run tests with hack/test.sh: it builds Karpenter");
        let folder = PathBuf::from(folder);
        let crds = folder.join("crds");
        cluster.kubectl(&["apply", "--server-side", "-f", crds.to_str().unwrap()]);
        let (types, log) = (
            cluster.dir().join("instance-types.json"),
            cluster.dir().join("karpenter.log"),
        );
        let all = json!([instance_type("amd64", 0.2), instance_type("arm64", 0.15)]);
        std::fs::write(&types, all.to_string()).unwrap();
        let output = File::create(&log).unwrap();
        let registration = registration(cluster).await;
        let child = Command::new(folder.join("karpenter"))
            .env("KUBECONFIG", cluster.kubeconfig("admin"))
            .env("INSTANCE_TYPES_FILE_PATH", types)
            .env("METRICS_PORT", free_port().to_string())
            .env("HEALTH_PROBE_PORT", free_port().to_string())
            .env("DISABLE_LEADER_ELECTION", "true")
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let nodes = cluster.nodes();
        let karpenter = Self {
            child,
            _registration: registration,
            kubelets: tokio::spawn(async move {
                loop {
                    become_ready(&nodes).await;
                    tokio::time::sleep(KUBELET_PERIOD).await;
                }
            }),
            log,
        };
        let class = json!({"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass",
            "metadata": {"name": "default"}});
        for object in [&class].into_iter().chain(pools) {
            karpenter.apply(cluster, object);
        }
        for pool in pools {
            let name = pool["metadata"]["name"].as_str().unwrap();
            eventually("a NodePool that is ready", DEADLINE, || async {
                let ready = "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}";
                let pool = cluster.kubectl(&["get", "nodepool", name, "-o", ready]);
                (pool == "True").then_some(())
            })
            .await;
        }
        karpenter
    }

    /// When it first computed nodes for pending pods.
    pub async fn first_computation(&self) -> Computation {
        eventually("a computation of Karpenter", 2 * DEADLINE, || async {
            let log = std::fs::read_to_string(&self.log).ok()?;
            let computed = log.lines().find(|line| line.contains(COMPUTED))?;
            serde_json::from_str(computed).ok()
        })
        .await
    }

    fn apply(&self, cluster: &TestCluster, object: &Value) {
        let file = self.log.with_extension("json");
        std::fs::write(&file, object.to_string()).unwrap();
        cluster.kubectl(&["apply", "-f", file.to_str().unwrap()]);
    }

    /// The names of all nodes that it has asked for.
    pub fn node_claims(&self, cluster: &TestCluster) -> Vec<String> {
        let names = cluster.kubectl(&["get", "nodeclaims", "-o", "name"]);
        names.lines().map(str::to_owned).collect()
    }
}

/// A kubelet creates its Node object with its architecture. Karpenter's provider makes the object
/// itself, without, so this adds it before any other webhook sees the object: they are called in
/// the order of their names.
async fn registration(cluster: &TestCluster) -> RecordingWebhook {
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["nodes"]});
    RecordingWebhook::start(cluster, "a-kubelet", rule, |node| {
        let architecture = node["metadata"]["labels"]["kubernetes.io/arch"].clone();
        if architecture.is_null() {
            return json!([]);
        }
        let info = json!({"architecture": architecture, "operatingSystem": "linux", "kubeletVersion": "v1.36.3"});
        json!([{"op": "add", "path": "/status/nodeInfo", "value": info}])
    })
    .await
}

/// What a kubelet reports when its node can run pods.
async fn become_ready(nodes: &Api<Node>) {
    let made = ListParams::default().labels("kwok.x-k8s.io/node=fake");
    let Ok(made) = nodes.list(&made).await else {
        return;
    };
    for node in made {
        let status = node.status.as_ref();
        if status.is_some_and(|status| status.conditions.is_some()) {
            continue;
        }
        let allocatable = status.and_then(|status| status.allocatable.clone());
        let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady"});
        let status = json!({"status": {
            "phase": "Running",
            "capacity": allocatable,
            "conditions": [ready],
        }});
        let patch = Patch::Merge(status);
        let _ = nodes
            .patch_status(&node.name_any(), &PatchParams::default(), &patch)
            .await;
    }
}

impl Drop for Karpenter {
    fn drop(&mut self) {
        self.kubelets.abort();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("--- log of Karpenter ---\n{log}");
        }
    }
}
