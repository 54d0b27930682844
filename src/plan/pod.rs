//! Plans the change of a pod.

use std::time::Instant;

use crate::{
    cluster::{
        objects::{Pod, annotations},
        patch,
    },
    evaluate::{Evaluation, Stage, Subject},
    placement::annotation,
};

use super::{ObjectState, Plan, PlannedChange, PlannedPatch, Policies, draft::Draft};

/// The parts of a pod that are evaluated.
pub(crate) fn subject(pod: &Pod) -> Subject<'_> {
    Subject {
        spec: &pod.spec,
        annotations: annotations(&pod.metadata),
        namespace: pod.metadata.namespace.as_deref().unwrap_or_default(),
        stage: Stage::Pod,
        decided_by_policy: None,
    }
}

/// Whether the pod's annotation records a decision that its images made.
fn names_architectures(pod: &Pod) -> bool {
    let decision = annotations(&pod.metadata).get(annotation::DECISION);
    decision.is_some_and(|decision| !matches!(decision.as_str(), "any" | "none"))
}

/// The plan for a pod that archaware decides about.
pub(crate) fn plan(
    pod: &Pod,
    evaluation: &Evaluation,
    policies: Policies<'_>,
    remembered: Option<ObjectState>,
    now: Instant,
) -> Plan {
    let mut draft = Draft::new(&pod.spec, remembered, policies, now);
    let decided = draft.decide(&pod.spec, evaluation, names_architectures(pod));
    let gate = pod.spec.gate();
    let release = gate.map(|_| patch::pod::remove_gate(pod));
    let plan = &mut draft.plan;
    plan.requeue = decided.requeue;
    let by_policy = decided.is_by_policy();
    let Some(decision) = decided.decision else {
        plan.patch = release
            .filter(|_| decided.may_remove_gate)
            .map(|patch| PlannedPatch::new(patch, PlannedChange::GateRemoved));
        plan.decides = plan.patch.is_none() && !decided.waiting;
        // A taint with NoExecute would evict a bound pod, so startup waits for its decision, of the failure policy if
        // necessary.
        plan.is_complete = plan.patch.is_some() || !(pod.is_bound() && decided.waiting);
        return draft.finish();
    };
    plan.decides = true;
    let subject = subject(pod);
    let change = subject.change(policies.placement, &decision, &evaluation.preferences);
    if !change.is_empty() || gate.is_some() {
        let done = PlannedChange::PodPlaced {
            decision: decision.annotation(),
            by_policy,
        };
        let mut write = PlannedPatch::new(patch::pod::apply(pod, change, &decision), done);
        // The change may be rejected, but the gate must be removed all the same.
        write.gate_removal = release;
        if by_policy {
            write.report_failure_policy(&decision);
        }
        plan.patch = Some(write);
    }
    draft.finish()
}

#[cfg(test)]
mod tests;
