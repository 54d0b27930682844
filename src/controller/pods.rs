//! Gives pods the tolerations that their images allow.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kube::{Api, Client, ResourceExt};
use kube_runtime::{controller::Action, reflector::Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        events::Events,
        objects::Pod,
        patch::{self, JsonPatch, annotations},
        writer::{Outcome, WriteError, Writer},
    },
    config::Config,
    inspect::{Stage, Subject},
    metrics::Metrics,
    placement::{Effect, annotation},
};

use super::{
    attempt::Attempt,
    judge::{Judge, Prior},
    startup::Seen,
};

/// How long until a gate is tried again that could not be removed.
const RELEASE_RETRY: Duration = Duration::from_secs(15);

/// The reconciler of pods.
pub(super) struct Pods {
    client: Client,
    judge: Judge,
    writer: Writer,
    events: Events,
    metrics: Metrics,
    store: Store<Pod>,
    seen: Seen,
    /// With `NoExecute` bound pods matter, too: they would be evicted.
    bound_too: bool,
}

/// A field selector, and whether two states of a pod are the same to archaware.
type Selection = (Option<&'static str>, fn(&Pod, &Pod) -> bool);

/// Which pods are watched, and which changes in them matter. An unbound pod is all that NoSchedule
/// needs, so the cost does not depend on how many pods run.
pub(crate) fn selection(config: &Config) -> Selection {
    let fields = (config.taint.effect != Effect::NoExecute).then_some("spec.nodeName=");
    (fields, same)
}

/// The scheduler writes the status of a pod that it cannot place again and again.
fn same(old: &Pod, new: &Pod) -> bool {
    old.metadata.uid == new.metadata.uid
        && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
        && old.status == new.status
}

/// Whether it carries a decision.
fn is_recorded(pod: &Pod) -> bool {
    annotations(&pod.metadata).contains_key(annotation::DECISION)
}

/// Since the API server created it, by this machine's clock.
fn age(pod: &Pod) -> Duration {
    let created = pod.metadata.creation_timestamp.as_ref();
    let age = created.map(|time| jiff::Timestamp::now().duration_since(time.0));
    age.and_then(|age| Duration::try_from(age).ok())
        .unwrap_or_default()
}

impl Pods {
    pub(super) fn new(
        client: Client,
        config: &Config,
        judge: Judge,
        (writer, events, metrics): (Writer, Events, Metrics),
        store: Store<Pod>,
    ) -> Arc<Self> {
        let bound_too = config.taint.effect == Effect::NoExecute;
        let seen = Seen::default();
        Arc::new(Self {
            client,
            judge,
            writer,
            events,
            metrics,
            store,
            seen,
            bound_too,
        })
    }

    /// Which pods have had their first attempt.
    pub(super) fn seen(&self) -> Seen {
        self.seen.clone()
    }

    pub(super) async fn reconcile(
        self: Arc<Self>,
        pod: Arc<Pod>,
        stop: CancellationToken,
    ) -> Action {
        let started = Instant::now();
        let attempt = self.place(&pod, &stop).await;
        self.metrics.attempt_took(started.elapsed());
        if attempt.complete {
            self.seen.mark(&*pod);
        }
        attempt.action
    }

    async fn place(&self, pod: &Pod, stop: &CancellationToken) -> Attempt {
        let bound = pod.is_bound();
        if !pod.is_in_scope() || (bound && !self.bound_too) {
            self.judge.forget(pod);
            return Attempt::complete(Action::await_change());
        }
        self.judge.sweep(&self.store);
        let own = annotations(&pod.metadata);
        let prior = match own.get(annotation::DECISION).map(String::as_str) {
            None | Some("any" | "none") => Prior::Nothing,
            Some(_) => Prior::Decided,
        };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let subject = Subject {
            spec: &pod.spec,
            annotations: own,
            namespace,
            stage: Stage::Pod,
        };
        let judgement = self.judge.judge(pod, subject, prior, stop).await;
        let later = judgement
            .retry
            .map_or_else(Action::await_change, Action::requeue);
        let Some(decision) = judgement.decision else {
            if judgement.release && pod.spec.gate().is_some() {
                return self.release(pod, later).await;
            }
            if !judgement.waiting {
                self.decided(pod);
            }
            // A taint with NoExecute would evict it: the start waits for what the failure policy says.
            return Attempt {
                action: later,
                complete: !(bound && judgement.waiting),
            };
        };
        let inspector = self.judge.inspector();
        let change = inspector.change(&decision, subject, &judgement.preferences);
        if change.is_empty() && pod.spec.gate().is_none() {
            self.decided(pod);
            return Attempt::complete(later);
        }
        let patch = patch::pod::place(pod, change, &decision);
        let written = self.write(pod, patch).await;
        // Whoever refuses the change may have a reason; the gate is archaware's, and goes all the same.
        let refused = matches!(
            written,
            Err(WriteError::Refused(_) | WriteError::Forbidden(_))
        );
        if let Some(attempt) = Attempt::unless_applied(pod, &written, &self.events) {
            if refused && pod.spec.gate().is_some() {
                return self.release(pod, attempt.action).await;
            }
            return attempt;
        }
        let (name, by_policy) = (
            format!("{namespace}/{}", pod.name_any()),
            judgement.by_policy,
        );
        tracing::info!(
            pod = name,
            decision = decision.annotation(),
            by_policy,
            "pod placed"
        );
        if by_policy {
            self.judge.told_policy(pod, &decision);
        }
        self.decided(pod);
        Attempt::complete(later)
    }

    /// Counts how long the pod has waited for its decision, once.
    fn decided(&self, pod: &Pod) {
        let is_new = self.judge.decided(pod, &pod.spec);
        if is_new && !pod.is_bound() && !is_recorded(pod) {
            self.metrics.pod_decided(age(pod));
        }
    }

    /// Pods that still wait for a decision, and the age of the oldest in seconds.
    fn undecided(&self) -> (i64, i64) {
        let (mut count, mut oldest) = (0, Duration::ZERO);
        for pod in self.store.state() {
            let waits = pod.is_in_scope() && !pod.is_bound();
            if waits && !is_recorded(&pod) && !self.judge.is_decided(&*pod) {
                count += 1;
                oldest = oldest.max(age(&pod));
            }
        }
        (count, i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX))
    }

    /// What there is to do, counted when scraped; by the replica that does it. The metrics, which this holds, do
    /// not hold it: whoever waits for the last one of `Events` would wait for ever.
    pub(super) fn register_gauges(self: &Arc<Self>, leading: &watch::Receiver<bool>) {
        let store = self.store.clone();
        let watched = [("pods_watched", "Pods in the selection of the watch")];
        self.metrics.register_gauges(watched, move || {
            let count = i64::try_from(store.len()).unwrap_or(i64::MAX);
            [vec![([], count)]]
        });
        let undecided = [
            ("pods_undecided", "Unbound pods that wait for a decision"),
            (
                "pods_undecided_oldest_seconds",
                "Age of the oldest unbound pod that waits for a decision; 0 when there is none",
            ),
        ];
        let (pods, leads) = (Arc::downgrade(self), leading.clone());
        self.metrics.register_gauges(undecided, move || {
            let pods = pods.upgrade().filter(|_| *leads.borrow());
            let found = pods.map(|pods| pods.undecided());
            let sample = |value| vec![([], value)];
            found.map_or_else(Default::default, |(count, oldest)| {
                [sample(count), sample(oldest)]
            })
        });
    }

    /// Takes archaware's scheduling gate away without any decision.
    async fn release(&self, pod: &Pod, then: Action) -> Attempt {
        let written = self.write(pod, patch::pod::release(pod)).await;
        let attempt = Attempt::unless_applied(pod, &written, &self.events);
        // Whatever is in the way, the pod must not wait for its next change.
        if attempt.is_some() && !matches!(written, Ok(Outcome::Gone)) {
            return Attempt::complete(Action::requeue(RELEASE_RETRY));
        }
        if attempt.is_none() {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            let name = format!("{namespace}/{}", pod.name_any());
            tracing::info!(pod = name, "gate removed without a decision");
        }
        attempt.unwrap_or_else(|| Attempt::complete(then))
    }

    async fn write(&self, pod: &Pod, patch: JsonPatch) -> Result<Outcome, WriteError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        self.writer.patch(&api, &pod.name_any(), patch).await
    }
}
