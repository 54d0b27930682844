//! Another webhook beside archaware's, which records its requests.

use std::sync::{Arc, Mutex};

use base64::{Engine, engine::general_purpose::STANDARD};
use http_body_util::{BodyExt, Full};
use hyper::{body::Bytes, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};
use tokio::{net::TcpListener, task::JoinHandle};

use super::{TestCluster, tls::self_signed};

/// Stops on drop. The next test deletes its configuration.
pub struct RecordingWebhook {
    seen: Arc<Mutex<Vec<Value>>>,
    task: JoinHandle<()>,
}

impl RecordingWebhook {
    /// Registers under `name` for `rule`; `patch` returns the operations for an object.
    pub async fn start(
        cluster: &TestCluster,
        name: &str,
        rule: Value,
        patch: impl Fn(&Value) -> Value + Send + Sync + 'static,
    ) -> Self {
        let (tls, certificate) = self_signed();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let seen: Arc<Mutex<Vec<Value>>> = Arc::default();
        let (all, patch) = (seen.clone(), Arc::new(patch));
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (tls, all, patch) = (tls.clone(), all.clone(), patch.clone());
                tokio::spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else {
                        return;
                    };
                    let answer = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
                        let (all, patch) = (all.clone(), patch.clone());
                        async move {
                            let body = request.into_body().collect().await?.to_bytes();
                            let review: Value = serde_json::from_slice(&body).unwrap();
                            let operations = patch(&review["request"]["object"]).to_string();
                            let response = json!({
                                "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                                "response": {
                                    "uid": review["request"]["uid"], "allowed": true,
                                    "patchType": "JSONPatch", "patch": STANDARD.encode(operations),
                                },
                            });
                            all.lock().unwrap().push(review);
                            let body = Full::new(Bytes::from(response.to_string()));
                            Ok::<_, hyper::Error>(hyper::Response::new(body))
                        }
                    });
                    let stream = TokioIo::new(stream);
                    let _ = http1::Builder::new().serve_connection(stream, answer).await;
                });
            }
        });
        let configuration = json!({
            "metadata": {"name": name},
            "webhooks": [{
                "name": format!("{name}.example.com"),
                "clientConfig": {"url": url, "caBundle": STANDARD.encode(certificate)},
                "rules": [rule], "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail",
            }],
        });
        let configurations: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
        let configuration = serde_json::from_value(configuration).unwrap();
        configurations
            .create(&PostParams::default(), &configuration)
            .await
            .unwrap();
        Self { seen, task }
    }

    /// The requests so far.
    pub fn seen(&self) -> Vec<Value> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for RecordingWebhook {
    fn drop(&mut self) {
        self.task.abort();
    }
}
