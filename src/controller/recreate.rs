//! Evicts pods that were created while the webhook did not answer (`affinity.recreatePods`), so that their controllers create them
//! anew, through the webhook. Without node affinity an autoscaler may make nodes that such a pod does not tolerate, one after the
//! other, and Kubernetes lets affinity be set only when a pod is created.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use kube::Resource;
use kube_runtime::reflector::Store;
use tokio::sync::watch;

use crate::{
    backoff::Backoff,
    cluster::{
        api::{ApiClient, ApiError},
        events::{EventReason, Events},
        name::NamespacedName,
        namespaces::Namespaces,
        objects::{Pod, annotations},
    },
    evaluate::Evaluator,
    metrics::Metrics,
    placement::{annotation, reinvocation},
    plan,
};

use super::pods::age;

/// How often the pods are looked at. A pod that is not bound after this time is one that an autoscaler looks at.
const PERIOD: Duration = Duration::from_secs(10);
/// Maximum number of evictions in a period: the webhook and the scheduler have to cope with the new pods.
const MAX_EVICTIONS: usize = 100;
/// If the new pods of a controller have no affinity either, something keeps the webhook from them.
const PAUSES: Backoff = Backoff::seconds(60, 3600);
/// Pauses between single evictions while it is not known whether the API server asks the webhook.
const TRIALS: Backoff = Backoff::seconds(10, 3600);
/// Maximum number of remembered controllers; beyond it, all are forgotten.
const MAX_OWNERS: usize = 10_000;

/// What evicts pods while this process leads.
pub(super) struct Recreation {
    pub(super) api: ApiClient,
    pub(super) evaluator: Evaluator,
    pub(super) namespaces: Namespaces,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) pods: Store<Pod>,
    /// When the newest pod was created that came through the webhook, in seconds since 1970.
    pub(super) newest_admitted: Arc<AtomicI64>,
}

/// Remembers that this pod came through the webhook of some replica, if it did.
pub(super) fn record_admission(newest: &AtomicI64, pod: &Pod) {
    let created = pod.metadata.creation_timestamp.as_ref();
    let added = reinvocation::recorded_change(annotations(&pod.metadata));
    if let Some(created) = created
        && added.affinity.require.is_some()
        && pod.controller().is_some()
    {
        newest.fetch_max(created.0.as_second(), Ordering::Relaxed);
    }
}

/// What was evicted without knowing whether the webhook is asked: how often, and when last.
type Trials = (u32, Option<Instant>);

/// The controllers whose pods were evicted: how often, and when last.
type Owners = HashMap<String, (u32, Instant)>;

impl Recreation {
    /// Runs until it is cancelled.
    pub(super) async fn run(self, mut leadership: watch::Receiver<bool>) {
        let (mut owners, mut trials) = (Owners::new(), Trials::default());
        while leadership.wait_for(|leading| *leading).await.is_ok() {
            let pods = self.due(&mut owners, &mut trials, Instant::now());
            self.evict(pods).await;
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// The pods to evict now. While it is not known that the API server asks the webhook again, one pod is tried.
    fn due(&self, owners: &mut Owners, trials: &mut Trials, now: Instant) -> Vec<Arc<Pod>> {
        let pods = self.pods.state().into_iter();
        let late = pods.filter(|pod| self.is_late(pod) && may_evict(pod, owners, now));
        let (known, unknown): (Vec<_>, Vec<_>) = late.partition(|pod| self.is_asked_since(pod));
        if known.is_empty() {
            let pause = trials.1.map(|last| (last, TRIALS.delay(trials.0)));
            let is_due =
                pause.is_none_or(|(last, pause)| now.saturating_duration_since(last) >= pause);
            let first: Vec<_> = unknown.into_iter().take(usize::from(is_due)).collect();
            if !first.is_empty() {
                *trials = (trials.0 + 1, Some(now));
            }
            return first;
        }
        *trials = Trials::default();
        let due: Vec<_> = known.into_iter().take(MAX_EVICTIONS).collect();
        if owners.len() > MAX_OWNERS {
            owners.clear();
        }
        let evicted: BTreeSet<String> = due.iter().filter_map(|pod| owner(pod)).collect();
        for owner in evicted {
            let entry = owners.entry(owner).or_insert((0, now));
            *entry = (entry.0 + 1, now);
        }
        due
    }

    async fn evict(&self, pods: Vec<Arc<Pod>>) {
        for pod in pods {
            let name = NamespacedName::of_object(&*pod);
            match self.api.evict(&pod).await {
                Ok(()) => {
                    tracing::info!(pod = %name, "pod evicted: it was created without node affinity");
                    let note = "evicted, so that it is created anew with node affinity: the webhook was not asked when it was created";
                    let note = note.to_owned();
                    self.events.publish(&*pod, EventReason::Recreated, note);
                }
                Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => {}
                Err(error) => tracing::warn!(pod = %name, %error, "cannot evict the pod"),
            }
        }
    }

    /// Whether this pod waits for a node without the affinity that it would get through the webhook.
    fn is_late(&self, pod: &Pod) -> bool {
        age(pod) > PERIOD
            && !self.is_excluded(pod)
            && plan::pod::lacks_affinity(pod, &self.evaluator.policy)
    }

    /// Whether the API server has asked the webhook after this pod was created: this replica, or another one, which the result
    /// shows.
    fn is_asked_since(&self, pod: &Pod) -> bool {
        let asked = self.metrics.admissions.last_asked();
        let created = pod.metadata.creation_timestamp.as_ref();
        let newest = self.newest_admitted.load(Ordering::Relaxed);
        asked.is_some_and(|ago| Duration::from_secs(ago + 1) < age(pod))
            || created.is_some_and(|created| created.0.as_second() < newest)
    }

    /// Whether the pod's namespace is excluded from the webhook.
    fn is_excluded(&self, pod: &Pod) -> bool {
        let name = pod.metadata.namespace.as_deref().unwrap_or_default();
        let namespace = self.namespaces.get(name);
        let labels = namespace
            .as_ref()
            .and_then(|found| found.meta().labels.as_ref());
        let admission = labels.and_then(|labels| labels.get(annotation::ADMISSION));
        admission.is_some_and(|value| value == "disabled")
    }
}

/// The uid of the pod's controller.
fn owner(pod: &Pod) -> Option<String> {
    pod.controller().map(|owner| owner.uid.clone())
}

fn may_evict(pod: &Pod, owners: &Owners, now: Instant) -> bool {
    let Some(owner) = owner(pod) else {
        return false;
    };
    owners
        .get(&owner)
        .is_none_or(|(times, last)| now.saturating_duration_since(*last) >= PAUSES.delay(*times))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_pods_of_a_controller_are_evicted_with_growing_pauses() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]}}))
        .unwrap();
        let (now, mut owners) = (Instant::now(), Owners::new());
        let after = |seconds| now + Duration::from_secs(seconds);
        assert!(may_evict(&pod, &owners, now));
        owners.insert("r".to_owned(), (1, now));
        assert!(!may_evict(&pod, &owners, after(59)) && may_evict(&pod, &owners, after(60)));
        owners.insert("r".to_owned(), (3, now));
        assert!(!may_evict(&pod, &owners, after(239)) && may_evict(&pod, &owners, after(240)));
        assert!(
            !may_evict(&Pod::default(), &owners, now),
            "nobody would make it anew"
        );
    }
}
