//! Evicts pods, so that their controllers replace them. All evictions are made here: at one rate
//! for all reasons, only while this process holds the Lease, and through the Eviction API, which
//! respects disruption budgets.

use std::{num::NonZeroU16, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::metrics::EvictionMetrics;

use super::{
    api::{ApiClient, ApiError},
    events::{EventReason, Events},
    lease::{Leadership, is_held},
    name::NamespacedName,
    objects::Pod,
};

/// At most as many evictions may happen at once as the rate allows in this time, because the
/// webhook and the scheduler have to handle all new pods.
const BURST: Duration = Duration::from_secs(10);

/// Why a pod is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum EvictionReason {
    /// It was created without node affinity (`affinity.recreatePods`).
    NoAffinity,
    /// It cannot run on its node (`misplaced: evict`).
    WrongArchitecture,
    /// It has tolerations of archaware, and Kubernetes does not allow tolerations to be removed
    /// from a pod (`clean --recreate-pods`).
    Clean,
}

/// The result of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EvictionResult {
    /// The API server accepted the eviction.
    Evicted,
    /// A disruption budget does not allow it now.
    Budget(ApiError),
    /// The pod was deleted or replaced meanwhile.
    Gone,
    /// This process does not hold the Lease any more, so nothing was sent.
    NotLeading,
    /// The eviction failed for another reason.
    Failed(ApiError),
}

impl EvictionReason {
    /// The label value in metrics.
    fn as_str(self) -> &'static str {
        self.into()
    }

    /// The note of the event `Recreated`, for evictions by the controller.
    fn note(self) -> Option<&'static str> {
        Some(match self {
            Self::NoAffinity => {
                "evicted, so that its replacement gets node affinity: the API server did not call the webhook when the pod was created"
            }
            Self::WrongArchitecture => "evicted, so that its replacement is placed by its images",
            Self::Clean => return None,
        })
    }
}

/// Evicts pods at a limited rate.
pub(crate) struct Evictor {
    api: ApiClient,
    until: watch::Receiver<Option<Instant>>,
    metrics: EvictionMetrics,
    events: Option<Events>,
    rate: Rate,
}

impl Evictor {
    /// An evictor for `per_minute` evictions (`concurrency.evictionsPerMinute`). Commands print
    /// their own results, so they pass no `events`: then nothing is published or logged.
    pub(crate) fn new(
        api: ApiClient,
        leadership: &Leadership,
        per_minute: NonZeroU16,
        metrics: EvictionMetrics,
        events: Option<Events>,
    ) -> Self {
        Self {
            api,
            until: leadership.until.clone(),
            metrics,
            events,
            rate: Rate::new(per_minute),
        }
    }

    /// How many evictions may happen at once.
    pub(crate) fn at_once(&self) -> usize {
        self.rate.at_once()
    }

    /// Waits until the rate allows another eviction and the Lease is held. The pod may change
    /// during the wait.
    pub(crate) async fn turn(&self) {
        tokio::time::sleep(self.rate.take()).await;
        let mut until = self.until.clone();
        // An error means that the sender was dropped. `evict` checks the Lease again.
        drop(until.wait_for(|until| is_held(*until)).await);
    }

    /// Whether the rate allows another eviction now. If so, this call counts as an eviction.
    pub(crate) fn may_evict_now(&self) -> bool {
        self.rate.take_now()
    }

    /// Evicts a pod now. The request may be repeated after `Retry-After`, but not after this
    /// process has lost the Lease.
    pub(crate) async fn evict(&self, pod: &Pod, reason: EvictionReason) -> EvictionResult {
        let mut until = self.until.clone();
        if !is_held(*until.borrow_and_update()) {
            return EvictionResult::NotLeading;
        }
        let answer = tokio::select! {
            answer = self.api.evict(pod) => answer,
            Ok(_) = until.wait_for(Option::is_none) => return EvictionResult::NotLeading,
        };
        self.report(pod, reason, &answer);
        let (result, label) = match answer {
            Ok(()) => (EvictionResult::Evicted, "evicted"),
            Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => (EvictionResult::Gone, "gone"),
            Err(error @ ApiError::DisruptionBudget(_)) => (EvictionResult::Budget(error), "budget"),
            Err(error) => (EvictionResult::Failed(error), "failed"),
        };
        self.metrics.count(reason.as_str(), label);
        result
    }

    fn report(&self, pod: &Pod, reason: EvictionReason, answer: &Result<(), ApiError>) {
        let Some(events) = &self.events else {
            return;
        };
        let (name, why) = (NamespacedName::of_object(pod), reason.as_str());
        match answer {
            Ok(()) => {
                tracing::info!(pod = %name, why, "pod evicted, so that its controller replaces it");
                if let Some(note) = reason.note() {
                    events.publish(pod, EventReason::Recreated, note.to_owned());
                }
            }
            Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => {}
            Err(error) => tracing::warn!(pod = %name, why, %error, "cannot evict the pod"),
        }
    }
}

/// A rate limit for turns: one per interval on average, and at once as many as [`BURST`] contains
/// intervals (the generic cell rate algorithm).
struct Rate {
    interval: Duration,
    /// When the next turn would be if all turns had the same distance.
    next: Mutex<Instant>,
}

impl Rate {
    fn new(per_minute: NonZeroU16) -> Self {
        Self {
            interval: Duration::from_mins(1) / u32::from(per_minute.get()),
            next: Mutex::new(Instant::now()),
        }
    }

    /// How many turns may be taken at once.
    fn at_once(&self) -> usize {
        let turns = self.burst().as_nanos() / self.interval.as_nanos();
        usize::try_from(turns).unwrap_or(usize::MAX)
    }

    /// Takes the next turn, and returns the time until then.
    fn take(&self) -> Duration {
        let (mut next, now) = (self.next.lock(), Instant::now());
        *next = (*next).max(now) + self.interval;
        // A turn needs no wait while `next` is at most one burst ahead.
        next.saturating_duration_since(now)
            .saturating_sub(self.burst())
    }

    /// Takes a turn if there is one now.
    fn take_now(&self) -> bool {
        let (mut next, now) = (self.next.lock(), Instant::now());
        let after = (*next).max(now) + self.interval;
        let is_free = after.saturating_duration_since(now) <= self.burst();
        if is_free {
            *next = after;
        }
        is_free
    }

    fn burst(&self) -> Duration {
        BURST.max(self.interval)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::scripted_api::{ScriptedApi, ScriptedResponse};

    /// A process that was stopped for a while may not know yet that another process leads.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_sent_after_the_lease_has_expired() {
        let api = ScriptedApi::default();
        let pod = json!({"metadata": {"namespace": "n", "name": "p", "uid": "u"}});
        api.put("/api/v1/namespaces/n/pods/p", pod.clone());
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let expires = Instant::now() + Duration::from_secs(15);
        let leadership = Leadership {
            leading: watch::channel(true).1,
            until: watch::channel(Some(expires)).1,
        };
        let limit = NonZeroU16::new(600).unwrap();
        let metrics = EvictionMetrics::default();
        let evictor = Evictor::new(api.client(), &leadership, limit, metrics, None);
        tokio::time::sleep_until(expires).await;
        let late = evictor.evict(&pod, EvictionReason::Clean).await;
        assert_eq!(late, EvictionResult::NotLeading);
        let evictor = Evictor {
            until: Leadership::always().until,
            ..evictor
        };
        let leading = evictor.evict(&pod, EvictionReason::Clean).await;
        assert_eq!(leading, EvictionResult::Evicted);
        let call = "POST /api/v1/namespaces/n/pods/p/eviction";
        assert_eq!(api.calls(&[call]).len(), 1);
    }

    /// The API server asks for a retry, and meanwhile another process leads.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_repeated_after_the_lease_is_lost() {
        let api = ScriptedApi::default();
        let pod = json!({"metadata": {"namespace": "n", "name": "p", "uid": "u"}});
        api.put("/api/v1/namespaces/n/pods/p", pod.clone());
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let call = "POST /api/v1/namespaces/n/pods/p/eviction";
        let later = json!({"retryAfterSeconds": 3});
        api.script(call, [ScriptedResponse::Status(429, "wait", later)]);
        let (lease, until) = watch::channel(Some(Instant::now() + Duration::from_secs(15)));
        let leadership = Leadership {
            leading: watch::channel(true).1,
            until,
        };
        let limit = NonZeroU16::new(600).unwrap();
        let metrics = EvictionMetrics::default();
        let evictor = Evictor::new(api.client(), &leadership, limit, metrics, None);
        let lose = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            lease.send_replace(None);
        };
        let evicting = evictor.evict(&pod, EvictionReason::Clean);
        assert_eq!(tokio::join!(evicting, lose).0, EvictionResult::NotLeading);
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert_eq!(api.calls(&[call]).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn turns_have_a_rate() {
        for (per_minute, at_once, next) in [(600, 100, 100), (6, 1, 10_000), (1, 1, 60_000)] {
            let rate = Rate::new(NonZeroU16::new(per_minute).unwrap());
            let start = Instant::now();
            for _ in 0..at_once {
                tokio::time::sleep(rate.take()).await;
            }
            assert_eq!(start.elapsed(), Duration::ZERO, "{per_minute}");
            assert_eq!(rate.at_once(), at_once, "{per_minute}");
            assert!(!rate.take_now(), "{per_minute}");
            for turn in 1..4 {
                tokio::time::sleep(rate.take()).await;
                // Timers are as exact as a millisecond.
                let waited = start.elapsed().as_millis();
                assert!(
                    waited.abs_diff(turn * next) <= 1,
                    "{per_minute}: {waited} ms"
                );
            }
            tokio::time::sleep(Duration::from_mins(1)).await;
            let taken = (0..=at_once).filter(|_| rate.take_now()).count();
            assert_eq!(taken, at_once, "{per_minute}");
        }
    }
}
