//! The state that is kept per object between reconciles.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use crate::{backoff::Backoff, cluster::events::EventReason, placement::failure::FailureHistory};

/// How long a template stays unchanged after another writer reverted it.
const REVERT_BACKOFF: Backoff = Backoff::seconds(30, 600);

/// Identifies an event that is published once per object: its reason and a hash of its subject.
type EventKey = (EventReason, u64);

/// The state of one object, reset when its images change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObjectState {
    /// A hash of the images.
    images: u64,
    /// Whether the images changed while this process knew the object.
    images_changed: bool,
    /// Whether these images have been resolved before.
    resolved: bool,
    /// Whether nothing remains to be decided about these images.
    decided: bool,
    /// Number of consecutive failures.
    failures: u32,
    /// Time of the first of them.
    failing_since: Instant,
    reported: HashSet<EventKey>,
    counted: HashSet<&'static str>,
    /// How often other writers reverted a change.
    reverts: u32,
    /// When the next change is allowed after that.
    next_change: Instant,
}

impl ObjectState {
    /// The stored state if it is for the same images, otherwise a new one.
    pub(crate) fn resume(remembered: Option<Self>, images: u64, now: Instant) -> Self {
        let images_changed = match remembered {
            Some(state) if state.images == images => return state,
            other => other.is_some(),
        };
        Self {
            images,
            images_changed,
            resolved: false,
            decided: false,
            failures: 0,
            failing_since: now,
            reported: HashSet::new(),
            counted: HashSet::new(),
            reverts: 0,
            next_change: now,
        }
    }

    /// Counts a failed attempt.
    pub(super) fn record_failure(&mut self, now: Instant) -> FailureHistory {
        if self.failures == 0 {
            self.failing_since = now;
        }
        self.failures = self.failures.saturating_add(1);
        FailureHistory {
            failures: self.failures,
            failing_for: now.saturating_duration_since(self.failing_since),
        }
    }

    /// Records that the images have been resolved.
    pub(super) fn record_success(&mut self) {
        self.resolved = true;
        self.failures = 0;
    }

    /// Whether a decision by exactly these images stands. `recorded`: the object carries one, which is trusted unless
    /// the images are known to have changed since.
    pub(super) fn decision_is_valid(&self, recorded: bool) -> bool {
        self.resolved || (recorded && !self.images_changed)
    }

    /// Whether nothing remains to be decided.
    pub(crate) fn is_decided(&self) -> bool {
        self.decided
    }

    /// Records that nothing remains to be decided; returns whether that is new.
    pub(crate) fn mark_decided(&mut self) -> bool {
        !std::mem::replace(&mut self.decided, true)
    }

    /// Whether this event has not been published yet.
    pub(super) fn report_once(&mut self, reason: EventReason, about: u64) -> bool {
        self.reported.insert((reason, about))
    }

    /// Whether `result` has not been counted yet.
    pub(super) fn count_once(&mut self, result: &'static str) -> bool {
        self.counted.insert(result)
    }

    /// Another writer reverted a change: how long to wait, or `None` if it may be repeated now.
    pub(super) fn revert_backoff(&mut self, now: Instant) -> Option<Duration> {
        let left = self.next_change.saturating_duration_since(now);
        if !left.is_zero() {
            return Some(left);
        }
        self.reverts = self.reverts.saturating_add(1);
        self.next_change = now + REVERT_BACKOFF.delay(self.reverts);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_images_start_anew() {
        let now = Instant::now();
        let reason = EventReason::ImageNotResolved;
        let mut state = ObjectState::resume(None, 1, now);
        assert_eq!(state.record_failure(now).failures, 1);
        let second = state.record_failure(now + Duration::from_secs(3));
        assert_eq!(
            (second.failures, second.failing_for),
            (2, Duration::from_secs(3))
        );
        assert!(state.report_once(reason, 7) && !state.report_once(reason, 7));
        assert!(state.mark_decided() && !state.mark_decided());
        let same = ObjectState::resume(Some(state.clone()), 1, now);
        assert_eq!(same, state);
        let mut other = ObjectState::resume(Some(state), 2, now);
        assert!(other.report_once(reason, 7) && !other.is_decided());
        assert_eq!(other.record_failure(now).failures, 1);
    }

    #[test]
    fn success_ends_a_row_of_failures_and_the_decision_is_valid() {
        let now = Instant::now();
        let mut state = ObjectState::resume(None, 1, now);
        state.record_failure(now);
        assert!(!state.decision_is_valid(false));
        assert!(state.decision_is_valid(true), "recorded before a restart");
        state.record_success();
        assert!(state.decision_is_valid(false));
        assert_eq!(state.record_failure(now).failures, 1);
        let other = ObjectState::resume(Some(state), 2, now);
        assert!(!other.decision_is_valid(true), "recorded for other images");
    }

    #[test]
    fn reverts_are_repaired_at_once_and_then_with_growing_pauses() {
        let now = Instant::now();
        let mut state = ObjectState::resume(None, 1, now);
        assert_eq!(state.revert_backoff(now), None);
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(state.revert_backoff(now), seconds(30));
        let later = now + Duration::from_secs(31);
        assert_eq!(state.revert_backoff(later), None);
        assert_eq!(state.revert_backoff(later), seconds(60));
    }
}
