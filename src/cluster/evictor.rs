//! Evicts pods, so that their controllers create new ones. All evictions are made here, with one rate for all reasons, through the
//! Eviction API, which respects disruption budgets, and only while this process holds the Lease.

use std::{num::NonZeroU16, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::metrics::EvictionMetrics;

use super::{
    api::{ApiClient, ApiError},
    events::{EventReason, Events},
    lease::Leadership,
    name::NamespacedName,
    objects::Pod,
};

/// Evictions of this time may happen at once: the webhook and the scheduler have to cope with the new pods.
const BURST: Duration = Duration::from_secs(10);

/// Why a pod is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum EvictionReason {
    /// It was created without node affinity (`affinity.recreatePods`).
    NoAffinity,
    /// It cannot run on its node (`misplaced: evict`).
    WrongArchitecture,
    /// It has tolerations of archaware, and Kubernetes lets no toleration of a pod be removed (`clean --recreate-pods`).
    Clean,
}

/// The result of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EvictionResult {
    /// The pod was evicted.
    Evicted,
    /// A disruption budget does not allow it now.
    Budget,
    /// The pod was deleted or replaced meanwhile.
    Gone,
    /// This process does not hold the Lease any more, so nothing was sent.
    NotLeading,
    /// The API server did not do it.
    Failed(ApiError),
}

impl EvictionReason {
    /// The label value in metrics.
    fn as_str(self) -> &'static str {
        self.into()
    }

    /// The note of the event `Recreated`.
    fn note(self) -> &'static str {
        match self {
            Self::NoAffinity => {
                "evicted, so that it is created anew with node affinity: the webhook was not asked when it was created"
            }
            Self::WrongArchitecture => {
                "evicted, so that it is created anew and placed by its images"
            }
            Self::Clean => "evicted, so that it is created anew without additions of archaware",
        }
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
    /// An evictor for `per_minute` evictions (`concurrency.evictionsPerMinute`). Without `events`, none are published.
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

    /// Waits until the rate allows another eviction. The pod may have changed after that.
    pub(crate) async fn turn(&self) {
        self.rate.turn().await;
    }

    /// Evicts a pod now.
    pub(crate) async fn evict(&self, pod: &Pod, reason: EvictionReason) -> EvictionResult {
        let may_write = self
            .until
            .borrow()
            .is_some_and(|until| Instant::now() < until);
        if !may_write {
            return EvictionResult::NotLeading;
        }
        let (name, why) = (NamespacedName::of_object(pod), reason.as_str());
        let (result, label) = match self.api.evict(pod).await {
            Ok(()) => {
                tracing::info!(pod = %name, why, "pod evicted, so that it is created anew");
                if let Some(events) = &self.events {
                    events.publish(pod, EventReason::Recreated, reason.note().to_owned());
                }
                (EvictionResult::Evicted, "evicted")
            }
            Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => (EvictionResult::Gone, "gone"),
            Err(error) => {
                tracing::warn!(pod = %name, why, %error, "cannot evict the pod");
                match error {
                    ApiError::DisruptionBudget(_) => (EvictionResult::Budget, "budget"),
                    error => (EvictionResult::Failed(error), "failed"),
                }
            }
        };
        self.metrics.count(why, label);
        result
    }
}

/// At most this many turns in a minute, and those of [`BURST`] at once (the generic cell rate algorithm).
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

    async fn turn(&self) {
        let wait = {
            let (mut next, now) = (self.next.lock(), Instant::now());
            let at = (*next).max(now);
            *next = at + self.interval;
            // The last turn of a burst is one interval before its end.
            (*next)
                .saturating_duration_since(now)
                .saturating_sub(BURST.max(self.interval))
        };
        tokio::time::sleep(wait).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::scripted_api::ScriptedApi;

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

    #[tokio::test(start_paused = true)]
    async fn turns_have_a_rate() {
        for (per_minute, at_once, next) in [(600, 100, 100), (6, 1, 10_000), (1, 1, 60_000)] {
            let rate = Rate::new(NonZeroU16::new(per_minute).unwrap());
            let start = Instant::now();
            for _ in 0..at_once {
                rate.turn().await;
            }
            assert_eq!(start.elapsed(), Duration::ZERO, "{per_minute}");
            for turn in 1..4 {
                rate.turn().await;
                // Timers are as exact as a millisecond.
                let waited = start.elapsed().as_millis();
                assert!(
                    waited.abs_diff(turn * next) <= 1,
                    "{per_minute}: {waited} ms"
                );
            }
            tokio::time::sleep(Duration::from_mins(1)).await;
            let start = Instant::now();
            for _ in 0..at_once {
                rate.turn().await;
            }
            assert_eq!(start.elapsed(), Duration::ZERO, "{per_minute}");
        }
    }
}
