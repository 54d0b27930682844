//! `affinity`: node affinity of pods.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    placement::{Weight, preference::Preferences},
    platform::Architecture,
};

use super::{Config, mistakes::Mistakes};

/// Node affinity to add to pods, for autoscalers and topology spread. Kubernetes allows node
/// affinity to be set only when a pod is created or while the pod has a scheduling gate, so the
/// webhook is needed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AffinityConfig {
    /// Whether node affinity requires the architectures of the images.
    pub required: bool,
    /// Architectures that are preferred if the images have them, like `{architecture: arm64,
    /// weight: 80}`, with weights from 1 to 100.
    pub preferred: Vec<PreferenceConfig>,
    /// Whether to evict pods that were created while the webhook did not answer: see
    /// autoscaling.md.
    ///
    /// Only pending pods of `ReplicaSet`s and `StatefulSet`s are evicted, so that their
    /// controllers create pods with node affinity instead.
    pub recreate_pods: bool,
}

impl Default for AffinityConfig {
    fn default() -> Self {
        Self {
            required: true,
            preferred: Vec::new(),
            recreate_pods: false,
        }
    }
}

impl AffinityConfig {
    /// Weights by architecture.
    pub fn preferences(&self) -> Preferences {
        let weights = self.preferred.iter();
        weights
            .map(|preference| (preference.architecture.clone(), preference.weight.get()))
            .collect()
    }

    pub(super) fn check(&self, config: &Config, mistakes: &mut Mistakes) {
        let names: BTreeSet<_> = self
            .preferred
            .iter()
            .map(|preference| &preference.architecture)
            .collect();
        mistakes.unless(
            names.len() == self.preferred.len(),
            &["affinity.preferred"],
            "affinity.preferred names an architecture twice",
        );
        mistakes.unless(
            !self.recreate_pods || self.required && config.admission.enabled,
            &["affinity.recreatePods"],
            "affinity.recreatePods needs affinity.required and admission.enabled: otherwise new pods get no affinity either",
        );
    }
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
