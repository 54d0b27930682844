//! A real control plane for one test at a time. It is taken from those that `hack/test.sh` started
//! and emptied before use, so that a test that was killed does not affect the next one.

mod admission;
mod autoscaling;
mod controller;
mod descheduler;
mod diagnosis;
mod fixtures;
mod helm;
mod host;
mod karpenter;
mod objects;
mod policy;
mod service;
mod tls;
mod wait;
mod webhook;

use std::{
    collections::HashMap,
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use k8s_openapi::api::{
    admissionregistration::v1::MutatingWebhookConfiguration,
    apps::v1::{DaemonSet, Deployment, StatefulSet},
    batch::v1::{CronJob, Job},
    coordination::v1::Lease,
    core::v1::{Namespace, Node, Pod, Secret},
};
use kube::{
    Api, Client, Config, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};

pub use crate::free_port;
pub use admission::{admission_config, client};
pub use autoscaling::{Placement, demand, roll_out};
pub use controller::Controller;
pub use karpenter::{Karpenter, node_pool};
pub use objects::{architectures_of, pod, pod_spec, taints};
pub use service::Service;
pub use tls::self_signed;
pub use wait::{DEADLINE, eventually, is_unschedulable, never};
pub use webhook::RecordingWebhook;

/// How the folders of clusters begin that only one test uses.
const OWN: &str = "own-";

/// The name of the node with a kubelet.
const REAL_NODE: &str = "localhost";

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A control plane and a registry with the test images.
pub struct TestCluster {
    dir: PathBuf,
    /// Client with administrator permissions.
    pub client: Client,
    /// A namespace for this test.
    pub namespace: String,
    /// Released when the test ends.
    _lock: File,
}

/// Exit status, stdout and stderr.
fn ended(output: std::process::Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.code().unwrap_or(-1),
        text(output.stdout),
        text(output.stderr),
    )
}

impl Drop for TestCluster {
    /// A cluster that only one test uses would slow down all later ones.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.state());
        }
        let name = self.dir.file_name().and_then(|name| name.to_str());
        if name.is_some_and(|name| name.starts_with(OWN)) {
            let _ = Command::new("hack/testbed/down.sh").arg(&self.dir).status();
        }
    }
}

impl TestCluster {
    /// Any free cluster that only has the nodes that the test creates.
    pub async fn take() -> Self {
        Self::take_one(|dir| !dir.join("node").exists()).await
    }

    /// The cluster with a real node.
    pub async fn take_with_node() -> Self {
        Self::take_one(|dir| dir.join("node").exists()).await
    }

    async fn take_one(matches: impl Fn(&Path) -> bool) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let clusters = std::env::var("ARCHAWARE_TEST_BEDS")
            .expect("run tests with hack/test.sh: it starts the control planes");
        let clusters: Vec<PathBuf> = clusters
            .split(':')
            .map(PathBuf::from)
            .filter(|dir| matches(dir))
            .collect();
        assert!(!clusters.is_empty(), "no test cluster matches this test");
        let (dir, lock) = eventually("a free test cluster", Duration::from_mins(15), || async {
            clusters.iter().find_map(|dir| {
                let file = File::create(dir.join("lock")).ok()?;
                file.try_lock().ok()?;
                Some((dir.clone(), file))
            })
        })
        .await;
        Self::open(dir, lock).await
    }

    /// A separate cluster with additional flags for a component. Ends with its test.
    pub async fn start_with(variable: &str, flags: &str) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let clusters = std::env::var("ARCHAWARE_TEST_BEDS").expect("run tests with hack/test.sh");
        let shared = PathBuf::from(clusters.split(':').next().unwrap());
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = shared.with_file_name(format!("{OWN}{}-{number}", std::process::id()));
        let status = Command::new("hack/testbed/up.sh")
            .arg(&dir)
            .env(variable, flags)
            .env("OWNER", std::process::id().to_string())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        // The registry is shared and only read.
        std::fs::create_dir_all(dir.join("registry")).unwrap();
        std::fs::copy(
            shared.join("registry/address"),
            dir.join("registry/address"),
        )
        .unwrap();
        let lock = File::create(dir.join("lock")).unwrap();
        Self::open(dir, lock).await
    }

    async fn open(dir: PathBuf, lock: File) -> Self {
        let kubeconfig = Kubeconfig::read_from(dir.join("kubeconfig/admin")).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .unwrap();
        let client = Client::try_from(config).unwrap();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("test-{}-{number}", std::process::id());
        let cluster = Self {
            dir,
            client,
            namespace,
            _lock: lock,
        };
        cluster.resume_components();
        cluster.empty().await;
        cluster
            .create_namespace(&cluster.namespace, json!({}))
            .await;
        cluster.kubectl(&[
            "apply",
            "-f",
            "manifests/archaware.yaml",
            "-l",
            "app.kubernetes.io/component=access",
        ]);
        cluster
    }

    /// The same cluster, for a test whose namespace has this name. It has to begin with `test-`.
    pub async fn in_namespace(mut self, name: &str) -> Self {
        self.create_namespace(name, json!({})).await;
        name.clone_into(&mut self.namespace);
        self
    }

    /// Deletes everything that tests create.
    async fn empty(&self) {
        // Deleted first, so that no webhook is called for what is created below.
        let webhooks: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        let (now, all) = (DeleteParams::default(), ListParams::default());
        webhooks.delete_collection(&now, &all).await.unwrap();
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), "archaware");
        let _ = secrets.delete("archaware-admission", &now).await;
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "archaware");
        let _ = leases.delete("archaware", &now).await;
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        for namespace in namespaces.list(&ListParams::default()).await.unwrap() {
            if namespace.name_any().starts_with("test-") {
                let _ = namespaces
                    .delete(&namespace.name_any(), &DeleteParams::default())
                    .await;
            }
        }
        self.empty_objects().await;
    }

    async fn empty_objects(&self) {
        self.delete_all::<CronJob>().await;
        self.delete_all::<Deployment>().await;
        self.delete_all::<StatefulSet>().await;
        self.delete_all::<DaemonSet>().await;
        self.delete_all::<Job>().await;
        self.delete_all::<Pod>().await;
        let nodes: Api<Node> = Api::all(self.client.clone());
        for node in nodes.list(&ListParams::default()).await.unwrap() {
            if node.name_any() == REAL_NODE {
                // Those of the kubelet have these domains.
                let is_added = |label: &&String| {
                    let domain = label.split_once('/').map_or("", |(domain, _)| domain);
                    !["kubernetes.io", "beta.kubernetes.io"].contains(&domain)
                };
                let added = node.labels().keys().filter(is_added);
                let added: HashMap<&String, Value> =
                    added.map(|label| (label, Value::Null)).collect();
                let bare = json!({
                    "spec": {"taints": null},
                    "metadata": {"annotations": {"archaware.dev/taint": null}, "labels": added},
                });
                nodes
                    .patch(REAL_NODE, &PatchParams::default(), &Patch::Merge(bare))
                    .await
                    .unwrap();
            } else {
                let _ = nodes
                    .delete(&node.name_any(), &DeleteParams::default())
                    .await;
            }
        }
        eventually("an empty cluster", DEADLINE, || async {
            let pods: Api<Pod> = Api::all(self.client.clone());
            let left = pods.list(&ListParams::default()).await.ok()?.items;
            for pod in &left {
                let namespace = pod.namespace().unwrap_or_default();
                let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
                let now = DeleteParams {
                    grace_period_seconds: Some(0),
                    ..DeleteParams::default()
                };
                let _ = pods.delete(&pod.name_any(), &now).await;
            }
            left.is_empty().then_some(())
        })
        .await;
    }

    /// Deletes the nodes and pods of a finished round.
    pub async fn clear(&self) {
        self.empty_objects().await;
    }

    /// Deletes the pods of a namespace without grace period.
    pub async fn delete_pods(&self, namespace: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        let all = ListParams::default();
        eventually("an empty namespace", 10 * DEADLINE, || async {
            // With very many pods, some are left when the API server's request timeout ends.
            let _ = pods.delete_collection(&now, &all).await;
            let left = pods.list(&all.clone().limit(1)).await.ok()?;
            left.items.is_empty().then_some(())
        })
        .await;
    }

    /// Pushes a test image under another name.
    pub async fn push(&self, name: &str, image: &str) {
        let http = reqwest::Client::builder()
            .tls_certs_only([])
            .build()
            .unwrap();
        let image = testimg::find(image);
        testimg::push(
            &http,
            &self.registry(),
            &format!("testimg/{name}"),
            "latest",
            &image,
        )
        .await
        .unwrap();
    }

    async fn delete_all<K>(&self)
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + serde::de::DeserializeOwned
            + std::fmt::Debug,
    {
        let all: Api<K> = Api::all(self.client.clone());
        for object in all.list(&ListParams::default()).await.unwrap() {
            let api: Api<K> = Api::namespaced(self.client.clone(), &object.namespace().unwrap());
            let now = DeleteParams {
                grace_period_seconds: Some(0),
                ..DeleteParams::background()
            };
            let _ = api.delete(&object.name_any(), &now).await;
        }
    }

    /// The name of a test image in the cluster's registry.
    pub fn image(&self, name: &str) -> String {
        format!("{}/testimg/{name}", self.registry())
    }

    /// `127.0.0.1:PORT`
    pub fn registry(&self) -> String {
        std::fs::read_to_string(self.dir.join("registry/address"))
            .unwrap()
            .trim()
            .to_owned()
    }

    /// The folder with the cluster's files.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A kubeconfig of this cluster, for example `admin`.
    pub fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.join("kubeconfig").join(name)
    }

    /// A kubeconfig with a token of a ServiceAccount from the manifests.
    pub fn service_account(&self, name: &str) -> PathBuf {
        let token = self.kubectl(&["-n", "archaware", "create", "token", name]);
        let admin = std::fs::read_to_string(self.kubeconfig("admin")).unwrap();
        let users = admin
            .lines()
            .find(|line| line.starts_with("users:"))
            .unwrap();
        let user = format!(
            "users: [{{name: admin, user: {{token: {}}}}}]",
            token.trim()
        );
        let path = self.dir.join("kubeconfig").join(format!("token-{name}"));
        std::fs::write(&path, admin.replace(users, &user)).unwrap();
        path
    }

    /// Runs kubectl as administrator and requires success.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        let (done, output, error) = self.try_kubectl(arguments);
        assert!(done, "kubectl {arguments:?}: {error}");
        output
    }

    /// Runs kubectl as administrator; returns success, stdout and stderr.
    pub fn try_kubectl(&self, arguments: &[&str]) -> (bool, String, String) {
        let kubectl = std::env::var("ARCHAWARE_KUBECTL").expect("hack/test.sh sets it");
        let output = Command::new(kubectl)
            .arg("--kubeconfig")
            .arg(self.kubeconfig("admin"))
            .args(arguments)
            .output()
            .unwrap();
        let (status, out, error) = ended(output);
        (status == 0, out, error)
    }

    /// Runs an archaware command; returns exit status, stdout and stderr.
    pub fn archaware(&self, arguments: &[&str]) -> (i32, String, String) {
        self.archaware_with(&[], &self.kubeconfig("admin"), arguments)
    }

    /// The same with variables, and as another user.
    pub fn archaware_with(
        &self,
        environment: &[(&str, &str)],
        kubeconfig: &Path,
        arguments: &[&str],
    ) -> (i32, String, String) {
        let output = Command::new(crate::program())
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(arguments)
            // What an earlier test saw must not count.
            .env("XDG_CACHE_HOME", self.dir.join(&self.namespace))
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        ended(output)
    }

    /// Runs archaware as in one of its own pods: with the files and variables of its
    /// ServiceAccount, and no kubeconfig. Needs root, for a mount namespace.
    pub fn archaware_in_pod(&self, arguments: &[&str]) -> (i32, String, String) {
        const SCRIPT: &str = "mount -t tmpfs none /var/run/secrets && \
            mkdir -p /var/run/secrets/kubernetes.io && \
            cp -r \"$1\" /var/run/secrets/kubernetes.io/serviceaccount && shift && exec \"$@\"";
        let token = self.kubectl(&["-n", "archaware", "create", "token", "archaware"]);
        let admin = std::fs::read_to_string(self.kubeconfig("admin")).unwrap();
        let value = |key: &str| {
            let (_, rest) = admin.split_once(key).unwrap();
            rest.trim_start_matches([' ', '"'])
                .split(['"', '}', ','])
                .next()
                .unwrap()
        };
        let account = self.dir.join("account");
        let _ = std::fs::create_dir(&account);
        std::fs::write(account.join("token"), token.trim()).unwrap();
        std::fs::write(account.join("namespace"), "archaware").unwrap();
        std::fs::copy(value("certificate-authority:"), account.join("ca.crt")).unwrap();
        std::fs::create_dir_all("/var/run/secrets").unwrap();
        let server = value("server:").trim_start_matches("https://");
        let (host, port) = server.split_once(':').unwrap();
        let output = Command::new("unshare")
            .args(["--mount", "sh", "-c", SCRIPT, "sh"])
            .arg(account)
            .arg(crate::program())
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("KUBERNETES_SERVICE_HOST", host)
            .env("KUBERNETES_SERVICE_PORT", port)
            .output()
            .unwrap();
        ended(output)
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Objects of a kind in the test's namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}
