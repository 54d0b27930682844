//! Sends patches: a bounded number at once, only while the Lease is held, each answer understood.

use std::{
    fmt::Debug,
    sync::Arc,
    time::{Duration, Instant},
};

use kube::{
    Api, Resource,
    api::{Patch, PatchParams},
};
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

use super::{CALL_TIMEOUT, FIELD_MANAGER, lease::Leadership, patch::JsonPatch, spread};

/// How soon a patch is tried again that the API server did not answer, at the earliest.
const RETRY: Duration = Duration::from_secs(2);
/// How long a patch under way may take once this process has been told to end: with what comes after it, less
/// than the kubelet waits.
const FINISH: Duration = Duration::from_secs(4);
/// How long to wait after a stale patch for the watch to bring what changed.
pub const STALE_RETRY: Duration = Duration::from_secs(2);

/// The way of every patch to the API server. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    slots: Arc<Semaphore>,
    until: watch::Receiver<Option<Instant>>,
    stop: CancellationToken,
    metrics: Metrics,
}

/// What became of a patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The object is as it should be.
    Applied,
    /// Something that the patch relied on has changed; the watch will tell.
    Stale,
    /// The object is gone.
    Gone,
}

/// Why a patch was not applied, and not because of a change in the object.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The API server's validation refuses it; it will not change its mind until the object changes.
    #[error("the API server refuses the patch")]
    Refused(#[source] kube::Error),
    /// RBAC or an admission plugin forbids it.
    #[error("the patch is forbidden; does the ClusterRole of archaware match its manifests?")]
    Forbidden(#[source] kube::Error),
    /// Load, a restart, no connection.
    #[error("the API server does not answer")]
    Unavailable(#[source] kube::Error),
    /// No answer within [`CALL_TIMEOUT`].
    #[error("the API server did not answer within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut,
    /// This process is ending.
    #[error("archaware is stopping")]
    Stopping,
}

impl WriteError {
    fn result(&self) -> &'static str {
        match self {
            Self::Refused(_) => "refused",
            Self::Forbidden(_) => "forbidden",
            Self::Unavailable(_) | Self::TimedOut => "unavailable",
            Self::Stopping => "stopping",
        }
    }

    /// When to try again.
    pub fn retry(&self) -> Option<Duration> {
        match self {
            Self::Refused(_) | Self::Stopping => None,
            Self::Forbidden(_) => Some(Duration::from_secs(30)),
            // Thousands of pods may wait for an API server that restarts: they do not come back at once.
            Self::Unavailable(_) | Self::TimedOut => Some(spread(RETRY)),
        }
    }
}

impl Writer {
    /// A writer with so many requests at once, which waits while the Lease is not held, until `stop`.
    pub fn new(
        writes: usize,
        leadership: &Leadership,
        stop: CancellationToken,
        metrics: Metrics,
    ) -> Self {
        Self {
            slots: Arc::new(Semaphore::new(writes)),
            until: leadership.until.clone(),
            stop,
            metrics,
        }
    }

    /// A slot for one request, while this process leads.
    async fn slot(&self) -> Result<SemaphorePermit<'_>, WriteError> {
        let mut until = self.until.clone();
        let now_in = |until: &Option<Instant>| until.is_some_and(|until| Instant::now() < until);
        let slot = async {
            let slot = self.slots.acquire().await.ok()?;
            until.wait_for(now_in).await.ok()?;
            Some(slot)
        };
        let slot = self.stop.run_until_cancelled(slot).await.flatten();
        slot.ok_or(WriteError::Stopping)
    }

    /// Sends a patch.
    pub async fn patch<K>(
        &self,
        api: &Api<K>,
        name: &str,
        patch: JsonPatch,
    ) -> Result<Outcome, WriteError>
    where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let _slot = self.slot().await?;
        let patch: Patch<()> = match serde_json::from_value(patch.into_operations()) {
            Ok(patch) => Patch::Json(patch),
            Err(error) => return Err(WriteError::Refused(kube::Error::SerdeError(error))),
        };
        let parameters = parameters();
        let call = api.patch(name, &parameters, &patch);
        let finish = async {
            self.stop.cancelled().await;
            tokio::time::sleep(FINISH).await;
        };
        let call = tokio::time::timeout(CALL_TIMEOUT, call);
        let outcome = tokio::select! {
            answer = call => match answer {
                Ok(answer) => classify(answer.map(drop)),
                Err(_) => Err(WriteError::TimedOut),
            },
            () = finish => Err(WriteError::Stopping),
        };
        let result = match &outcome {
            Ok(Outcome::Applied) => "applied",
            Ok(Outcome::Stale) => "stale",
            Ok(Outcome::Gone) => "gone",
            Err(error) => error.result(),
        };
        self.metrics.wrote(kind::<K>(), result);
        outcome
    }
}

/// Of every patch.
pub fn parameters() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

fn kind<K: Resource<DynamicType = ()>>() -> &'static str {
    match &*K::kind(&()) {
        "Pod" => "Pod",
        "Node" => "Node",
        "DaemonSet" => "DaemonSet",
        _ => "other",
    }
}

fn classify(answer: Result<(), kube::Error>) -> Result<Outcome, WriteError> {
    match answer {
        Ok(()) => Ok(Outcome::Applied),
        Err(error) => {
            let kube::Error::Api(status) = &error else {
                return Err(WriteError::Unavailable(error));
            };
            // Whoever denies may say so with any code (`ToStatusErr` of k8s.io/apiserver).
            let denied = ["admission webhook", "ValidatingAdmissionPolicy"];
            if denied.iter().any(|who| status.message.contains(who)) {
                return Err(WriteError::Refused(error));
            }
            match status.code {
                404 => Ok(Outcome::Gone),
                409 => Ok(Outcome::Stale),
                // A failed test and a refusal by validation are both 422; only the refusal names fields.
                422 if status
                    .details
                    .as_ref()
                    .is_none_or(|d| d.kind.is_empty() && d.causes.is_empty()) =>
                {
                    Ok(Outcome::Stale)
                }
                400 | 413 | 415 | 422 => Err(WriteError::Refused(error)),
                401 | 403 => Err(WriteError::Forbidden(error)),
                _ => Err(WriteError::Unavailable(error)),
            }
        }
    }
}
