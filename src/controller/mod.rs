//! The controllers of pods, DaemonSets and nodes. Pods and DaemonSets get the tolerations that
//! their images allow, nodes get their taint. At start nodes come last, because a taint would block
//! pods that have no decision yet.

mod advice;
mod bound_pods;
mod components;
mod daemon_sets;
mod durable;
mod initial;
mod misplaced;
mod nodes;
mod object_state;
mod permissions;
mod pods;
mod reconcile;
mod recreate;
mod run_controller;
mod startup;
mod webhook_use;

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        access::{self, Permission},
        api::{ApiClient, ApiError},
        events,
        lease::{Elector, Leadership},
        namespaces::Namespaces,
        writer::Writer,
    },
    config::Config,
    evaluate::Evaluator,
    metrics::Metrics,
    tasks,
};

use components::Components;
use reconcile::Outputs;

pub(crate) use advice::{node_pools, without_pull_secrets};
pub use durable::Durable;

/// Names of initial lists that are not complete.
pub type PendingSyncs = Vec<&'static str>;

/// The watched kinds.
pub const WATCHES: [&str; 4] = ["namespaces", "pods", "DaemonSets", "nodes"];

/// What the controllers need.
pub struct ControllerParts {
    /// The API server.
    pub api: ApiClient,
    /// The configuration.
    pub config: Arc<Config>,
    /// Evaluates pods and templates.
    pub evaluator: Evaluator,
    /// The namespaces; this module runs their watch.
    pub namespaces: Namespaces,
    /// archaware's own namespace.
    pub namespace: String,
    /// The elector and its result.
    pub election: (Elector, Leadership),
    /// What survives a restart; the elector stores it with the Lease.
    pub durable: Durable,
    /// Metrics to update.
    pub metrics: Metrics,
    /// Initial lists that are not complete.
    pub pending: watch::Sender<PendingSyncs>,
}

/// Why the controllers ended by themselves.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The permissions could not be checked.
    #[error("cannot check archaware's own permissions")]
    Access(#[from] ApiError),
    /// Permissions are missing.
    #[error(
        "archaware lacks permissions; apply the manifests or the chart of this version again, with the components that the configuration needs. Missing:\n{}",
        list(.0)
    )]
    Lacking(Vec<Permission>),
    /// A task ended that should run until `stop`.
    #[error("the {0} ended; the process cannot go on without it")]
    Ended(&'static str),
    /// A task panicked that should run until `stop`.
    #[error("a task panicked, which is a bug; its location is in the log")]
    Failed(#[from] tokio::task::JoinError),
}

fn list(permissions: &[Permission]) -> String {
    permissions
        .iter()
        .map(|lacking| format!("  {lacking}"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Runs until `stop`, then shuts down: starts no new work, finishes patches in progress, releases
/// the Lease.
///
/// # Errors
///
/// When permissions are missing or cannot be checked, or when a task ends by itself.
pub async fn run(run: ControllerParts, stop: CancellationToken) -> Result<(), RunError> {
    let ControllerParts {
        api,
        config,
        evaluator,
        namespaces,
        namespace,
        election: (elector, leadership),
        durable,
        metrics,
        pending,
    } = run;
    let lacking = access::missing(&api, permissions::needed(&namespace, &config)).await?;
    if !lacking.is_empty() {
        return Err(RunError::Lacking(lacking));
    }
    if let Some(consequence) = without_pull_secrets(&api).await? {
        tracing::info!("{consequence}");
    }

    let (events, event_writer) = events::channel(api.clone(), metrics.clone());
    let writes = config.concurrency.writes.get().into();
    let writer = Writer::new(
        api.clone(),
        writes,
        &leadership,
        stop.clone(),
        metrics.clone(),
    );
    let mut components = Components {
        api,
        evaluator,
        config,
        leadership,
        namespace,
        outputs: Outputs {
            writer,
            events,
            metrics,
            namespaces,
            durable,
        },
        admitted: webhook_use::AdmittedPods::default(),
        stop: stop.clone(),
        tasks: JoinSet::new(),
    };
    // The elector stops last, so that no patch is in progress after the Lease is released.
    let writers_done = CancellationToken::new();
    let mut elector = tasks::spawn("elector", elector.run(writers_done.clone()));
    let mut event_writer = tasks::spawn("event writer", event_writer.run());

    components.start(pending);

    // A task that ends before `stop` has failed.
    let ended = tokio::select! {
        ended = components.tasks.join_next() => ended.unwrap_or(Ok("last task")),
        ended = &mut elector => ended.map(|()| "elector"),
        ended = &mut event_writer => ended.map(|()| "event writer"),
    };
    let result = match ended {
        _ if stop.is_cancelled() => Ok(()),
        Ok(name) => Err(RunError::Ended(name)),
        Err(error) => Err(error.into()),
    };
    stop.cancel();
    while components.tasks.join_next().await.is_some() {}
    writers_done.cancel();
    if !elector.is_finished() {
        let _ = elector.await;
    }
    // Dropping the last sender closes the queue. Queued events are still written, within a limit.
    drop(components);
    if !event_writer.is_finished() {
        let _ = tokio::time::timeout(Duration::from_secs(2), event_writer).await;
    }
    result
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]
mod tests;
