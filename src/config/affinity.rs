//! `affinity`: node affinity of pods.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::platform::Architecture;

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

/// The weight of a preference, from 1 to 100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "u8")]
#[schemars(with = "u8", extend("minimum" = 1, "maximum" = 100))]
pub struct Weight(u8);

impl Weight {
    /// From 1 to 100.
    pub fn get(self) -> u8 {
        self.0
    }
}

impl TryFrom<u8> for Weight {
    type Error = &'static str;

    fn try_from(weight: u8) -> Result<Self, &'static str> {
        if (1..=100).contains(&weight) {
            Ok(Self(weight))
        } else {
            Err("a weight is a number from 1 to 100")
        }
    }
}
