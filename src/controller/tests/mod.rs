//! The controllers against a scripted API server: which calls they make in which order, and what
//! follows from each answer. The clock is virtual.

mod faults;
mod leadership;
mod order;

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::{sync::watch, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::{ControllerParts, Durable, RunError, WATCHES, run};
use crate::{
    cluster::{cluster_nodes::ClusterNodes, lease::Elector, namespaces::Namespaces},
    config::Config,
    evaluate::{Evaluator, KnownKeys, pull_secrets::PullSecrets},
    image::{self, Resolver, credentials::OperatorCredentials, metrics::Resolutions},
    metrics::Metrics,
    scripted_api::{RecordedCall, ScriptedApi},
    sources::sources,
};

const NODE: &str = "/api/v1/nodes/a";
const POD: &str = "/api/v1/namespaces/ns/pods/p";
const DAEMON_SET: &str = "/apis/apps/v1/namespaces/ns/daemonsets/d";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/archaware/leases/archaware";
const EVENTS: &str = "POST /apis/events.k8s.io/v1";

/// A running controller.
struct Controller {
    stop: CancellationToken,
    running: JoinHandle<Result<(), RunError>>,
    metrics: Metrics,
}

impl Controller {
    /// Starts with this configuration, without its `apiVersion` and `kind`.
    fn start(api: &ScriptedApi, config: &str) -> Self {
        let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
        let config = crate::config::parse("c", &format!("{head}{config}\n")).unwrap();
        let (config, client): (Arc<Config>, _) = (Arc::new(config), api.client());
        let metrics = Metrics::default();
        let nodes = ClusterNodes::default();
        let evaluator = Evaluator {
            resolver: resolver(),
            pull_secrets: PullSecrets::new(client.clone()),
            policy: Arc::new((&*config).into()),
            config: config.clone(),
            keys: KnownKeys::new(&*config),
            sources: sources(&config.selection, &nodes).unwrap(),
            nodes,
            explains: false,
        };
        let durable = Durable::new(evaluator.keys.clone());
        let (memory, me) = (Arc::new(durable.clone()), "me".to_owned());
        let election = Elector::new(&client, "archaware", me, memory, metrics.clone());
        let stop = CancellationToken::new();
        let run = run(
            ControllerParts {
                api: client,
                config,
                evaluator,
                namespaces: Namespaces::default(),
                namespace: "archaware".to_owned(),
                election,
                durable,
                metrics: metrics.clone(),
                pending: watch::channel(WATCHES.to_vec()).0,
            },
            stop.clone(),
        );
        Self {
            stop,
            running: tokio::spawn(run),
            metrics,
        }
    }

    /// Stops it. It must end soon and without an error.
    async fn stop(self) {
        self.stop.cancel();
        let ended = tokio::time::timeout(Duration::from_secs(10), self.running);
        ended.await.expect("it ends").unwrap().unwrap();
    }

    /// The value of the metric whose line begins with `line`.
    fn metric(&self, line: &str) -> Option<String> {
        let text = self.metrics.encode().unwrap();
        let found = text
            .lines()
            .find_map(|candidate| candidate.strip_prefix(line));
        found.map(|value| value.trim().to_owned())
    }
}

/// A resolver. No test here lets it contact a registry.
fn resolver() -> Resolver {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let settings = image::ResolverSettings {
        registry: image::registry::RegistryClient::default(),
        rewrites: Vec::new(),
        images: 16,
        tag_ttl: Duration::from_mins(1),
        latest_ttl: Duration::from_mins(1),
        per_credential: false,
    };
    let credentials = OperatorCredentials::default();
    Resolver::new(settings, None, credentials, Resolutions::default())
}

/// A cluster with a namespace and a node.
fn cluster() -> ScriptedApi {
    let api = ScriptedApi::default();
    api.put(
        "/api/v1/namespaces/ns",
        json!({ "metadata": { "name": "ns", "uid": "n" } }),
    );
    api.put(
        NODE,
        json!({
            "metadata": { "name": "a", "uid": "node", "labels": { "kubernetes.io/arch": "arm64" } },
            "spec": {},
            "status": { "nodeInfo": { "architecture": "arm64" } },
        }),
    );
    api
}

/// A pod with an architectures annotation, so that no image is resolved.
fn pod() -> Value {
    json!({
        "metadata": { "name": "p", "namespace": "ns", "uid": "pod",
            "annotations": { "archaware.dev/architectures": "arm64" } },
        "spec": { "containers": [{ "image": "a" }] },
    })
}

fn daemon_set() -> Value {
    json!({
        "metadata": { "name": "d", "namespace": "ns", "uid": "set" },
        "spec": { "template": {
            "metadata": { "annotations": { "archaware.dev/architectures": "amd64" } },
            "spec": { "containers": [{ "image": "a" }] },
        }},
    })
}

fn toleration(architecture: &str) -> Value {
    json!({ "key": "kubernetes.io/arch", "operator": "Equal", "value": architecture,
        "effect": "NoSchedule" })
}

/// All calls that write, except those for Leases and access reviews.
fn writes(api: &ScriptedApi) -> Vec<RecordedCall> {
    let calls = api.calls(&["PATCH", "POST", "DELETE", "PUT"]);
    let is_other = |call: &RecordedCall| {
        call.path.contains("/leases") || call.path.ends_with("/selfsubjectaccessreviews")
    };
    calls.into_iter().filter(|call| !is_other(call)).collect()
}

/// Reason and object of the published events.
fn events(api: &ScriptedApi) -> Vec<(String, String)> {
    let calls = api.calls(&[EVENTS]);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    calls
        .iter()
        .map(|call| {
            let event = &call.body;
            (text(&event["reason"]), text(&event["regarding"]["name"]))
        })
        .collect()
}
