//! Evicts pods that were created while the webhook did not answer (`affinity.recreatePods`), so
//! that their controllers create replacements through the webhook. Without node affinity an
//! autoscaler may keep making nodes that such a pod does not tolerate, and Kubernetes lets affinity
//! be set only when a pod is created.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use kube_runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;

use crate::{
    backoff::Backoff,
    cluster::{
        api::ServerClock,
        evictor::{EvictionReason, EvictionResult, Evictor},
        objects::Pod,
    },
    evaluate::Evaluator,
    plan,
};

use super::webhook_use::{WebhookUse, namespace_of};

/// Interval of checks, and minimum age of a pod to evict. Autoscalers react to pods that are still
/// not bound after this time.
const PERIOD: Duration = Duration::from_secs(10);
/// Pauses between evictions for a controller whose replacements have no affinity either, because
/// they do not come through the webhook.
const PAUSES: Backoff = Backoff::seconds(60, 3600);
/// Pauses between single evictions while it is not proven that the API server asks the webhook.
const TRIAL_PAUSES: Backoff = Backoff::seconds(10, 3600);
/// Maximum number of remembered controllers, and of namespaces with trials; beyond it, the oldest
/// is forgotten.
const MAX_REMEMBERED: usize = 10_000;

/// What evicts pods while this process leads.
pub(super) struct Recreation {
    pub(super) evictor: Arc<Evictor>,
    pub(super) evaluator: Evaluator,
    pub(super) webhook: WebhookUse,
    pub(super) pods: Store<Pod>,
}

/// For each controller whose pods were evicted, by uid: how many evictions were in vain, and the
/// time of the last eviction.
type Owners = HashMap<String, (u32, Instant)>;

/// Evictions of single pods, without a proof that the API server calls the webhook. Each value
/// holds their number and the time of the last eviction.
#[derive(Default)]
struct Trials {
    /// Trials while nothing shows that the API server calls the webhook. All namespaces share them.
    shared: Option<(u32, Instant)>,
    /// Trials by namespace, for as long as requests or pods suggest that the API server calls the
    /// webhook. Tenants can forge these requests and pods.
    namespaces: HashMap<String, (u32, Instant)>,
}

impl Trials {
    /// Whether one pod of this namespace may be evicted now. If so, records the trial.
    fn begin(&mut self, namespace: &str, seems_asked: bool, now: Instant) -> bool {
        let last = if seems_asked {
            self.namespaces.get(namespace).copied()
        } else {
            self.shared
        };
        let is_due = last.is_none_or(|(times, last)| {
            now.saturating_duration_since(last) >= TRIAL_PAUSES.delay(times)
        });
        if is_due {
            let trial = (last.map_or(0, |(times, _)| times) + 1, now);
            if seems_asked {
                make_room(&mut self.namespaces, namespace);
                self.namespaces.insert(namespace.to_owned(), trial);
            } else {
                self.shared = Some(trial);
            }
        }
        is_due
    }

    /// Forgets the trials, because the API server calls the webhook for pods of this namespace.
    fn succeeded(&mut self, namespace: &str) {
        self.shared = None;
        self.namespaces.remove(namespace);
    }
}

/// Forgets the oldest entry if there is no room for one more.
fn make_room(entries: &mut HashMap<String, (u32, Instant)>, key: &str) {
    if entries.len() >= MAX_REMEMBERED && !entries.contains_key(key) {
        let oldest = entries.iter().min_by_key(|(_, (_, last))| *last);
        let oldest = oldest.map(|(key, _)| key.clone());
        entries.remove(&oldest.unwrap_or_default());
    }
}

impl Recreation {
    /// Runs until it is cancelled.
    pub(super) async fn run(self, mut leadership: watch::Receiver<bool>) {
        if self
            .webhook
            .namespaces
            .ready()
            .wait_for(|ready| *ready)
            .await
            .is_err()
        {
            return;
        }
        let (mut owners, mut trials) = (Owners::new(), Trials::default());
        while leadership.wait_for(|leading| *leading).await.is_ok() {
            for pod in self.due(&owners, &mut trials, Instant::now()) {
                // A pod that is bound by now must not use up the rate limit.
                if !self.is_still_due(&pod, &owners) {
                    continue;
                }
                self.evictor.turn().await;
                // The wait may have been long, so leadership and pod are checked again.
                if !*leadership.borrow() || !self.is_still_due(&pod, &owners) {
                    continue;
                }
                let result = self.evictor.evict(&pod, EvictionReason::NoAffinity).await;
                if result == EvictionResult::Evicted {
                    remember(&mut owners, &pod, &self.webhook.clock, Instant::now());
                }
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// The pods to evict now, at most as many as may be evicted at once, so that the state of the
    /// pods and of the webhook is still current when they are evicted. Until a pod proves that the
    /// API server calls the webhook again for its namespace, one pod of the namespace is tried at a
    /// time. Namespaces take turns.
    fn due(&self, owners: &Owners, trials: &mut Trials, now: Instant) -> Vec<Arc<Pod>> {
        let pods = self.pods.state().into_iter();
        let late = pods.filter(|pod| self.is_late(pod) && self.may_evict(pod, owners, now));
        let due = in_turns(late.collect()).into_iter().filter(|pod| {
            let namespace = namespace_of(pod);
            if self.webhook.is_proven_since(pod) {
                trials.succeeded(namespace);
                true
            } else {
                trials.begin(namespace, self.webhook.seems_asked_since(pod), now)
            }
        });
        due.take(self.evictor.at_once()).collect()
    }

    fn is_still_due(&self, pod: &Pod, owners: &Owners) -> bool {
        let current = self.pods.get(&ObjectRef::from_obj(pod));
        current
            .is_some_and(|pod| self.is_late(&pod) && self.may_evict(&pod, owners, Instant::now()))
    }

    fn may_evict(&self, pod: &Pod, owners: &Owners, now: Instant) -> bool {
        may_evict(pod, &self.webhook.clock, owners, now)
    }

    /// Whether this pod has waited for a node longer than `PERIOD`, and lacks the affinity that the
    /// webhook would add.
    fn is_late(&self, pod: &Pod) -> bool {
        self.webhook.clock.age(pod) > PERIOD
            && !self.webhook.is_excluded(pod)
            && plan::pod::lacks_affinity(pod, &self.evaluator.policy)
    }
}

/// The first pod of each namespace, then the second of each, and so on.
fn in_turns(pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    let mut counts = HashMap::<String, usize>::new();
    let mut turns: Vec<_> = pods
        .into_iter()
        .map(|pod| {
            let turn = counts.entry(namespace_of(&pod).to_owned()).or_default();
            *turn += 1;
            (*turn, pod)
        })
        .collect();
    turns.sort_by_key(|(turn, _)| *turn);
    turns.into_iter().map(|(_, pod)| pod).collect()
}

/// The uid of the pod's controller.
fn owner(pod: &Pod) -> Option<String> {
    pod.controller().map(|owner| owner.uid.clone())
}

/// Whether the pod is newer than the last eviction for its controller. If so, it is a replacement
/// that has no affinity again. An older pod has not been evicted yet.
fn is_in_vain(pod: &Pod, clock: &ServerClock, last: Instant, now: Instant) -> bool {
    clock.age(pod) < now.saturating_duration_since(last)
}

fn may_evict(pod: &Pod, clock: &ServerClock, owners: &Owners, now: Instant) -> bool {
    let Some(owner) = owner(pod) else {
        return false;
    };
    owners.get(&owner).is_none_or(|(times, last)| {
        let waited = now.saturating_duration_since(*last);
        !is_in_vain(pod, clock, *last, now) || waited >= PAUSES.delay(times + 1)
    })
}

fn remember(owners: &mut Owners, pod: &Pod, clock: &ServerClock, now: Instant) {
    let Some(owner) = owner(pod) else {
        return;
    };
    make_room(owners, &owner);
    let entry = owners.entry(owner).or_insert((0, now));
    let in_vain = is_in_vain(pod, clock, entry.1, now);
    *entry = (entry.0 + u32::from(in_vain), now);
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_pods_of_a_controller_are_evicted_with_growing_pauses() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]}}))
        .unwrap();
        let (now, clock, mut owners) = (Instant::now(), ServerClock::default(), Owners::new());
        let after = |seconds| now + Duration::from_secs(seconds);
        // Created an hour ago, before other pods of its controller were evicted, so it has not had
        // its turn, and need not wait.
        let mut old = pod.clone();
        old.metadata.creation_timestamp =
            Some(Time(jiff::Timestamp::now() - Duration::from_hours(1)));
        assert!(may_evict(&pod, &clock, &owners, now) && may_evict(&old, &clock, &owners, now));
        remember(&mut owners, &old, &clock, now);
        assert!(may_evict(&old, &clock, &owners, after(1)));
        // Created just now.
        assert!(
            !may_evict(&pod, &clock, &owners, after(59))
                && may_evict(&pod, &clock, &owners, after(60))
        );
        remember(&mut owners, &pod, &clock, after(60));
        remember(&mut owners, &pod, &clock, after(180));
        assert!(
            !may_evict(&pod, &clock, &owners, after(180 + 239))
                && may_evict(&pod, &clock, &owners, after(180 + 240))
        );
        assert!(
            !may_evict(&Pod::default(), &clock, &owners, now),
            "no controller would replace it"
        );
    }

    #[test]
    fn a_namespace_without_proof_has_single_trials() {
        let (mut trials, start) = (Trials::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(trials.begin("a", false, start));
        assert!(
            !trials.begin("b", false, start),
            "all namespaces share the pauses"
        );
        // A forged request seems to show that the webhook is asked.
        assert!(trials.begin("a", true, start) && trials.begin("b", true, start));
        assert!(!trials.begin("a", true, after(9)) && trials.begin("a", true, after(10)));
        assert!(!trials.begin("a", true, after(29)) && trials.begin("a", true, after(30)));
        trials.succeeded("a");
        assert!(trials.begin("a", true, after(60)) && trials.begin("a", false, after(60)));
        assert!(!trials.begin("b", true, start));
    }

    #[test]
    fn namespaces_take_turns() {
        let pod_of = |namespace: &str| {
            let pod = json!({"metadata": {"name": "p", "namespace": namespace}});
            Arc::new(serde_json::from_value::<Pod>(pod).unwrap())
        };
        let pods: Vec<_> = ["a", "a", "a", "b", "b", "c"].map(pod_of).into();
        let turns = in_turns(pods);
        let namespaces: Vec<_> = turns.iter().map(|pod| namespace_of(pod)).collect();
        assert_eq!(namespaces, ["a", "b", "c", "a", "b", "a"]);
    }

    #[test]
    fn the_oldest_owner_makes_room() {
        let pod_of = |owner: usize| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "p", "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": owner.to_string(), "controller": true}]}}))
            .unwrap()
        };
        let (now, clock, mut owners) = (Instant::now(), ServerClock::default(), Owners::new());
        for owner in 0..=MAX_REMEMBERED {
            let seconds = u64::try_from(owner).unwrap();
            remember(
                &mut owners,
                &pod_of(owner),
                &clock,
                now + Duration::from_secs(seconds),
            );
        }
        assert_eq!(owners.len(), MAX_REMEMBERED);
        assert!(!owners.contains_key("0") && owners.contains_key("1"));
    }
}
