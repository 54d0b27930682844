//! Plans the change of a DaemonSet. The controller, the webhook and `archaware plan` share
//! [`change`].

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    cluster::{events::EventReason, patch},
    config::DaemonSets,
    evaluate::{Evaluation, template::Template},
    placement::{
        DecidedBy, Decision, PlacementPolicy,
        daemon_set::{self, TemplateChange},
    },
};

use super::{
    EventDraft, Plan, PlannedChange, PlannedPatch, Policies, Remembered,
    draft::{Draft, RECHECK_INTERVAL, hash},
    repairs,
};

/// The change that makes a template match a decision; `None` if it matches already.
pub(crate) fn change(
    policy: &PlacementPolicy,
    template: &Template<'_>,
    decision: &Decision,
    by: DecidedBy,
) -> Option<TemplateChange> {
    daemon_set::decide_template(policy, decision, template.placement_view(), by)
}

/// The plan for a DaemonSet.
pub(crate) fn plan(
    template: &Template<'_>,
    evaluation: &Evaluation,
    policies: Policies<'_>,
    mode: DaemonSets,
    remembered: Remembered,
    now: Instant,
) -> Plan {
    let mut draft = Draft::new(&template.without_owned, remembered.state, policies, now);
    // A decision for these images stands until the images change, so that there is no second
    // rollout.
    let recorded = template.decided_by_images();
    let decided = draft.decide(&template.without_owned, evaluation, recorded);
    draft.plan.requeue = decided.requeue;
    let by_policy = decided.is_by_policy();
    let Some(decision) = decided.decision else {
        return draft.finish();
    };
    let decision = match decided.by {
        DecidedBy::Policy => template.narrow(decision),
        DecidedBy::Images | DecidedBy::StandingPolicy => decision,
    };
    let Some(change) = change(policies.placement, template, &decision, decided.by) else {
        return draft.finish();
    };
    if let Some(note) = report_only(template, &change, &decision, mode) {
        draft.report(EventReason::TolerationsMissing, note);
        recheck_within(&mut draft.plan, RECHECK_INTERVAL);
        return draft.finish();
    }
    if !change.rolls() {
        // The annotation can be written later without loss.
        match draft.state.next_annotation_write(now) {
            Ok(()) if mode == DaemonSets::Manage => {
                draft.plan.patch = Some(write(template, change, &decision, by_policy));
            }
            Ok(()) => {}
            Err(wait) => recheck_within(&mut draft.plan, wait),
        }
        return draft.finish();
    }
    let wanted = hash(&(&template.images, owned_after(&change)));
    let reverted = template.was_reverted();
    match repairs::OF_TEMPLATES.next(remembered.written, reverted, wanted, now) {
        Ok(written) => {
            let mut write = write(template, change, &decision, by_policy);
            if written.is_repair() {
                let event = EventDraft::new(EventReason::TolerationsReverted, fight(template));
                write.events.push(event);
            }
            write.written = Some(written);
            draft.plan.patch = Some(write);
        }
        Err(wait) => {
            draft.report(EventReason::TolerationsReverted, fight(template));
            recheck_within(&mut draft.plan, wait.min(RECHECK_INTERVAL));
        }
    }
    draft.finish()
}

/// Reconciles again after at most this time. Images that cannot be resolved may ask for an earlier
/// time.
fn recheck_within(plan: &mut Plan, wait: Duration) {
    plan.requeue = plan.requeue.into_iter().chain([wait]).min();
}

/// Why archaware does not change a template that should change.
pub(crate) fn report_only(
    template: &Template<'_>,
    change: &TemplateChange,
    decision: &Decision,
    mode: DaemonSets,
) -> Option<String> {
    if !change.rolls() {
        return None;
    }
    let missing = change.add.iter().filter_map(|toleration| {
        let text = |field| toleration.get(field).and_then(Value::as_str);
        let value = text("value").map(|value| format!("={value}"));
        Some(format!("{}{}", text("key")?, value.unwrap_or_default()))
    });
    let missing: Vec<String> = missing.collect();
    let tolerated = match missing.as_slice() {
        [] => format!("nothing but {}", decision.annotation()),
        missing => missing.join(", "),
    };
    let appliers: Vec<&str> = template.set.managers.appliers().collect();
    if mode == DaemonSets::Report {
        Some(format!(
            "the template should tolerate {tolerated}, but with daemonSets: report archaware changes no template. Change the \
             tolerations at the template's source"
        ))
    } else if !appliers.is_empty() {
        // The next server-side apply of the other tool would end with a conflict.
        Some(format!(
            "the template should tolerate {tolerated}, but {} manages spec.template.spec.tolerations by server-side apply, so \
             archaware does not change them: correct the tolerations in the manifest that is applied",
            appliers.join(", ")
        ))
    } else {
        None
    }
}

/// The tolerations that archaware owns after a change; their order in the template does not matter.
fn owned_after(change: &TemplateChange) -> BTreeSet<String> {
    let record = change.record.iter();
    let owned = record.flat_map(|record| &record.tolerations);
    owned.map(ToString::to_string).collect()
}

fn fight(template: &Template<'_>) -> String {
    let who = template.set.managers.last_writer();
    format!(
        "{who} removes the tolerations that archaware adds (spec.template.spec.tolerations): add them at the template's \
         source, or annotate the template with archaware.dev/mode: ignore; archaware repairs them at most once an hour"
    )
}

fn write(
    template: &Template<'_>,
    change: TemplateChange,
    decision: &Decision,
    by_policy: bool,
) -> PlannedPatch {
    let rolls = change.rolls();
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
        write.report_failure_policy(decision, None);
    }
    write
}

#[cfg(test)]
mod tests;
