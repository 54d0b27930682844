//! Plans the change of a node.

use crate::{
    cluster::{events::EventReason, objects::Node, patch},
    placement::node::{self, TaintPolicy, TaintProblem},
};

use super::{EventDraft, Plan, PlannedChange, PlannedPatch};

/// The plan for a node.
pub(crate) fn plan(node: &Node, policy: &TaintPolicy) -> Plan {
    let mut plan = Plan::nothing();
    let (change, problem) = node::decide(policy, &node.view());
    plan.events = problem.iter().map(describe).collect();
    plan.patch = change.map(|change| {
        let removed = change.remove.is_some();
        let corrected = change.correct.as_ref().map(|(_, taint)| taint);
        let done = match change.add.as_ref().or(corrected) {
            Some(taint) => PlannedChange::NodeTainted {
                taint: taint.to_string(),
                removed,
            },
            None => PlannedChange::NodeUntainted { removed },
        };
        PlannedPatch::new(patch::node(node, change), done)
    });
    plan
}

/// The event for a problem of a node.
pub(crate) fn describe(problem: &TaintProblem) -> EventDraft {
    match problem {
        TaintProblem::Conflict { wanted, value } => EventDraft::new(
            EventReason::TaintConflict,
            format!(
                "its taint {}={value}:{} was set by another tool and is not {wanted}; archaware does not change it",
                wanted.kind.key,
                wanted.kind.effect.as_str()
            ),
        ),
        TaintProblem::UnknownArchitecture => EventDraft::new(
            EventReason::UnknownArchitecture,
            "status.nodeInfo.architecture is not a known architecture; archaware does not change its taint",
        ),
    }
}

#[cfg(test)]
mod tests;
