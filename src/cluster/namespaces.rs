//! Namespaces: annotations can set the mode of their pods, and rules can select them by label.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kube_runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    api::ApiClient,
    objects::{Namespace, annotations},
    watch::{Removed, Watched, watch_objects},
};

/// archaware's annotations of the namespaces that have some, by uid.
type KnownAnnotations = Arc<Mutex<HashMap<String, BTreeMap<String, String>>>>;

/// Forgets deleted namespaces: there may be thousands of short-lived namespaces, and a new one may
/// get the same name.
fn forget(known: KnownAnnotations) -> impl Fn(Removed<'_, Namespace>) + Send + 'static {
    move |removed| removed.forget_in(&mut known.lock())
}

/// How long to wait for a new namespace to arrive on the watch.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(1);

/// The watched namespaces. Cheap to clone.
#[derive(Clone)]
pub struct Namespaces {
    store: Arc<Mutex<Option<Store<Namespace>>>>,
    /// Counts namespaces that arrived on the watch.
    arrivals: watch::Sender<u64>,
    /// Counts changes of archaware's annotations.
    changes: watch::Sender<u64>,
    ready: watch::Sender<bool>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Self {
            store: Arc::default(),
            arrivals: watch::Sender::new(0),
            changes: watch::Sender::new(0),
            ready: watch::Sender::new(false),
        }
    }
}

impl Namespaces {
    /// Watches namespaces until `stop`.
    pub fn watch(
        &self,
        api: &ApiClient,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send + use<> {
        let same = |a: &Namespace, b: &Namespace| {
            a.metadata.annotations == b.metadata.annotations
                && a.metadata.labels == b.metadata.labels
        };
        // A namespace without archaware's annotations is equivalent to an unknown one.
        let known = KnownAnnotations::default();
        let Watched {
            store,
            changes,
            ready: mut synced,
        } = watch_objects(api, None, same, forget(known.clone()));
        *self.store.lock() = Some(store);
        let (arrivals, changed, ready) = (
            self.arrivals.clone(),
            self.changes.clone(),
            self.ready.clone(),
        );
        async move {
            let synced = async {
                if synced.wait_for(|synced| *synced).await.is_ok() {
                    ready.send_replace(true);
                }
            };
            let changes = changes.for_each(move |event| {
                if let Ok(namespace) = event {
                    let new = annotations(&namespace.metadata).clone();
                    let uid = namespace.metadata.uid.unwrap_or_default();
                    let mut known = known.lock();
                    let same = known.get(&uid).map_or(new.is_empty(), |old| *old == new);
                    if new.is_empty() {
                        known.remove(&uid)
                    } else {
                        known.insert(uid, new)
                    };
                    drop(known);
                    arrivals.send_modify(|count| *count += 1);
                    if !same {
                        changed.send_modify(|count| *count += 1);
                    }
                }
                std::future::ready(())
            });
            stop.run_until_cancelled(futures::future::join(synced, changes))
                .await;
        }
    }

    /// Whether the first list is complete.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Yields an item for every change of annotations.
    pub fn changes(&self) -> impl Stream<Item = ()> + Send + use<> {
        stream::unfold(self.changes.subscribe(), |mut changes| async move {
            changes.changed().await.ok()?;
            Some(((), changes))
        })
    }

    /// Finds a namespace. Waits up to a second if the watch has not delivered it yet, and then
    /// returns a namespace without labels and annotations.
    pub async fn find(&self, name: &str) -> Arc<Namespace> {
        let mut arrivals = self.arrivals.subscribe();
        let arrives = async {
            loop {
                if let Some(known) = self.get(name) {
                    return known;
                }
                if arrivals.changed().await.is_err() {
                    return Arc::default();
                }
            }
        };
        tokio::time::timeout(ARRIVAL_TIMEOUT, arrives)
            .await
            .unwrap_or_default()
    }

    /// A namespace from the watch.
    pub fn get(&self, name: &str) -> Option<Arc<Namespace>> {
        let store = self.store.lock().clone()?;
        store.get(&ObjectRef::new(name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::scripted_api::ScriptedApi;

    /// A namespace that is deleted and recreated with the same annotations counts as a change: pods
    /// that were evaluated while it was deleted did not see the annotations.
    #[tokio::test(start_paused = true)]
    async fn deleted_namespaces_are_forgotten() {
        const PATH: &str = "/api/v1/namespaces/a";
        let (api, namespaces) = (ScriptedApi::default(), Namespaces::default());
        let stop = CancellationToken::new();
        let watching = tokio::spawn(namespaces.watch(&api.client(), stop.clone()));
        let mut changes = namespaces.changes.subscribe();
        for uid in ["1", "2", "3"] {
            api.put(
                PATH,
                json!({ "metadata": { "name": "a", "uid": uid,
                    "annotations": { "archaware.dev/mode": "any" } } }),
            );
            let changed = tokio::time::timeout(Duration::from_mins(1), changes.changed());
            changed.await.expect("a change").unwrap();
            api.delete(PATH);
        }
        stop.cancel();
        watching.await.unwrap();
    }
}
