//! The annotations of namespaces, which can set the mode of all their pods.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kube::Api;
use kube_runtime::reflector::{ObjectRef, Store};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::cluster::{
    objects::Namespace,
    patch::annotations,
    watch::{Followed, follow},
};

/// How long a pod waits for the watch to bring its brand-new namespace.
const LAG: Duration = Duration::from_secs(1);

/// A view of all namespaces. Cheap to clone.
#[derive(Clone)]
pub(super) struct Namespaces {
    store: Arc<Mutex<Option<Store<Namespace>>>>,
    /// Counts changes of annotations.
    version: watch::Sender<u64>,
    ready: watch::Sender<bool>,
}

impl Default for Namespaces {
    fn default() -> Self {
        Self {
            store: Arc::default(),
            version: watch::Sender::new(0),
            ready: watch::Sender::new(false),
        }
    }
}

impl Namespaces {
    /// Follows the cluster until `stop`.
    pub(super) fn follow(
        &self,
        api: Api<Namespace>,
        stop: CancellationToken,
    ) -> impl Future<Output = ()> + Send + use<> {
        let same = |a: &Namespace, b: &Namespace| a.metadata.annotations == b.metadata.annotations;
        let Followed {
            store,
            news,
            ready: mut synced,
        } = follow(api, None, same);
        *self.store.lock().unwrap_or_else(PoisonError::into_inner) = Some(store);
        let (version, ready) = (self.version.clone(), self.ready.clone());
        async move {
            let synced = async {
                if synced.wait_for(|synced| *synced).await.is_ok() {
                    ready.send_replace(true);
                }
            };
            let changes = news.for_each(|_| {
                version.send_modify(|version| *version += 1);
                std::future::ready(())
            });
            stop.run_until_cancelled(futures::future::join(synced, changes))
                .await;
        }
    }

    /// Resolves once the first list is complete.
    pub(super) fn ready(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut ready = self.ready.subscribe();
        async move {
            let _ = ready.wait_for(|ready| *ready).await;
        }
    }

    /// An item for every time that annotations have changed.
    pub(super) fn changes(&self) -> impl Stream<Item = ()> + Send + use<> {
        stream::unfold(self.version.subscribe(), |mut version| async move {
            version.changed().await.ok()?;
            Some(((), version))
        })
    }

    /// The annotations of a namespace. One that is younger than the watch is waited for, shortly.
    pub(super) async fn annotations(&self, name: &str) -> BTreeMap<String, String> {
        let of = |namespace: &Namespace| annotations(&namespace.metadata).clone();
        let mut version = self.version.subscribe();
        let arrives = async {
            loop {
                if let Some(known) = self.get(name) {
                    return of(&known);
                }
                if version.changed().await.is_err() {
                    return BTreeMap::new();
                }
            }
        };
        tokio::time::timeout(LAG, arrives).await.unwrap_or_default()
    }

    /// A namespace that the watch has brought.
    pub(super) fn get(&self, name: &str) -> Option<Arc<Namespace>> {
        let store = self
            .store
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()?;
        store.get(&ObjectRef::new(name))
    }
}
