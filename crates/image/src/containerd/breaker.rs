//! A circuit breaker: while containerd fails, resolutions do not wait for its timeout.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Consecutive failures that open the breaker.
const MAX_FAILURES: u32 = 3;
/// How long the breaker stays open before one probe is allowed.
const OPEN_DURATION: Duration = Duration::from_secs(30);

#[derive(Default)]
pub(super) struct Breaker {
    state: Mutex<BreakerState>,
}

#[derive(Default)]
struct BreakerState {
    failures: u32,
    /// Set while open: the time of the next probe.
    probe_at: Option<Instant>,
    /// When a failure was last logged.
    last_logged: Option<Instant>,
}

/// Permission for one call; the caller reports the outcome.
pub(super) struct Permit<'a> {
    breaker: &'a Breaker,
    probe: bool,
}

impl Breaker {
    /// Returns `None` while open, except that one caller per [`OPEN_DURATION`] may probe.
    pub(super) fn enter(&self) -> Option<Permit<'_>> {
        let mut state = self.state.lock();
        let probe = match state.probe_at {
            None => false,
            Some(at) if Instant::now() < at => return None,
            Some(_) => {
                state.probe_at = Some(Instant::now() + OPEN_DURATION);
                true
            }
        };
        Some(Permit {
            breaker: self,
            probe,
        })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().probe_at.is_none()
    }
}

impl Permit<'_> {
    pub(super) fn is_probe(&self) -> bool {
        self.probe
    }

    /// Returns whether this call closed the breaker.
    pub(super) fn succeeded(self) -> bool {
        let mut state = self.breaker.state.lock();
        state.failures = 0;
        state.probe_at.take().is_some()
    }

    /// Returns whether to log the failure: the first one, then at most one per [`OPEN_DURATION`].
    pub(super) fn failed(self) -> bool {
        let now = Instant::now();
        let mut state = self.breaker.state.lock();
        state.failures += 1;
        if state.probe_at.is_none() && state.failures >= MAX_FAILURES {
            state.probe_at = Some(now + OPEN_DURATION);
        }
        let logged_recently = state
            .last_logged
            .is_some_and(|last_logged| now < last_logged + OPEN_DURATION);
        if !logged_recently {
            state.last_logged = Some(now);
        }
        !logged_recently
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_three_failures_and_closes_after_a_probe() {
        let breaker = Breaker::default();
        for last_logged in [true, false, false] {
            assert!(breaker.is_closed());
            assert_eq!(breaker.enter().unwrap().failed(), last_logged);
        }
        assert!(!breaker.is_closed());
        let time_is_up = || breaker.state.lock().probe_at = Some(Instant::now());
        time_is_up();
        let probe = breaker.enter().unwrap();
        assert!(probe.is_probe());
        assert!(!probe.failed());
        assert!(!breaker.is_closed());
        time_is_up();
        assert!(breaker.enter().unwrap().succeeded());
        assert!(breaker.is_closed());
        assert!(!breaker.enter().unwrap().is_probe());
    }

    #[test]
    fn while_open_no_call_is_made() {
        let breaker = Breaker::default();
        for _ in 0..3 {
            breaker.enter().unwrap().failed();
        }
        assert!(breaker.enter().is_none());
    }
}
