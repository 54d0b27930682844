//! `startup` and `concurrency`: limits of time, of concurrency and of rates.

use std::{num::NonZeroU16, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::duration;

/// Behaviour at start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StartupConfig {
    /// Maximum time that nodes stay untainted while existing pods and DaemonSets are decided first.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
}

impl Default for StartupConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_mins(2),
        }
    }
}

/// Limits of concurrency.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConcurrencyConfig {
    /// How many pods are decided at once, including pods that wait for a registry. As many
    /// DaemonSets are decided at the same time.
    pub pods: NonZeroU16,
    /// Patches of pods, DaemonSets and nodes at once.
    pub writes: NonZeroU16,
    /// Requests to one registry at once.
    pub per_registry: NonZeroU16,
    /// Evictions in a minute (affinity.recreatePods, misplaced: evict, and clean --recreate-pods);
    /// a sixth of them may happen at once.
    pub evictions_per_minute: NonZeroU16,
}

impl Default for ConcurrencyConfig {
    fn default() -> Self {
        let at_most = |limit: u16| NonZeroU16::MIN.saturating_add(limit - 1);
        Self {
            pods: at_most(4096),
            writes: at_most(32),
            per_registry: at_most(8),
            evictions_per_minute: at_most(600),
        }
    }
}
