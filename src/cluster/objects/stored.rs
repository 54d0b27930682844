//! Objects as the API server sends them, without the parts that archaware does not read.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::{Deserialize, Deserializer, de::IgnoredAny};

use crate::{cluster::field_managers::FieldManagers, placement::annotation};

use super::{DaemonSet, DaemonSetSpec, MIRROR, Node, NodeSpec, NodeStatus};

/// Parses metadata without the parts that archaware does not read.
pub(crate) fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let stored = Option::<StoredMetadata<IgnoredAny>>::deserialize(deserializer)?;
    Ok(stored.unwrap_or_default().into())
}

/// Metadata as the API server sends it, with the managers of fields only where archaware reads
/// them.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct StoredMetadata<M: Default> {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
    managed_fields: M,
}

impl<M: Default> From<StoredMetadata<M>> for ObjectMeta {
    /// `managedFields` is often the largest part, and foreign annotations may hold whole manifests.
    /// An empty map means that there are only foreign annotations, `None` that there are none at
    /// all, which decides how a patch adds one.
    fn from(mut stored: StoredMetadata<M>) -> Self {
        if let Some(annotations) = &mut stored.annotations {
            let is_read = |name: &str| {
                let prefixes = [annotation::PREFIX, annotation::OCIFIT_PREFIX];
                name == MIRROR || prefixes.iter().any(|prefix| name.starts_with(prefix))
            };
            annotations.retain(|name, _| is_read(name));
        }
        Self {
            name: stored.name,
            namespace: stored.namespace,
            uid: stored.uid,
            resource_version: stored.resource_version,
            creation_timestamp: stored.creation_timestamp,
            deletion_timestamp: stored.deletion_timestamp,
            labels: stored.labels,
            annotations: stored.annotations,
            owner_references: stored.owner_references,
            ..Self::default()
        }
    }
}

/// A node as the API server sends it.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct StoredNode {
    metadata: Option<StoredMetadata<FieldManagers>>,
    spec: NodeSpec,
    status: NodeStatus,
}

impl From<StoredNode> for Node {
    fn from(stored: StoredNode) -> Self {
        let mut metadata = stored.metadata.unwrap_or_default();
        Self {
            managers: std::mem::take(&mut metadata.managed_fields),
            metadata: metadata.into(),
            spec: stored.spec,
            status: stored.status,
        }
    }
}

/// A DaemonSet as the API server sends it.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct StoredDaemonSet {
    metadata: Option<StoredMetadata<FieldManagers>>,
    spec: DaemonSetSpec,
}

impl From<StoredDaemonSet> for DaemonSet {
    fn from(stored: StoredDaemonSet) -> Self {
        let mut metadata = stored.metadata.unwrap_or_default();
        let annotations = metadata.annotations.as_ref();
        let applied = annotations.and_then(|annotations| annotations.get(LAST_APPLIED));
        let applied = applied.and_then(|text| serde_json::from_str::<Self>(text).ok());
        let tolerations = applied.and_then(|applied| applied.spec.template.spec.tolerations);
        Self {
            managers: std::mem::take(&mut metadata.managed_fields),
            metadata: metadata.into(),
            applied_tolerations: tolerations.unwrap_or_default(),
            spec: stored.spec,
        }
    }
}

/// The annotation in which `kubectl apply` stores the manifest that it applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
