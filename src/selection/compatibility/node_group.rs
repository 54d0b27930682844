//! Nodes that are alike for the rules of documents.

use crate::placement::NodeVariant;

use super::NodeFacts;

/// Nodes that are alike for the rules of a document.
#[derive(Clone, Copy, Debug)]
pub struct NodeGroup<'a> {
    /// Its position among the groups of the cluster.
    pub index: usize,
    /// Facts about each of the nodes.
    pub facts: NodeFacts<'a>,
    /// Architecture of the nodes.
    pub architecture: &'a str,
    /// Variant of the nodes, if it is known.
    pub variant: Option<NodeVariant>,
    /// Values of `kubernetes.io/hostname`; empty if there are too many, or a node lacks the label.
    pub hosts: &'a [String],
    /// The number of nodes in the group.
    pub count: usize,
}

impl NodeGroup<'_> {
    /// Whether both are the same group, not only equal groups.
    pub fn is_same(&self, other: &NodeGroup<'_>) -> bool {
        self.index == other.index
    }
}
