//! Leader election by a Lease: only the holder patches nodes, pods and DaemonSets, and maintains
//! the webhook configuration.
//!
//! Every patch is guarded, so two holders for a moment do no harm. A Lease counts as expired when
//! the elector has seen no change of it for the Lease's duration; the elector never compares the
//! holder's clock with its own (client-go's rule, `k8s.io/client-go/tools/leaderelection`).

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use serde::de::IgnoredAny;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{backoff::jittered, metrics::Metrics, placement::annotation};

use super::{
    NAME,
    api::{ApiClient, ApiError},
    name::NamespacedName,
    objects::annotations,
    patch,
};

/// How long a holder that does not renew is assumed to be alive.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Interval of renewals. Two fit into [`LEASE_DURATION`]. A failed renewal is retried each second.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of attempts to acquire the Lease. After a release the next holder leads within this
/// time.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one call, short enough for several attempts before the Lease expires.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Attempts to take the Lease over from a holder that renews it every [`RENEW_INTERVAL`].
const TAKE_ATTEMPTS: usize = 5;
/// The holder starts no patch when its Lease expires within this time.
const SAFETY_MARGIN: Duration = Duration::from_secs(1);

/// Whether this process leads. Cheap to clone.
#[derive(Clone)]
pub struct Leadership {
    /// Whether this process holds the Lease.
    pub leading: watch::Receiver<bool>,
    /// Until when this process may write, extended by each renewal. After a pause of the process
    /// `leading` may still be true for a moment, although this time is over.
    pub until: watch::Receiver<Option<Instant>>,
}

/// Whether this process may write now, by the value of [`Leadership::until`].
pub(super) fn is_held(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() < until)
}

impl Leadership {
    /// Leadership without competitors, for tests and single commands.
    pub fn always() -> Self {
        // A channel keeps its last value after its sender is dropped.
        Self {
            leading: watch::channel(true).1,
            until: watch::channel(Instant::now().checked_add(FOR_EVER)).1,
        }
    }
}

/// Data that is stored with the Lease for the next holder.
pub trait LeaseMemory: Send + Sync {
    /// Restores the data that the previous holder stored with the Lease.
    fn read(&self, text: &str);
    /// The data to store; `None` leaves the stored data unchanged.
    fn text(&self) -> Option<String>;
}

/// Longer than any run of the program.
const FOR_EVER: Duration = Duration::from_hours(24 * 365);

/// A Lease as a candidate saw it, and since when.
struct Observed {
    record: LeaseSpec,
    since: Instant,
}

/// Acquires and renews the Lease until it is cancelled, then releases it.
pub struct Elector {
    api: ApiClient,
    name: NamespacedName,
    identity: String,
    leading: watch::Sender<bool>,
    until: watch::Sender<Option<Instant>>,
    memory: Arc<dyn LeaseMemory>,
    metrics: Metrics,
    /// Whether it reports at level debug instead of info.
    is_silent: bool,
}

impl Elector {
    /// An elector that competes for the Lease in `namespace` as `identity`, and the leadership that
    /// it reports. `memory` is loaded before leadership is reported.
    pub fn new(
        api: &ApiClient,
        namespace: &str,
        identity: String,
        memory: Arc<dyn LeaseMemory>,
        metrics: Metrics,
    ) -> (Self, Leadership) {
        let (leading, is_leading) = watch::channel(false);
        let (until, is_until) = watch::channel(None);
        let elector = Self {
            api: api.with_timeout(CALL_TIMEOUT),
            name: NamespacedName::new(namespace, NAME),
            identity,
            leading,
            until,
            memory,
            metrics,
            is_silent: false,
        };
        let leadership = Leadership {
            leading: is_leading,
            until: is_until,
        };
        (elector, leadership)
    }

    /// Reports at level debug only, for commands that print results.
    #[must_use]
    pub fn silent(mut self) -> Self {
        self.is_silent = true;
        self
    }

    /// Runs until `stop`. All writes must be finished by then.
    pub async fn run(self, stop: CancellationToken) {
        let mut observed: Option<Observed> = None;
        let mut renewed = Instant::now();
        loop {
            // The Lease is renewed from the time of the request, not of the answer.
            let request_time = Instant::now();
            let attempt = in_time(self.attempt(&mut observed));
            let result = tokio::select! {
                () = stop.cancelled() => break,
                result = attempt => result,
            };
            let mut pause = RETRY_INTERVAL;
            match result {
                Ok(leads) => {
                    if leads {
                        renewed = request_time;
                        pause = RENEW_INTERVAL;
                    }
                    let until =
                        leads.then(|| request_time + LEASE_DURATION.saturating_sub(SAFETY_MARGIN));
                    self.until.send_replace(until);
                    self.report_leadership(leads);
                }
                Err(ApiError::Conflict(_)) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot acquire or renew the Lease; trying again");
                }
            }
            // Gives up when another attempt could end after the Lease expires.
            if renewed.elapsed() + 2 * pause.min(RETRY_INTERVAL) + CALL_TIMEOUT >= LEASE_DURATION {
                self.until.send_replace(None);
                self.report_leadership(false);
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(pause + jittered(pause) / 20) => {}
            }
        }
        self.until.send_replace(None);
        self.report_leadership(false);
        // Releases the Lease even if this process does not seem to hold it: a cancelled renewal may
        // have arrived, and may still arrive between the two calls of the release.
        let mut result = Ok(false);
        for _ in 0..2 {
            result = in_time(self.release()).await;
            if !matches!(result, Err(ApiError::Conflict(_))) {
                break;
            }
        }
        match result {
            Ok(true) if self.is_silent => tracing::debug!("lease released"),
            Ok(true) => tracing::info!("lease released"),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "Lease not released; another replica leads when it expires");
            }
        }
    }

    fn report_leadership(&self, leading: bool) {
        let before = self.leading.send_replace(leading);
        if before != leading {
            self.metrics.set_leader(leading);
            let (identity, state) = (
                &self.identity,
                if leading {
                    "this replica is leading"
                } else {
                    "this replica is not leading"
                },
            );
            if self.is_silent {
                tracing::debug!(identity, "{state}");
            } else {
                tracing::info!(identity, "{state}");
            }
        }
    }

    /// Creates, acquires or renews the Lease; `false` while another process holds it.
    async fn attempt(&self, observed: &mut Option<Observed>) -> Result<bool, ApiError> {
        let Some(lease) = self.api.find::<Lease>(&self.name).await? else {
            let memory = self.memory.text();
            let memory = memory.map(|text| [(annotation::STATE.to_owned(), text)].into());
            let metadata = ObjectMeta {
                name: Some(NAME.to_owned()),
                annotations: memory,
                ..ObjectMeta::default()
            };
            let lease = Lease {
                metadata,
                spec: Some(record_of(&self.identity, None)),
            };
            let namespace = self.name.namespace.as_deref();
            let created = self.api.create::<Lease, IgnoredAny>(namespace, &lease);
            return created.await.map(|_| true);
        };
        let stored = annotations(&lease.metadata).get(annotation::STATE);
        if let Some(stored) = stored {
            self.memory.read(stored);
        }
        let record = lease.spec.clone().unwrap_or_default();
        let holder = record.holder_identity.clone().unwrap_or_default();
        if !holder.is_empty() && holder != self.identity {
            let unchanged = observed.as_ref().filter(|seen| seen.record == record);
            let since = unchanged.map_or_else(Instant::now, |seen| seen.since);
            let lasts = duration_of(&record);
            *observed = Some(Observed {
                record: record.clone(),
                since,
            });
            if since.elapsed() < lasts {
                return Ok(false);
            }
        }
        let memory = self.memory.text().filter(|text| Some(text) != stored);
        let patch = patch::lease(
            &lease,
            &record_of(&self.identity, Some(&record)),
            memory.as_deref(),
        );
        self.api.patch::<Lease>(&self.name, patch).await?;
        Ok(true)
    }

    /// Releases the Lease if this process holds it.
    async fn release(&self) -> Result<bool, ApiError> {
        let Some(lease) = self.api.find::<Lease>(&self.name).await? else {
            return Ok(false);
        };
        let record = lease.spec.clone().unwrap_or_default();
        if record.holder_identity.as_ref() != Some(&self.identity) {
            return Ok(false);
        }
        let released = LeaseSpec {
            holder_identity: None,
            renew_time: None,
            ..record
        };
        let stored = annotations(&lease.metadata).get(annotation::STATE);
        let memory = self.memory.text().filter(|text| Some(text) != stored);
        let patch = patch::lease(&lease, &released, memory.as_deref());
        self.api.patch::<Lease>(&self.name, patch).await?;
        Ok(true)
    }
}

/// The record of a Lease that `identity` acquires or renews.
fn record_of(identity: &str, before: Option<&LeaseSpec>) -> LeaseSpec {
    let now = || Some(MicroTime(jiff::Timestamp::now()));
    let mine = before.filter(|before| before.holder_identity.as_deref() == Some(identity));
    let transitions = before
        .and_then(|before| before.lease_transitions)
        .unwrap_or_default();
    LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: Some(i32::try_from(LEASE_DURATION.as_secs()).unwrap_or(i32::MAX)),
        acquire_time: mine.and_then(|mine| mine.acquire_time.clone()).or_else(now),
        renew_time: now(),
        lease_transitions: Some(if mine.is_some() {
            transitions
        } else {
            transitions + 1
        }),
        ..before.cloned().unwrap_or_default()
    }
}

/// Bounds a read and a write together by the timeout of one call.
async fn in_time(work: impl Future<Output = Result<bool, ApiError>>) -> Result<bool, ApiError> {
    let result = tokio::time::timeout(CALL_TIMEOUT, work).await;
    result.unwrap_or(Err(ApiError::TimedOut(CALL_TIMEOUT)))
}

fn duration_of(record: &LeaseSpec) -> Duration {
    let seconds = record
        .lease_duration_seconds
        .and_then(|s| u64::try_from(s).ok());
    seconds.map_or(LEASE_DURATION, Duration::from_secs)
}

/// Makes `identity` the holder of the Lease for this long, even if another process holds it. A
/// former holder stops at its next renewal; after [`LEASE_DURATION`] it certainly writes no more.
///
/// # Errors
///
/// When the Lease cannot be read or written.
pub async fn take(
    api: &ApiClient,
    namespace: &str,
    identity: &str,
    time: Duration,
) -> Result<(), ApiError> {
    let name = NamespacedName::new(namespace, NAME);
    let mut result = Ok(());
    for _ in 0..TAKE_ATTEMPTS {
        let Some(lease) = api.find::<Lease>(&name).await? else {
            return Ok(());
        };
        let record = LeaseSpec {
            lease_duration_seconds: i32::try_from(time.as_secs()).ok(),
            ..record_of(identity, lease.spec.as_ref())
        };
        result = api
            .patch::<Lease>(&name, patch::lease(&lease, &record, None))
            .await;
        // A conflict means that the holder renewed the Lease meanwhile: try again.
        if !matches!(result, Err(ApiError::Conflict(_))) {
            break;
        }
    }
    result
}

/// Reads the data that is stored with the Lease into `memory`, without taking part in the election.
///
/// # Errors
///
/// When the Lease cannot be read.
pub async fn read_memory(
    api: &ApiClient,
    namespace: &str,
    memory: &dyn LeaseMemory,
) -> Result<(), ApiError> {
    let lease = api
        .find::<Lease>(&NamespacedName::new(namespace, NAME))
        .await?;
    let stored = lease
        .as_ref()
        .and_then(|lease| annotations(&lease.metadata).get(annotation::STATE));
    if let Some(stored) = stored {
        memory.read(stored);
    }
    Ok(())
}

/// The holder, if its renewal time is recent by the local clock; `archaware clean` then refuses at
/// once. Otherwise `clean` still waits for the Lease, because a live holder with another clock may
/// look expired.
pub fn fresh_holder(lease: &Lease) -> Option<String> {
    let record = lease.spec.clone().unwrap_or_default();
    let fresh = record.renew_time.as_ref().is_some_and(|time| {
        jiff::Timestamp::now().duration_since(time.0).unsigned_abs() < duration_of(&record)
    });
    record
        .holder_identity
        .filter(|holder| fresh && !holder.is_empty())
}

/// The name of a candidate: the pod's or machine's name and a random part, because two processes on
/// one machine are two candidates.
pub fn identity(fallback: &str) -> String {
    let host = std::env::var("HOSTNAME")
        .ok()
        .filter(|name| !name.is_empty());
    let host = host.or_else(|| std::fs::read_to_string("/etc/hostname").ok());
    let host = host.as_deref().map_or(fallback, str::trim);
    format!("{host}_{:016x}", rand::random::<u64>())
}
