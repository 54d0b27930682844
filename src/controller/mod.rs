//! The controllers of pods, DaemonSets and nodes. Pods and DaemonSets get the tolerations that their images allow,
//! nodes get their taint. At start nodes come last, because a taint would make pods wait that have not been decided
//! yet.

mod advice;
mod daemon_sets;
mod durable;
mod initial;
mod nodes;
mod object_state;
mod permissions;
mod pods;
mod reconcile;
mod recreate;
mod run_controller;
mod startup;

use std::{
    num::NonZeroU16,
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use futures::{FutureExt, Stream};
use kube::Resource;
use kube_runtime::reflector::Store;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        access::{self, Permission},
        api::{ApiClient, ApiError},
        events,
        lease::{Elector, Leadership},
        namespaces::Namespaces,
        objects::{DaemonSet, Node, Pod},
        watch::{Removed, Watched, watch_objects},
        writer::Writer,
    },
    config::Config,
    evaluate::Evaluator,
    metrics::Metrics,
};

use initial::{InitialObjects, InitialOfKind};
use object_state::ObjectStates;
use reconcile::{Outputs, ReconcileSteps, Reconciler};
use run_controller::{ControllerSettings, run_controller};

pub(crate) use advice::{node_pools, without_pull_secrets};
pub use durable::Durable;
pub(crate) use pods::selection as pod_selection;

/// Concurrent node reconciles. A thousand nodes take seconds, and each connection costs memory.
const CONCURRENT_NODES: NonZeroU16 = NonZeroU16::MIN.saturating_add(7);

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
        "archaware lacks permissions; apply manifests/archaware.yaml again, and the components that its configuration needs:\n{}",
        list(.0)
    )]
    Lacking(Vec<Permission>),
    /// A task ended that should run until `stop`.
    #[error("{0} ended; the process cannot go on without it")]
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

/// What the controllers are built from.
struct Components {
    api: ApiClient,
    config: Arc<Config>,
    evaluator: Evaluator,
    leadership: Leadership,
    /// archaware's own namespace.
    namespace: String,
    outputs: Outputs,
    /// When the newest pod was created that came through the webhook, in seconds since 1970.
    newest_admitted: Arc<AtomicI64>,
    stop: CancellationToken,
    /// Tasks that run until `stop`; each returns its name.
    tasks: JoinSet<&'static str>,
}

/// Runs until `stop`, then shuts down: starts no new work, finishes patches in progress, releases the Lease.
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
        newest_admitted: Arc::default(),
        stop: stop.clone(),
        tasks: JoinSet::new(),
    };
    // The elector stops last, so that no patch is in progress after the Lease is released.
    let writers_done = CancellationToken::new();
    let mut elector = tokio::spawn(elector.run(writers_done.clone()));
    let mut event_writer = tokio::spawn(event_writer.run());

    components.start(pending);

    // No task ends before `stop`.
    let ended = tokio::select! {
        ended = components.tasks.join_next() => ended.unwrap_or(Ok("everything")),
        ended = &mut elector => ended.map(|()| "the elector"),
        ended = &mut event_writer => ended.map(|()| "the event writer"),
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

impl Components {
    /// Starts all tasks: watches, one controller per kind, and the startup sequence.
    fn start(&mut self, pending: watch::Sender<PendingSyncs>) {
        let namespaces = &self.outputs.namespaces;
        let following = namespaces.watch(&self.api, self.stop.clone());
        let namespaces_ready = namespaces.ready();
        self.tasks
            .spawn(following.map(|()| "the watch of namespaces"));
        let (pods, pods_ready) = self.pods();
        let (daemon_sets, daemon_sets_ready) = self.daemon_sets();
        let (may_taint, nodes, nodes_ready) = self.nodes();
        let advice = advice::Advice {
            api: self.api.clone(),
            config: self.config.clone(),
            nodes,
            pods: pods.store.clone(),
            lists: vec![pods_ready.clone(), nodes_ready.clone()],
        };
        let advice = advice.log(self.leadership.leading.clone());
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            stop.run_until_cancelled(advice).await;
            stop.cancelled().await;
            "the advice"
        });
        self.recreation(pods.store.clone());
        let lists = [namespaces_ready, pods_ready, daemon_sets_ready, nodes_ready];
        let startup = startup::Startup {
            pods,
            daemon_sets,
            lists: WATCHES.into_iter().zip(lists).collect(),
            timeout: self.config.startup.timeout,
        };
        let startup = startup.run(self.leadership.leading.clone(), pending, may_taint);
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            stop.run_until_cancelled(startup).await;
            "the startup sequence"
        });
    }

    /// Starts the eviction of pods without affinity, if that is configured.
    fn recreation(&mut self, pods: Store<Pod>) {
        if !self.config.affinity.recreate_pods {
            return;
        }
        let recreation = recreate::Recreation {
            api: self.api.clone(),
            evaluator: self.evaluator.clone(),
            namespaces: self.outputs.namespaces.clone(),
            own_namespace: self.namespace.clone(),
            events: self.outputs.events.clone(),
            metrics: self.outputs.metrics.clone(),
            pods,
            newest_admitted: self.newest_admitted.clone(),
        };
        let recreation = recreation.run(self.leadership.leading.clone());
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            stop.run_until_cancelled(recreation).await;
            "the eviction of pods without affinity"
        });
    }

    fn pods(&mut self) -> (InitialOfKind<Pod>, watch::Receiver<bool>) {
        let (fields, same) = pods::selection(&self.config);
        let (states, initial) = (ObjectStates::default(), InitialObjects::new());
        let forget = self.forget(pods::PodSteps::NAME, &states, Some(&initial));
        let watched = watch_objects(&self.api, fields, same, forget);
        let leading = self.leadership.leading.clone();
        let (store, metrics) = (watched.store.clone(), &self.outputs.metrics);
        pods::register_gauges(metrics, store.clone(), states.clone(), leading.clone());
        let kind = pods::PodSteps {
            evaluator: self.evaluator.clone(),
            namespaces: self.outputs.namespaces.clone(),
            failure: (&self.config.resolution.failure).into(),
            metrics: metrics.clone(),
            newest_admitted: self.newest_admitted.clone(),
        };
        let reconciler = self.reconciler(kind, store.clone(), states, Some(initial.clone()));
        let (again, ready) = (self.outputs.namespaces.changes(), watched.ready.clone());
        let concurrency = self.config.concurrency.pods;
        let settings = self.settings(pods::PodSteps::NAME, concurrency, leading, &ready);
        self.spawn(
            settings,
            watched,
            again,
            reconciler,
            "the controller of pods",
        );
        (
            InitialOfKind {
                objects: initial,
                store,
            },
            ready,
        )
    }

    fn daemon_sets(&mut self) -> (InitialOfKind<DaemonSet>, watch::Receiver<bool>) {
        let (states, initial) = (ObjectStates::default(), InitialObjects::new());
        let forget = self.forget(daemon_sets::DaemonSetSteps::NAME, &states, Some(&initial));
        let watched = watch_objects(&self.api, None, daemon_sets::same, forget);
        let kind = daemon_sets::DaemonSetSteps {
            evaluator: self.evaluator.clone(),
            namespaces: self.outputs.namespaces.clone(),
            failure: (&self.config.resolution.failure).into(),
        };
        let store = watched.store.clone();
        let reconciler = self.reconciler(kind, store.clone(), states, Some(initial.clone()));
        let (again, ready) = (self.outputs.namespaces.changes(), watched.ready.clone());
        let (concurrency, leading) = (
            self.config.concurrency.pods,
            self.leadership.leading.clone(),
        );
        let settings = self.settings(
            daemon_sets::DaemonSetSteps::NAME,
            concurrency,
            leading,
            &ready,
        );
        let name = "the controller of DaemonSets";
        self.spawn(settings, watched, again, reconciler, name);
        (
            InitialOfKind {
                objects: initial,
                store,
            },
            ready,
        )
    }

    /// Starts the node controller. The returned sender enables it.
    fn nodes(&mut self) -> (watch::Sender<bool>, Store<Node>, watch::Receiver<bool>) {
        let states = ObjectStates::default();
        let forget = self.forget(nodes::NodeSteps::NAME, &states, None);
        let watched = watch_objects(&self.api, None, nodes::same, forget);
        nodes::register_gauge(&self.outputs.metrics, watched.store.clone());
        let kind = nodes::NodeSteps {
            policy: (&*self.config).into(),
            keys: self.evaluator.keys.clone(),
        };
        let reconciler = self.reconciler(kind, watched.store.clone(), states, None);
        let (may_taint, is_active) = watch::channel(false);
        let (store, ready) = (watched.store.clone(), watched.ready.clone());
        let settings = self.settings(nodes::NodeSteps::NAME, CONCURRENT_NODES, is_active, &ready);
        let again = futures::stream::pending();
        self.spawn(
            settings,
            watched,
            again,
            reconciler,
            "the controller of nodes",
        );
        (may_taint, store, ready)
    }

    /// Removes what is kept about deleted objects.
    fn forget<K: Resource<DynamicType = ()> + Clone + 'static>(
        &self,
        controller: &'static str,
        states: &ObjectStates,
        initial: Option<&InitialObjects>,
    ) -> impl Fn(Removed<'_, K>) + Send + use<K> {
        let (states, initial) = (states.clone(), initial.cloned());
        let durable = self.outputs.durable.clone();
        move |removed| {
            states.removed(&removed);
            durable.removed(controller, &removed);
            if let Some(initial) = &initial {
                initial.removed(&removed);
            }
        }
    }

    fn reconciler<R: ReconcileSteps>(
        &self,
        kind: R,
        store: Store<R::Object>,
        states: ObjectStates,
        initial: Option<InitialObjects>,
    ) -> Arc<Reconciler<R>> {
        Arc::new(Reconciler {
            steps: kind,
            outputs: self.outputs.clone(),
            store,
            states,
            initial,
        })
    }

    fn settings(
        &self,
        name: &'static str,
        concurrency: NonZeroU16,
        is_active: watch::Receiver<bool>,
        listed: &watch::Receiver<bool>,
    ) -> ControllerSettings {
        ControllerSettings {
            name,
            concurrency: concurrency.get(),
            is_active,
            namespaces_listed: self.outputs.namespaces.ready(),
            metrics: self.outputs.metrics.clone(),
            listed: listed.clone(),
            stop: self.stop.clone(),
        }
    }

    /// Spawns the controller of one kind as a task of this name.
    fn spawn<R: ReconcileSteps>(
        &mut self,
        settings: ControllerSettings,
        watched: Watched<R::Object>,
        again: impl Stream<Item = ()> + Send + 'static,
        reconciler: Arc<Reconciler<R>>,
        name: &'static str,
    ) {
        let stop = self.stop.clone();
        let controller = run_controller(settings, watched, again, move |object| {
            reconciler.clone().reconcile(object, stop.clone())
        });
        self.tasks.spawn(controller.map(move |()| name));
    }
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
