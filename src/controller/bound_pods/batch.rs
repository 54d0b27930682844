//! Nodes whose pods are checked together, and the results.

use std::{
    collections::{HashMap, HashSet},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    cluster::{api::ApiError, name::NamespacedName},
    error::chain,
    placement::Effect,
};

use super::checks::{CheckResult, NodeCheck, Phase};

/// How often progress is logged.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Time limit to resolve a pod's images after an earlier pod of its namespace was slow.
const SHORT_LOOK: Duration = Duration::from_millis(500);
/// After this many failures the node is tainted anyway, if the taint evicts no pod. Later failures
/// are not logged as warnings.
const MAX_FAILURES: u32 = 3;

/// Nodes whose pods are looked at together.
pub(super) struct Batch {
    pub(super) phase: Phase,
    pub(super) checks: Vec<NodeCheck>,
    results: HashMap<String, NodeResult>,
    looked_at: AtomicUsize,
    tolerated: AtomicUsize,
    /// Namespaces with a pod whose images were not known in time.
    slow: Mutex<HashSet<String>>,
}

/// The result for the pods of a node.
struct NodeResult {
    check: NodeCheck,
    tolerated: AtomicUsize,
    /// A pod that did not get its toleration, and why.
    failed: Mutex<Option<(NamespacedName, Failure)>>,
}

/// Why a pod did not get its toleration.
pub(super) enum Failure {
    /// The pod changed meanwhile, or archaware stops.
    Changed,
    /// Looking at it panicked.
    Panicked,
    Rejected(ApiError),
}

impl Failure {
    /// Whether further attempts fail as well, until an administrator changes a policy.
    fn is_refusal(&self) -> bool {
        matches!(self, Self::Rejected(error) if error.is_refusal())
    }

    /// Whether the pod itself is the reason. The taint must not wait for such a pod, or its author
    /// could keep the node untainted.
    fn is_by_pod(&self) -> bool {
        matches!(self, Self::Rejected(ApiError::Invalid(_)))
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Changed => f.write_str("the pod changed during the patch"),
            Self::Panicked => f.write_str("a panic, which is a bug; its location is in the log"),
            Self::Rejected(error) => f.write_str(&chain(error)),
        }
    }
}

impl Batch {
    pub(super) fn new(phase: Phase, checks: Vec<NodeCheck>) -> Self {
        let node_result = |check: &NodeCheck| NodeResult {
            check: check.clone(),
            tolerated: AtomicUsize::new(0),
            failed: Mutex::default(),
        };
        Self {
            phase,
            results: checks
                .iter()
                .map(|check| (check.name.clone(), node_result(check)))
                .collect(),
            checks,
            looked_at: AtomicUsize::new(0),
            tolerated: AtomicUsize::new(0),
            slow: Mutex::default(),
        }
    }

    /// Time limit to resolve a pod's images, if an earlier pod of its namespace was slow: a tenant
    /// whose registries hang must not keep the nodes of all tenants untainted.
    pub(super) fn patience(&self, namespace: &str) -> Option<Duration> {
        let is_slow = self.slow.lock().contains(namespace);
        is_slow.then_some(SHORT_LOOK)
    }

    /// Remembers that the images of a pod of this namespace were not known in time.
    pub(super) fn mark_slow(&self, namespace: &str) {
        self.slow.lock().insert(namespace.to_owned());
    }

    /// The check of this node, if the node is in the batch.
    pub(super) fn check(&self, node: &str) -> Option<&NodeCheck> {
        Some(&self.results.get(node)?.check)
    }

    /// The names of its nodes.
    pub(super) fn nodes(&self) -> Vec<String> {
        self.results.keys().cloned().collect()
    }

    pub(super) fn count(&self) {
        self.looked_at.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a pod of this node that got its toleration.
    pub(super) fn tolerated(&self, node: &str) {
        self.tolerated.fetch_add(1, Ordering::Relaxed);
        if let Some(node_result) = self.results.get(node) {
            node_result.tolerated.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records why a pod of this node got no toleration. A temporary failure replaces a refusal.
    pub(super) fn failed(&self, node: &str, pod: NamespacedName, failure: Failure) {
        let Some(node_result) = self.results.get(node) else {
            return;
        };
        let mut failed = node_result.failed.lock();
        if failed
            .as_ref()
            .is_none_or(|(_, before)| before.is_refusal())
        {
            *failed = Some((pod, failure));
        }
    }

    /// The pods that were looked at, and those of them that got a toleration.
    pub(super) fn counts(&self) -> (usize, usize) {
        let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (count(&self.looked_at), count(&self.tolerated))
    }

    /// Logs the progress from time to time; does not end.
    pub(super) async fn log_progress(&self) {
        let nodes = self.checks.len();
        loop {
            tokio::time::sleep(PROGRESS_INTERVAL).await;
            let (pods, tolerated) = self.counts();
            tracing::info!(
                nodes,
                pods,
                tolerated,
                "archaware still checks whether the pods on these nodes tolerate the taint of their node"
            );
        }
    }

    /// The result for a node; logs failures.
    pub(super) fn outcome(&self, check: &NodeCheck) -> CheckResult {
        let Some(node_result) = self.results.get(&check.name) else {
            return CheckResult::Tolerated;
        };
        let before = self.phase == Phase::BeforeTaint;
        let evicts = check.taint.kind.effect == Effect::NoExecute && before;
        let failed = node_result.failed.lock();
        if let Some((pod, failure)) = &*failed {
            let (node, taint, failures) = (&check.name, &check.taint, check.failures + 1);
            let may_go_on = failure.is_refusal() || failures >= MAX_FAILURES;
            let goes_on = before && (failure.is_by_pod() || (!evicts && may_go_on));
            if failures > MAX_FAILURES {
                tracing::debug!(%pod, node, %taint, %failure, failures, "the pod gets no toleration");
            } else if evicts && goes_on {
                tracing::warn!(%pod, node, %taint, %failure, failures,
                    "the taint of its node evicts the pod, because the pod cannot be patched");
            } else if evicts {
                tracing::warn!(%pod, node, %taint, %failure, failures,
                    "the node is not tainted: its taint would evict a pod that cannot be patched");
            } else {
                tracing::warn!(%pod, node, %taint, %failure, failures,
                    "the pod gets no toleration for the taint of its node");
            }
            if !goes_on {
                return CheckResult::Failed;
            }
        }
        if evicts && node_result.tolerated.load(Ordering::Relaxed) > 0 {
            CheckResult::Settling
        } else {
            CheckResult::Tolerated
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(taint: &str, failures: u32) -> NodeCheck {
        NodeCheck {
            uid: "1".to_owned(),
            name: "n".to_owned(),
            taint: taint.parse().unwrap(),
            failures,
        }
    }

    #[test]
    fn what_a_failure_means_for_the_taint() {
        let (schedule, execute) = ("a/b=arm64:NoSchedule", "a/b=arm64:NoExecute");
        let (before, after) = (Phase::BeforeTaint, Phase::AfterTaint);
        let denied = || Failure::Rejected(ApiError::Denied("no".to_owned()));
        let invalid = || Failure::Rejected(ApiError::Invalid("no".to_owned()));
        let (again, go_on) = (CheckResult::Failed, CheckResult::Tolerated);
        for (taint, phase, failures, failure, expected) in [
            (schedule, before, 0, denied(), go_on),
            (schedule, before, 0, Failure::Changed, again),
            (schedule, before, 1, Failure::Changed, again),
            (schedule, before, 2, Failure::Changed, go_on),
            (execute, before, 9, denied(), again),
            (execute, before, 0, invalid(), go_on),
            (execute, after, 0, invalid(), again),
            (execute, before, 9, Failure::Changed, again),
            // No taint waits for this check, so it is repeated for ever.
            (schedule, after, 9, Failure::Panicked, again),
            (schedule, after, 9, denied(), again),
        ] {
            let check = check(taint, failures);
            let batch = Batch::new(phase, vec![check.clone()]);
            let text = failure.to_string();
            batch.failed("n", NamespacedName::cluster("p"), failure);
            assert_eq!(
                batch.outcome(&check),
                expected,
                "{taint} {phase:?} {failures} {text}"
            );
        }
    }

    #[test]
    fn a_refusal_hides_no_failure_that_may_pass() {
        let check = check("a/b=arm64:NoSchedule", 0);
        let denied = || Failure::Rejected(ApiError::Denied("no".to_owned()));
        let pod = || NamespacedName::cluster("p");
        let batch = Batch::new(Phase::BeforeTaint, vec![check.clone()]);
        batch.failed("n", pod(), denied());
        batch.failed("n", pod(), Failure::Changed);
        batch.failed("n", pod(), denied());
        assert_eq!(batch.outcome(&check), CheckResult::Failed);
    }

    #[test]
    fn whoever_evicts_has_to_see_tolerations_first() {
        for (taint, expected) in [
            ("a/b=arm64:NoSchedule", CheckResult::Tolerated),
            ("a/b=arm64:NoExecute", CheckResult::Settling),
        ] {
            let check = check(taint, 0);
            let batch = Batch::new(Phase::BeforeTaint, vec![check.clone()]);
            assert_eq!(batch.outcome(&check), CheckResult::Tolerated);
            batch.tolerated("n");
            assert_eq!(batch.outcome(&check), expected);
        }
    }
}
