//! Which nodes' pods are to be looked at, and when. Pure: the time is given.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio::time::Instant;

use crate::{backoff::Backoff, placement::Taint};

/// Pauses after a look that did not succeed.
const RETRY: Backoff = Backoff::seconds(1, 60);

/// When a node is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// Before it gets its taint, which waits for it.
    BeforeTaint,
    /// After it has its taint: the scheduler may have bound a pod meanwhile that does not tolerate it.
    AfterTaint,
}

impl Phase {
    /// Requests that come within this time of each other are served together: one list of all pods costs less than thousands
    /// of lists of single nodes. The scheduler of a busy cluster sees a taint after some seconds.
    fn quiet(self) -> Duration {
        match self {
            Self::BeforeTaint => Duration::from_millis(250),
            Self::AfterTaint => Duration::from_secs(5),
        }
    }

    /// The longest that a request waits for others.
    fn patience(self) -> Duration {
        match self {
            Self::BeforeTaint => Duration::from_secs(5),
            Self::AfterTaint => Duration::from_mins(1),
        }
    }
}

/// A node whose pods are to be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) uid: String,
    pub(super) name: String,
    /// The taint that its pods have to tolerate.
    pub(super) taint: Taint,
    /// How often in a row it did not succeed.
    pub(super) failures: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Requested at this time, which is in the future after a failure.
    Waiting(Phase, Instant),
    InProgress(Phase),
    /// Its pods have what they need: it may be tainted, once.
    Ready,
    /// Nothing remains to be done while it has this taint.
    Done,
}

/// All nodes that archaware taints, by uid.
#[derive(Debug, Default)]
pub(super) struct Looks(HashMap<String, (Look, State)>);

impl Looks {
    /// Whether the node may get this taint now. If not, its pods are looked at first.
    pub(super) fn may_taint(&mut self, uid: &str, name: &str, taint: &Taint, now: Instant) -> bool {
        match self.state(uid, taint) {
            Some(State::Ready) => {
                self.0.remove(uid);
                true
            }
            Some(State::Waiting(Phase::BeforeTaint, _) | State::InProgress(Phase::BeforeTaint)) => {
                false
            }
            _ => {
                self.request(uid, name, taint, Phase::BeforeTaint, now);
                false
            }
        }
    }

    /// The node has this taint: its pods are looked at, unless they were since.
    pub(super) fn is_tainted(&mut self, uid: &str, name: &str, taint: &Taint, now: Instant) {
        let known = matches!(
            self.state(uid, taint),
            Some(
                State::Waiting(Phase::AfterTaint, _)
                    | State::InProgress(Phase::AfterTaint)
                    | State::Done
            )
        );
        if !known {
            self.request(uid, name, taint, Phase::AfterTaint, now);
        }
    }

    fn state(&self, uid: &str, taint: &Taint) -> Option<State> {
        let (_, state) = self.0.get(uid).filter(|(look, _)| look.taint == *taint)?;
        Some(*state)
    }

    fn request(&mut self, uid: &str, name: &str, taint: &Taint, phase: Phase, now: Instant) {
        let look = Look {
            uid: uid.to_owned(),
            name: name.to_owned(),
            taint: taint.clone(),
            failures: 0,
        };
        self.0
            .insert(uid.to_owned(), (look, State::Waiting(phase, now)));
    }

    /// When the next requests are to be served; `None` if there are none.
    pub(super) fn due(&self, now: Instant) -> Option<(Phase, Instant)> {
        let phases = [Phase::BeforeTaint, Phase::AfterTaint];
        let all = phases.map(|phase| self.due_in(phase, now).map(|due| (phase, due)));
        all.into_iter().flatten().min_by_key(|(_, due)| *due)
    }

    fn due_in(&self, phase: Phase, now: Instant) -> Option<Instant> {
        let mut since: Option<(Instant, Instant)> = None;
        let mut retry: Option<Instant> = None;
        for (_, state) in self.0.values() {
            match *state {
                State::Waiting(of, at) if of == phase && at <= now => {
                    let (first, last) = since.unwrap_or((at, at));
                    since = Some((first.min(at), last.max(at)));
                }
                State::Waiting(of, at) if of == phase => {
                    retry = Some(retry.map_or(at, |earliest| earliest.min(at)));
                }
                _ => {}
            }
        }
        let gathered =
            since.map(|(first, last)| (last + phase.quiet()).min(first + phase.patience()));
        gathered.into_iter().chain(retry).min()
    }

    /// The requests of a phase that wait now; they are in progress afterwards.
    pub(super) fn take(&mut self, phase: Phase, now: Instant) -> Vec<Look> {
        let mut taken = Vec::new();
        for (look, state) in self.0.values_mut() {
            if matches!(state, State::Waiting(of, at) if *of == phase && *at <= now) {
                *state = State::InProgress(phase);
                taken.push(look.clone());
            }
        }
        taken
    }

    /// A look succeeded. Returns whether the node may be tainted now.
    pub(super) fn succeeded(&mut self, look: &Look, phase: Phase) -> bool {
        let Some((known, state)) = self.0.get_mut(&look.uid) else {
            return false;
        };
        if known.taint != look.taint || *state != State::InProgress(phase) {
            return false;
        }
        *state = match phase {
            Phase::BeforeTaint => State::Ready,
            Phase::AfterTaint => State::Done,
        };
        phase == Phase::BeforeTaint
    }

    /// A look did not succeed, and is repeated after a pause.
    pub(super) fn failed(&mut self, look: &Look, phase: Phase, now: Instant) {
        let Some((known, state)) = self.0.get_mut(&look.uid) else {
            return;
        };
        if known.taint == look.taint && *state == State::InProgress(phase) {
            known.failures = known.failures.saturating_add(1);
            *state = State::Waiting(phase, now + RETRY.delay(known.failures));
        }
    }

    /// Nodes were deleted.
    pub(super) fn forget(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// Only these nodes are left.
    pub(super) fn retain(&mut self, uids: &HashSet<String>) {
        self.0.retain(|uid, _| uids.contains(uid));
    }

    /// Another process may taint nodes from now on.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// How many nodes wait for their taint until their pods have been looked at.
    pub(super) fn waiting(&self) -> usize {
        let before = |state: &State| {
            matches!(
                state,
                State::Waiting(Phase::BeforeTaint, _) | State::InProgress(Phase::BeforeTaint)
            )
        };
        self.0.values().filter(|(_, state)| before(state)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn taint(text: &str) -> Taint {
        text.parse().unwrap()
    }

    fn names(mut taken: Vec<Look>) -> Vec<String> {
        taken.sort_by(|a, b| a.name.cmp(&b.name));
        taken.into_iter().map(|look| look.name).collect()
    }

    #[test]
    fn a_node_is_looked_at_before_and_after() {
        let (mut looks, now) = (Looks::default(), Instant::now());
        let arm = taint("kubernetes.io/arch=arm64:NoSchedule");
        assert!(!looks.may_taint("1", "n", &arm, now));
        // Asked again, for example because its labels change.
        assert!(!looks.may_taint("1", "n", &arm, now + SECOND));
        let (phase, due) = looks.due(now).unwrap();
        assert_eq!((phase, due), (Phase::BeforeTaint, now + phase.quiet()));
        let taken = looks.take(phase, due);
        assert_eq!((taken.len(), looks.waiting(), looks.due(due)), (1, 1, None));
        assert!(!looks.may_taint("1", "n", &arm, due));
        assert!(looks.succeeded(&taken[0], phase) && looks.waiting() == 0);
        assert!(looks.may_taint("1", "n", &arm, due));
        // It has its taint.
        for _ in 0..2 {
            looks.is_tainted("1", "n", &arm, due);
        }
        let (phase, then) = looks.due(due).unwrap();
        assert_eq!((phase, then), (Phase::AfterTaint, due + phase.quiet()));
        let taken = looks.take(phase, then);
        assert!(!looks.succeeded(&taken[0], phase));
        looks.is_tainted("1", "n", &arm, then);
        assert_eq!(looks.due(then), None, "nothing remains to be done");
        // Somebody removed the taint.
        assert!(!looks.may_taint("1", "n", &arm, then));
        assert_eq!(looks.waiting(), 1);
    }

    #[test]
    fn requests_that_come_together_are_served_together() {
        let (mut looks, start) = (Looks::default(), Instant::now());
        let arm = taint("kubernetes.io/arch=arm64:NoSchedule");
        let quiet = Phase::BeforeTaint.quiet();
        let mut now = start;
        for n in 0..3 {
            looks.may_taint(&n.to_string(), &n.to_string(), &arm, now);
            now += quiet / 2;
        }
        let (_, due) = looks.due(now).unwrap();
        assert_eq!(due, start + 2 * quiet);
        assert_eq!(names(looks.take(Phase::BeforeTaint, due)), ["0", "1", "2"]);
        // They never stop coming.
        for n in 0..100 {
            looks.may_taint(&format!("more-{n}"), "more", &arm, start + n * quiet / 2);
        }
        let (_, due) = looks.due(start + 50 * quiet).unwrap();
        assert_eq!(due, start + Phase::BeforeTaint.patience());
    }

    #[test]
    fn what_fails_is_repeated_after_a_pause() {
        let (mut looks, now) = (Looks::default(), Instant::now());
        let arm = taint("kubernetes.io/arch=arm64:NoSchedule");
        looks.may_taint("1", "n", &arm, now);
        for (failures, pause) in [(1, 1), (2, 2), (3, 4)] {
            let (_, at) = looks.due(now + 100 * SECOND).unwrap();
            let taken = looks.take(Phase::BeforeTaint, at);
            looks.failed(&taken[0], Phase::BeforeTaint, now);
            assert_eq!(looks.due(now).unwrap().1, now + pause * SECOND);
            assert!(looks.take(Phase::BeforeTaint, now).is_empty());
            assert_eq!(looks.0["1"].0.failures, failures);
        }
    }

    #[test]
    fn what_changed_meanwhile_counts() {
        let (mut looks, now) = (Looks::default(), Instant::now());
        let (arm, other) = (
            taint("kubernetes.io/arch=arm64:NoSchedule"),
            taint("example.com/arch=arm64:NoSchedule"),
        );
        for (uid, change) in [
            (
                "1",
                &mut (|looks: &mut Looks| looks.forget("1")) as &mut dyn FnMut(&mut Looks),
            ),
            ("2", &mut |looks: &mut Looks| {
                assert!(!looks.may_taint("2", "n", &other, now));
            }),
            ("3", &mut |looks: &mut Looks| looks.retain(&HashSet::new())),
            ("4", &mut Looks::clear),
            ("5", &mut |looks: &mut Looks| {
                looks.is_tainted("5", "n", &arm, now);
            }),
        ] {
            looks.may_taint(uid, "n", &arm, now);
            let taken = looks.take(Phase::BeforeTaint, now);
            change(&mut looks);
            assert!(!looks.succeeded(&taken[0], Phase::BeforeTaint), "{uid}");
            looks.failed(&taken[0], Phase::BeforeTaint, now);
            assert!(looks.take(Phase::AfterTaint, now).len() <= 1);
        }
    }
}
