//! Schedules the checks of the pods on each node. Pure: callers pass the time.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::{
    backoff::Backoff,
    cluster::{objects::Node, watch::Removed},
    placement::Taint,
};

/// Back-off, 1 s to 10 min, before a node is checked again because a pod on it could not be
/// patched.
const RETRY: Backoff = Backoff::seconds(1, 600);
/// The pause after a list that failed.
const LIST_RETRY: Duration = Duration::from_secs(5);
/// How long the controllers of Kubernetes may take to see new tolerations: the taint eviction
/// controller would evict a pod whose toleration is not in its cache (`tainteviction` of
/// kube-controller-manager).
const SETTLING: Duration = Duration::from_secs(5);
/// Interval of repeated checks. They find pods that were created on a node while the webhook did
/// not answer.
const RECHECK_INTERVAL: Duration = Duration::from_hours(1);

/// When a node is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    /// Before it gets its taint; the taint waits for this check.
    BeforeTaint,
    /// After it has its taint: meanwhile the scheduler may have bound a pod that does not tolerate
    /// the taint.
    AfterTaint,
}

impl Phase {
    /// Requests that come within this time of each other are served together: one list of all pods
    /// costs less than thousands of lists of single nodes. The scheduler of a busy cluster sees a
    /// taint after some seconds, so checks after a taint wait longer.
    fn quiet(self) -> Duration {
        match self {
            Self::BeforeTaint => Duration::from_millis(250),
            Self::AfterTaint => Duration::from_secs(5),
        }
    }

    /// The longest time that a request waits for other requests, to share their list of pods.
    fn patience(self) -> Duration {
        match self {
            Self::BeforeTaint => Duration::from_secs(5),
            Self::AfterTaint => Duration::from_mins(1),
        }
    }
}

/// A node whose pods are to be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeCheck {
    pub(super) uid: String,
    pub(super) name: String,
    /// The taint that its pods have to tolerate.
    pub(super) taint: Taint,
    /// How often in a row a pod could not be patched.
    pub(super) failures: u32,
}

/// The result of a check of a node's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CheckResult {
    /// All pods that have to tolerate the taint do.
    Tolerated,
    /// Tolerations were just written; wait until the taint eviction controller has seen them.
    Settling,
    /// A pod could not be patched.
    Failed,
    /// The pods could not be listed.
    NotListed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A check is due at this time.
    Waiting(Phase, Instant),
    InProgress(Phase),
    /// Its pods have their tolerations: the node may be tainted, once.
    Ready,
}

/// All nodes that archaware taints, by uid.
#[derive(Debug, Default)]
pub(super) struct NodeChecks(HashMap<String, (NodeCheck, State)>);

impl NodeChecks {
    /// Takes the permission to give the node this taint. Without a permission, requests a check of
    /// its pods and returns false.
    pub(super) fn take_permission(
        &mut self,
        uid: &str,
        name: &str,
        taint: &Taint,
        now: Instant,
    ) -> bool {
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

    /// Requests repeated checks of the pods on a node that has this taint.
    pub(super) fn recheck(&mut self, uid: &str, name: &str, taint: &Taint, now: Instant) {
        let known = matches!(
            self.state(uid, taint),
            Some(State::Waiting(Phase::AfterTaint, _) | State::InProgress(Phase::AfterTaint))
        );
        if !known {
            self.request(uid, name, taint, Phase::AfterTaint, now);
        }
    }

    fn state(&self, uid: &str, taint: &Taint) -> Option<State> {
        let (_, state) = self.0.get(uid).filter(|(check, _)| check.taint == *taint)?;
        Some(*state)
    }

    fn request(&mut self, uid: &str, name: &str, taint: &Taint, phase: Phase, now: Instant) {
        let check = NodeCheck {
            uid: uid.to_owned(),
            name: name.to_owned(),
            taint: taint.clone(),
            failures: 0,
        };
        self.0
            .insert(uid.to_owned(), (check, State::Waiting(phase, now)));
    }

    /// The phase and the time of the next requests to serve; `None` if there are none.
    pub(super) fn due(&self, now: Instant) -> Option<(Phase, Instant)> {
        let phases = [Phase::BeforeTaint, Phase::AfterTaint];
        let due_phases = phases.map(|phase| self.due_in(phase, now).map(|due| (phase, due)));
        due_phases.into_iter().flatten().min_by_key(|(_, due)| *due)
    }

    fn due_in(&self, phase: Phase, now: Instant) -> Option<Instant> {
        let mut since: Option<(Instant, Instant)> = None;
        let mut retry: Option<Instant> = None;
        for (_, state) in self.0.values() {
            match *state {
                State::Waiting(waiting_phase, at) if waiting_phase == phase && at <= now => {
                    let (first, last) = since.unwrap_or((at, at));
                    since = Some((first.min(at), last.max(at)));
                }
                State::Waiting(waiting_phase, at) if waiting_phase == phase => {
                    retry = Some(retry.map_or(at, |earliest| earliest.min(at)));
                }
                _ => {}
            }
        }
        let gathered =
            since.map(|(first, last)| (last + phase.quiet()).min(first + phase.patience()));
        gathered.into_iter().chain(retry).min()
    }

    /// Takes the due requests of a phase, and marks them as in progress.
    pub(super) fn take(&mut self, phase: Phase, now: Instant) -> Vec<NodeCheck> {
        let mut taken = Vec::new();
        for (check, state) in self.0.values_mut() {
            if matches!(state, State::Waiting(of, at) if *of == phase && *at <= now) {
                *state = State::InProgress(phase);
                taken.push(check.clone());
            }
        }
        taken
    }

    /// Records the result of a check. Returns whether the node may be tainted now.
    pub(super) fn record(
        &mut self,
        check: &NodeCheck,
        phase: Phase,
        outcome: CheckResult,
        now: Instant,
    ) -> bool {
        let Some((known, state)) = self.0.get_mut(&check.uid) else {
            return false;
        };
        if known.taint != check.taint || *state != State::InProgress(phase) {
            return false;
        }
        let pause = match outcome {
            CheckResult::Tolerated if phase == Phase::BeforeTaint => {
                *state = State::Ready;
                return true;
            }
            CheckResult::Tolerated => {
                known.failures = 0;
                RECHECK_INTERVAL
            }
            CheckResult::Settling => SETTLING,
            CheckResult::Failed => {
                known.failures = known.failures.saturating_add(1);
                RETRY.delay(known.failures)
            }
            CheckResult::NotListed => LIST_RETRY,
        };
        *state = State::Waiting(phase, now + pause);
        false
    }

    /// Forgets a node that has no taint and gets none.
    pub(super) fn forget(&mut self, uid: &str) {
        self.0.remove(uid);
    }

    /// Forgets deleted nodes.
    pub(super) fn removed(&mut self, removed: &Removed<'_, Node>) {
        removed.forget_in(&mut self.0);
    }

    /// Forgets all nodes, because another process may taint them from now on.
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
mod tests;
