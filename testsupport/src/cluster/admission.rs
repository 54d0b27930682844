//! The webhook from the API server's point of view.

use k8s_openapi::api::{admissionregistration::v1::MutatingWebhookConfiguration, core::v1::Pod};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use crate::free_port;

use super::{Controller, DEADLINE, TestCluster, eventually, pod, pod_spec};

/// The `admission:` section of a configuration with this port; `more` are additional keys.
pub fn admission_config(port: u16, more: &str) -> String {
    format!(
        "admission: {{enabled: true, listen: \"127.0.0.1:{port}\", url: \"https://127.0.0.1:{port}\", {more}}}\n"
    )
}

impl Controller {
    /// Starts archaware with a webhook and waits until the API server calls it.
    pub async fn start_with_webhook(cluster: &TestCluster, config: &str, more: &str) -> Self {
        cluster.register();
        let controller = Self::start(
            cluster,
            &format!("{config}{}", admission_config(free_port(), more)),
        );
        cluster.wait_until_called().await;
        controller
    }
}

impl TestCluster {
    /// Creates the registration of the manifests, unless there is one. It has no `caBundle`, and
    /// names a Service that does not exist here: archaware writes its URL into it.
    pub fn register(&self) {
        let label = "app.kubernetes.io/component=admission";
        let created = self.try_kubectl(&["create", "-f", "manifests/archaware.yaml", "-l", label]);
        let (is_new, _, error) = created;
        assert!(is_new || error.contains("AlreadyExists"), "{error}");
    }

    /// The same, and the API server waits as long as it can (30 s). Where a busy machine answers
    /// later than the registration of the manifests allows, pods are created without their
    /// affinity, which a pod without a gate cannot get later.
    pub fn register_for_busy_machines(&self) {
        self.register();
        let path = |n: u8| format!("/webhooks/{n}/timeoutSeconds");
        let patch: Vec<Value> = (0..3)
            .map(|n| json!({"op": "replace", "path": path(n), "value": 30}))
            .collect();
        let kind = "mutatingwebhookconfiguration";
        let patch = json!(patch).to_string();
        self.kubectl(&["patch", kind, "archaware", "--type=json", "-p", &patch]);
    }

    /// Whether the API server calls the webhook and gets a response.
    pub async fn is_called(&self) -> bool {
        let any = json!({"archaware.dev/mode": "any"});
        let probe = pod("probe", pod_spec(&["probe".to_owned()]), any);
        let dry_run = PostParams {
            dry_run: true,
            ..PostParams::default()
        };
        let probe = serde_json::from_value(probe).unwrap();
        let pod: Pod = self.pods().create(&dry_run, &probe).await.unwrap();
        let tolerations = pod.spec.unwrap().tolerations.unwrap_or_default();
        tolerations
            .iter()
            .any(|one| one.key.as_deref() == Some("kubernetes.io/arch"))
    }

    /// Waits until the API server calls the webhook.
    pub async fn wait_until_called(&self) {
        eventually("a webhook that is asked", DEADLINE, || async {
            self.is_called().await.then_some(())
        })
        .await;
    }

    /// The authorities that the API server trusts.
    pub async fn webhook_ca(&self) -> Vec<u8> {
        let configurations: Api<MutatingWebhookConfiguration> = Api::all(self.client.clone());
        eventually("a registered webhook", DEADLINE, || async {
            let found = configurations.get("archaware").await.ok()?;
            let bundle = found.webhooks?.first()?.client_config.ca_bundle.clone()?;
            Some(bundle.0)
        })
        .await
    }
}

/// A client that trusts only these authorities and uses HTTP/1.1, as API servers do for Services.
pub fn client(authorities: &[u8]) -> reqwest::Client {
    reqwest::Client::builder()
        .tls_certs_only(reqwest::Certificate::from_pem_bundle(authorities).unwrap())
        .http1_only()
        .build()
        .unwrap()
}
