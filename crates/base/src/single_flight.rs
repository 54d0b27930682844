//! Single execution: concurrent callers with the same key share one execution.

use std::{
    collections::HashMap,
    hash::Hash,
    panic::{AssertUnwindSafe, resume_unwind},
};

use futures::{
    FutureExt,
    future::{BoxFuture, WeakShared},
};

/// `None` when the work panicked.
type SharedWork<V> = WeakShared<BoxFuture<'static, Option<V>>>;
use parking_lot::Mutex;

/// The executions in progress, by key. Holds no results. When the last waiting caller goes away,
/// the work is cancelled. The number of entries is bounded by the number of waiting callers.
pub struct SingleFlight<K: Hash + Eq, V> {
    running: Mutex<HashMap<K, SharedWork<V>>>,
}

impl<K: Hash + Eq, V> Default for SingleFlight<K, V> {
    fn default() -> Self {
        Self {
            running: Mutex::new(HashMap::new()),
        }
    }
}

impl<K: Hash + Eq + Clone, V: Clone + 'static> SingleFlight<K, V> {
    /// Waits for the execution under `key`, or starts it with `work`.
    pub async fn run(&self, key: K, work: impl FnOnce() -> BoxFuture<'static, V>) -> V {
        // Declared first and therefore dropped last, after this caller's handle.
        let _remove = RemoveOnDrop {
            owner: self,
            key: key.clone(),
        };
        let execution = {
            let mut running = self.running.lock();
            if let Some(execution) = running.get(&key).and_then(WeakShared::upgrade) {
                execution
            } else {
                // Without this, a panic would leave the other callers waiting forever.
                let execution = AssertUnwindSafe(work()).catch_unwind().map(Result::ok);
                let execution = execution.boxed().shared();
                if let Some(weak) = execution.downgrade() {
                    running.insert(key, weak);
                }
                execution
            }
        };
        match execution.await {
            Some(value) => value,
            // A panic of the work becomes a panic of each waiting caller.
            None => resume_unwind(Box::new("shared work panicked")),
        }
    }
}

struct RemoveOnDrop<'a, K: Hash + Eq, V> {
    owner: &'a SingleFlight<K, V>,
    key: K,
}

impl<K: Hash + Eq, V> Drop for RemoveOnDrop<'_, K, V> {
    fn drop(&mut self) {
        let mut running = self.owner.running.lock();
        if running
            .get(&self.key)
            .is_some_and(|execution| execution.upgrade().is_none())
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
        let owner = SingleFlight::<&str, usize>::default();
        let runs = Arc::new(AtomicUsize::new(0));
        let callers = (0..64).map(|_| {
            let runs = runs.clone();
            owner.run("key", move || {
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
        assert!(owner.running.lock().is_empty());
    }

    #[tokio::test]
    async fn a_panic_of_the_work_reaches_all_waiting_callers() {
        let owner = Arc::new(SingleFlight::<&str, ()>::default());
        let callers: Vec<_> = (0..8)
            .map(|_| {
                let owner = owner.clone();
                let work = || {
                    async {
                        tokio::task::yield_now().await;
                        panic!("this panic is part of the test")
                    }
                    .boxed()
                };
                tokio::spawn(async move { owner.run("key", work).await })
            })
            .collect();
        let all = futures::future::join_all(callers);
        let ended = tokio::time::timeout(std::time::Duration::from_secs(30), all).await;
        assert!(ended.unwrap().iter().all(Result::is_err));
        assert!(owner.running.lock().is_empty());
    }

    #[tokio::test]
    async fn a_cancelled_caller_leaves_nothing_behind() {
        let owner = SingleFlight::<&str, ()>::default();
        {
            let waiting = owner.run("key", || futures::future::pending().boxed());
            futures::pin_mut!(waiting);
            assert!(futures::poll!(&mut waiting).is_pending());
        }
        assert!(owner.running.lock().is_empty());
        owner
            .run("key", || futures::future::ready(()).boxed())
            .await;
    }
}
