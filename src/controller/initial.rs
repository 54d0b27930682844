//! Tracks which of the objects that exist when this process begins to lead have been attempted
//! once.

use std::{collections::HashSet, sync::Arc};

use kube::Resource;
use kube_runtime::reflector::Store;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cluster::{api::ApiObject, watch::Removed};

/// Uids of the initial objects of one kind. Cheap to clone.
#[derive(Clone)]
pub(super) struct InitialObjects {
    phase: Arc<Mutex<Phase>>,
    /// Number of objects that have not been attempted.
    left: watch::Sender<usize>,
}

/// The initial objects of a kind and their store.
pub(super) struct InitialOfKind<K: ApiObject + Clone + 'static> {
    pub(super) objects: InitialObjects,
    pub(super) store: Store<K>,
}

impl<K: ApiObject + Clone + 'static> InitialOfKind<K> {
    /// Waits until every object that is in the store now has been attempted or deleted.
    pub(super) async fn wait(&self) {
        self.objects.wait(&self.store).await;
    }
}

enum Phase {
    /// Uids that were attempted before the wait began.
    Before(HashSet<String>),
    /// Uids that are waited for.
    Waiting(HashSet<String>),
    /// Nothing is waited for any more.
    Over,
}

impl InitialObjects {
    pub(super) fn new() -> Self {
        Self {
            phase: Arc::new(Mutex::new(Phase::Before(HashSet::new()))),
            left: watch::Sender::new(0),
        }
    }

    /// Records a completed attempt at an object.
    pub(super) fn attempted<K: Resource>(&self, object: &K) {
        let Some(uid) = &object.meta().uid else {
            return;
        };
        self.update(|phase| match phase {
            Phase::Before(attempted) => {
                attempted.insert(uid.clone());
            }
            Phase::Waiting(left) => {
                left.remove(uid);
            }
            Phase::Over => {}
        });
    }

    /// Objects that were deleted are not waited for.
    pub(super) fn removed<K: Resource>(&self, removed: &Removed<'_, K>) {
        self.update(|phase| match (phase, removed) {
            (Phase::Waiting(left), Removed::One(object)) => {
                left.remove(object.meta().uid.as_deref().unwrap_or_default());
            }
            (Phase::Waiting(left), Removed::Relisted(uids)) => {
                left.retain(|uid| uids.contains(uid));
            }
            (Phase::Before(_) | Phase::Over, _) => {}
        });
    }

    /// Waits until every object that is in the store now has been attempted or deleted.
    pub(super) async fn wait<K: ApiObject + Clone + 'static>(&self, store: &Store<K>) {
        let mut is_left = self.left.subscribe();
        self.update(|phase| {
            // Under the lock, so that no attempt is missed.
            let uids = store
                .state()
                .into_iter()
                .filter_map(|object| object.meta().uid.clone());
            if let Phase::Before(attempted) = phase {
                let left = uids.filter(|uid| !attempted.contains(uid)).collect();
                *phase = Phase::Waiting(left);
            }
        });
        // The sender lives as long as `self`.
        let _ = is_left.wait_for(|left| *left == 0).await;
    }

    /// Ends the wait and returns the number of objects that were not attempted.
    pub(super) fn finish(&self) -> usize {
        let left = *self.left.borrow();
        *self.phase.lock() = Phase::Over;
        left
    }

    fn update(&self, change: impl FnOnce(&mut Phase)) {
        let mut phase = self.phase.lock();
        change(&mut phase);
        if let Phase::Waiting(left) = &*phase {
            let left = left.len();
            self.left
                .send_if_modified(|old| std::mem::replace(old, left) != left);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use kube_runtime::{reflector, watcher::Event};

    use super::*;
    use crate::cluster::objects::Pod;

    fn pod(name: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.uid = Some(name.to_owned());
        pod
    }

    #[test]
    fn the_start_waits_for_what_is_there_and_stays() {
        let (store, mut writer) = reflector::store::<Pod>();
        for name in ["early", "late", "deleted", "relisted"] {
            writer.apply_watcher_event(&Event::Apply(pod(name)));
        }
        let initial = InitialObjects::new();
        initial.attempted(&pod("early"));
        let mut waiting = Box::pin(initial.wait(&store));
        assert!(waiting.as_mut().now_or_never().is_none());
        initial.attempted(&pod("of a later watch event"));
        initial.removed(&Removed::One(&pod("deleted")));
        assert_eq!(*initial.left.borrow(), 2);
        let uids = HashSet::from(["early".to_owned(), "late".to_owned()]);
        initial.removed(&Removed::<Pod>::Relisted(&uids));
        assert!(waiting.as_mut().now_or_never().is_none());
        initial.attempted(&pod("late"));
        assert!(waiting.now_or_never().is_some());
        assert_eq!(initial.finish(), 0);
    }

    #[test]
    fn nothing_to_wait_for_is_no_wait() {
        let (store, _writer) = reflector::store::<Pod>();
        let initial = InitialObjects::new();
        assert!(initial.wait(&store).now_or_never().is_some());
    }
}
