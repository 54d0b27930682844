//! The webhook as the API server sees it.

use std::net::TcpListener;

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, api::PostParams};
use serde_json::json;

use super::{Bed, Controller, DEADLINE, eventually, pod, pod_spec};

/// A port that nobody listens on.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// `admission:` of a configuration whose webhook is at this port; `more` are further keys.
pub(crate) fn admission(port: u16, more: &str) -> String {
    format!(
        "admission: {{enabled: true, listen: \"127.0.0.1:{port}\", url: \"https://127.0.0.1:{port}\", {more}}}\n"
    )
}

impl Controller {
    /// Starts with a webhook that the API server asks.
    pub(crate) async fn admitting(bed: &Bed, config: &str, more: &str) -> Self {
        let controller = Self::start(bed, &format!("{config}{}", admission(free_port(), more)));
        bed.asked().await;
        controller
    }
}

impl Bed {
    /// Whether the API server asks the webhook, and gets an answer.
    pub(crate) async fn is_asked(&self) -> bool {
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

    /// Waits until it does.
    pub(crate) async fn asked(&self) {
        eventually("a webhook that is asked", DEADLINE, || async {
            self.is_asked().await.then_some(())
        })
        .await;
    }

    /// A client that trusts the webhook as the API server does.
    pub(crate) async fn webhook_client(&self) -> reqwest::Client {
        let secrets: Api<Secret> = Api::namespaced(self.client.clone(), "archaware");
        let secret = eventually("a certificate", DEADLINE, || async {
            secrets.get("archaware-admission").await.ok()
        })
        .await;
        let bundle = secret.data.unwrap()["ca.crt"].0.clone();
        reqwest::Client::builder()
            .tls_certs_only(reqwest::Certificate::from_pem_bundle(&bundle).unwrap())
            .build()
            .unwrap()
    }
}
