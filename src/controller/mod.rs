//! The reconcilers, side by side: pods and DaemonSets get the tolerations that their images allow,
//! nodes get their taint. Nodes come last: until what was there at the start has been looked at, a
//! taint would only keep pods waiting.

mod attempt;
mod attempts;
mod daemon_sets;
mod drive;
mod judge;
mod nodes;
mod pods;
mod startup;

use std::{num::NonZeroU16, sync::Arc, time::Duration};

use futures::FutureExt;
use kube::{Api, Client};
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        access::{self, AccessError, Permission},
        events::{self, Events},
        lease::{Elector, Leadership},
        namespaces::Namespaces,
        objects::{DaemonSet, Pod},
        watch::follow,
        writer::Writer,
    },
    config::Config,
    inspect::Inspector,
    metrics::Metrics,
};

use judge::Judge;

pub(crate) use nodes::describe as describe_node_problem;
pub(crate) use pods::selection as pod_selection;

/// Nodes that are tainted at once: a thousand are done in seconds, and each connection costs memory.
const NODES_AT_ONCE: NonZeroU16 = NonZeroU16::MIN.saturating_add(7);

/// Names of lists.
pub type Unread = Vec<&'static str>;

/// What is followed.
pub const LISTS: [&str; 4] = ["namespaces", "pods", "DaemonSets", "nodes"];

/// What `run` needs.
pub struct Run {
    /// The cluster.
    pub client: Client,
    /// Settings.
    pub config: Arc<Config>,
    /// Decides.
    pub inspector: Inspector,
    /// A view of all namespaces, which is followed from here.
    pub namespaces: Namespaces,
    /// archaware's own namespace.
    pub namespace: String,
    /// A candidate for the Lease, and whether it holds it.
    pub election: (Elector, Leadership),
    /// Where to count.
    pub metrics: Metrics,
    /// Which lists have not been read yet.
    pub unread: watch::Sender<Unread>,
}

/// Why the controller ended by itself.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The API server cannot be asked for permissions.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// Permissions are missing.
    #[error(
        "archaware lacks permissions; apply manifests/archaware.yaml again, and with admission on \
         manifests/webhook/permissions.yaml:\n{}",
        list(.0)
    )]
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

/// What every part is made from.
struct Parts {
    client: Client,
    config: Arc<Config>,
    inspector: Inspector,
    namespaces: Namespaces,
    leadership: Leadership,
    writer: Writer,
    events: Events,
    metrics: Metrics,
    stop: CancellationToken,
    /// The parts that have to run, each giving its name when it ends.
    tasks: JoinSet<&'static str>,
}

/// Runs until `stop`, then ends cleanly: no new work, patches under way finish, the Lease is released.
pub async fn run(run: Run, stop: CancellationToken) -> Result<(), RunError> {
    let Run {
        client,
        config,
        inspector,
        namespaces,
        namespace,
        election: (elector, leadership),
        metrics,
        unread,
    } = run;
    let lacking = access::lacking(&client, access::needed(&namespace, &config)).await?;
    if !lacking.is_empty() {
        return Err(RunError::Lacking(lacking));
    }
    if !access::lacking(&client, access::pull_secrets())
        .await?
        .is_empty()
    {
        tracing::info!("pull secrets can be read only where a RoleBinding allows it");
    }

    let (events, event_writer) = events::channel(client.clone(), metrics.clone());
    let writes = config.concurrency.writes.get().into();
    let mut parts = Parts {
        client: client.clone(),
        inspector,
        config,
        namespaces,
        writer: Writer::new(writes, &leadership, stop.clone(), metrics.clone()),
        leadership,
        events,
        metrics,
        stop: stop.clone(),
        tasks: JoinSet::new(),
    };
    // The elector outlives the rest: a patch under way must not outlive the Lease.
    let writers_done = CancellationToken::new();
    let mut elector = tokio::spawn(elector.run(writers_done.clone()));
    let mut event_writer = tokio::spawn(event_writer.run());

    parts.namespaces();
    let (pods, pods_ready) = parts.pods();
    let (daemon_sets, daemon_sets_ready) = parts.daemon_sets();
    let (open, nodes_ready) = parts.nodes();
    let namespaces_ready = parts.namespaces.ready();
    let lists = [namespaces_ready, pods_ready, daemon_sets_ready, nodes_ready];
    let lists = LISTS.into_iter().zip(lists).collect();
    let timeout = parts.config.startup.timeout;
    let startup = startup::Startup {
        pods,
        daemon_sets,
        lists,
        timeout,
    };
    let startup = startup.run(parts.leadership.leading.clone(), unread, open);
    parts.tasks.spawn({
        let stop = stop.clone();
        async move {
            stop.run_until_cancelled(startup).await;
            "the order at start"
        }
    });

    // None of them ends before it is told to.
    let ended = tokio::select! {
        ended = parts.tasks.join_next() => ended.unwrap_or(Ok("everything")),
        ended = &mut elector => ended.map(|()| "the elector"),
        ended = &mut event_writer => ended.map(|()| "the writer of events"),
    };
    let result = match ended {
        _ if stop.is_cancelled() => Ok(()),
        Ok(name) => Err(RunError::Ended(name)),
        Err(error) => Err(error.into()),
    };
    stop.cancel();
    while parts.tasks.join_next().await.is_some() {}
    writers_done.cancel();
    if !elector.is_finished() {
        let _ = elector.await;
    }
    // With the last handle gone the queue ends; what is in it is written, if that is quick.
    drop(parts);
    if !event_writer.is_finished() {
        let _ = tokio::time::timeout(Duration::from_secs(2), event_writer).await;
    }
    result
}

impl Parts {
    fn judge(&self) -> Judge {
        let (events, metrics) = (self.events.clone(), self.metrics.clone());
        Judge::new(
            self.inspector.clone(),
            self.namespaces.clone(),
            events,
            metrics,
        )
    }

    fn sinks(&self) -> (Writer, Events, Metrics) {
        (
            self.writer.clone(),
            self.events.clone(),
            self.metrics.clone(),
        )
    }

    fn settings(
        &self,
        name: &'static str,
        concurrency: NonZeroU16,
        listed: &watch::Receiver<bool>,
    ) -> drive::Settings {
        drive::Settings {
            name,
            concurrency: concurrency.get(),
            gate: self.leadership.leading.clone(),
            ready: self.namespaces.ready(),
            metrics: self.metrics.clone(),
            listed: listed.clone(),
            stop: self.stop.clone(),
        }
    }

    fn namespaces(&mut self) {
        let api = Api::all(self.client.clone());
        let following = self.namespaces.follow(api, self.stop.clone());
        self.tasks
            .spawn(following.map(|()| "the watch of namespaces"));
    }

    fn pods(&mut self) -> (startup::Backlog<Pod>, watch::Receiver<bool>) {
        let (fields, same) = pods::selection(&self.config);
        let list = follow(Api::all(self.client.clone()), fields, same);
        let (client, store) = (self.client.clone(), list.store.clone());
        let pods = pods::Pods::new(
            client,
            &self.config,
            self.judge(),
            self.sinks(),
            store.clone(),
        );
        pods.register_gauges(&self.leadership.leading);
        let backlog = startup::Backlog::new(store.clone(), pods.seen());
        let driven = drive::drive(
            self.settings("pods", self.config.concurrency.pods, &list.ready),
            (store, list.news),
            self.namespaces.changes(),
            move |pod, stop| pods.clone().reconcile(pod, stop),
        );
        self.tasks.spawn(driven.map(|()| "the controller of pods"));
        (backlog, list.ready)
    }

    fn daemon_sets(&mut self) -> (startup::Backlog<DaemonSet>, watch::Receiver<bool>) {
        let list = follow(Api::all(self.client.clone()), None, daemon_sets::same);
        let (client, store) = (self.client.clone(), list.store.clone());
        let (judge, sinks) = (self.judge(), self.sinks());
        let sets = daemon_sets::DaemonSets::new(client, &self.config, judge, sinks, store.clone());
        let backlog = startup::Backlog::new(store.clone(), sets.seen());
        let driven = drive::drive(
            self.settings("daemonsets", self.config.concurrency.pods, &list.ready),
            (store, list.news),
            self.namespaces.changes(),
            move |set, stop| sets.clone().reconcile(set, stop),
        );
        self.tasks
            .spawn(driven.map(|()| "the controller of DaemonSets"));
        (backlog, list.ready)
    }

    /// The sender opens the gate that keeps nodes from being tainted too early.
    fn nodes(&mut self) -> (watch::Sender<bool>, watch::Receiver<bool>) {
        let list = follow(Api::all(self.client.clone()), None, nodes::same);
        nodes::register_gauge(&self.metrics, list.store.clone());
        let (open, gate) = watch::channel(false);
        let (writer, events, _) = self.sinks();
        let nodes = nodes::Nodes::new(self.client.clone(), &self.config, writer, events);
        let settings = self.settings("nodes", NODES_AT_ONCE, &list.ready);
        let driven = drive::drive(
            drive::Settings { gate, ..settings },
            (list.store, list.news),
            futures::stream::pending(),
            move |node, _| nodes.clone().reconcile(node),
        );
        self.tasks.spawn(driven.map(|()| "the controller of nodes"));
        (open, list.ready)
    }
}
