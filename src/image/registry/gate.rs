//! One host's share of attention: how many requests at once, and none at all while it limits the rate
//! of who asks, or does not answer.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderMap;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    backoff::Backoff,
    image::{credentials::Fingerprint, error::ImageError},
};

/// Hosts are named by whoever creates pods: the state of the least used ones is dropped.
const MAX_HOSTS: usize = 1024;
/// Who is being kept waiting by one host: more are let through rather than remembered.
const MAX_CLOSED: usize = 256;
/// Timeouts in a row that close the gate.
const MAX_TIMEOUTS: u32 = 3;
/// How long it stays closed.
const PAUSE: Backoff = Backoff::seconds(10, 60);
/// A registry may ask for this much quiet, not more.
pub(super) const LONGEST_RETRY_AFTER: Duration = Duration::from_hours(1);
/// When a registry limits its rate without saying for how long.
pub(super) const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(30);

/// As whom a host is asked: registries count anonymous clients by address and others by account.
pub(super) type Asker = Option<Fingerprint>;

pub(super) struct Gates {
    hosts: Cache<String, Arc<Gate>>,
    per_host: usize,
}

pub(super) struct Gate {
    name: String,
    slots: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    timeouts: u32,
    pause: Duration,
    /// It does not answer: closed for everybody.
    silent_until: Option<Instant>,
    /// It asked to be left alone by these.
    closed: HashMap<Asker, Closed>,
    quota: Option<Quota>,
}

#[derive(Clone, Copy)]
struct Closed {
    until: Instant,
    rate_limited: bool,
}

/// What a registry last said of its limit, as Docker Hub does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Pulls within its window.
    pub limit: Option<u64>,
    /// Those that are left.
    pub remaining: u64,
}

impl Gates {
    pub(super) fn new(per_host: usize) -> Self {
        Self {
            hosts: Cache::new(MAX_HOSTS),
            per_host,
        }
    }

    pub(super) fn host(&self, name: &str) -> Arc<Gate> {
        let fresh = || {
            Ok::<_, Infallible>(Arc::new(Gate {
                name: name.to_owned(),
                slots: Arc::new(Semaphore::new(self.per_host)),
                state: Mutex::default(),
            }))
        };
        let Ok(gate) = self.hosts.get_or_insert_with(name, fresh);
        gate
    }

    /// Hosts that somebody is kept from asking at the moment.
    pub(super) fn closed(&self) -> usize {
        self.hosts
            .iter()
            .filter(|(_, gate)| gate.is_closed())
            .count()
    }

    /// What hosts said of their limits.
    pub(super) fn quotas(&self) -> Vec<(String, Quota)> {
        let said = |(name, gate): (String, Arc<Gate>)| Some((name, gate.state.lock().quota?));
        let mut quotas: Vec<_> = self.hosts.iter().filter_map(said).collect();
        quotas.sort_by(|(a, _), (b, _)| a.cmp(b));
        quotas
    }
}

impl Gate {
    /// A slot for one request; fails at once while the gate is closed, also when it closes while
    /// waiting for the slot.
    pub(super) async fn enter(&self, asker: Asker) -> Result<OwnedSemaphorePermit, ImageError> {
        self.check(asker)?;
        let slot = self.slots.clone().acquire_owned().await;
        let slot = slot.map_err(|_| ImageError::unavailable(&self.name, "shutting down"))?;
        self.check(asker)?;
        Ok(slot)
    }

    fn check(&self, asker: Asker) -> Result<(), ImageError> {
        let state = self.state.lock();
        let now = Instant::now();
        if let Some(until) = state.silent_until.filter(|until| *until > now) {
            return Err(self.error(until - now, false));
        }
        match state.closed.get(&asker).filter(|closed| closed.until > now) {
            Some(closed) => Err(self.error(closed.until - now, closed.rate_limited)),
            None => Ok(()),
        }
    }

    fn is_closed(&self) -> bool {
        let state = self.state.lock();
        let now = Instant::now();
        state.silent_until.is_some_and(|until| until > now)
            || state.closed.values().any(|closed| closed.until > now)
    }

    fn error(&self, retry_after: Duration, rate_limited: bool) -> ImageError {
        let host = self.name.clone();
        if rate_limited {
            ImageError::RateLimited { host, retry_after }
        } else {
            ImageError::Gated { host, retry_after }
        }
    }

    /// The host answered, whatever it said.
    pub(super) fn answered(&self, headers: &HeaderMap) {
        let mut state = self.state.lock();
        state.timeouts = 0;
        state.pause = Duration::ZERO;
        state.silent_until = None;
        if let Some(remaining) = number(headers, "remaining") {
            let limit = number(headers, "limit");
            state.quota = Some(Quota { limit, remaining });
        }
    }

    /// The host did not answer in time. The third time in a row closes the gate; after that each
    /// further timeout closes it for twice as long.
    pub(super) fn timed_out(&self) {
        let mut state = self.state.lock();
        state.timeouts += 1;
        // Requests that were under way when the gate closed tell nothing new.
        let closed = state
            .silent_until
            .is_some_and(|until| until > Instant::now());
        if state.timeouts >= MAX_TIMEOUTS && !closed {
            state.pause = PAUSE.next(state.pause);
            state.silent_until = Some(Instant::now() + state.pause);
        }
    }

    /// The host wants to be left alone by `asker`: because it limits the rate, or is overloaded. Gives
    /// the error for whoever met it.
    pub(super) fn close(
        &self,
        asker: Asker,
        retry_after: Duration,
        rate_limited: bool,
    ) -> ImageError {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.closed.retain(|_, closed| closed.until > now);
        let until = now + retry_after;
        // Answers to requests that were under way do not shorten what was asked for.
        let longer = state
            .closed
            .get(&asker)
            .is_none_or(|closed| closed.until < until);
        if longer && (state.closed.len() < MAX_CLOSED || state.closed.contains_key(&asker)) {
            state.closed.insert(
                asker,
                Closed {
                    until,
                    rate_limited,
                },
            );
        }
        self.error(retry_after, rate_limited)
    }
}

/// `RateLimit-Remaining: 76;w=21600`, with or without `X-`.
fn number(headers: &HeaderMap, what: &str) -> Option<u64> {
    let value = ["ratelimit-", "x-ratelimit-"]
        .iter()
        .find_map(|prefix| headers.get(format!("{prefix}{what}")))?;
    let text = value.to_str().ok()?.split(';').next()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn three_timeouts_in_a_row_close_the_gate() {
        let gates = Gates::new(1);
        let gate = gates.host("reg");
        gate.timed_out();
        gate.timed_out();
        gate.answered(&HeaderMap::new());
        gate.timed_out();
        gate.timed_out();
        assert!(gate.enter(None).await.is_ok());
        assert_eq!(gates.closed(), 0);
        gate.timed_out();
        assert_eq!(gates.closed(), 1);
        let error = gates.host("reg").enter(None).await.unwrap_err();
        assert!(
            error
                .retry_after()
                .is_some_and(|after| after <= PAUSE.first)
        );
        gate.answered(&HeaderMap::new());
        assert!(gate.enter(None).await.is_ok());
    }

    #[tokio::test]
    async fn who_waits_for_a_slot_fails_when_the_gate_closes() {
        let gates = Gates::new(1);
        let gate = gates.host("reg");
        let slot = gate.enter(None).await.unwrap();
        let waiting = {
            let gate = gate.clone();
            tokio::spawn(async move { gate.enter(None).await.map(drop) })
        };
        tokio::task::yield_now().await;
        gate.close(None, Duration::from_secs(5), true);
        drop(slot);
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, ImageError::RateLimited { .. }), "{error}");
        gate.answered(&HeaderMap::new());
        assert!(
            gate.enter(None).await.is_err(),
            "an answer does not lift a rate limit"
        );
    }

    #[tokio::test]
    async fn a_limit_holds_for_who_met_it() {
        use crate::image::credentials::Credential;
        let gates = Gates::new(1);
        let gate = gates.host("reg");
        let asker = Some(Credential::password("a".into(), "b".into()).fingerprint());
        gate.close(None, Duration::from_mins(1), true);
        gate.close(None, Duration::from_secs(1), true);
        let error = gate.enter(None).await.unwrap_err();
        assert!(error.retry_after().unwrap() > Duration::from_secs(50));
        assert!(gate.enter(asker).await.is_ok());
    }

    #[test]
    fn quotas_are_read_as_docker_hub_writes_them() {
        let gates = Gates::new(1);
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit-limit", "100;w=21600".parse().unwrap());
        headers.insert("ratelimit-remaining", "76;w=21600".parse().unwrap());
        gates.host("reg").answered(&headers);
        gates.host("silent").answered(&HeaderMap::new());
        let quota = Quota {
            limit: Some(100),
            remaining: 76,
        };
        assert_eq!(gates.quotas(), [("reg".to_owned(), quota)]);
    }
}
