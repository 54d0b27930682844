//! A node, as far as placement looks at it.

use std::collections::BTreeMap;

use serde_json::Value;

/// The parts of a node that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// `status.nodeInfo.architecture` as reported.
    pub architecture: &'a str,
    /// Labels of the node.
    pub labels: &'a BTreeMap<String, String>,
    /// Annotations of the node.
    pub annotations: &'a BTreeMap<String, String>,
    /// `spec.taints` in the API's form.
    pub taints: &'a [Value],
}
