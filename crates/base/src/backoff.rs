//! Delays between retries.

use std::time::Duration;

/// A delay that doubles with each failure, up to a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The delay after the first failure.
    pub first: Duration,
    /// The longest delay.
    pub max: Duration,
}

impl Backoff {
    /// From `first` to `max` seconds.
    pub const fn seconds(first: u64, max: u64) -> Self {
        Self {
            first: Duration::from_secs(first),
            max: Duration::from_secs(max),
        }
    }

    /// The delay after this many failures in a row, counted from 1.
    pub fn delay(self, failures: u32) -> Duration {
        // Avoids overflow. 2^16 times the first delay is longer than any limit here.
        let doublings = failures.saturating_sub(1).min(16);
        self.first.saturating_mul(1 << doublings).min(self.max)
    }

    /// The delay after `previous`.
    pub fn next(self, previous: Duration) -> Duration {
        previous.saturating_mul(2).clamp(self.first, self.max)
    }
}

/// A random duration between `time` and twice `time`, so that processes and objects that wait for
/// the same event do not retry at the same moment.
pub fn jittered(time: Duration) -> Duration {
    time.mul_f64(1.0 + rand::random::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_limit() {
        let backoff = Backoff::seconds(5, 60);
        let delays: Vec<u64> = [0, 1, 2, 3, 4, 5, 100]
            .map(|failures| backoff.delay(failures).as_secs())
            .into();
        assert_eq!(delays, [5, 5, 10, 20, 40, 60, 60]);
        assert_eq!(backoff.next(Duration::ZERO), Duration::from_secs(5));
        assert_eq!(
            backoff.next(Duration::from_secs(20)),
            Duration::from_secs(40)
        );
        assert_eq!(
            backoff.next(Duration::from_secs(40)),
            Duration::from_mins(1)
        );
    }

    #[test]
    fn jitter_stays_within_twice_the_time() {
        let second = Duration::from_secs(1);
        for _ in 0..100 {
            let time = jittered(second);
            assert!(time >= second && time <= 2 * second, "{time:?}");
        }
    }
}
