//! The real API server asks the real webhook, and the real scheduler decides.

mod abuse;
mod affinity;
mod asked;
mod certificates;
mod gates;
mod others;
mod pods;
mod requests;
mod trouble;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;

/// A pod that nobody schedules: what the webhook has made of it is all there is.
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
