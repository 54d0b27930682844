//! The order at start: nodes are tainted only after every pod and DaemonSet that was there has had its
//! first attempt. A taint that came earlier would make all of them wait for us.

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kube::Resource;
use kube_runtime::reflector::Store;
use tokio::sync::{Notify, watch};

use crate::{
    cluster::objects::{DaemonSet, Pod},
    metrics::Metrics,
};

/// Which objects have had their first attempt. Forgotten once the start is over.
#[derive(Clone, Default)]
pub(super) struct Seen(Arc<SeenInner>);

#[derive(Default)]
struct SeenInner {
    /// `None` once nobody waits any more.
    uids: Mutex<Option<HashSet<String>>>,
    news: Notify,
}

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
    pub(super) lists: Vec<watch::Receiver<bool>>,
    /// How long pods and DaemonSets may keep nodes from being tainted.
    pub(super) timeout: Duration,
}

/// How often objects that went away without an attempt are looked for.
const TICK: Duration = Duration::from_millis(100);

impl Seen {
    pub(super) fn mark_uid(&self, uid: &str) {
        let mut uids = self.0.uids.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(uids) = uids.as_mut() {
            uids.insert(uid.to_owned());
            self.0.news.notify_one();
        }
    }

    fn contains(&self, uid: &str) -> bool {
        let uids = self.0.uids.lock().unwrap_or_else(PoisonError::into_inner);
        uids.as_ref().is_none_or(|uids| uids.contains(uid))
    }

    /// Starts to remember.
    fn watch(&self) {
        let mut uids = self.0.uids.lock().unwrap_or_else(PoisonError::into_inner);
        uids.get_or_insert_default();
    }

    /// Nobody asks any more: what was remembered goes.
    fn close(&self) {
        *self.0.uids.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl<K> Backlog<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
{
    pub(super) fn new(store: Store<K>, seen: Seen) -> Self {
        seen.watch();
        Self { store, seen }
    }

    /// Once the first list is complete: waits until every object of it has had its first attempt or is gone; leaves in
    /// `left` those that have not.
    async fn drain(&self, left: &Mutex<HashSet<String>>) {
        let uids = || -> HashSet<String> {
            self.store
                .state()
                .iter()
                .filter_map(|object| object.meta().uid.clone())
                .collect()
        };
        let keep = |uids: HashSet<String>| {
            *left.lock().unwrap_or_else(PoisonError::into_inner) = uids;
        };
        let mut waiting = uids();
        loop {
            waiting.retain(|uid| !self.seen.contains(uid));
            keep(waiting.clone());
            if waiting.is_empty() {
                return;
            }
            let _ = tokio::time::timeout(TICK, self.seen.0.news.notified()).await;
            let live = uids();
            waiting.retain(|uid| live.contains(uid));
        }
    }
}

impl Startup {
    /// Goes through the order, then opens the gate of the nodes.
    pub(super) async fn run(
        self,
        mut leadership: watch::Receiver<bool>,
        synced: watch::Sender<bool>,
        open: watch::Sender<bool>,
    ) {
        for mut list in self.lists {
            if list.wait_for(|ready| *ready).await.is_err() {
                return;
            }
        }
        synced.send_replace(true);
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        let started = Instant::now();
        let (pods, sets) = (Mutex::default(), Mutex::default());
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
            let left = |of: Mutex<HashSet<String>>| {
                of.into_inner()
                    .unwrap_or_else(PoisonError::into_inner)
                    .len()
            };
            let (pods, daemon_sets) = (left(pods), left(sets));
            tracing::warn!(
                pods,
                daemon_sets,
                "startup.timeout is over before these have been looked at; tainting nodes now"
            );
        }
        open.send_replace(true);
        // The gate stays open while this task lives.
        std::future::pending::<()>().await;
    }
}

/// Pods in the watch: with NoSchedule those that are not bound yet.
pub(super) fn register_gauge(metrics: &Metrics, store: Store<Pod>) {
    metrics.register_gauges(
        "pods_watched",
        "Pods in the selection of the watch",
        move || vec![([], i64::try_from(store.len()).unwrap_or(i64::MAX))],
    );
}
