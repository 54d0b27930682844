//! Runs one `kube_runtime::Controller` the way all of archaware's are run.

use std::{convert::Infallible, fmt::Debug, future::Future, sync::Arc};

use futures::{Stream, StreamExt, stream};
use kube_runtime::{
    Controller,
    controller::{Action, Config, Error},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{api::Kind, watch::Watched},
    metrics::Metrics,
};

/// How a controller is run.
pub(super) struct Settings {
    /// In logs and metrics.
    pub(super) name: &'static str,
    /// Reconciliations at once; never zero, which would mean no limit.
    pub(super) concurrency: u16,
    /// While false, nothing is reconciled: replicas that do not lead only follow the cluster.
    pub(super) is_active: watch::Receiver<bool>,
    /// What has to be true before `is_active` counts.
    pub(super) ready: watch::Receiver<bool>,
    /// Where to count.
    pub(super) metrics: Metrics,
    /// Whether the first list is complete. Until then kube's controller cannot end by itself.
    pub(super) listed: watch::Receiver<bool>,
    /// Ends the controller: nothing new is started, what is under way finishes.
    pub(super) stop: CancellationToken,
}

/// Reconciles every object of the stream, and all of them on each item of `again`, until told to stop.
pub(super) async fn run_controller<K, F, Fut>(
    settings: Settings,
    watched: Watched<K>,
    again: impl Stream<Item = ()> + Send + 'static,
    reconcile: F,
) where
    K: Kind + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: Fn(Arc<K>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Action> + Send + 'static,
{
    let Settings {
        name,
        concurrency,
        is_active,
        ready,
        metrics,
        listed,
        stop,
    } = settings;
    let activated = activations(is_active.clone(), ready.clone());
    let step = move |object: Arc<K>, _: Arc<()>| {
        let (reconcile, metrics) = (reconcile.clone(), metrics.clone());
        let is_active = *is_active.borrow() && *ready.borrow();
        async move {
            // Nothing waits here: on activation, everything in the store is looked at.
            if !is_active {
                return Ok(Action::await_change());
            }
            let _counted = metrics.work(name);
            Ok::<_, Infallible>(reconcile(object).await)
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
    let controller = Controller::for_stream(watched.changes, watched.store)
        .with_config(Config::default().concurrency(concurrency))
        .reconcile_all_on(stream::select(again, activated))
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

/// An item each time that the controller becomes active, the first one once everything is ready.
fn activations(
    is_active: watch::Receiver<bool>,
    ready: watch::Receiver<bool>,
) -> impl Stream<Item = ()> + Send + 'static {
    stream::unfold(
        (is_active, ready, false),
        |(mut is_active, mut ready, was_active)| async move {
            drop(ready.wait_for(|ready| *ready).await.ok()?);
            if was_active {
                drop(is_active.wait_for(|active| !*active).await.ok()?);
            }
            drop(is_active.wait_for(|active| *active).await.ok()?);
            Some(((), (is_active, ready, true)))
        },
    )
}
