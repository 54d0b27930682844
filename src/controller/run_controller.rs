//! Runs a `kube_runtime::Controller` with archaware's settings.

use std::{convert::Infallible, fmt::Debug, future::Future, sync::Arc};

use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use kube_runtime::{
    Controller,
    controller::{Action, Config, Error},
    reflector::ObjectRef,
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{api::ApiObject, watch::Watched},
    metrics::Metrics,
};

pub(super) struct ControllerSettings {
    /// Name in logs and metrics.
    pub(super) name: &'static str,
    /// Concurrent reconciles; never zero, which would mean no limit.
    pub(super) concurrency: u16,
    /// Nothing is reconciled while this is false: replicas that do not lead only watch.
    pub(super) is_active: watch::Receiver<bool>,
    /// Must be true before `is_active` is considered.
    pub(super) namespaces_listed: watch::Receiver<bool>,
    /// Metrics to update.
    pub(super) metrics: Metrics,
    /// Whether the initial list is complete. Until then kube's controller does not end by itself.
    pub(super) listed: watch::Receiver<bool>,
    /// Stops the controller: no new reconcile is started, those in progress finish.
    pub(super) stop: CancellationToken,
}

/// What causes reconciles besides changes of the objects.
pub(super) struct Triggers<K: ApiObject> {
    /// Each item causes a reconcile of all objects.
    pub(super) reconcile_all: BoxStream<'static, ()>,
    /// Each item causes a reconcile of this object.
    pub(super) reconcile_one: BoxStream<'static, ObjectRef<K>>,
}

/// Reconciles every object of the stream, and those of the triggers, until `stop`.
pub(super) async fn run_controller<K, F, Fut>(
    settings: ControllerSettings,
    watched: Watched<K>,
    triggers: Triggers<K>,
    reconcile: F,
) where
    K: ApiObject + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    F: Fn(Arc<K>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Action> + Send + 'static,
{
    let ControllerSettings {
        name,
        concurrency,
        is_active,
        namespaces_listed: ready,
        metrics,
        listed,
        stop,
    } = settings;
    let activated = activations(is_active.clone(), ready.clone());
    let step = move |object: Arc<K>, _: Arc<()>| {
        let (reconcile, metrics) = (reconcile.clone(), metrics.clone());
        let is_active = *is_active.borrow() && *ready.borrow();
        async move {
            // On activation every object in the store is reconciled, so nothing has to be queued
            // now.
            if !is_active {
                return Ok(Action::await_change());
            }
            let _counted = metrics.reconcile_started(name);
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
        .reconcile_all_on(stream::select(triggers.reconcile_all, activated))
        .reconcile_on(triggers.reconcile_one)
        .graceful_shutdown_on(stop.cancelled_owned())
        .run(step, |_, never, _| match *never {}, Arc::new(()))
        .for_each(|result| async move {
            match result {
                Ok(_) | Err(Error::ObjectNotFound(_)) => {}
                // The watch logs its own failures and continues.
                Err(error) => tracing::debug!(controller = name, %error, "reconciliation"),
            }
        });
    tokio::select! {
        () = controller => {}
        () = unlisted => {}
    }
}

/// Yields an item each time the controller becomes active, but none before `ready` is true.
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
