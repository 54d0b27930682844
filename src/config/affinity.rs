//! `affinity`: node affinity of pods.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{placement::Weight, platform::Architecture};

/// Node affinity to add to pods: what autoscalers and topology spread go by. Kubernetes allows it to be set when a pod is
/// created and while it has a scheduling gate, so this needs the webhook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AffinityConfig {
    /// Whether the architectures of the images are required.
    pub required: bool,
    /// Architectures that are preferred if the images have them.
    pub preferred: Vec<PreferenceConfig>,
    /// Whether pods of `ReplicaSet`s and `StatefulSet`s that were created while the webhook did not answer, and that wait for a node, are
    /// evicted, so that they are created anew with node affinity.
    pub recreate_pods: bool,
}

/// A preferred architecture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreferenceConfig {
    /// The architecture.
    pub architecture: Architecture,
    /// The weight, from 1 to 100.
    pub weight: Weight,
}
