//! Patches of nodes, pods and DaemonSets: a bounded number at once, and only while the Lease is held.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, SemaphorePermit, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

use super::{
    api::{ApiClient, ApiError, Kind},
    lease::Leadership,
    name::NamespacedName,
    patch::JsonPatch,
};

/// How long a patch under way may take once this process has been told to end: with what comes after it, less
/// than the kubelet waits.
const FINISH: Duration = Duration::from_secs(4);

/// Sends patches. Cheap to clone.
#[derive(Clone)]
pub struct Writer {
    api: ApiClient,
    slots: Arc<Semaphore>,
    until: watch::Receiver<Option<Instant>>,
    stop: CancellationToken,
    metrics: Metrics,
}

/// What became of a patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// The object is as it should be.
    Applied,
    /// Something that the patch relied on has changed; the watch will tell.
    Stale,
    /// The object is gone.
    Gone,
    /// It was not applied, and not because of a change in the object.
    Failed(ApiError),
    /// It was not sent, or not waited for: this process is ending.
    Stopping,
}

impl Written {
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
    /// A writer with so many requests at once, which waits while the Lease is not held, until `stop`.
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

    /// A slot for one request, while this process leads; `None` when it is told to end.
    async fn slot(&self) -> Option<SemaphorePermit<'_>> {
        let mut until = self.until.clone();
        let now_in = |until: &Option<Instant>| until.is_some_and(|until| Instant::now() < until);
        let slot = async {
            let slot = self.slots.acquire().await.ok()?;
            until.wait_for(now_in).await.ok()?;
            Some(slot)
        };
        self.stop.run_until_cancelled(slot).await.flatten()
    }

    /// Sends a patch.
    pub async fn patch<K: Kind>(&self, name: &NamespacedName, patch: JsonPatch) -> Written {
        let Some(_slot) = self.slot().await else {
            return Written::Stopping;
        };
        let finish = async {
            self.stop.cancelled().await;
            tokio::time::sleep(FINISH).await;
        };
        let mut until = self.until.clone();
        let written = tokio::select! {
            answer = self.api.patch::<K>(name, patch) => match answer {
                Ok(()) => Written::Applied,
                Err(ApiError::Conflict(_)) => Written::Stale,
                Err(ApiError::NotFound(_)) => Written::Gone,
                Err(error) => Written::Failed(error),
            },
            () = finish => Written::Stopping,
            // Another process may write from now on; whether this patch has arrived is seen in the object.
            Ok(_) = until.wait_for(Option::is_none) => Written::Stale,
        };
        self.metrics.wrote(kind::<K>(), written.result());
        written
    }
}

fn kind<K: Kind>() -> &'static str {
    match &*K::kind(&()) {
        "Pod" => "Pod",
        "Node" => "Node",
        "DaemonSet" => "DaemonSet",
        _ => "other",
    }
}
