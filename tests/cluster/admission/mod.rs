//! A real API server calls the webhook, and a real scheduler schedules the pods.

mod abuse;
mod affinity;
mod certificates;
mod direct_client;
mod faults;
mod gates;
mod nodes_and_daemon_sets;
mod pods;
mod registration;
mod requests;
mod virtual_nodes;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;

/// A pod without scheduler, so that it shows only what the webhook did.
async fn create(
    cluster: &TestCluster,
    name: &str,
    images: &[&str],
    change: impl Fn(&mut Value),
) -> Pod {
    let images: Vec<String> = images.iter().map(|image| cluster.image(image)).collect();
    let mut pod = pod(name, pod_spec(&images), json!({}));
    pod["spec"]["schedulerName"] = json!("none");
    change(&mut pod);
    cluster.create(pod).await
}

fn set(names: &[&str]) -> std::collections::BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}
