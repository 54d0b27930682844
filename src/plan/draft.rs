//! The part of a plan that pods and templates share: the decision by annotations, images or the
//! failure policy, and its events.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::{Duration, Instant},
};

use crate::{
    cluster::{events::EventReason, objects::PodSpec},
    evaluate::{Evaluation, Notice, Verdict},
    image::ImageError,
    placement::{
        DecidedBy, Decision,
        failure::{self, FailureAction, FailurePolicy, ImageFailure},
    },
    platform::Architectures,
};

use super::{EventDraft, ObjectState, Plan, Policies};

/// Longest time until an object that waits is reconciled again, even if it does not change: a tag
/// may have been pushed again, and the event with the reason must not expire (after an hour by
/// default, `--event-ttl` of the API server).
pub(super) const RECHECK_INTERVAL: Duration = Duration::from_mins(10);

/// The decision of this reconcile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DraftDecision {
    /// The decision, if there is one.
    pub(super) decision: Option<Decision>,
    /// The source of the decision.
    pub(super) by: DecidedBy,
    /// Whether there is no decision because images cannot be resolved yet.
    pub(super) waiting: bool,
    /// When to reconcile again if the object does not change.
    pub(super) requeue: Option<Duration>,
}

impl DraftDecision {
    pub(super) fn is_by_policy(&self) -> bool {
        self.by != DecidedBy::Images
    }
}

impl Default for DraftDecision {
    /// No decision, and nothing to wait for.
    fn default() -> Self {
        Self {
            decision: None,
            by: DecidedBy::Images,
            waiting: false,
            requeue: None,
        }
    }
}

/// A plan under construction.
pub(super) struct Draft<'a> {
    pub(super) plan: Plan,
    pub(super) state: ObjectState,
    pub(super) policies: Policies<'a>,
    pub(super) now: Instant,
}

impl<'a> Draft<'a> {
    /// An empty plan for an object with this spec.
    pub(super) fn new(
        spec: &PodSpec,
        remembered: Option<ObjectState>,
        policies: Policies<'a>,
        now: Instant,
    ) -> Self {
        Self {
            plan: Plan::nothing(),
            state: ObjectState::resume(remembered, hash(&spec.images()), now),
            policies,
            now,
        }
    }

    /// The plan, with the state to store.
    pub(super) fn finish(self) -> Plan {
        Plan {
            state: Some(self.state),
            ..self.plan
        }
    }

    /// The decision about a pod or template. `recorded`: the earlier decision of its images, as far
    /// as the object proves it.
    pub(super) fn decide(
        &mut self,
        spec: &PodSpec,
        evaluation: &Evaluation,
        recorded: Option<Decision>,
    ) -> DraftDecision {
        for notice in evaluation.notices(self.policies.placement) {
            self.report_notice(&notice);
        }
        match &evaluation.verdict {
            Verdict::Skip => {
                self.count_once("ignored");
                DraftDecision::default()
            }
            // The failure policy's earlier decision has already been counted and reported.
            Verdict::Decided(decision) if evaluation.by_policy => DraftDecision {
                decision: Some(decision.clone()),
                by: DecidedBy::StandingPolicy,
                ..DraftDecision::default()
            },
            Verdict::Decided(decision) => {
                self.count_once(decision.as_str());
                self.state.record_success();
                if !evaluation.images.is_empty() {
                    self.state.decided_by_images(decision);
                }
                let is_none = *decision == Decision::NoCommonArchitecture;
                DraftDecision {
                    decision: Some(decision.clone()),
                    requeue: is_none.then_some(RECHECK_INTERVAL),
                    ..DraftDecision::default()
                }
            }
            Verdict::Unresolved { failed, known } => {
                let earlier = self.state.earlier_decision(recorded);
                self.decide_without_images(spec, failed, known.as_ref(), earlier)
            }
        }
    }

    /// If the images decided earlier, that decision stands, and is applied again if the object
    /// lacks it. Otherwise the failure policy decides.
    fn decide_without_images(
        &mut self,
        spec: &PodSpec,
        unresolved: &[(String, ImageError)],
        known: Option<&Architectures>,
        earlier: Option<Decision>,
    ) -> DraftDecision {
        self.count_once("unresolved");
        for (image, error) in unresolved {
            let reason = error.reason();
            let note = format!("{}: {image}: {}", reason.as_str(), error.note());
            self.report_about(EventReason::ImageNotResolved, hash(&(reason, image)), note);
        }
        let attempts = self.state.record_failure(self.now);
        let failures: Vec<_> = unresolved
            .iter()
            .map(|(_, error)| ImageFailure {
                backoff: error.reason().backoff(),
                retry_after: error.retry_after(),
            })
            .collect();
        let placement = self.policies.placement;
        if let Some(earlier) = earlier {
            let held = FailurePolicy {
                action: FailureAction::Hold,
                ..self.policies.failure.clone()
            };
            let next = failure::next_step(&held, placement, known, &failures, attempts, false);
            return DraftDecision {
                decision: Some(earlier),
                requeue: next.retry,
                ..DraftDecision::default()
            };
        }
        let (policy, critical) = (self.policies.failure, spec.is_system_critical());
        let next = failure::next_step(policy, placement, known, &failures, attempts, critical);
        let waiting = next.decision.is_none();
        let is_none = next.decision == Some(Decision::NoCommonArchitecture);
        if is_none {
            let note = "none of resolution.failure.architectures can run all images that archaware could read";
            self.report(EventReason::NoCommonArchitecture, note);
        }
        let recheck = (waiting || is_none).then_some(RECHECK_INTERVAL);
        DraftDecision {
            by: match (&next.decision, next.stands) {
                (None, _) => DecidedBy::Images,
                (Some(_), false) => DecidedBy::Policy,
                (Some(_), true) => DecidedBy::StandingPolicy,
            },
            waiting,
            decision: next.decision,
            requeue: next.retry.into_iter().chain(recheck).min(),
        }
    }

    fn count_once(&mut self, result: &'static str) {
        if self.state.count_once(result) {
            self.plan.counts.push(result);
        }
    }

    fn report_about(&mut self, reason: EventReason, about: u64, note: impl Into<String>) {
        if self.state.report_is_due(reason, about, self.now) {
            self.plan.events.push(EventDraft::new(reason, note));
        }
    }

    fn report_notice(&mut self, notice: &Notice) {
        let (reason, note) = (notice.reason(), notice.to_string());
        if notice.is_on_namespace() {
            let event = EventDraft::new(reason, note);
            self.plan.events.push(EventDraft {
                on_namespace: true,
                ..event
            });
        } else if notice.depends_on_images() {
            self.report(reason, note);
        } else {
            self.report_about(reason, hash(notice), note);
        }
    }

    /// Plans an event. Another event of the same reason follows after `REPEAT_INTERVAL` at the
    /// earliest, whatever its note is.
    pub(super) fn report(&mut self, reason: EventReason, note: impl Into<String>) {
        self.report_about(reason, 0, note);
    }
}

pub(crate) fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}
