//! Plans the change of a pod.

use std::time::Instant;

use crate::{
    cluster::{
        objects::{Pod, annotations, labels},
        patch,
    },
    evaluate::{Evaluation, Stage, Subject},
    placement::{
        Decision, PlacementPolicy, affinity_change::requires_more, annotation, change::PodChange,
        demand::Source, record,
    },
};

use super::{ObjectState, Plan, PlannedChange, PlannedPatch, Policies, draft::Draft};

/// The parts of a pod that are evaluated.
pub(crate) fn subject(pod: &Pod) -> Subject<'_> {
    Subject {
        spec: &pod.spec,
        annotations: annotations(&pod.metadata),
        labels: labels(&pod.metadata),
        namespace: pod.metadata.namespace.as_deref().unwrap_or_default(),
        stage: Stage::Pod,
        decided_by_policy: None,
    }
}

/// The value of the pod's decision annotation.
fn annotated(pod: &Pod) -> Option<&str> {
    let value = annotations(&pod.metadata).get(annotation::DECISION);
    value.map(String::as_str)
}

/// The decision that the pod's annotation records, if the images made that decision, and the pod
/// has all additions that follow from it under this policy. The annotation alone proves nothing: it
/// may have been copied from another pod.
fn recorded(pod: &Pod, evaluation: &Evaluation, policy: &PlacementPolicy) -> Option<Decision> {
    let decision = annotated(pod).and_then(Decision::parse)?;
    let by_images = matches!(decision, Decision::Architectures(_));
    let change = subject(pod).change(policy, &decision, evaluation);
    (by_images && change.is_empty()).then_some(decision)
}

/// Whether a pod that was created without the webhook would get node affinity if it were recreated.
/// Only pods of `ReplicaSet`s and `StatefulSet`s: a Job counts a deleted pod as failed.
pub(crate) fn lacks_affinity(pod: &Pod, policy: &PlacementPolicy) -> bool {
    let is_replaced = pod.controller().is_some_and(|owner| {
        owner.api_version.starts_with("apps/")
            && matches!(owner.kind.as_str(), "ReplicaSet" | "StatefulSet")
    });
    let waits = pod.is_in_scope() && !pod.is_bound() && !pod.spec.is_gated();
    let decision = annotated(pod).and_then(Decision::parse);
    let Some(Decision::Architectures(set)) = decision.filter(|_| is_replaced && waits) else {
        return false;
    };
    let author = pod.spec.author_nodes();
    let added = record::read(annotations(&pod.metadata));
    if added.affinity.require.is_some() {
        // The webhook added node affinity: a replacement would get no more.
        return false;
    }
    policy.requires_affinity
        && !author.excludes_all(&set)
        && requires_more(&set, &policy.variants, author)
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
    let recorded = recorded(pod, evaluation, policies.placement);
    let decided = draft.decide(&pod.spec, evaluation, recorded);
    let is_gated = pod.spec.gate().is_some();
    let release = || is_gated.then(|| patch::pod::remove_gate(pod));
    let plan = &mut draft.plan;
    plan.requeue = decided.requeue;
    let by_policy = decided.is_by_policy();
    let Some(decision) = decided.decision else {
        // A pod with unresolved images stays behind the gate: without affinity an autoscaler could
        // make any node for it. Without the webhook all pods wait without a gate.
        plan.patch = release()
            .filter(|_| !decided.waiting || !policies.gates)
            .map(|patch| PlannedPatch::new(patch, PlannedChange::GateRemoved));
        plan.decides = plan.patch.is_none() && !decided.waiting;
        return draft.finish();
    };
    // A pod that no node can run still waits.
    let is_none = decision == Decision::NoCommonArchitecture;
    plan.decides = !is_none;
    // No node can run the pod, but one of its images may be pushed again. So the pod stays behind
    // the gate, where it can still get affinity. A decision `none` of the failure policy is
    // temporary, so it adds no affinity either.
    let stays_gated = is_none && is_gated;
    let release = release().filter(|_| !stays_gated);
    let change = if stays_gated || (is_none && by_policy) {
        PodChange::default()
    } else if by_policy {
        subject(pod).change_by_policy(policies.placement, &decision, evaluation)
    } else {
        subject(pod).change(policies.placement, &decision, evaluation)
    };
    let is_annotation_outdated = is_none != (annotated(pod) == Some("none"));
    let mut due = !change.is_empty() || release.is_some();
    if !due && is_annotation_outdated {
        match draft.state.next_annotation_write(now) {
            Ok(()) => due = true,
            Err(wait) => plan.requeue = plan.requeue.into_iter().chain([wait]).min(),
        }
    }
    if due {
        let done = PlannedChange::PodPlaced {
            decision: decision.annotation(),
            by_policy,
        };
        let mut write =
            PlannedPatch::new(patch::pod::apply(pod, change, &decision, stays_gated), done);
        // The change may be rejected, but the gate must still be removed.
        write.gate_removal = release;
        if by_policy && !is_none {
            let locality = evaluation.demands.find(&Source::ImageLocality);
            write.report_failure_policy(
                &decision,
                locality.and_then(|demand| demand.note.as_deref()),
            );
        }
        plan.patch = Some(write);
    }
    draft.finish()
}

#[cfg(test)]
mod tests;
