//! Persistent volumes and their claims: they limit the nodes on which a pod can run.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;

use crate::placement::affinity::NodeSelector;

use super::stored;

/// A claim of a volume.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PersistentVolumeClaim {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    /// Desired state.
    pub spec: PersistentVolumeClaimSpec,
}

/// A claim's spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PersistentVolumeClaimSpec {
    /// The name of the bound `PersistentVolume`.
    pub volume_name: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PersistentVolume {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    /// Desired state.
    pub spec: PersistentVolumeSpec,
}

/// A volume's spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PersistentVolumeSpec {
    /// The nodes that can use it.
    pub node_affinity: VolumeNodeAffinity,
}

/// The nodes that can use a volume: by default all.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct VolumeNodeAffinity {
    /// One of its terms has to select the node.
    pub required: Option<NodeSelector>,
}
