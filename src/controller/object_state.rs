//! State per object, by uid. It is removed with its object.

use std::{collections::HashMap, sync::Arc};

use kube::Resource;
use kube_runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;

use crate::{
    cluster::{api::ApiObject, watch::Removed},
    plan::ObjectState,
};

/// The states of the objects of one kind. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct ObjectStates(Arc<Mutex<HashMap<String, ObjectState>>>, Refusals);

/// How often the patch of an object was refused in a row, by uid.
type Refusals = Arc<Mutex<HashMap<String, u32>>>;

impl ObjectStates {
    /// The state of an object.
    pub(super) fn get<K: Resource>(&self, object: &K) -> Option<ObjectState> {
        let states = self.0.lock();
        states.get(object.meta().uid.as_deref()?).cloned()
    }

    /// Whether nothing remains to be decided about an object; `None` before its first attempt.
    pub(super) fn is_decided<K: Resource>(&self, object: &K) -> Option<bool> {
        let uid = object.meta().uid.as_deref().unwrap_or_default();
        self.0.lock().get(uid).map(ObjectState::is_decided)
    }

    /// Stores or removes the state of an object. The state of an object that left the store is not
    /// kept: `removed` was already called for it.
    pub(super) fn set<K>(&self, object: &K, state: Option<ObjectState>, store: &Store<K>)
    where
        K: ApiObject + Clone + 'static,
    {
        let Some(uid) = &object.meta().uid else {
            return;
        };
        let mut states = self.0.lock();
        match state.filter(|_| is_stored(object, store)) {
            Some(state) => states.insert(uid.clone(), state),
            None => states.remove(uid),
        };
    }

    /// Counts a refused patch, and returns how many were refused in a row. The count of an object
    /// that left the store is not kept.
    pub(super) fn refused<K>(&self, object: &K, store: &Store<K>) -> u32
    where
        K: ApiObject + Clone + 'static,
    {
        let uid = object.meta().uid.as_deref().unwrap_or_default();
        let mut refusals = self.1.lock();
        let count = refusals
            .get(uid)
            .copied()
            .unwrap_or_default()
            .saturating_add(1);
        if is_stored(object, store) {
            refusals.insert(uid.to_owned(), count);
        }
        count
    }

    /// Resets the count of refused patches, because a patch was applied.
    pub(super) fn accepted<K: Resource>(&self, object: &K) {
        let uid = object.meta().uid.as_deref().unwrap_or_default();
        self.1.lock().remove(uid);
    }

    /// Removes the states of deleted objects.
    pub(super) fn removed<K: ApiObject>(&self, removed: &Removed<'_, K>) {
        removed.forget_in(&mut self.0.lock());
        removed.forget_in(&mut self.1.lock());
    }
}

/// Whether the store has this object, and not a newer object of the same name.
fn is_stored<K: ApiObject + Clone + 'static>(object: &K, store: &Store<K>) -> bool {
    let stored = store.get(&ObjectRef::from_obj(object));
    stored.is_some_and(|stored| stored.meta().uid == object.meta().uid)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, time::Instant};

    use kube_runtime::{reflector, watcher::Event};

    use super::*;
    use crate::cluster::objects::Pod;

    fn pod(name: &str, uid: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.name = Some(name.to_owned());
        pod.metadata.uid = Some(uid.to_owned());
        pod
    }

    #[test]
    fn a_state_is_removed_with_its_object() {
        let (store, mut writer) = reflector::store::<Pod>();
        let states = ObjectStates::default();
        let state = || Some(ObjectState::resume(None, 1, Instant::now()));
        let (a, b) = (pod("a", "1"), pod("b", "2"));
        for pod in [&a, &b] {
            writer.apply_watcher_event(&Event::Apply(pod.clone()));
            states.set(pod, state(), &store);
        }
        assert!(states.get(&a).is_some());
        assert_eq!(
            (states.refused(&a, &store), states.refused(&a, &store)),
            (1, 2)
        );
        states.accepted(&a);
        assert_eq!(states.refused(&a, &store), 1);
        states.removed(&Removed::One(&a));
        assert!(states.get(&a).is_none() && states.1.lock().is_empty());
        // A reconcile was in progress while its pod was deleted or replaced under the same name.
        writer.apply_watcher_event(&Event::Delete(a.clone()));
        states.set(&a, state(), &store);
        states.set(&pod("b", "3"), state(), &store);
        assert_eq!(states.0.lock().len(), 1);
        states.removed(&Removed::<Pod>::Relisted(&HashSet::new()));
        assert_eq!(states.0.lock().len(), 0);
    }
}
