//! `pods`, `daemonSets` and `misplaced`: how pods and DaemonSets are handled.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::placement::Mode;

/// How pods are handled unless their annotations say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodsConfig {
    /// Their mode: see annotations.md.
    pub mode: Mode,
    /// Namespaces whose pods get the mode `any`: they tolerate every architecture, and archaware
    /// does not read their images.
    pub exempt_namespaces: BTreeSet<String>,
}

impl PodsConfig {
    /// The mode of pods in a namespace, unless annotations say otherwise.
    pub fn mode_in(&self, namespace: &str) -> Mode {
        if self.exempt_namespaces.contains(namespace) {
            Mode::Any
        } else {
            self.mode
        }
    }
}

/// How DaemonSets are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum DaemonSets {
    /// Their templates get the tolerations that their images allow, which causes a rollout.
    #[default]
    Manage,
    /// They are not changed; a Warning event reports the missing tolerations.
    Report,
}

/// The treatment of pods that cannot run on their node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Misplaced {
    /// A Warning event reports them.
    #[default]
    Report,
    /// Pods are evicted if their controller creates another pod that lands elsewhere: for each
    /// controller, one pod after the other.
    Evict,
}
