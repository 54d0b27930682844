//! The floor: a client that patches a constant toleration into every pod as soon as it sees it.

use std::time::Instant;

use archaware::cluster::objects::Pod;
use futures::{StreamExt, TryStreamExt};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use kube_runtime::{WatchStreamExt, watcher};
use serde_json::json;

/// One toleration and one annotation, guarded as archaware's patches are.
pub(crate) async fn patch(api: &Api<Pod>, pod: &Pod) {
    let operations = json!([
        {"op": "test", "path": "/metadata/uid", "value": pod.metadata.uid},
        {"op": "test", "path": "/spec/tolerations", "value": pod.spec.tolerations},
        {"op": "add", "path": "/spec/tolerations/-", "value":
            {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}},
        {"op": "add", "path": "/metadata/annotations", "value": {"bare": "arm64"}},
    ]);
    let patch = Patch::<()>::Json(serde_json::from_value(operations).unwrap());
    api.patch(&pod.name_any(), &PatchParams::default(), &patch)
        .await
        .unwrap();
}

/// Watches a namespace and patches new pods until it is dropped.
pub(crate) fn watch_and_patch(client: Client, namespace: &str) -> tokio::task::JoinHandle<()> {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    tokio::spawn(async move {
        let config = watcher::Config::default().fields("spec.nodeName=");
        let pods = watcher(api.clone(), config).applied_objects();
        futures::pin_mut!(pods);
        while let Some(pod) = pods.try_next().await.unwrap() {
            if pod
                .spec
                .tolerations
                .as_ref()
                .is_some_and(|all| all.iter().all(|t| t["key"] != "kubernetes.io/arch"))
            {
                patch(&api, &pod).await;
            }
        }
    })
}

/// Patches known pods with this concurrency; returns patches per second.
pub(crate) async fn patch_all(client: &Client, namespace: &str, at_once: usize) -> f64 {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pods = api.list(&Default::default()).await.unwrap().items;
    let (count, started) = (pods.len() as f64, Instant::now());
    futures::stream::iter(pods)
        .map(|pod| {
            let api = api.clone();
            async move { patch(&api, &pod).await }
        })
        .buffer_unordered(at_once)
        .for_each(|()| async {})
        .await;
    count / started.elapsed().as_secs_f64()
}
