//! What is to be done about a node.

use crate::{
    cluster::{events::EventReason, objects::Node, patch},
    placement::node::{self, Policy, Problem},
};

use super::{Change, EventDraft, Plan, Write};

/// The plan for a node.
pub(crate) fn plan(node: &Node, policy: &Policy) -> Plan {
    let mut plan = Plan::nothing();
    let (change, problem) = node::decide(policy, &node.view());
    plan.events = problem.iter().map(describe).collect();
    plan.write = change.map(|change| {
        let removed = change.remove.is_some();
        let corrected = change.correct.as_ref().map(|(_, taint)| taint);
        let done = match change.add.as_ref().or(corrected) {
            Some(taint) => Change::NodeTainted {
                taint: taint.to_string(),
                removed,
            },
            None => Change::NodeReleased { removed },
        };
        Write::new(patch::node(node, change), done)
    });
    plan
}

/// The event about a node's problem.
pub(crate) fn describe(problem: &Problem) -> EventDraft {
    match problem {
        Problem::Conflict { wanted, value } => EventDraft::new(
            EventReason::TaintConflict,
            format!(
                "its taint {}={value}:{} is not archaware's and not {wanted}; it is left alone",
                wanted.kind.key,
                wanted.kind.effect.as_str()
            ),
        ),
        Problem::UnknownArchitecture => EventDraft::new(
            EventReason::UnknownArchitecture,
            "status.nodeInfo.architecture names no architecture; the node is not tainted",
        ),
    }
}

#[cfg(test)]
mod tests;
