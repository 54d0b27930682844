//! How often an object was tried and what was told about it. Forgotten with the object.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::{cluster::events::EventReason, image::Reason};

/// Entries that are kept for objects that are gone, before somebody looks which those are.
const SLACK: usize = 256;

/// Something that is told once per object.
pub(super) type Told = (EventReason, Option<Reason>);

/// By uid. Bounded by the number of objects in the store plus [`SLACK`].
#[derive(Default)]
pub(super) struct Attempts(Mutex<HashMap<String, Attempt>>);

struct Attempt {
    /// A hash of what was tried: other images start anew.
    subject: u64,
    first: Instant,
    failures: u32,
    told: HashSet<Told>,
}

impl Attempts {
    /// Counts a failed attempt at `subject`: how many there were and the time since the first.
    pub(super) fn failed(&self, uid: &str, subject: u64) -> (u32, Duration) {
        self.with(uid, subject, |attempt| {
            attempt.failures += 1;
            (attempt.failures, attempt.first.elapsed())
        })
    }

    /// Whether this is the first time that something is told about `subject`.
    pub(super) fn tell(&self, uid: &str, subject: u64, told: Told) -> bool {
        self.with(uid, subject, |attempt| attempt.told.insert(told))
    }

    /// Marks the beginning of the first attempt at `subject`.
    pub(super) fn begin(&self, uid: &str, subject: u64) {
        self.with(uid, subject, |_| ());
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
        let fresh = || Attempt {
            subject,
            first: Instant::now(),
            failures: 0,
            told: HashSet::new(),
        };
        let attempt = all.entry(uid.to_owned()).or_insert_with(fresh);
        if attempt.subject != subject {
            *attempt = fresh();
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
        let told = (EventReason::ImageNotResolved, Some(Reason::NotFound));
        assert_eq!(attempts.failed("a", 1).0, 1);
        assert_eq!(attempts.failed("a", 1).0, 2);
        assert!(attempts.tell("a", 1, told));
        assert!(!attempts.tell("a", 1, told));
        assert!(attempts.tell("a", 2, told));
        assert_eq!(attempts.failed("a", 2).0, 1);
        for n in 0..=SLACK {
            attempts.begin(&n.to_string(), 0);
        }
        attempts.sweep(1, || HashSet::from(["a".to_owned()]));
        assert_eq!(attempts.lock().len(), 1);
    }
}
