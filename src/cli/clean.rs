//! `archaware clean`: removes what archaware added to the cluster, and nothing else.

mod installation;
mod lease;
mod objects;
#[cfg(test)]
mod tests;
mod verify;

use std::{collections::BTreeSet, num::NonZeroU16, sync::Arc, time::Duration};

use anyhow::{Context, anyhow};
use clap::Args;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{NAME, api::ApiClient, evictor::Evictor, name::NamespacedName, writer::Writer},
    evaluate::KnownKeys,
    metrics::Metrics,
};

use lease::{CleanLease, acquire};

use super::{CommandStatus, Global, output, progress::Progress};

/// Concurrent patches.
const CONCURRENCY: usize = 16;
/// Time after the deletion of the webhook configuration in which API servers may still call the
/// webhook, and pod creations may still be in progress.
const IN_FLIGHT: Duration = Duration::from_secs(5);
/// How long to wait after the release of the Lease, so that a running replica can take it before
/// the result is verified.
const SETTLE: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct CleanCommand {
    /// Print what would be removed, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Scale archaware's Deployment to 0 before removing anything. In a pod of archaware's
    /// namespace, clean always does this, but as its last step
    #[arg(long)]
    stop_controller: bool,
    /// Evict the pods that carry a decision of archaware and have a controller that recreates them
    #[arg(long)]
    recreate_pods: bool,
}

/// The installation that is removed.
#[derive(Clone, Debug)]
pub(super) struct Installation {
    /// archaware's namespace.
    namespace: String,
    /// Whether this process runs in that namespace, so that stopping the Deployment may end it too.
    is_inside: bool,
    /// The keys of its configurations, as far as they are known.
    keys: KnownKeys,
    /// The limit of evictions (`concurrency.evictionsPerMinute`).
    evictions_per_minute: NonZeroU16,
}

/// One change, for the report.
struct CleanedObject {
    what: String,
    outcome: Result<(), String>,
}

struct Session {
    api: ApiClient,
    writer: Writer,
    evictor: Arc<Evictor>,
    namespace: String,
    keys: KnownKeys,
    dry_run: bool,
    progress: Progress,
    done: usize,
    remaining: Vec<String>,
    /// Kinds and names of objects where a change failed.
    failed: BTreeSet<(String, NamespacedName)>,
    /// Whether an object still has a record of archaware. The next run needs the Lease, because the
    /// Lease stores the keys of such records.
    is_record_left: bool,
    /// When the webhook configuration was removed, if it existed.
    unregistered: Option<Instant>,
}

/// The result of `archaware clean`.
#[derive(Debug)]
enum CleanResult {
    /// Nothing was done: archaware runs.
    Refused,
    /// The command has ended. `remaining`: the objects that were not cleaned, or came back.
    Cleaned { remaining: Vec<String> },
}

impl CleanResult {
    fn status(&self) -> CommandStatus {
        match self {
            Self::Refused => CommandStatus::Refused,
            Self::Cleaned { remaining } if remaining.is_empty() => CommandStatus::Done,
            Self::Cleaned { .. } => CommandStatus::Failed,
        }
    }
}

impl CleanCommand {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<CommandStatus> {
        let config = global.load_config()?;
        let metrics = Metrics::default();
        let api = global.reachable_api(&metrics).await?;
        let installation = Installation {
            is_inside: global.is_in_own_pod(&api),
            namespace: global.namespace(),
            keys: KnownKeys::new(&config),
            evictions_per_minute: config.concurrency.evictions_per_minute,
        };
        let outcome = self.run(api, installation, metrics).await?;
        Ok(outcome.status())
    }

    async fn run(
        self,
        api: ApiClient,
        installation: Installation,
        metrics: Metrics,
    ) -> anyhow::Result<CleanResult> {
        let Some(lease) = acquire(self, &api, &installation, &metrics).await? else {
            return Ok(CleanResult::Refused);
        };
        let stop = CancellationToken::new();
        let evictor = Evictor::new(
            api.clone(),
            &lease.leadership,
            installation.evictions_per_minute,
            metrics.evictions.clone(),
            None,
        );
        let mut session = Session {
            evictor: Arc::new(evictor),
            writer: Writer::new(api.clone(), CONCURRENCY, &lease.leadership, stop, metrics),
            api,
            namespace: installation.namespace,
            keys: installation.keys,
            dry_run: self.dry_run,
            progress: Progress::new(),
            done: 0,
            remaining: Vec::new(),
            failed: BTreeSet::new(),
            is_record_left: false,
            unregistered: None,
        };
        let mut cleaned = tokio::select! {
            cleaned = session.clean_objects(self.recreate_pods) => cleaned,
            () = lease.lost() => Err(anyhow!(
                "another process took the Lease: archaware runs again; run clean --stop-controller"
            )),
        };
        if lease.stops_own_pod {
            return session.end_with_own_pod(lease, cleaned).await;
        }
        let (was_there, is_held) = (lease.was_there, lease.is_held());
        // Release the Lease also after an error: the next attempt need not wait until it expires.
        lease.release().await;
        if cleaned.is_ok() {
            session.remove_secret().await;
            if is_held {
                // Give a waiting replica time to take the Lease: it tries every second.
                tokio::time::sleep(SETTLE).await;
            }
            cleaned = session.verify_again().await;
        }
        if cleaned.is_ok() {
            cleaned = session.find_replicas().await;
        }
        if cleaned.is_ok() {
            session.remove_lease(was_there).await;
        }
        let outcome = session.summary();
        cleaned.map(|()| outcome)
    }
}

impl Session {
    async fn clean_objects(&mut self, recreate_pods: bool) -> anyhow::Result<()> {
        // First, because the webhook would restore the objects that are removed below.
        self.remove_configuration().await;
        self.remove_gates().await.context("cannot list pods")?;
        self.untaint_nodes().await.context("cannot list nodes")?;
        // The API server may still call the webhook for updates of DaemonSets, and the webhook
        // would undo them.
        self.wait_until_not_asked().await;
        self.restore_templates()
            .await
            .context("cannot list DaemonSets")?;
        if recreate_pods {
            self.evict_pods().await.context("cannot list pods")?;
        }
        Ok(())
    }

    /// Waits until no API server asks the webhook any more.
    async fn wait_until_not_asked(&self) {
        if let Some(since) = self.unregistered {
            tokio::time::sleep(IN_FLIGHT.saturating_sub(since.elapsed())).await;
        }
    }

    async fn verify_again(&mut self) -> anyhow::Result<()> {
        if self.dry_run {
            return Ok(());
        }
        self.verify().await.context("cannot verify the result")
    }

    /// Stops the Deployment that this process is part of. Does not release the Lease: without the
    /// Lease, replicas that still run cannot restore the removed objects.
    async fn end_with_own_pod(
        mut self,
        lease: CleanLease,
        mut cleaned: anyhow::Result<()>,
    ) -> anyhow::Result<CleanResult> {
        if cleaned.is_ok() {
            cleaned = self.verify_again().await;
        }
        if cleaned.is_err() || !self.remaining.is_empty() {
            lease.release().await;
            let outcome = self.summary();
            eprintln!("archaware goes on running; run clean again");
            return cleaned.map(|()| outcome);
        }
        self.remove_secret().await;
        let name = NamespacedName::new(&self.namespace, NAME);
        let api = self.api.clone();
        lease
            .keep(&api, &self.namespace)
            .await
            .context("cannot keep the Lease until archaware has stopped")?;
        let outcome = self.summary();
        let scaled = api.scale(&name, 0, false).await;
        scaled.with_context(|| format!("cannot scale Deployment {name} to 0"))?;
        output::print_line(&format!(
            "Deployment {name} stops, and with it this pod. Then remove the rest:\n\n    \
             kubectl delete -f manifests/archaware.yaml"
        ));
        Ok(outcome)
    }

    fn count(&mut self, item: CleanedObject) {
        match item.outcome {
            Ok(()) => self.done += 1,
            Err(why) => self.remaining.push(format!("{} ({why})", item.what)),
        }
    }

    fn summary(self) -> CleanResult {
        self.progress.finish();
        let objects = if self.done == 1 { "object" } else { "objects" };
        output::print_line(
            &match (self.dry_run, self.done, self.remaining.is_empty()) {
                (_, 0, true) => "Nothing of archaware is left.".to_owned(),
                (true, ..) => format!("Would clean {} {objects}; nothing was changed.", self.done),
                (false, ..) => format!("Cleaned {} {objects}.", self.done),
            },
        );
        if !self.remaining.is_empty() {
            output::print_line(&format!("{} remain:", self.remaining.len()));
        }
        for item in &self.remaining {
            output::print_line(&format!("  {item}"));
        }
        CleanResult::Cleaned {
            remaining: self.remaining,
        }
    }
}
