//! One host's share of attention: how many requests at once, and none at all while it limits its
//! rate or does not answer.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use quick_cache::sync::Cache;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::image::error::ImageError;

/// Hosts are named by whoever creates pods: the state of the least used ones is dropped.
const MAX_HOSTS: usize = 1024;
/// Timeouts in a row that close the gate.
const MAX_TIMEOUTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// A registry may ask for this much quiet, not more.
pub(super) const LONGEST_RETRY_AFTER: Duration = Duration::from_hours(1);
/// When a registry limits its rate without saying for how long.
pub(super) const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(30);

pub(super) struct Gates {
    hosts: Cache<String, Arc<Host>>,
    per_host: usize,
}

pub(super) struct Host {
    slots: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    timeouts: u32,
    pause: Duration,
    closed: Option<Closed>,
}

#[derive(Clone, Copy)]
struct Closed {
    until: Instant,
    rate_limited: bool,
}

impl Gates {
    pub(super) fn new(per_host: usize) -> Self {
        Self {
            hosts: Cache::new(MAX_HOSTS),
            per_host,
        }
    }

    pub(super) fn host(&self, name: &str) -> Arc<Host> {
        let fresh = || {
            let slots = Arc::new(Semaphore::new(self.per_host));
            Ok::<_, std::convert::Infallible>(Arc::new(Host {
                slots,
                state: Mutex::default(),
            }))
        };
        match self.hosts.get_or_insert_with(name, fresh) {
            Ok(host) => host,
            Err(never) => match never {},
        }
    }
}

impl Host {
    /// A slot for one request; fails at once while the gate is closed, also when it closes while
    /// waiting for the slot.
    pub(super) async fn enter(&self, name: &str) -> Result<OwnedSemaphorePermit, ImageError> {
        self.check(name)?;
        let slot = self.slots.clone().acquire_owned().await;
        let slot = slot.map_err(|_| ImageError::unavailable(name, "shutting down"))?;
        self.check(name)?;
        Ok(slot)
    }

    fn check(&self, name: &str) -> Result<(), ImageError> {
        let closed = self.state().closed;
        let Some(closed) = closed else { return Ok(()) };
        let retry_after = closed.until.saturating_duration_since(Instant::now());
        if retry_after.is_zero() {
            return Ok(());
        }
        let host = name.to_owned();
        Err(if closed.rate_limited {
            ImageError::RateLimited { host, retry_after }
        } else {
            ImageError::Gated { host, retry_after }
        })
    }

    /// The host answered, whatever it said.
    pub(super) fn answered(&self) {
        let mut state = self.state();
        state.timeouts = 0;
        state.pause = Duration::ZERO;
        if state.closed.is_some_and(|closed| !closed.rate_limited) {
            state.closed = None;
        }
    }

    /// The host did not answer in time. The third time in a row closes the gate; after that each
    /// further timeout closes it for twice as long.
    pub(super) fn timed_out(&self) {
        let mut state = self.state();
        state.timeouts += 1;
        // Requests that were under way when the gate closed tell nothing new.
        let closed = state
            .closed
            .is_some_and(|closed| closed.until > Instant::now());
        if state.timeouts >= MAX_TIMEOUTS && !closed {
            state.pause = (state.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            let until = Instant::now() + state.pause;
            state.closed = Some(Closed {
                until,
                rate_limited: false,
            });
        }
    }

    /// The host wants to be left alone: because it limits its rate, or because it is overloaded.
    pub(super) fn close(&self, retry_after: Duration, rate_limited: bool) {
        let mut state = self.state();
        let until = Instant::now() + retry_after;
        // Answers to requests that were under way do not shorten what was asked for.
        if state.closed.is_none_or(|closed| closed.until < until) {
            state.closed = Some(Closed {
                until,
                rate_limited,
            });
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn three_timeouts_in_a_row_close_the_gate() {
        let gates = Gates::new(1);
        let host = gates.host("reg");
        host.timed_out();
        host.timed_out();
        host.answered();
        host.timed_out();
        host.timed_out();
        assert!(host.enter("reg").await.is_ok());
        host.timed_out();
        let error = gates.host("reg").enter("reg").await.unwrap_err();
        assert!(
            error
                .retry_after()
                .is_some_and(|after| after <= FIRST_PAUSE)
        );
        host.answered();
        assert!(host.enter("reg").await.is_ok());
    }

    #[tokio::test]
    async fn who_waits_for_a_slot_fails_when_the_gate_closes() {
        let gates = Gates::new(1);
        let host = gates.host("reg");
        let slot = host.enter("reg").await.unwrap();
        let waiting = {
            let host = host.clone();
            tokio::spawn(async move { host.enter("reg").await.map(drop) })
        };
        tokio::task::yield_now().await;
        host.close(Duration::from_secs(5), true);
        drop(slot);
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, ImageError::RateLimited { .. }), "{error}");
        host.answered();
        assert!(
            host.enter("reg").await.is_err(),
            "an answer does not lift a rate limit"
        );
    }
}
