//! Single flight: callers who ask for the same thing at the same time share one answer.

use std::{
    collections::HashMap,
    hash::Hash,
    panic::{AssertUnwindSafe, resume_unwind},
};

use futures::{
    FutureExt,
    future::{BoxFuture, WeakShared},
};

/// `None`: the work panicked.
type Flight<V> = WeakShared<BoxFuture<'static, Option<V>>>;
use parking_lot::Mutex;

/// The work in progress, by key. It holds no result and nothing that nobody waits for: when the last
/// waiter goes away, the work is cancelled. Its size is bounded by the number of waiting callers.
pub(crate) struct Flights<K: Hash + Eq, V> {
    running: Mutex<HashMap<K, Flight<V>>>,
}

impl<K: Hash + Eq + Clone, V: Clone + 'static> Flights<K, V> {
    pub(crate) fn new() -> Self {
        Self {
            running: Mutex::new(HashMap::new()),
        }
    }

    /// Joins the work under `key`, or starts it with `work`.
    pub(crate) async fn run(&self, key: K, work: impl FnOnce() -> BoxFuture<'static, V>) -> V {
        // Declared first, so dropped last: by then this caller's share is gone.
        let _landing = Landing {
            flights: self,
            key: key.clone(),
        };
        let flight = {
            let mut running = self.running.lock();
            if let Some(flight) = running.get(&key).and_then(WeakShared::upgrade) {
                flight
            } else {
                // A panic would leave the others who wait with nothing to wake them.
                let flight = AssertUnwindSafe(work()).catch_unwind().map(Result::ok);
                let flight = flight.boxed().shared();
                if let Some(weak) = flight.downgrade() {
                    running.insert(key, weak);
                }
                flight
            }
        };
        match flight.await {
            Some(value) => value,
            // The panic of the work is the panic of each who waits for it.
            None => resume_unwind(Box::new("shared work panicked")),
        }
    }
}

struct Landing<'a, K: Hash + Eq, V> {
    flights: &'a Flights<K, V>,
    key: K,
}

impl<K: Hash + Eq, V> Drop for Landing<'_, K, V> {
    fn drop(&mut self) {
        let mut running = self.flights.running.lock();
        if running
            .get(&self.key)
            .is_some_and(|flight| flight.upgrade().is_none())
        {
            running.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    #[tokio::test]
    async fn many_callers_share_one_flight_and_nothing_stays() {
        let flights = Flights::<&str, usize>::new();
        let runs = Arc::new(AtomicUsize::new(0));
        let callers = (0..64).map(|_| {
            let runs = runs.clone();
            flights.run("key", move || {
                async move {
                    tokio::task::yield_now().await;
                    runs.fetch_add(1, Ordering::SeqCst)
                }
                .boxed()
            })
        });
        let answers = futures::future::join_all(callers).await;
        assert_eq!(answers, vec![0; 64]);
        assert_eq!(runs.load(Ordering::SeqCst), 1);
        assert!(flights.running.lock().is_empty());
    }

    #[tokio::test]
    async fn a_panic_of_the_work_reaches_all_who_wait() {
        let flights = Arc::new(Flights::<&str, ()>::new());
        let callers: Vec<_> = (0..8)
            .map(|_| {
                let flights = flights.clone();
                let work = || {
                    async {
                        tokio::task::yield_now().await;
                        panic!("this panic is part of the test")
                    }
                    .boxed()
                };
                tokio::spawn(async move { flights.run("key", work).await })
            })
            .collect();
        let all = futures::future::join_all(callers);
        let ended = tokio::time::timeout(std::time::Duration::from_secs(30), all).await;
        assert!(ended.unwrap().iter().all(Result::is_err));
        assert!(flights.running.lock().is_empty());
    }

    #[tokio::test]
    async fn a_cancelled_caller_leaves_nothing_behind() {
        let flights = Flights::<&str, ()>::new();
        {
            let waiting = flights.run("key", || futures::future::pending().boxed());
            futures::pin_mut!(waiting);
            assert!(futures::poll!(&mut waiting).is_pending());
        }
        assert!(flights.running.lock().is_empty());
        flights
            .run("key", || futures::future::ready(()).boxed())
            .await;
    }
}
