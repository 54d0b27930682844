//! Objects as the API server sends them, without the parts that archaware does not read.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use serde::{Deserialize, Deserializer, de::IgnoredAny};

use crate::{bounded::Budget, cluster::field_managers::FieldManagers, placement::annotation};

use super::{
    DaemonSet, DaemonSetSpec, MIRROR, Node, NodeSpec, NodeStatus, Pod, PodSpec, PodStatus,
};

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
    generation: Option<i64>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
    managed_fields: M,
}

impl<M: Default> From<StoredMetadata<M>> for ObjectMeta {
    /// Drops `managedFields`, often the largest part, and annotations that archaware does not read,
    /// which may hold whole manifests. If an object has only such annotations, the map is empty,
    /// but it is `Some`: a patch then adds an annotation to the map instead of creating the map.
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
            generation: stored.generation,
            creation_timestamp: stored.creation_timestamp,
            deletion_timestamp: stored.deletion_timestamp,
            labels: stored.labels,
            annotations: stored.annotations,
            owner_references: stored.owner_references,
            ..Self::default()
        }
    }
}

/// Maximum number of elements, and bytes of text, of a pod or a DaemonSet. Real pods have some
/// hundred elements. A small object in a list needs about a KiB of memory, so this is a few MiB.
const MAX_ELEMENTS: usize = 16 * 1024;
const MAX_TEXT: usize = 512 * 1024;
/// Maximum number of elements, and bytes of text, of a node. A kubelet can be configured to report
/// all images that the node holds (`nodeStatusMaxImages: -1`), which may be thousands.
const MAX_NODE_ELEMENTS: usize = 128 * 1024;
const MAX_NODE_TEXT: usize = 2 << 20;

/// The fields that identify an object. An oversized object keeps no other metadata.
fn identity(metadata: ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: metadata.name,
        namespace: metadata.namespace,
        uid: metadata.uid,
        resource_version: metadata.resource_version,
        creation_timestamp: metadata.creation_timestamp,
        deletion_timestamp: metadata.deletion_timestamp,
        ..ObjectMeta::default()
    }
}

impl<'de> Deserialize<'de> for Pod {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize, Default)]
        #[serde(default)]
        struct StoredPod {
            #[serde(deserialize_with = "metadata")]
            metadata: ObjectMeta,
            spec: PodSpec,
            status: PodStatus,
        }
        let budget = Budget::new(MAX_ELEMENTS, MAX_TEXT);
        let stored: StoredPod = budget.parse(deserializer)?;
        let oversized = budget.is_exceeded() || stored.spec.has_long_list();
        Ok(if oversized {
            Self {
                metadata: identity(stored.metadata),
                spec: PodSpec {
                    node_name: stored.spec.node_name,
                    ..PodSpec::default()
                },
                status: PodStatus::default(),
                oversized,
            }
        } else {
            Self {
                metadata: stored.metadata,
                spec: stored.spec,
                status: stored.status,
                oversized,
            }
        })
    }
}

impl<'de> Deserialize<'de> for DaemonSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize, Default)]
        #[serde(default)]
        struct StoredDaemonSet {
            metadata: Option<StoredMetadata<FieldManagers>>,
            spec: DaemonSetSpec,
        }
        let budget = Budget::new(MAX_ELEMENTS, MAX_TEXT);
        let stored: StoredDaemonSet = budget.parse(deserializer)?;
        let mut metadata = stored.metadata.unwrap_or_default();
        if budget.is_exceeded() || stored.spec.template.spec.has_long_list() {
            return Ok(Self {
                metadata: identity(metadata.into()),
                oversized: true,
                ..Self::default()
            });
        }
        let annotations = metadata.annotations.as_ref();
        let applied = annotations.and_then(|annotations| annotations.get(LAST_APPLIED));
        let applied = applied.and_then(|text| serde_json::from_str::<Self>(text).ok());
        let tolerations = applied.and_then(|applied| applied.spec.template.spec.tolerations);
        Ok(Self {
            managers: std::mem::take(&mut metadata.managed_fields),
            metadata: metadata.into(),
            applied_tolerations: tolerations.unwrap_or_default(),
            spec: stored.spec,
            oversized: false,
        })
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize, Default)]
        #[serde(default)]
        struct StoredNode {
            metadata: Option<StoredMetadata<FieldManagers>>,
            spec: NodeSpec,
            status: NodeStatus,
        }
        let budget = Budget::new(MAX_NODE_ELEMENTS, MAX_NODE_TEXT);
        let stored: StoredNode = budget.parse(deserializer)?;
        let mut metadata = stored.metadata.unwrap_or_default();
        let managers = std::mem::take(&mut metadata.managed_fields);
        let mut node = Self {
            managers,
            metadata: metadata.into(),
            spec: stored.spec,
            status: stored.status,
        };
        if budget.is_exceeded() {
            // Taints or labels may be missing. Without an architecture, archaware skips this node.
            node.status.node_info.architecture.clear();
        }
        Ok(node)
    }
}

/// The annotation in which `kubectl apply` stores the manifest that it applied last.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
