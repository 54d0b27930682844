//! Runs one `kube_runtime::Controller` the way all of archaware's are run.

use std::{convert::Infallible, fmt::Debug, future::Future, sync::Arc};

use futures::{FutureExt, Stream, StreamExt, future::BoxFuture};
use kube::Resource;
use kube_runtime::{
    Controller,
    controller::{Action, Config, Error},
    reflector::{ObjectRef, Store},
    watcher,
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// How a controller is run.
pub(super) struct Settings {
    /// In logs and metrics.
    pub(super) name: &'static str,
    /// Reconciliations at once; never zero, which would mean no limit.
    pub(super) concurrency: u16,
    /// While false, nothing is reconciled. Replicas that do not lead follow the cluster all the same.
    pub(super) gate: watch::Receiver<bool>,
    /// What the first reconciliation waits for.
    pub(super) ready: BoxFuture<'static, ()>,
    /// Where to count.
    pub(super) metrics: Metrics,
    /// Ends the controller: nothing new is started, what is under way finishes.
    pub(super) stop: CancellationToken,
}

/// Reconciles every object of the stream, and all of them on each item of `again`, until told to stop.
pub(super) async fn drive<K, F, Fut>(
    settings: Settings,
    (store, news): (
        Store<K>,
        impl Stream<Item = watcher::Result<K>> + Send + 'static,
    ),
    again: impl Stream<Item = ()> + Send + 'static,
    reconcile: F,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: Fn(Arc<K>, CancellationToken) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Action> + Send + 'static,
{
    let Settings {
        name,
        concurrency,
        gate,
        ready,
        metrics,
        stop,
    } = settings;
    let ready = ready.shared();
    let known = store.clone();
    let token = stop.clone();
    let step = move |object: Arc<K>, _: Arc<()>| {
        let (reconcile, known, stop) = (reconcile.clone(), known.clone(), token.clone());
        let (mut gate, ready, metrics) = (gate.clone(), ready.clone(), metrics.clone());
        async move {
            let waited = !*gate.borrow() || ready.peek().is_none();
            if waited {
                let open = async {
                    ready.await;
                    gate.wait_for(|open| *open).await.is_ok()
                };
                if !stop.run_until_cancelled(open).await.unwrap_or(false) {
                    return Ok(Action::await_change());
                }
            }
            // What was waited for took time: the object may have changed or gone.
            let object = if waited {
                known.get(&ObjectRef::from_obj(&*object))
            } else {
                Some(object)
            };
            let Some(object) = object else {
                return Ok(Action::await_change());
            };
            let _counted = metrics.work(name);
            Ok::<_, Infallible>(reconcile(object, stop).await)
        }
    };
    Controller::for_stream(news, store)
        .with_config(Config::default().concurrency(concurrency))
        .reconcile_all_on(again)
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(step, |_, never, _| match *never {}, Arc::new(()))
        .for_each(|result| async move {
            match result {
                Ok(_) | Err(Error::ObjectNotFound(_)) => {}
                // The watch logs its own failures, and goes on.
                Err(error) => tracing::debug!(controller = name, %error, "reconciliation"),
            }
        })
        .await;
}
