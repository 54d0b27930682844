//! Patches nodes, pods and DaemonSets with bounded concurrency, and only while this process holds
//! the Lease. Everything else is written through [`ApiClient`] directly.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

use super::{
    api::{ApiClient, ApiError, ApiObject},
    lease::{Leadership, is_held},
    name::NamespacedName,
    patch::JsonPatch,
};

/// How long a patch in progress may take during shutdown. This time and the rest of the shutdown
/// together are shorter than the pod's grace period (`terminationGracePeriodSeconds`).
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(4);

/// Sends patches. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    api: ApiClient,
    slots: Arc<Semaphore>,
    until: watch::Receiver<Option<Instant>>,
    stop: CancellationToken,
    metrics: Metrics,
}

/// The outcome of a patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PatchOutcome {
    Applied,
    /// Something that the patch relies on changed, or leadership ended while it was sent.
    Stale,
    /// The object does not exist any more.
    Gone,
    /// The patch failed for another reason than a change of the object.
    Failed(ApiError),
    /// The patch was not sent, or its answer not awaited: the process is stopping.
    Stopping,
}

impl PatchOutcome {
    fn result(&self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Stale => "stale",
            Self::Gone => "gone",
            Self::Failed(error) => error.result(),
            Self::Stopping => "stopping",
        }
    }
}

impl Writer {
    /// A writer with this many concurrent requests. It waits while the Lease is not held, until
    /// `stop`.
    pub fn new(
        api: ApiClient,
        writes: usize,
        leadership: &Leadership,
        stop: CancellationToken,
        metrics: Metrics,
    ) -> Self {
        Self {
            api,
            slots: Arc::new(Semaphore::new(writes)),
            until: leadership.until.clone(),
            stop,
            metrics,
        }
    }

    /// Waits for a free slot and for leadership; `None` when the process is stopping.
    async fn slot(&self) -> Option<SemaphorePermit<'_>> {
        let mut until = self.until.clone();
        let slot = async {
            let slot = self.slots.acquire().await.ok()?;
            until.wait_for(|until| is_held(*until)).await.ok()?;
            Some(slot)
        };
        self.stop.run_until_cancelled(slot).await.flatten()
    }

    /// Sends a patch.
    pub async fn patch<K: ApiObject>(
        &self,
        name: &NamespacedName,
        patch: JsonPatch,
    ) -> PatchOutcome {
        let Some(_slot) = self.slot().await else {
            return PatchOutcome::Stopping;
        };
        let finish = async {
            self.stop.cancelled().await;
            tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
        };
        let mut until = self.until.clone();
        let written = tokio::select! {
            answer = self.api.patch::<K>(name, patch) => match answer {
                Ok(()) => PatchOutcome::Applied,
                Err(ApiError::Conflict(_)) => PatchOutcome::Stale,
                Err(ApiError::NotFound(_)) => PatchOutcome::Gone,
                Err(error) => PatchOutcome::Failed(error),
            },
            () = finish => PatchOutcome::Stopping,
            // Another process may write from now on. Whether this patch arrived will be seen in the
            // object.
            Ok(_) = until.wait_for(Option::is_none) => PatchOutcome::Stale,
        };
        self.metrics.patch_finished(kind::<K>(), written.result());
        written
    }
}

fn kind<K: ApiObject>() -> &'static str {
    match &*K::kind(&()) {
        "Pod" => "Pod",
        "Node" => "Node",
        "DaemonSet" => "DaemonSet",
        _ => "other",
    }
}
