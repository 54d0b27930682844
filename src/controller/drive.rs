//! Runs one `kube_runtime::Controller` the way all of archaware's are run.

use std::{convert::Infallible, fmt::Debug, future::Future, sync::Arc};

use futures::{Stream, StreamExt, stream};
use kube::Resource;
use kube_runtime::{
    Controller,
    controller::{Action, Config, Error},
    reflector::Store,
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
    /// While false, nothing is reconciled: replicas that do not lead only follow the cluster.
    pub(super) gate: watch::Receiver<bool>,
    /// What has to be true before the gate counts.
    pub(super) ready: watch::Receiver<bool>,
    /// Where to count.
    pub(super) metrics: Metrics,
    /// Whether the first list is complete. Until then kube's controller cannot end by itself.
    pub(super) listed: watch::Receiver<bool>,
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
        listed,
        stop,
    } = settings;
    let (opened, token) = (opened(gate.clone(), ready.clone()), stop.clone());
    let step = move |object: Arc<K>, _: Arc<()>| {
        let (reconcile, stop, metrics) = (reconcile.clone(), token.clone(), metrics.clone());
        let open = *gate.borrow() && *ready.borrow();
        async move {
            // Nothing waits here: when the gate opens, everything in the store is looked at.
            if !open {
                return Ok(Action::await_change());
            }
            let _counted = metrics.work(name);
            Ok::<_, Infallible>(reconcile(object, stop).await)
        }
    };
    let unlisted = {
        let stop = stop.clone();
        async move {
            stop.cancelled().await;
            if *listed.borrow() {
                std::future::pending::<()>().await;
            }
        }
    };
    let controller = Controller::for_stream(news, store)
        .with_config(Config::default().concurrency(concurrency))
        .reconcile_all_on(stream::select(again, opened))
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(step, |_, never, _| match *never {}, Arc::new(()))
        .for_each(|result| async move {
            match result {
                Ok(_) | Err(Error::ObjectNotFound(_)) => {}
                // The watch logs its own failures, and goes on.
                Err(error) => tracing::debug!(controller = name, %error, "reconciliation"),
            }
        });
    tokio::select! {
        () = controller => {}
        () = unlisted => {}
    }
}

/// An item each time that the gate opens, the first one once everything is ready.
fn opened(
    gate: watch::Receiver<bool>,
    ready: watch::Receiver<bool>,
) -> impl Stream<Item = ()> + Send + 'static {
    stream::unfold(
        (gate, ready, false),
        |(mut gate, mut ready, was_open)| async move {
            drop(ready.wait_for(|ready| *ready).await.ok()?);
            if was_open {
                drop(gate.wait_for(|open| !*open).await.ok()?);
            }
            drop(gate.wait_for(|open| *open).await.ok()?);
            Some(((), (gate, ready, true)))
        },
    )
}
