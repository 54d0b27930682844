//! Which pods were looked at, and when.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::backoff::Backoff;

/// A misplaced pod is checked again after this time, if events about it still arrive: the kubelet
/// publishes an event at least every five minutes while a container keeps ending.
const INTERVAL: Duration = Duration::from_secs(30);
/// Intervals for pods that fail for another reason: their images may be resolved later.
const OTHER_INTERVALS: Backoff = Backoff::seconds(5, 600);
/// A pod without events for this long no longer counts as misplaced: it was deleted, or it runs
/// now. The alert on misplaced pods waits longer than this.
const FORGET: Duration = Duration::from_mins(8);
/// Maximum number of pods. More pods are checked only when earlier pods are forgotten.
const MAX_PODS: usize = 10_000;
/// The share of one namespace.
const MAX_PODS_OF_NAMESPACE: usize = MAX_PODS / 4;
/// Maximum number of pods of one namespace that are being checked or wait for a check. The kubelet
/// publishes the events of further pods again.
const MAX_IN_PROGRESS: usize = 32;

/// The pods that events named.
#[derive(Default)]
pub(super) struct Tracker(HashMap<String, Tracked>);

struct Tracked {
    namespace: String,
    /// The time of the last check.
    at: Instant,
    /// Whether it was found to be on the wrong architecture.
    found: bool,
    /// How many checks in a row found another reason.
    other_reasons: u32,
    /// Whether it is being looked at.
    in_progress: bool,
}

impl Tracker {
    /// Whether a pod is to be checked now. If so, records that the check is in progress.
    pub(super) fn is_due(&mut self, uid: &str, namespace: &str, now: Instant) -> bool {
        let of_namespace = || self.0.values().filter(|pod| pod.namespace == namespace);
        if of_namespace().filter(|pod| pod.in_progress).count() >= MAX_IN_PROGRESS {
            return false;
        }
        let current_pods = of_namespace().filter(|pod| pod.is_current(now)).count();
        if let Some(tracked) = self.0.get_mut(uid) {
            let pause = if tracked.found {
                INTERVAL
            } else {
                OTHER_INTERVALS.delay(tracked.other_reasons)
            };
            let is_due = !tracked.in_progress && now.saturating_duration_since(tracked.at) >= pause;
            if is_due {
                tracked.at = now;
                tracked.in_progress = true;
            }
            return is_due;
        }
        if self.0.len() >= MAX_PODS {
            self.0.retain(|_, tracked| tracked.is_current(now));
        }
        if self.0.len() >= MAX_PODS || current_pods >= MAX_PODS_OF_NAMESPACE {
            return false;
        }
        let new = Tracked {
            namespace: namespace.to_owned(),
            at: now,
            found: false,
            other_reasons: 0,
            in_progress: true,
        };
        self.0.insert(uid.to_owned(), new);
        true
    }

    /// Records the result of a check.
    pub(super) fn record(&mut self, uid: &str, found: bool, now: Instant) {
        if let Some(tracked) = self.0.get_mut(uid) {
            tracked.at = now;
            tracked.other_reasons = if found { 0 } else { tracked.other_reasons + 1 };
            tracked.found = found;
            tracked.in_progress = false;
        }
    }

    /// A look has ended without a result.
    pub(super) fn end(&mut self, uid: &str) {
        if let Some(tracked) = self.0.get_mut(uid) {
            tracked.in_progress = false;
        }
    }

    /// Forgets a pod that was evicted.
    pub(super) fn remove(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// How many pods are known to be on the wrong architecture.
    pub(super) fn found(&self, now: Instant) -> usize {
        let tracked_pods = self.0.values();
        tracked_pods
            .filter(|tracked| tracked.found && tracked.is_current(now))
            .count()
    }

    /// Forgets all pods, because this process no longer leads.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Tracked {
    fn is_current(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < FORGET
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_not_looked_at_all_the_time() {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        let after = |minutes| start + Duration::from_mins(minutes);
        assert!(tracker.is_due("a", "apps", start) && !tracker.is_due("a", "apps", start));
        tracker.record("a", true, start);
        assert!(tracker.is_due("a", "apps", after(1)) && !tracker.is_due("a", "apps", after(1)));
        assert!(
            !tracker.is_due("a", "apps", after(2)),
            "it is still being looked at"
        );
        tracker.end("a");
        assert!(tracker.is_due("a", "apps", after(2)));
        tracker.record("a", true, after(1));
        assert_eq!((tracker.found(after(2)), tracker.found(after(9))), (1, 0));
        // The status may follow the event a moment later; after that it is looked at less and less.
        let mut at = start;
        for pause in [5, 10, 20, 40] {
            assert!(tracker.is_due("b", "apps", at));
            tracker.record("b", false, at);
            assert!(!tracker.is_due("b", "apps", at + Duration::from_secs(pause - 1)));
            at += Duration::from_secs(pause);
        }
    }

    #[test]
    fn the_number_of_pods_is_limited() {
        let (start, mut tracker) = (Instant::now(), Tracker::default());
        let mut add = |pod: usize, namespace: &str, now| {
            let uid = pod.to_string();
            let is_due = tracker.is_due(&uid, namespace, now);
            tracker.end(&uid);
            is_due
        };
        for pod in 0..MAX_PODS_OF_NAMESPACE {
            assert!(add(pod, "0", start));
        }
        assert!(!add(MAX_PODS, "0", start), "a namespace has its share");
        for pod in MAX_PODS_OF_NAMESPACE..MAX_PODS {
            assert!(add(pod, &(pod / MAX_PODS_OF_NAMESPACE).to_string(), start));
        }
        assert!(!add(MAX_PODS, "one more", start));
        assert!(add(MAX_PODS, "one more", start + FORGET));
    }

    #[test]
    fn a_namespace_does_not_take_all_looks() {
        let (now, mut tracker) = (Instant::now(), Tracker::default());
        for pod in 0..MAX_IN_PROGRESS {
            assert!(tracker.is_due(&pod.to_string(), "greedy", now));
        }
        assert!(!tracker.is_due("one more", "greedy", now));
        assert!(tracker.is_due("a", "other", now));
        tracker.record("0", true, now);
        assert!(tracker.is_due("one more", "greedy", now));
    }
}
