//! How often an object was tried and what was told about it. Forgotten with the object.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::cluster::events::EventReason;

/// Entries that are kept for objects that are gone, before somebody looks which those are.
const SLACK: usize = 256;

/// Something that is told once per object: an event's reason, and what it is about.
pub(super) type Told = (EventReason, u64);

/// The first wait before a template that somebody changed back is changed again; it doubles.
const FIRST_HOLD: Duration = Duration::from_secs(30);
const LONGEST_HOLD: Duration = Duration::from_mins(10);

/// By uid. Bounded by the number of objects in the store plus [`SLACK`].
#[derive(Default)]
pub(super) struct Attempts(Mutex<HashMap<String, Attempt>>);

struct Attempt {
    /// A hash of what was tried: other images start anew.
    subject: u64,
    /// The images changed while this process knew the object.
    changed: bool,
    /// These images have been resolved before.
    resolved: bool,
    /// Nothing is left to be decided about these images.
    decided: bool,
    /// When the failures in a row began, and how many there are.
    failing_since: Instant,
    failures: u32,
    told: HashSet<Told>,
    counted: HashSet<&'static str>,
    /// How often a change was taken back, and when the next one may be made.
    reverts: u32,
    next_change: Instant,
}

impl Attempt {
    fn new(subject: u64, changed: bool) -> Self {
        let now = Instant::now();
        Self {
            subject,
            changed,
            resolved: false,
            decided: false,
            failing_since: now,
            failures: 0,
            told: HashSet::new(),
            counted: HashSet::new(),
            reverts: 0,
            next_change: now,
        }
    }
}

impl Attempts {
    /// Counts a failed attempt at `subject`: how many there were in a row, and the time since the first.
    pub(super) fn failed(&self, uid: &str, subject: u64) -> (u32, Duration) {
        self.with(uid, subject, |attempt| {
            if attempt.failures == 0 {
                attempt.failing_since = Instant::now();
            }
            attempt.failures += 1;
            (attempt.failures, attempt.failing_since.elapsed())
        })
    }

    /// The images of `subject` have been resolved.
    pub(super) fn succeeded(&self, uid: &str, subject: u64) {
        self.with(uid, subject, |attempt| {
            attempt.resolved = true;
            attempt.failures = 0;
        });
    }

    /// What is to be done about `subject` is decided, and done; whether that is new.
    pub(super) fn decided(&self, uid: &str, subject: u64) -> bool {
        self.with(uid, subject, |attempt| {
            !std::mem::replace(&mut attempt.decided, true)
        })
    }

    /// Whether anything is known of the object, and that is that it is decided.
    pub(super) fn is_decided(&self, uid: &str) -> bool {
        self.lock().get(uid).is_some_and(|attempt| attempt.decided)
    }

    /// Whether a decision on exactly these images stands. `recorded`: the object carries a decision; it
    /// is believed unless the images are known to have changed since.
    pub(super) fn stands(&self, uid: &str, subject: u64, recorded: bool) -> bool {
        self.with(uid, subject, |attempt| {
            attempt.resolved || (recorded && !attempt.changed)
        })
    }

    /// Whether this is the first time that something is told about `subject`.
    pub(super) fn tell(&self, uid: &str, subject: u64, told: Told) -> bool {
        self.with(uid, subject, |attempt| attempt.told.insert(told))
    }

    /// Whether this is the first time that `result` is counted for `subject`.
    pub(super) fn count(&self, uid: &str, subject: u64, result: &'static str) -> bool {
        self.with(uid, subject, |attempt| attempt.counted.insert(result))
    }

    /// A change was taken back by somebody: `None` when it may be made again now, else how long to wait.
    pub(super) fn hold_back(&self, uid: &str, subject: u64) -> Option<Duration> {
        self.with(uid, subject, |attempt| {
            let left = attempt
                .next_change
                .saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Some(left);
            }
            let hold = FIRST_HOLD
                .saturating_mul(1 << attempt.reverts.min(10))
                .min(LONGEST_HOLD);
            attempt.reverts += 1;
            attempt.next_change = Instant::now() + hold;
            None
        })
    }

    /// Nothing is left to remember about the object.
    pub(super) fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Drops what belongs to no live object, when there is much of it.
    pub(super) fn sweep(&self, live: usize, is_live: impl Fn() -> HashSet<String>) {
        let mut all = self.lock();
        if all.len() > live + SLACK {
            let live = is_live();
            all.retain(|uid, _| live.contains(uid));
        }
    }

    fn with<T>(&self, uid: &str, subject: u64, act: impl FnOnce(&mut Attempt) -> T) -> T {
        let mut all = self.lock();
        let attempt = all
            .entry(uid.to_owned())
            .or_insert_with(|| Attempt::new(subject, false));
        if attempt.subject != subject {
            *attempt = Attempt::new(subject, true);
        }
        act(attempt)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Attempt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_images_start_anew_and_the_gone_are_swept() {
        let attempts = Attempts::default();
        let told = (EventReason::ImageNotResolved, 7);
        assert_eq!(attempts.failed("a", 1).0, 1);
        assert_eq!(attempts.failed("a", 1).0, 2);
        assert!(attempts.tell("a", 1, told));
        assert!(!attempts.tell("a", 1, told));
        assert!(attempts.tell("a", 2, told));
        assert_eq!(attempts.failed("a", 2).0, 1);
        for n in 0..=SLACK {
            attempts.succeeded(&n.to_string(), 0);
        }
        attempts.sweep(1, || HashSet::from(["a".to_owned()]));
        assert_eq!(attempts.lock().len(), 1);
    }

    #[test]
    fn success_ends_a_row_of_failures_and_the_decision_stands() {
        let attempts = Attempts::default();
        attempts.failed("a", 1);
        assert!(!attempts.stands("a", 1, false));
        assert!(
            attempts.stands("a", 1, true),
            "what was recorded before a restart"
        );
        attempts.succeeded("a", 1);
        assert!(attempts.stands("a", 1, false));
        assert_eq!(attempts.failed("a", 1).0, 1);
        assert!(
            !attempts.stands("a", 2, true),
            "the record is of other images"
        );
    }

    #[test]
    fn who_takes_changes_back_is_met_with_growing_patience() {
        let attempts = Attempts::default();
        assert_eq!(attempts.hold_back("a", 1), None);
        let wait = attempts.hold_back("a", 1).unwrap();
        assert!(wait > FIRST_HOLD / 2 && wait <= FIRST_HOLD);
    }
}
