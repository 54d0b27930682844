//! Plans the change of a node.

use std::time::Instant;

use crate::{
    cluster::{events::EventReason, objects::Node, patch},
    placement::{
        ConfiguredKeys, affinity,
        node::{self, NodeChange, TaintPolicy, TaintProblem},
    },
    platform::Architecture,
};

use super::{
    EventDraft, Plan, PlannedChange, PlannedPatch, Remembered, draft::RECHECK_INTERVAL, repairs,
};

/// The plan for a node.
pub(crate) fn plan(
    node: &Node,
    policy: &TaintPolicy,
    keys: &ConfiguredKeys,
    remembered: &Remembered,
    now: Instant,
) -> Plan {
    let mut plan = Plan::nothing();
    let (change, problem) = node::decide(policy, &node.view(), keys);
    let label_problem = describe_label(node);
    plan.events = problem.iter().map(describe).chain(label_problem).collect();
    let Some(change) = change else {
        return plan;
    };
    let wanted = change.new_taint().map(ToString::to_string);
    // If the annotation already records the wanted taint, another writer removed or changed it on
    // the node.
    let recorded = node::recorded(node.view().annotations).map(|taint| taint.to_string());
    let was_there = wanted.is_some() && recorded == wanted;
    // The hash is always 0, so that every write counts: another tool may change the node so that
    // archaware wants a different taint each time.
    match repairs::OF_NODES.next(remembered.written, was_there, 0, now) {
        Ok(written) => {
            let mut write = write(node, change);
            write.written = Some(written);
            plan.patch = Some(write);
        }
        Err(wait) => {
            plan.events.push(reverted(node, wanted));
            plan.requeue = Some(wait.min(RECHECK_INTERVAL));
        }
    }
    plan
}

fn write(node: &Node, change: NodeChange) -> PlannedPatch {
    let removed = change.remove.is_some();
    let done = match change.new_taint() {
        Some(taint) => PlannedChange::NodeTainted {
            taint: taint.clone(),
            removed,
        },
        None => PlannedChange::NodeUntainted { removed },
    };
    PlannedPatch::new(patch::node(node, change), done)
}

/// The event while archaware waits before the next repair.
fn reverted(node: &Node, wanted: Option<String>) -> EventDraft {
    let who = node.managers.last_writer();
    let what = wanted.map_or(
        "undoes archaware's changes of spec.taints or of the annotation archaware.dev/taint"
            .to_owned(),
        |taint| format!("removes or changes archaware's taint {taint} in spec.taints"),
    );
    let note = format!(
        "{who} {what} again and again: let that tool ignore the key of archaware's taint, or label the node \
         archaware.dev/ignore=true; archaware repairs the node after growing pauses of at most 10 minutes"
    );
    EventDraft::new(EventReason::TaintReverted, note)
}

/// The event for a problem of a node.
pub(crate) fn describe(problem: &TaintProblem) -> EventDraft {
    match problem {
        TaintProblem::Conflict { wanted, value } => EventDraft::new(
            EventReason::TaintConflict,
            format!(
                "another tool set the taint {}={value}:{} on the node, so archaware cannot set {wanted}: remove the other taint, or set another taint.key",
                wanted.kind.key,
                wanted.kind.effect.as_str()
            ),
        ),
        TaintProblem::UnknownKey(taint) => EventDraft::new(
            EventReason::TaintConflict,
            format!(
                "the annotation archaware.dev/taint of the node names {taint}, but archaware was never configured with its key, so \
                 archaware does not change the node: remove the annotation, and also the taint if archaware set it"
            ),
        ),
        TaintProblem::UnknownArchitecture => EventDraft::new(
            EventReason::UnknownArchitecture,
            "status.nodeInfo.architecture is not a known architecture; archaware does not change its taint",
        ),
    }
}

/// The event for a node whose label is not the architecture that it reports. Node selectors and
/// node affinity use the label, and archaware's taint uses the reported architecture.
fn describe_label(node: &Node) -> Option<EventDraft> {
    let view = node.view();
    let architecture: Architecture = view.architecture.parse().ok()?;
    let consequence = match view.labels.get(affinity::LABEL) {
        Some(label) if label == architecture.as_str() => return None,
        Some(label) => format!(
            "the label {} is {label}, so no pod for {architecture} can land here",
            affinity::LABEL
        ),
        None => format!(
            "the label {} is missing. Only pods that archaware placed after this node joined can land here, and no pod that selects nodes by this label",
            affinity::LABEL
        ),
    };
    let note = format!(
        "the node reports the architecture {architecture}, but {consequence}: set {}={architecture} where the node gets its labels",
        affinity::LABEL
    );
    Some(EventDraft::new(EventReason::ArchitectureLabelDiffers, note))
}

#[cfg(test)]
mod tests;
