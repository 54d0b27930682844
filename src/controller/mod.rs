//! The reconcilers, side by side: pods and DaemonSets get the tolerations that their images allow,
//! nodes get their taint. Nodes come last: until what was there at the start has been looked at, a
//! taint would only keep pods waiting.

mod attempts;
mod daemon_sets;
mod drive;
pub mod inspect;
mod judge;
mod namespaces;
mod nodes;
mod pods;
mod startup;

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use kube::{Api, Client};
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        access::{self, AccessError, Permission},
        events,
        lease::Elector,
        watch::follow,
        writer::Writer,
    },
    config::{Config, DaemonSets},
    image::{Resolver, credentials::Keyring},
    metrics::Metrics,
    placement::pod::Policy,
};

use inspect::Inspector;
use judge::Judge;
use namespaces::Namespaces;

pub(crate) use daemon_sets::{plan as plan_daemon_set, record as daemon_set_record};
pub(crate) use nodes::{describe as describe_node_problem, view as node_view};
pub(crate) use pods::selection as pod_selection;

/// What `run` needs.
pub struct Run {
    /// The cluster.
    pub client: Client,
    /// Settings.
    pub config: Arc<Config>,
    /// Images.
    pub resolver: Resolver,
    /// Credentials for every pod's images.
    pub keyring: Arc<Keyring>,
    /// archaware's own namespace.
    pub namespace: String,
    /// Name of this process on the Lease.
    pub identity: String,
    /// Where to count.
    pub metrics: Metrics,
    /// Whether every list has been read once.
    pub synced: watch::Sender<bool>,
}

/// Why the controller ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The API server cannot be asked for permissions.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Permissions are missing.
    #[error("archaware lacks permissions, apply its ClusterRole again:\n{}", list(.0))]
    Lacking(Vec<Permission>),
    /// A part that has to run ended.
    #[error("{0} ended; the process cannot go on without it")]
    Ended(&'static str),
    /// A part that has to run panicked.
    #[error("a task failed")]
    Failed(#[from] tokio::task::JoinError),
}

fn list(permissions: &[Permission]) -> String {
    permissions
        .iter()
        .map(|lacking| format!("  {lacking}"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Runs until `stop`, then ends cleanly: no new work, patches under way finish, the Lease is released.
pub async fn run(run: Run, stop: CancellationToken) -> Result<(), RunError> {
    let Run {
        client,
        config,
        resolver,
        keyring,
        namespace,
        identity,
        metrics,
        synced,
    } = run;
    let manage = config.daemon_sets == DaemonSets::Manage;
    let lacking = access::lacking(&client, access::needed(&namespace, manage)).await?;
    if !lacking.is_empty() {
        return Err(RunError::Lacking(lacking));
    }

    let (elector, leadership) = Elector::new(client.clone(), &namespace, identity, metrics.clone());
    let writer = Writer::new(
        config.concurrency.writes.get().into(),
        leadership.clone(),
        metrics.clone(),
    );
    let (events, event_writer) = events::channel(client.clone(), metrics.clone());
    let policy = Arc::new(Policy::from(&*config));
    let namespaces = Namespaces::default();
    let inspector = Inspector {
        resolver,
        keyring,
        policy,
        config: config.clone(),
    };
    let judge = || {
        Judge::new(
            inspector.clone(),
            namespaces.clone(),
            events.clone(),
            metrics.clone(),
        )
    };
    let sinks = || (writer.clone(), events.clone(), metrics.clone());

    // The elector outlives the rest: a patch under way must not outlive the Lease.
    let writers_done = CancellationToken::new();
    let elector = tokio::spawn(elector.run(writers_done.clone()));
    let event_writer = tokio::spawn(event_writer.run());

    let mut tasks = JoinSet::new();
    let part = |name: &'static str| move |()| name;
    let following = namespaces.follow(Api::all(client.clone()), stop.clone());
    tasks.spawn(following.map(part("the watch of namespaces")));

    let settings = |name, concurrency| drive::Settings {
        name,
        concurrency,
        gate: leadership.clone(),
        ready: namespaces.ready().boxed(),
    };
    let (fields, same) = pods::selection(&config);
    let pod_list = follow(Api::all(client.clone()), fields, same);
    let pod_store = pod_list.store.clone();
    let pods = pods::Pods::new(client.clone(), &config, judge(), sinks(), pod_store.clone());
    let pods_seen = pods.seen();
    let driven = drive::drive(
        settings("pods", config.concurrency.pods.get()),
        (pod_store.clone(), pod_list.news),
        namespaces.changes(),
        move |pod, stop| pods.clone().reconcile(pod, stop),
        metrics.clone(),
        stop.clone(),
    );
    tasks.spawn(driven.map(part("the controller of pods")));

    let set_list = follow(Api::all(client.clone()), None, daemon_sets::same);
    let set_store = set_list.store.clone();
    let sets =
        daemon_sets::DaemonSets::new(client.clone(), manage, judge(), sinks(), set_store.clone());
    let sets_seen = sets.seen();
    let driven = drive::drive(
        settings("daemonsets", config.concurrency.writes.get()),
        (set_store.clone(), set_list.news),
        namespaces.changes(),
        move |set, stop| sets.clone().reconcile(set, stop),
        metrics.clone(),
        stop.clone(),
    );
    tasks.spawn(driven.map(part("the controller of DaemonSets")));

    let node_list = follow(Api::all(client.clone()), None, nodes::same);
    nodes::register_gauge(&metrics, node_list.store.clone());
    startup::register_gauge(&metrics, pod_store.clone());
    let (open, gate) = watch::channel(false);
    let nodes = nodes::Nodes::new(client, &config, writer.clone(), events.clone());
    let driven = drive::drive(
        drive::Settings {
            gate,
            ..settings("nodes", config.concurrency.writes.get())
        },
        (node_list.store.clone(), node_list.news),
        futures::stream::pending(),
        move |node, _| nodes.clone().reconcile(node),
        metrics.clone(),
        stop.clone(),
    );
    tasks.spawn(driven.map(part("the controller of nodes")));

    let startup = startup::Startup {
        pods: startup::Backlog::new(pod_store, pods_seen),
        daemon_sets: startup::Backlog::new(set_store, sets_seen),
        lists: vec![pod_list.ready, set_list.ready, node_list.ready],
        timeout: config.startup.timeout,
    };
    let starting = tokio::spawn({
        let stop = stop.clone();
        async move {
            stop.run_until_cancelled(startup.run(leadership, synced, open))
                .await
        }
    });

    let ended = tasks.join_next().await;
    let result = match ended {
        _ if stop.is_cancelled() => Ok(()),
        Some(Ok(name)) => Err(RunError::Ended(name)),
        Some(Err(error)) => Err(error.into()),
        None => Ok(()),
    };
    stop.cancel();
    while tasks.join_next().await.is_some() {}
    let _ = starting.await;
    writers_done.cancel();
    let _ = elector.await;
    // With the last handle gone the queue ends; what is in it is written, if that is quick.
    drop(events);
    let _ = tokio::time::timeout(Duration::from_secs(2), event_writer).await;
    result
}
