//! The clock of the API server, which sets the times of objects. That of this machine may be
//! minutes ahead or behind.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use http::{HeaderMap, header};
use jiff::{SignedDuration, Timestamp, fmt::rfc2822};

use crate::cluster::objects::Pod;

/// Smaller differences are ignored: the `Date` header has whole seconds, and an answer arrives
/// later than it was dated.
const EXACTNESS: SignedDuration = SignedDuration::from_secs(2);

/// The difference between the clocks of the API server and of this machine. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerClock(Arc<AtomicI64>);

impl ServerClock {
    /// Reads the `Date` header (RFC 9110, section 6.6.1) of an answer that arrived at `now`.
    pub(super) fn observe(&self, headers: &HeaderMap, now: Timestamp) {
        let date = headers
            .get(header::DATE)
            .and_then(|value| value.to_str().ok());
        let Some(date) = date.and_then(|text| rfc2822::parse(text).ok()) else {
            return;
        };
        let ahead = date.timestamp().duration_since(now);
        let ahead = if ahead.abs() < EXACTNESS {
            SignedDuration::ZERO
        } else {
            ahead
        };
        self.0.store(ahead.as_secs(), Ordering::Relaxed);
    }

    fn now(&self, local_now: Timestamp) -> Timestamp {
        let ahead = SignedDuration::from_secs(self.0.load(Ordering::Relaxed));
        local_now.checked_add(ahead).unwrap_or(local_now)
    }

    /// Time since the creation of a pod.
    pub(crate) fn age(&self, pod: &Pod) -> Duration {
        self.age_at(pod, Timestamp::now())
    }

    fn age_at(&self, pod: &Pod, local_now: Timestamp) -> Duration {
        let created = pod.metadata.creation_timestamp.as_ref();
        let age = created.map(|time| self.now(local_now).duration_since(time.0));
        age.and_then(|age| Duration::try_from(age).ok())
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ages_are_by_the_clock_of_the_api_server() {
        let pod = json!({"metadata": {"creationTimestamp": "2026-01-02T03:00:00Z"}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let local_now: Timestamp = "2026-01-02T03:10:00Z".parse().unwrap();
        let clock = ServerClock::default();
        assert_eq!(clock.age_at(&pod, local_now).as_secs(), 600);
        for (date, age) in [
            ("Fri, 02 Jan 2026 03:05:00 GMT", 300),
            ("Fri, 02 Jan 2026 03:20:00 GMT", 1200),
            ("Fri, 02 Jan 2026 02:59:00 GMT", 0),
            // A difference that is too small, and values that are not a date.
            ("Fri, 02 Jan 2026 03:10:01 GMT", 600),
            ("yesterday", 600),
            ("", 600),
        ] {
            let headers = HeaderMap::from_iter([(header::DATE, date.parse().unwrap())]);
            clock.observe(&headers, local_now);
            assert_eq!(clock.age_at(&pod, local_now).as_secs(), age, "{date}");
        }
    }
}
