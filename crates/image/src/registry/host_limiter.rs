//! Limits the concurrent requests to each registry host, and sends none while the host rate-limits
//! the request's account or does not answer.

use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderMap;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{credentials::Fingerprint, error::ImageError};
use archaware_base::{
    backoff::Backoff,
    in_use::{InUseCache, in_use_cache},
};

/// The part of the budget for large bodies that the bodies of one host may take, so that a host
/// that stalls leaves most of it to other hosts.
pub(super) const MAX_OF_HOST: usize = 16 << 20;
/// Users choose the hosts, so the state of the least used hosts is dropped.
const MAX_HOSTS: usize = 1024;
/// Maximum number of paused hosts that are kept for a tenant, even if other tenants use more than
/// [`MAX_HOSTS`] hosts.
const MAX_KEPT: usize = 16;
/// Maximum number of tenants for which paused hosts are kept.
const MAX_TENANTS: usize = 1024;
/// Maximum number of rate-limited principals per host; more principals are not recorded.
const MAX_PAUSED: usize = 256;
/// Consecutive timeouts after which the host gets no requests.
const MAX_TIMEOUTS: u32 = 3;
/// The pause of a host after repeated timeouts: 10 s at first, at most 60 s.
const PAUSE_BACKOFF: Backoff = Backoff::seconds(10, 60);
/// The longest `Retry-After` that is obeyed.
pub(super) const MAX_RETRY_AFTER: Duration = Duration::from_hours(1);
/// Used when a registry limits the rate without `Retry-After`.
pub(super) const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(30);

/// The account of a request. Registries count anonymous clients by address and other clients by
/// account.
pub(super) type Principal = Option<Fingerprint>;

pub(super) struct HostLimiters {
    hosts: InUseCache<HostLimiter>,
    /// By tenant: paused hosts that delayed this tenant, the latest first. They stay in `hosts`,
    /// because a value that is in use is not dropped.
    kept_by_tenant: Cache<String, Arc<Mutex<VecDeque<Arc<HostLimiter>>>>>,
    per_host: usize,
}

pub(super) struct HostLimiter {
    name: String,
    slots: Arc<Semaphore>,
    /// One permit for each byte that the host's large bodies may have in memory.
    bodies: Arc<Semaphore>,
    state: Mutex<LimiterState>,
}

#[derive(Default)]
struct LimiterState {
    timeouts: u32,
    pause: Duration,
    /// The host does not answer: no requests from any principal until then.
    unanswered_until: Option<Instant>,
    /// Principals that the host rate-limits.
    paused_principals: HashMap<Principal, Pause>,
    quota: Option<Quota>,
}

#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    rate_limited: bool,
}

/// Rate limit reported by a registry such as Docker Hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Pulls per window.
    pub limit: Option<u64>,
    /// Remaining pulls.
    pub remaining: u64,
}

impl HostLimiters {
    pub(super) fn new(per_host: usize) -> Self {
        Self {
            hosts: in_use_cache(MAX_HOSTS),
            kept_by_tenant: Cache::new(MAX_TENANTS),
            per_host,
        }
    }

    pub(super) fn host(&self, name: &str) -> Arc<HostLimiter> {
        let fresh = || {
            Ok::<_, Infallible>(Arc::new(HostLimiter {
                name: name.to_owned(),
                slots: Arc::new(Semaphore::new(self.per_host)),
                bodies: Arc::new(Semaphore::new(MAX_OF_HOST)),
                state: Mutex::default(),
            }))
        };
        let Ok(limiter) = self.hosts.get_or_insert_with(name, fresh);
        limiter
    }

    /// Keeps a host whose pause has delayed this tenant. Otherwise another tenant that names many
    /// hosts would make archaware forget the pause.
    pub(super) fn keep(&self, tenant: &str, host: &str) {
        let Some(limiter) = self.hosts.get(host) else {
            return;
        };
        let empty = || Ok::<_, Infallible>(Arc::default());
        let Ok(kept_hosts) = self.kept_by_tenant.get_or_insert_with(tenant, empty);
        let mut kept_hosts = kept_hosts.lock();
        kept_hosts.retain(|other| other.is_paused() && !Arc::ptr_eq(other, &limiter));
        kept_hosts.push_front(limiter);
        kept_hosts.truncate(MAX_KEPT);
    }

    /// Number of hosts that are paused for at least one principal.
    pub(super) fn paused_hosts(&self) -> usize {
        self.hosts
            .iter()
            .filter(|(_, limiter)| limiter.is_paused())
            .count()
    }

    /// Rate limits as hosts last reported them.
    pub(super) fn quotas(&self) -> Vec<(String, Quota)> {
        let named_quota =
            |(name, limiter): (String, Arc<HostLimiter>)| Some((name, limiter.state.lock().quota?));
        let mut quotas: Vec<_> = self.hosts.iter().filter_map(named_quota).collect();
        quotas.sort_by(|(a, _), (b, _)| a.cmp(b));
        quotas
    }
}

impl HostLimiter {
    /// Waits for permission to send one request. Fails if the host or `principal` is paused, before
    /// or after the wait.
    ///
    /// # Errors
    ///
    /// [`ImageError::RateLimited`] or [`ImageError::HostPaused`].
    pub(super) async fn enter(
        &self,
        principal: Principal,
    ) -> Result<OwnedSemaphorePermit, ImageError> {
        self.check(principal)?;
        let slot = self.slots.clone().acquire_owned().await;
        let slot = slot.map_err(|_| ImageError::unavailable(&self.name, "shutting down"))?;
        self.check(principal)?;
        Ok(slot)
    }

    /// The host's part of the budget of large bodies.
    pub(super) fn body_share(&self) -> &Arc<Semaphore> {
        &self.bodies
    }

    fn check(&self, principal: Principal) -> Result<(), ImageError> {
        let state = self.state.lock();
        let now = Instant::now();
        if let Some(until) = state.unanswered_until.filter(|until| *until > now) {
            return Err(self.error(until - now, false));
        }
        match state
            .paused_principals
            .get(&principal)
            .filter(|pause| pause.until > now)
        {
            Some(pause) => Err(self.error(pause.until - now, pause.rate_limited)),
            None => Ok(()),
        }
    }

    fn is_paused(&self) -> bool {
        let state = self.state.lock();
        let now = Instant::now();
        state.unanswered_until.is_some_and(|until| until > now)
            || state
                .paused_principals
                .values()
                .any(|pause| pause.until > now)
    }

    fn error(&self, retry_after: Duration, rate_limited: bool) -> ImageError {
        let host = self.name.clone();
        if rate_limited {
            ImageError::RateLimited { host, retry_after }
        } else {
            ImageError::HostPaused { host, retry_after }
        }
    }

    /// Records that the host answered.
    pub(super) fn answered(&self, headers: &HeaderMap) {
        let mut state = self.state.lock();
        state.timeouts = 0;
        state.pause = Duration::ZERO;
        state.unanswered_until = None;
        if let Some(remaining) = number(headers, "remaining") {
            let limit = number(headers, "limit");
            state.quota = Some(Quota { limit, remaining });
        }
    }

    /// Records a timeout. The third consecutive one stops requests to the host, and each further
    /// one doubles the pause.
    pub(super) fn timed_out(&self) {
        let mut state = self.state.lock();
        state.timeouts += 1;
        // Timeouts of requests that were sent before the pause began do not extend it.
        let closed = state
            .unanswered_until
            .is_some_and(|until| until > Instant::now());
        if state.timeouts >= MAX_TIMEOUTS && !closed {
            state.pause = PAUSE_BACKOFF.next(state.pause);
            state.unanswered_until = Some(Instant::now() + state.pause);
        }
    }

    /// Stops requests of `principal`, because the host limits the rate or is overloaded. Returns
    /// the error to report.
    pub(super) fn pause(
        &self,
        principal: Principal,
        retry_after: Duration,
        rate_limited: bool,
    ) -> ImageError {
        let mut state = self.state.lock();
        let now = Instant::now();
        state.paused_principals.retain(|_, pause| pause.until > now);
        let until = now + retry_after;
        // A response to an earlier request must not shorten the pause.
        let longer = state
            .paused_principals
            .get(&principal)
            .is_none_or(|pause| pause.until < until);
        if longer
            && (state.paused_principals.len() < MAX_PAUSED
                || state.paused_principals.contains_key(&principal))
        {
            state.paused_principals.insert(
                principal,
                Pause {
                    until,
                    rate_limited,
                },
            );
        }
        self.error(retry_after, rate_limited)
    }
}

/// Parses `RateLimit-Remaining: 76;w=21600`, with or without `X-`.
fn number(headers: &HeaderMap, what: &str) -> Option<u64> {
    let value = ["ratelimit-", "x-ratelimit-"]
        .iter()
        .find_map(|prefix| headers.get(format!("{prefix}{what}")))?;
    let text = value.to_str().ok()?.split(';').next()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn three_consecutive_timeouts_pause_the_host() {
        let limiters = HostLimiters::new(1);
        let limiter = limiters.host("reg");
        limiter.timed_out();
        limiter.timed_out();
        limiter.answered(&HeaderMap::new());
        limiter.timed_out();
        limiter.timed_out();
        assert!(limiter.enter(None).await.is_ok());
        assert_eq!(limiters.paused_hosts(), 0);
        limiter.timed_out();
        assert_eq!(limiters.paused_hosts(), 1);
        let error = limiters.host("reg").enter(None).await.unwrap_err();
        assert!(
            error
                .retry_after()
                .is_some_and(|after| after <= PAUSE_BACKOFF.first)
        );
        limiter.answered(&HeaderMap::new());
        assert!(limiter.enter(None).await.is_ok());
    }

    #[tokio::test]
    async fn waiting_requests_fail_when_the_host_is_paused() {
        let limiters = HostLimiters::new(1);
        let limiter = limiters.host("reg");
        let slot = limiter.enter(None).await.unwrap();
        let waiting = {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.enter(None).await.map(drop) })
        };
        tokio::task::yield_now().await;
        limiter.pause(None, Duration::from_secs(5), true);
        drop(slot);
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, ImageError::RateLimited { .. }), "{error}");
        limiter.answered(&HeaderMap::new());
        assert!(
            limiter.enter(None).await.is_err(),
            "an answer does not lift a rate limit"
        );
    }

    #[tokio::test]
    async fn a_rate_limit_applies_to_its_account_only() {
        use crate::credentials::Credential;
        let limiters = HostLimiters::new(1);
        let limiter = limiters.host("reg");
        let principal = Some(Credential::password("a".into(), "b".into()).fingerprint());
        limiter.pause(None, Duration::from_mins(1), true);
        limiter.pause(None, Duration::from_secs(1), true);
        let error = limiter.enter(None).await.unwrap_err();
        assert!(error.retry_after().unwrap() > Duration::from_secs(50));
        assert!(limiter.enter(principal).await.is_ok());
    }

    #[tokio::test]
    async fn a_tenant_with_many_hosts_lifts_no_pause() {
        let limiters = HostLimiters::new(1);
        let pause = |tenant: &str, host: &str| {
            let limiter = limiters.host(host);
            limiter.pause(None, Duration::from_mins(1), true);
            limiters.keep(tenant, host);
        };
        pause("tenant", "docker.io");
        for _ in 0..3 {
            for number in 0..2 * MAX_HOSTS {
                pause("hostile", &format!("r{number}"));
            }
        }
        assert!(limiters.host("docker.io").enter(None).await.is_err());
        assert!(limiters.hosts.len() <= MAX_HOSTS + 1 + MAX_KEPT);
    }

    proptest! {
        /// A registry chooses its headers.
        #[test]
        fn any_rate_limit_is_a_number_or_none(value in "[ -~]{0,40}|[0-9]{0,30}(;w=[0-9]{0,9})?") {
            for name in ["ratelimit-remaining", "x-ratelimit-limit"] {
                let mut headers = HeaderMap::new();
                headers.insert(name, value.parse().unwrap());
                let number = number(&headers, name.rsplit('-').next().unwrap());
                let expected = value.split(';').next().unwrap().trim().parse::<u64>().ok();
                prop_assert_eq!(number, expected);
                HostLimiters::new(1).host("reg").answered(&headers);
            }
        }
    }

    #[test]
    fn quotas_are_read_as_docker_hub_writes_them() {
        let limiters = HostLimiters::new(1);
        let mut headers = HeaderMap::new();
        headers.insert("ratelimit-limit", "100;w=21600".parse().unwrap());
        headers.insert("ratelimit-remaining", "76;w=21600".parse().unwrap());
        limiters.host("reg").answered(&headers);
        limiters.host("silent").answered(&HeaderMap::new());
        let quota = Quota {
            limit: Some(100),
            remaining: 76,
        };
        assert_eq!(limiters.quotas(), [("reg".to_owned(), quota)]);
    }
}
