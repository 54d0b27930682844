//! The state that is kept per object between reconciles.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::{
    cluster::events::{EventReason, REPEAT_INTERVAL},
    placement::{Decision, failure::FailureHistory},
};

use super::{Written, repairs};

/// Identifies an event of an object: its reason and a hash of its subject.
type EventKey = (EventReason, u64);

/// The state of one object, reset when its images change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ObjectState {
    /// A hash of the images.
    images: u64,
    /// Whether the images changed while this process knew the object.
    images_changed: bool,
    /// The latest decision by these images.
    by_images: Option<Decision>,
    /// Whether nothing remains to be decided about these images.
    decided: bool,
    /// Number of consecutive failures.
    failures: u32,
    /// Time of the first of them.
    failing_since: Instant,
    /// When each event was published last.
    reported: HashMap<EventKey, Instant>,
    counted: HashSet<&'static str>,
    /// The latest write that changed only an annotation.
    annotated: Option<Written>,
}

impl ObjectState {
    /// The stored state if it belongs to these images, otherwise a new state.
    pub(crate) fn resume(remembered: Option<Self>, images: u64, now: Instant) -> Self {
        let images_changed = match remembered {
            Some(state) if state.images == images => return state,
            other => other.is_some(),
        };
        Self {
            images,
            images_changed,
            by_images: None,
            decided: false,
            failures: 0,
            failing_since: now,
            reported: HashMap::new(),
            counted: HashSet::new(),
            annotated: None,
        }
    }

    /// Permits and counts a write that changes only the annotation, or returns how long to wait.
    /// The limit stops endless rewrites when another tool keeps removing the annotation.
    pub(super) fn next_annotation_write(&mut self, now: Instant) -> Result<(), Duration> {
        let written = repairs::OF_NODES.next(self.annotated, false, 0, now)?;
        self.annotated = Some(written);
        Ok(())
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

    /// Records that no image failed.
    pub(super) fn record_success(&mut self) {
        self.failures = 0;
    }

    /// Records a decision by the images.
    pub(super) fn decided_by_images(&mut self, decision: &Decision) {
        self.by_images = Some(decision.clone());
    }

    /// The earlier decision for exactly these images, as far as this process knows it. `recorded`
    /// is the decision on the object; it is ignored if this process saw the images change.
    pub(super) fn earlier_decision(&self, recorded: Option<Decision>) -> Option<Decision> {
        let recorded = recorded.filter(|_| !self.images_changed);
        self.by_images.clone().or(recorded)
    }

    /// Whether nothing remains to be decided.
    pub(crate) fn is_decided(&self) -> bool {
        self.decided
    }

    /// Records whether nothing remains to be decided. Returns whether that has just become true.
    pub(crate) fn set_decided(&mut self, decided: bool) -> bool {
        let before = std::mem::replace(&mut self.decided, decided);
        decided && !before
    }

    /// Whether this event is due: it was never published, or `REPEAT_INTERVAL` has passed since. If
    /// it is due, records it as published now.
    pub(super) fn report_is_due(&mut self, reason: EventReason, about: u64, now: Instant) -> bool {
        let last = self.reported.get(&(reason, about));
        let due = last.is_none_or(|last| now.saturating_duration_since(*last) >= REPEAT_INTERVAL);
        if due {
            self.reported.insert((reason, about), now);
        }
        due
    }

    /// Whether `result` has not been counted yet.
    pub(super) fn count_once(&mut self, result: &'static str) -> bool {
        self.counted.insert(result)
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
        let later = now + REPEAT_INTERVAL;
        let due = [now, now, later, later].map(|at| state.report_is_due(reason, 7, at));
        assert_eq!(due, [true, false, true, false]);
        assert!(state.set_decided(true) && !state.set_decided(true));
        let same = ObjectState::resume(Some(state.clone()), 1, now);
        assert_eq!(same, state);
        let mut with_other_images = ObjectState::resume(Some(state), 2, now);
        assert!(with_other_images.report_is_due(reason, 7, now) && !with_other_images.is_decided());
        assert_eq!(with_other_images.record_failure(now).failures, 1);
    }

    #[test]
    fn success_ends_a_row_of_failures() {
        let now = Instant::now();
        let mut state = ObjectState::resume(None, 1, now);
        state.record_failure(now);
        state.record_success();
        assert_eq!(state.record_failure(now).failures, 1);
    }

    #[test]
    fn an_earlier_decision_counts_while_the_images_stay() {
        let now = Instant::now();
        let tolerate_all = || Some(Decision::TolerateAll);
        let mut state = ObjectState::resume(None, 1, now);
        assert_eq!(state.earlier_decision(None), None);
        assert_eq!(
            state.earlier_decision(tolerate_all()),
            tolerate_all(),
            "recorded before a restart"
        );
        state.decided_by_images(&Decision::NoCommonArchitecture);
        let by_images = Some(Decision::NoCommonArchitecture);
        assert_eq!(state.earlier_decision(tolerate_all()), by_images);
        let with_other_images = ObjectState::resume(Some(state), 2, now);
        assert_eq!(
            with_other_images.earlier_decision(tolerate_all()),
            None,
            "recorded for other images"
        );
    }
}
