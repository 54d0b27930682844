//! Karpenter's `NodePool`, as far as advice depends on it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde_json::Value;

use crate::placement::{
    author_nodes,
    requirement::{Operator, Requirement},
};

use super::stored;

/// A `NodePool` (`karpenter.sh/v1`): describes nodes that Karpenter may create.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NodePool {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    /// Desired state.
    pub spec: NodePoolSpec,
}

/// A `NodePool`'s spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NodePoolSpec {
    pub template: NodeClaimTemplate,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NodeClaimTemplate {
    pub spec: NodeClaimSpec,
}

/// The spec of the nodes of a pool.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NodeClaimSpec {
    /// Requirements on labels, `ANDed`.
    pub requirements: Option<Vec<Requirement>>,
    /// In the API's form.
    pub taints: Option<Vec<Value>>,
}

impl NodePool {
    /// The architecture of its nodes, if there can be only one.
    pub fn architecture(&self) -> Option<&str> {
        let requirements = self.spec.template.spec.requirements.iter().flatten();
        let mut listed = requirements.filter(|requirement| {
            author_nodes::is_on_architecture(requirement) && requirement.operator == Operator::In
        });
        listed.find_map(|requirement| match requirement.values.as_slice() {
            [single] => Some(single.as_str()),
            _ => None,
        })
    }

    /// Whether its nodes have a taint of this key from the start.
    pub fn declares_taint(&self, key: &str) -> bool {
        let mut taints = self.spec.template.spec.taints.iter().flatten();
        taints.any(|taint| taint.get("key").and_then(Value::as_str) == Some(key))
    }
}
