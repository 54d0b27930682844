//! Reconciles pods: they get the tolerations that their images allow.

use std::time::{Duration, Instant};

use kube_runtime::reflector::Store;
use tokio::sync::watch;

use crate::{
    cluster::{
        api::ServerClock,
        namespaces::Namespaces,
        objects::{Pod, annotations},
    },
    evaluate::{Evaluation, Evaluator},
    metrics::Metrics,
    placement::{annotation, failure::FailurePolicy},
    plan::{self, Plan, Policies, Remembered},
};

use super::{object_state::ObjectStates, reconcile::ReconcileSteps, webhook_use::AdmittedPods};

/// The reconciler of pods.
pub(super) struct PodSteps {
    pub(super) evaluator: Evaluator,
    pub(super) namespaces: Namespaces,
    pub(super) failure: FailurePolicy,
    pub(super) metrics: Metrics,
    pub(super) admitted: AdmittedPods,
    /// The clock of the API server.
    pub(super) clock: ServerClock,
}

/// Pods that are not bound. So the cost does not depend on the number of running pods.
pub(super) const UNBOUND: &str = "spec.nodeName=";

/// Compares the relevant fields. `PodStatus` leaves out conditions, which the scheduler updates for
/// pods that it cannot place.
pub(super) fn same(old: &Pod, new: &Pod) -> bool {
    old.metadata.uid == new.metadata.uid
        && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
        && old.status == new.status
}

/// Whether the pod's annotation records where it may run.
fn is_recorded(pod: &Pod) -> bool {
    let decision = annotations(&pod.metadata).get(annotation::DECISION);
    decision.is_some_and(|decision| decision != "none")
}

impl ReconcileSteps for PodSteps {
    type Object = Pod;
    type Evaluation = Evaluation;
    const NAME: &'static str = "pods";

    async fn evaluate(&self, pod: &Pod) -> Option<Evaluation> {
        if !pod.is_in_scope() {
            return None;
        }
        self.admitted.record(pod);
        let subject = plan::pod::subject(pod);
        let namespace = self.namespaces.find(subject.namespace).await;
        Some(self.evaluator.evaluate(subject, &namespace).await)
    }

    fn plan(
        &self,
        pod: &Pod,
        evaluation: Evaluation,
        remembered: Remembered,
        now: Instant,
    ) -> Plan {
        let policies = Policies {
            placement: &self.evaluator.policy,
            failure: &self.failure,
            gates: self.evaluator.config.admission.enabled,
        };
        plan::pod::plan(pod, &evaluation, policies, remembered.state, now)
    }

    /// Records how long the pod waited for its decision.
    fn decided(&self, pod: &Pod) {
        if !is_recorded(pod) {
            self.metrics.pod_decided(self.clock.age(pod));
        }
    }
}

/// The number of undecided pods, and the age of the oldest in seconds.
fn undecided(store: &Store<Pod>, states: &ObjectStates, clock: &ServerClock) -> (i64, i64) {
    let (mut count, mut oldest) = (0, Duration::ZERO);
    for pod in store.state() {
        let decided = states.is_decided(&*pod);
        if pod.is_in_scope() && !decided.unwrap_or_else(|| is_recorded(&pod)) {
            count += 1;
            oldest = oldest.max(clock.age(&pod));
        }
    }
    (count, i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX))
}

/// Registers gauges of watched and undecided pods. Only the leader reports undecided pods.
pub(super) fn register_gauges(
    metrics: &Metrics,
    (store, states): (Store<Pod>, ObjectStates),
    leading: watch::Receiver<bool>,
    clock: ServerClock,
) {
    let all_pods = store.clone();
    let watched = [("pods_watched", "Pods in the selection of the watch")];
    metrics.register_gauges(watched, move || {
        let count = i64::try_from(all_pods.len()).unwrap_or(i64::MAX);
        [vec![([], count)]]
    });
    let names = [
        (
            "pods_undecided",
            "Unbound pods that wait for a decision, or that no architecture can run",
        ),
        (
            "pods_undecided_oldest_seconds",
            "Age of the oldest pod of pods_undecided, in seconds; 0 when there is none",
        ),
    ];
    metrics.register_gauges(names, move || {
        if !*leading.borrow() {
            return Default::default();
        }
        let (count, oldest) = undecided(&store, &states, &clock);
        [count, oldest].map(|value| vec![([], value)])
    });
}
