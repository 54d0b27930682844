//! How archaware repairs values that other writers revert: at once at first, then with pauses,
//! because two tools that want different values would write for ever, and each write of a template
//! causes a rollout.

use std::time::{Duration, Instant};

use crate::backoff::Backoff;

/// The pauses between repairs of one kind of object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RepairPolicy {
    /// Repairs that are made at once.
    immediate: u32,
    /// Pauses before further repairs.
    backoff: Backoff,
    /// After this time without a repair, the next repair counts as the first.
    forget: Duration,
}

/// Each repair causes a rollout: one at once, then at most one an hour.
pub(crate) const OF_TEMPLATES: RepairPolicy = RepairPolicy {
    immediate: 1,
    backoff: Backoff::seconds(3600, 3600),
    forget: Duration::from_hours(24),
};

/// Pods may be scheduled to a node without its taint, so the first repairs are made at once.
/// Annotations of pods and DaemonSets, whose writes are cheap, are repaired in the same way.
pub(crate) const OF_NODES: RepairPolicy = RepairPolicy {
    immediate: 5,
    backoff: Backoff::seconds(15, 600),
    forget: Duration::from_hours(1),
};

/// Evictions of the misplaced pods of one controller: the first at once, later evictions when the
/// replacement has had time to be scheduled. The same images are not tried again for a day.
pub(crate) const OF_EVICTIONS: RepairPolicy = RepairPolicy {
    immediate: 1,
    backoff: Backoff::seconds(60, 3600),
    forget: Duration::from_hours(24),
};

/// While the webhook's registration is wrong, new pods may be scheduled before archaware has
/// changed them, so the pauses are short.
pub(crate) const OF_REGISTRATIONS: RepairPolicy = RepairPolicy {
    immediate: 5,
    backoff: Backoff::seconds(5, 60),
    forget: Duration::from_hours(1),
};

/// The latest write to an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// A hash of what archaware wanted.
    pub(crate) wanted: u64,
    /// How often archaware repeated this write.
    pub(crate) repairs: u32,
    /// The time of the write.
    pub(crate) at: Instant,
}

impl RepairPolicy {
    /// The write of `wanted` that may be made now, or how long to wait. `recorded`: the object's
    /// annotation tells of an earlier write.
    pub(crate) fn next(
        self,
        last: Option<Written>,
        recorded: bool,
        wanted: u64,
        now: Instant,
    ) -> Result<Written, Duration> {
        let last = last.filter(|last| {
            let age = now.saturating_duration_since(last.at);
            last.wanted == wanted && age < self.forget
        });
        let Some(last) = last else {
            let repairs = u32::from(recorded);
            return Ok(Written {
                wanted,
                repairs,
                at: now,
            });
        };
        let repairs = last.repairs.saturating_add(1);
        let pause = match repairs.saturating_sub(self.immediate) {
            0 => Duration::ZERO,
            delayed => self.backoff.delay(delayed),
        };
        let left = (last.at + pause).saturating_duration_since(now);
        if left.is_zero() {
            Ok(Written {
                wanted,
                repairs,
                at: now,
            })
        } else {
            Err(left)
        }
    }

    /// Whether a write no longer influences the next one.
    pub(crate) fn is_forgotten(self, written: &Written, now: Instant) -> bool {
        now.saturating_duration_since(written.at) >= self.forget
    }
}

impl Written {
    /// Whether another writer reverted an earlier write of this value.
    pub(crate) fn is_repair(self) -> bool {
        self.repairs > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pauses before each write, when another writer reverts each write at once.
    fn pauses(policy: RepairPolicy, recorded: bool, writes: usize) -> Vec<u64> {
        let (start, mut last) = (Instant::now(), None);
        let mut now = start;
        let mut pauses = Vec::new();
        for _ in 0..writes {
            let written = policy.next(last, recorded, 7, now).unwrap_or_else(|wait| {
                now += wait;
                policy.next(last, recorded, 7, now).unwrap()
            });
            let before = last.map_or(start, |last: Written| last.at);
            pauses.push((written.at - before).as_secs());
            last = Some(written);
        }
        pauses
    }

    #[test]
    fn a_fight_slows_down() {
        assert_eq!(pauses(OF_TEMPLATES, false, 4), [0, 0, 3600, 3600]);
        assert_eq!(pauses(OF_TEMPLATES, true, 3), [0, 3600, 3600], "restarted");
        let nodes = [0, 0, 0, 0, 0, 0, 15, 30, 60, 120, 240, 480, 600, 600];
        assert_eq!(pauses(OF_NODES, false, 14), nodes);
    }

    #[test]
    fn other_wishes_and_old_writes_are_no_repairs() {
        let now = Instant::now();
        let last = Written {
            wanted: 1,
            repairs: 9,
            at: now,
        };
        let next = |wanted, now| OF_TEMPLATES.next(Some(last), false, wanted, now);
        assert!(!next(2, now).unwrap().is_repair());
        let later = now + OF_TEMPLATES.forget;
        assert!(!next(1, later).unwrap().is_repair() && OF_TEMPLATES.is_forgotten(&last, later));
        assert_eq!(next(1, now), Err(Duration::from_hours(1)));
    }
}
