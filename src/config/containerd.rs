//! `containerd`: the node's containerd.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::mistakes::Mistakes;

/// The node's containerd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerdConfig {
    /// Path of its socket; empty: containerd is not asked.
    pub socket: PathBuf,
    /// Namespaces whose image records and content are read, in this order.
    pub read_namespaces: Vec<String>,
    /// archaware's own namespace, where it keeps fetched documents; empty: it keeps none.
    pub cache_namespace: String,
}

impl Default for ContainerdConfig {
    fn default() -> Self {
        Self {
            socket: PathBuf::new(),
            read_namespaces: vec!["k8s.io".to_owned()],
            cache_namespace: "archaware".to_owned(),
        }
    }
}

impl ContainerdConfig {
    pub(super) fn check(&self, mistakes: &mut Mistakes) {
        let (reads, own_namespace) = (&self.read_namespaces, &self.cache_namespace);
        let has_namespace = !reads.is_empty() || !own_namespace.is_empty();
        mistakes.unless(
            self.socket.as_os_str().is_empty() || has_namespace,
            &["containerd.socket"],
            "containerd.socket needs containerd.readNamespaces or containerd.cacheNamespace",
        );
        // archaware must not write into the kubelet's namespace or expire its content.
        mistakes.unless(
            !reads.contains(own_namespace),
            &["containerd.cacheNamespace", "containerd.readNamespaces"],
            "containerd.cacheNamespace must not be one of containerd.readNamespaces",
        );
        let is_namespace = |name: &String| {
            let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            !name.is_empty() && name.len() <= 76 && name.chars().all(plain)
        };
        let mut namespaces = reads
            .iter()
            .chain(Some(own_namespace).filter(|namespace| !namespace.is_empty()));
        mistakes.unless(
            namespaces.all(is_namespace),
            &["containerd.readNamespaces", "containerd.cacheNamespace"],
            "each name in containerd.readNamespaces and containerd.cacheNamespace needs 1 to 76 letters, digits, '-', '_' or '.'",
        );
    }
}
