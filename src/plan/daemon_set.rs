//! What is to be done about a DaemonSet. The controller, the webhook and `archaware plan` share [`change`].

use std::time::{Duration, Instant};

use crate::{
    cluster::{events::EventReason, patch},
    config::DaemonSets,
    evaluate::{Evaluation, template::Template},
    placement::{
        Decision, Policy,
        daemon_set::{self, Change as TemplateChange},
    },
};

use super::{Change, EventDraft, ObjectState, Plan, Policies, Write, images::Draft};

/// The change that brings a template to a decision, if it is not there yet.
pub(crate) fn change(
    policy: &Policy,
    template: &Template<'_>,
    decision: &Decision,
    by_policy: bool,
) -> Option<TemplateChange> {
    daemon_set::decide(policy, decision, template.view(), by_policy)
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
    let mut draft = Draft::new(&template.authored, remembered, policies, now);
    // What was decided for these images stands until they change: no second rollout.
    let record = &template.record;
    let recorded = record.is_for(&template.images) && !record.stepped_aside;
    let decided = draft.decide(&template.authored, evaluation, recorded);
    draft.plan.requeue = decided.requeue;
    let Some(decision) = decided.decision else {
        return draft.finish();
    };
    let by_policy = decided.by_policy;
    let Some(change) = change(policies.placement, template, &decision, by_policy) else {
        return draft.finish();
    };
    match mode {
        DaemonSets::Report => {
            let note = format!(
                "its images allow {}, its template tolerates something else; \
                 daemonSets: report leaves that to you",
                decision.annotation()
            );
            draft.report(EventReason::TolerationsMissing, note);
        }
        DaemonSets::Manage => match held_back(&mut draft, template) {
            // Taking turns with another writer would roll the DaemonSet for ever.
            Some(wait) => {
                let note = "somebody removes the tolerations that archaware adds to its template; give them \
                            to it at its source, or annotate the template with archaware.dev/mode: ignore";
                let event = EventDraft::new(EventReason::TolerationsReverted, note);
                draft.plan.events.push(event);
                draft.plan.requeue = Some(wait);
            }
            None => draft.plan.write = Some(write(template, change, &decision, by_policy)),
        },
    }
    draft.finish()
}

/// How long to wait when others have removed from the template what archaware had added.
fn held_back(draft: &mut Draft<'_>, template: &Template<'_>) -> Option<Duration> {
    let now = draft.now;
    let reverted = template.record.was_reverted(template.tolerations());
    reverted.then(|| draft.state.revert_backoff(now)).flatten()
}

fn write(
    template: &Template<'_>,
    change: TemplateChange,
    decision: &Decision,
    by_policy: bool,
) -> Write {
    let rolls = !(change.add.is_empty() && change.remove.is_empty());
    let patch = patch::daemon_set(template.set, change);
    if !rolls {
        return Write::new(patch, Change::RecordChanged);
    }
    let tolerated = decision.annotation();
    let note = format!("its template now tolerates {tolerated}; this rolls the DaemonSet");
    let done = Change::TemplateChanged {
        decision: tolerated,
        by_policy,
    };
    let mut write = Write::new(patch, done);
    let event = EventDraft::new(EventReason::TolerationsChanged, note);
    write.events.push(event);
    if by_policy {
        write.by_policy(decision);
    }
    write
}

#[cfg(test)]
mod tests;
