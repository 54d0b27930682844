//! `taint`: the taint of nodes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    names::QualifiedName,
    placement::{Effect, LabelSelector, TAINT_KEY},
    platform::Architecture,
};

/// The taint of nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TaintConfig {
    /// Whether nodes are tainted. If not, taints that archaware owns are removed.
    pub manage: bool,
    /// Its key; the value is the node's architecture. For another key see install.md.
    pub key: QualifiedName,
    /// The effect of the taint.
    pub effect: Effect,
    /// Only nodes of these architectures are tainted; empty means all.
    pub architectures: Vec<Architecture>,
    /// Only nodes that this label selector matches are tainted; empty means all.
    pub node_selector: LabelSelector,
    /// Pods that are bound before their node is tainted get a toleration.
    pub bound_pods: BoundPods,
    /// Whether the taint's value also names the CPU level if it is known, like `amd64-v3`: see
    /// variants.md.
    pub variants: bool,
}

impl Default for TaintConfig {
    fn default() -> Self {
        Self {
            manage: true,
            key: QualifiedName::constant(TAINT_KEY),
            effect: Effect::NoSchedule,
            architectures: Vec::new(),
            node_selector: LabelSelector::default(),
            bound_pods: BoundPods::default(),
            variants: false,
        }
    }
}

/// How to treat pods that run on a node already when it gets its taint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum BoundPods {
    /// They get a toleration for the taint. With the effect `NoExecute`, only pods whose images can
    /// run on the node get it.
    #[default]
    Tolerate,
    /// They are not changed.
    Leave,
}
