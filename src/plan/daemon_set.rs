//! Plans the change of a DaemonSet. The controller, the webhook and `archaware plan` share [`change`].

use std::time::{Duration, Instant};

use crate::{
    cluster::{events::EventReason, patch},
    config::DaemonSets,
    evaluate::{Evaluation, template::Template},
    placement::{
        Decision, PlacementPolicy,
        daemon_set::{self, TemplateChange},
    },
};

use super::{
    EventDraft, ObjectState, Plan, PlannedChange, PlannedPatch, Policies,
    draft::{DecidedBy, Draft},
};

/// The change that brings a template to a decision; `None` if it is there. `stands`: the failure policy decided, until
/// the images change.
pub(crate) fn change(
    policy: &PlacementPolicy,
    template: &Template<'_>,
    decision: &Decision,
    stands: bool,
) -> Option<TemplateChange> {
    daemon_set::decide_template(policy, decision, template.placement_view(), stands)
}

/// The plan for a DaemonSet.
pub(crate) fn plan(
    template: &Template<'_>,
    evaluation: &Evaluation,
    policies: Policies<'_>,
    mode: DaemonSets,
    remembered: Option<ObjectState>,
    now: Instant,
) -> Plan {
    let mut draft = Draft::new(&template.without_owned, remembered, policies, now);
    // A decision for these images stands until they change, so that there is no second rollout.
    let owned = &template.owned;
    let recorded = owned.is_for(&template.images) && !owned.is_by_policy;
    let decided = draft.decide(&template.without_owned, evaluation, recorded);
    draft.plan.requeue = decided.requeue;
    let by_policy = decided.is_by_policy();
    let stands = decided.by == DecidedBy::StandingPolicy;
    let Some(decision) = decided.decision else {
        return draft.finish();
    };
    let Some(change) = change(policies.placement, template, &decision, stands) else {
        return draft.finish();
    };
    match mode {
        DaemonSets::Report => {
            let note = format!(
                "its template should tolerate {}; with daemonSets: report archaware does not change it: change the \
                 tolerations at the template's source",
                decision.annotation()
            );
            draft.report(EventReason::TolerationsMissing, note);
        }
        DaemonSets::Manage => match revert_backoff(&mut draft, template) {
            // Undoing another writer's change again and again would roll the DaemonSet out forever.
            Some(wait) => {
                let note = "another tool removes the tolerations that archaware adds to its template; add them \
                            at the template's source, or annotate it with archaware.dev/mode: ignore";
                let event = EventDraft::new(EventReason::TolerationsReverted, note);
                draft.plan.events.push(event);
                draft.plan.requeue = Some(wait);
            }
            None => draft.plan.patch = Some(write(template, change, &decision, by_policy)),
        },
    }
    draft.finish()
}

/// How long to wait after another writer removed archaware's tolerations.
fn revert_backoff(draft: &mut Draft<'_>, template: &Template<'_>) -> Option<Duration> {
    let now = draft.now;
    let reverted = template.owned.was_reverted(template.tolerations());
    reverted.then(|| draft.state.revert_backoff(now)).flatten()
}

fn write(
    template: &Template<'_>,
    change: TemplateChange,
    decision: &Decision,
    by_policy: bool,
) -> PlannedPatch {
    let rolls = !(change.add.is_empty() && change.remove.is_empty());
    let patch = patch::daemon_set(template.set, change);
    if !rolls {
        return PlannedPatch::new(patch, PlannedChange::RecordChanged);
    }
    let tolerated = decision.annotation();
    let note = format!("its template now tolerates {tolerated}; this rolls the DaemonSet");
    let done = PlannedChange::TemplateChanged {
        decision: tolerated,
        by_policy,
    };
    let mut write = PlannedPatch::new(patch, done);
    let event = EventDraft::new(EventReason::TolerationsChanged, note);
    write.events.push(event);
    if by_policy {
        write.report_failure_policy(decision);
    }
    write
}

#[cfg(test)]
mod tests;
