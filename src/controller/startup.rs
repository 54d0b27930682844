//! The order at start: nodes are tainted only after every pod and DaemonSet that was there has had its
//! first attempt. A taint that came earlier would make all of them wait for us.

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kube::Resource;
use kube_runtime::reflector::Store;
use tokio::sync::watch;

use crate::cluster::objects::{DaemonSet, Pod};

use super::Unread;

/// Which objects have had their first attempt, by uid; `None` once nobody waits any more.
#[derive(Clone, Default)]
pub(super) struct Seen(Arc<Mutex<Option<HashSet<String>>>>);

/// The objects that were there at the start, and how far they have come.
pub(super) struct Backlog<K: Resource<DynamicType = ()> + Clone + 'static> {
    store: Store<K>,
    seen: Seen,
}

/// Everything that the start waits for.
pub(super) struct Startup {
    pub(super) pods: Backlog<Pod>,
    pub(super) daemon_sets: Backlog<DaemonSet>,
    /// Which first lists are complete.
    pub(super) lists: Vec<(&'static str, watch::Receiver<bool>)>,
    /// How long pods and DaemonSets may keep nodes from being tainted.
    pub(super) timeout: Duration,
}

/// How often the start looks how far it has come.
const TICK: Duration = Duration::from_millis(100);

impl Seen {
    /// Marks the first attempt at an object as done.
    pub(super) fn mark<K: Resource>(&self, object: &K) {
        if let (Some(uids), Some(uid)) = (self.lock().as_mut(), &object.meta().uid) {
            uids.insert(uid.clone());
        }
    }

    /// Nobody asks any more: what was remembered goes.
    fn close(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<HashSet<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K> Backlog<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
{
    pub(super) fn new(store: Store<K>, seen: Seen) -> Self {
        *seen.lock() = Some(HashSet::new());
        Self { store, seen }
    }

    fn uids(&self) -> HashSet<String> {
        self.store
            .state()
            .iter()
            .filter_map(|object| object.meta().uid.clone())
            .collect()
    }

    /// Waits until every object that is there now has had its first attempt or is gone; `left` says how
    /// many have not.
    async fn drain(&self, left: &AtomicUsize) {
        let mut waiting = self.uids();
        loop {
            if let Some(seen) = self.seen.lock().as_ref() {
                waiting.retain(|uid| !seen.contains(uid));
            }
            left.store(waiting.len(), Ordering::Relaxed);
            if waiting.is_empty() {
                return;
            }
            tokio::time::sleep(TICK).await;
            let live = self.uids();
            waiting.retain(|uid| live.contains(uid));
        }
    }
}

impl Startup {
    /// Goes through the order, then keeps the gate of the nodes open while this process leads.
    pub(super) async fn run(
        self,
        mut leadership: watch::Receiver<bool>,
        unread: watch::Sender<Unread>,
        open: watch::Sender<bool>,
    ) {
        let reading = self.lists.into_iter().map(|(name, mut list)| {
            let unread = &unread;
            async move {
                drop(list.wait_for(|ready| *ready).await.ok()?);
                unread.send_modify(|unread| unread.retain(|other| *other != name));
                Some(())
            }
        });
        let read = futures::future::join_all(reading).await;
        if read.contains(&None) {
            return;
        }
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        let started = Instant::now();
        let (pods, sets) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let both = futures::future::join(self.pods.drain(&pods), self.daemon_sets.drain(&sets));
        let in_time = tokio::time::timeout(self.timeout, both).await.is_ok();
        self.pods.seen.close();
        self.daemon_sets.seen.close();
        if in_time {
            let seconds = started.elapsed().as_secs_f64();
            tracing::info!(
                seconds,
                "pods and DaemonSets have been looked at; nodes are next"
            );
        } else {
            let (pods, daemon_sets) = (pods.into_inner(), sets.into_inner());
            tracing::warn!(
                pods,
                daemon_sets,
                "startup.timeout is over before these have been looked at; tainting nodes now"
            );
        }
        loop {
            open.send_replace(*leadership.borrow_and_update());
            if leadership.changed().await.is_err() {
                return;
            }
        }
    }
}
