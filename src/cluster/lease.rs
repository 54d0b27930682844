//! Leader election by a Lease: only the holder patches nodes, pods and DaemonSets, and maintains the webhook configuration.
//!
//! Every patch is guarded, so two holders for a moment do no harm. A Lease counts as expired when it has not changed
//! for its duration as observed here; the elector never compares the holder's clock with the local one (client-go's rule,
//! `k8s.io/client-go/tools/leaderelection`).

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use serde::de::IgnoredAny;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{backoff::jittered, metrics::Metrics};

use super::{
    NAME,
    api::{ApiClient, ApiError},
    name::NamespacedName,
    patch,
};

/// How long a holder that does not renew is assumed to be alive.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Interval of renewals: twice within [`LEASE_DURATION`], and retries every second in between.
const RENEW_INTERVAL: Duration = Duration::from_secs(5);
/// Interval of attempts to acquire the Lease. After a release the next holder leads within this time.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one call, short enough for several attempts before the Lease expires.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// The holder starts no patch when its Lease expires within this time.
const SAFETY_MARGIN: Duration = Duration::from_secs(1);

/// Whether this process leads. Cheap to clone.
#[derive(Clone)]
pub struct Leadership {
    /// Whether this process holds the Lease.
    pub leading: watch::Receiver<bool>,
    /// Until when this process may write, extended by each renewal. After a pause of the process `leading` may still
    /// be true for a moment; this is then in the past.
    pub until: watch::Receiver<Option<Instant>>,
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
    metrics: Metrics,
}

impl Elector {
    /// An elector with name `identity` in `namespace`, and its result.
    pub fn new(
        api: &ApiClient,
        namespace: &str,
        identity: String,
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
            metrics,
        };
        let leadership = Leadership {
            leading: is_leading,
            until: is_until,
        };
        (elector, leadership)
    }

    /// Runs until `stop`. All writes must be finished by then.
    pub async fn run(self, stop: CancellationToken) {
        let mut observed: Option<Observed> = None;
        let mut renewed = Instant::now();
        loop {
            // The Lease is renewed from the time of the request, not of the answer.
            let asked = Instant::now();
            let attempt = in_time(self.attempt(&mut observed));
            let result = tokio::select! {
                () = stop.cancelled() => break,
                result = attempt => result,
            };
            let mut pause = RETRY_INTERVAL;
            match result {
                Ok(leads) => {
                    if leads {
                        renewed = asked;
                        pause = RENEW_INTERVAL;
                    }
                    let until = leads.then(|| asked + LEASE_DURATION.saturating_sub(SAFETY_MARGIN));
                    self.until.send_replace(until);
                    self.set(leads);
                }
                Err(ApiError::Conflict(_)) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot acquire or renew the Lease; trying again");
                }
            }
            // Gives up when another attempt could end after the Lease expires.
            if renewed.elapsed() + 2 * pause.min(RETRY_INTERVAL) + CALL_TIMEOUT >= LEASE_DURATION {
                self.until.send_replace(None);
                self.set(false);
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(pause + jittered(pause) / 20) => {}
            }
        }
        self.until.send_replace(None);
        self.set(false);
        // Releases whatever the last known state is: a cancelled renewal may have arrived, and may still arrive
        // between the two calls of the release.
        let mut result = Ok(false);
        for _ in 0..2 {
            result = in_time(self.release()).await;
            if !matches!(result, Err(ApiError::Conflict(_))) {
                break;
            }
        }
        match result {
            Ok(true) => tracing::info!("lease released"),
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "Lease not released; another replica leads when it expires");
            }
        }
    }

    fn set(&self, leading: bool) {
        let before = self.leading.send_replace(leading);
        if before != leading {
            self.metrics.set_leader(leading);
            let (identity, state) = (
                &self.identity,
                if leading { "leading" } else { "not leading" },
            );
            tracing::info!(identity, "{state}");
        }
    }

    /// Creates, acquires or renews the Lease; `false` while another process holds it.
    async fn attempt(&self, observed: &mut Option<Observed>) -> Result<bool, ApiError> {
        let Some(lease) = self.api.find::<Lease>(&self.name).await? else {
            let metadata = ObjectMeta {
                name: Some(NAME.to_owned()),
                ..ObjectMeta::default()
            };
            let lease = Lease {
                metadata,
                spec: Some(self.record(None)),
            };
            let namespace = self.name.namespace.as_deref();
            let created = self.api.create::<Lease, IgnoredAny>(namespace, &lease);
            return created.await.map(|_| true);
        };
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
        let patch = patch::lease(&lease, &self.record(Some(&record)));
        self.api.patch::<Lease>(&self.name, patch).await?;
        Ok(true)
    }

    fn record(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = || Some(MicroTime(jiff::Timestamp::now()));
        let mine = before.filter(|b| b.holder_identity.as_ref() == Some(&self.identity));
        let transitions = before
            .and_then(|before| before.lease_transitions)
            .unwrap_or_default();
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(
                i32::try_from(LEASE_DURATION.as_secs()).unwrap_or(i32::MAX),
            ),
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
        let patch = patch::lease(&lease, &released);
        self.api.patch::<Lease>(&self.name, patch).await?;
        Ok(true)
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

/// The holder, if its renewal time is recent by the local clock; `archaware clean` then refuses at once. A holder with
/// another clock may look expired and be alive, so `clean` still waits for the Lease.
pub fn fresh_holder(lease: &Lease) -> Option<String> {
    let record = lease.spec.clone().unwrap_or_default();
    let fresh = record.renew_time.as_ref().is_some_and(|time| {
        jiff::Timestamp::now().duration_since(time.0).unsigned_abs() < duration_of(&record)
    });
    record
        .holder_identity
        .filter(|holder| fresh && !holder.is_empty())
}

/// The name of a candidate: the pod's or machine's name and a random part, because two processes on one machine are
/// two candidates.
pub fn identity(fallback: &str) -> String {
    let host = std::env::var("HOSTNAME")
        .ok()
        .filter(|name| !name.is_empty());
    let host = host.or_else(|| std::fs::read_to_string("/etc/hostname").ok());
    let host = host.as_deref().map_or(fallback, str::trim);
    format!("{host}_{:016x}", rand::random::<u64>())
}
