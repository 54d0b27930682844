//! Kubernetes objects for tests.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};

pub(crate) fn node(name: &str, architecture: &str) -> Value {
    json!({
        "metadata": {"name": name, "labels": {
            "kubernetes.io/arch": architecture, "kubernetes.io/os": "linux", "kubernetes.io/hostname": name,
        }},
        "status": {
            "nodeInfo": {
                "architecture": architecture, "operatingSystem": "linux", "kubeletVersion": "v1.36.3",
                "kernelVersion": "fake", "osImage": "fake", "containerRuntimeVersion": "fake://1",
                "bootID": "x", "machineID": "x", "systemUUID": "x", "kubeProxyVersion": "",
            },
            "capacity": {"cpu": "64", "memory": "256Gi", "pods": "1000"},
            "allocatable": {"cpu": "64", "memory": "256Gi", "pods": "1000"},
            "addresses": [{"type": "Hostname", "address": name}],
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "KubeletReady",
                "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        },
    })
}

pub fn pod(name: &str, spec: Value, annotations: Value) -> Value {
    json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec})
}

/// A spec whose containers have these images.
pub fn pod_spec(images: &[String]) -> Value {
    let container =
        |(number, image): (usize, &String)| json!({"name": format!("c{number}"), "image": image});
    json!({
        "containers": images.iter().enumerate().map(container).collect::<Vec<_>>(),
        "terminationGracePeriodSeconds": 0,
    })
}

/// The architectures that a pod tolerates by name.
pub fn architectures_of(pod: &Pod) -> BTreeSet<String> {
    let tolerations = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.tolerations.as_deref())
        .unwrap_or_default();
    let ours = tolerations
        .iter()
        .filter(|t| t.key.as_deref() == Some("kubernetes.io/arch"));
    ours.map(|t| t.value.clone().unwrap_or_else(|| "any".to_owned()))
        .collect()
}

/// `key=value:effect` of a node's taints.
pub fn taints(node: &Node) -> BTreeSet<String> {
    let taints = node
        .spec
        .as_ref()
        .and_then(|spec| spec.taints.as_deref())
        .unwrap_or_default();
    let text = |taint: &k8s_openapi::api::core::v1::Taint| {
        format!(
            "{}={}:{}",
            taint.key,
            taint.value.as_deref().unwrap_or_default(),
            taint.effect
        )
    };
    taints
        .iter()
        .map(text)
        .filter(|taint| !taint.starts_with("node.kubernetes.io/"))
        .collect()
}
