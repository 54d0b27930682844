//! The rows of nodes.

use crate::{
    cluster::objects::Node,
    placement::{
        ConfiguredKeys, Taint,
        node::{self, NodeChange, TaintPolicy, TaintProblem},
    },
    plan,
};

use super::PlanRow;

/// A node, and the planned change of its taint.
pub(super) struct PlannedNode<'a> {
    pub(super) node: &'a Node,
    change: Option<NodeChange>,
    problem: Option<TaintProblem>,
    /// archaware's taint on the node after the planned change.
    pub(super) taint: Option<Taint>,
}

impl<'a> PlannedNode<'a> {
    pub(super) fn new(node: &'a Node, policy: &TaintPolicy, keys: &ConfiguredKeys) -> Self {
        let (change, problem) = node::decide(policy, &node.view(), keys);
        let new = change
            .as_ref()
            .and_then(|change| change.new_taint().cloned());
        let removed = change
            .as_ref()
            .is_some_and(|change| change.remove.is_some());
        let standing = || node::standing(&node.view(), keys).filter(|_| !removed);
        Self {
            node,
            taint: new.or_else(standing),
            change,
            problem,
        }
    }

    /// The rows of the node. `tolerated`: number of its pods that get a toleration.
    pub(super) fn rows(&self, tolerated: usize) -> Vec<PlanRow> {
        let tolerate = match tolerated {
            0 => None,
            1 => Some("1 pod that runs there gets a toleration".to_owned()),
            count => Some(format!("{count} pods that run there get a toleration")),
        };
        let row = |action, detail| PlanRow::new("Node", self.node, action, detail);
        let mut rows = Vec::new();
        match (&self.change, tolerate) {
            (Some(change), tolerate) => {
                let (action, detail) = describe(change);
                let first = tolerate.map(|tolerate| format!("; before, {tolerate}"));
                rows.push(row(action, detail + &first.unwrap_or_default()));
            }
            // The node already has its taint, and only its pods change.
            (None, Some(tolerate)) => rows.push(row("tolerate", tolerate)),
            (None, None) => {}
        }
        rows.extend(self.problem.as_ref().map(|problem| {
            let event = plan::node::describe(problem);
            row(event.reason.as_str(), event.note)
        }));
        rows
    }
}

fn describe(change: &NodeChange) -> (&'static str, String) {
    let removed = change.remove.as_ref();
    let removed = removed.map(|(_, taint)| format!("removes {taint}"));
    match (&change.add, &change.correct, removed) {
        (Some(taint), _, Some(removed)) => ("move", format!("adds {taint}, {removed}")),
        (Some(taint), ..) => ("taint", taint.to_string()),
        (None, Some((_, taint)), _) => ("correct", taint.to_string()),
        (None, None, Some(removed)) => ("untaint", removed),
        (None, None, None) => (
            "disown",
            "removes the annotation that records a taint".to_owned(),
        ),
    }
}
