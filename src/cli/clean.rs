//! `archaware clean`: removes what archaware added to the cluster, and nothing else.

mod installation;
mod lease;
#[cfg(test)]
mod tests;

use std::time::Duration;

use anyhow::Context;
use clap::Args;
use futures::{StreamExt, TryStreamExt};
use kube::Resource;
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        api::{ApiClient, ApiError, ApiObject},
        name::NamespacedName,
        objects::{DaemonSet, Node, Pod, annotations},
        patch::{self, JsonPatch},
        writer::{PatchOutcome, Writer},
    },
    error::chain,
    evaluate::template,
    metrics::Metrics,
    placement::{GATE, annotation, daemon_set, node},
};

use lease::acquire;

use super::{CommandStatus, Global, progress::Progress};

/// Concurrent patches.
const CONCURRENCY: usize = 16;
/// How long the creation of a pod may take, and how long an API server may use a configuration that was deleted.
const IN_FLIGHT: Duration = Duration::from_secs(5);
/// Attempts per object when other writers change it at the same time.
const MAX_ATTEMPTS: usize = 5;

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct CleanCommand {
    /// Print what would be removed, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Scale archaware's Deployment to 0 first, and wait until it has stopped
    #[arg(long)]
    stop_controller: bool,
    /// Evict the pods that carry a decision of archaware and have a controller that recreates them
    #[arg(long)]
    recreate_pods: bool,
}

/// One change, for the report.
struct CleanedObject {
    what: String,
    outcome: Result<(), String>,
}

struct Session {
    api: ApiClient,
    writer: Writer,
    namespace: String,
    dry_run: bool,
    progress: Progress,
    done: usize,
    remaining: Vec<String>,
    /// Nodes whose patch failed.
    failed_nodes: Vec<NamespacedName>,
    /// When the webhook configuration was removed, if it existed.
    unregistered: Option<Instant>,
}

impl CleanCommand {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<CommandStatus> {
        let metrics = Metrics::default();
        let api = global.api(&metrics).await?;
        self.run(api, global.namespace(), metrics).await
    }

    async fn run(
        self,
        api: ApiClient,
        namespace: String,
        metrics: Metrics,
    ) -> anyhow::Result<CommandStatus> {
        let Some(lease) = acquire(self, &api, &namespace, &metrics).await? else {
            return Ok(CommandStatus::Refused);
        };
        let stop = CancellationToken::new();
        let mut session = Session {
            writer: Writer::new(api.clone(), CONCURRENCY, &lease.leadership, stop, metrics),
            api,
            namespace,
            dry_run: self.dry_run,
            progress: Progress::new(),
            done: 0,
            remaining: Vec::new(),
            failed_nodes: Vec::new(),
            unregistered: None,
        };
        let cleaned = session.clean_objects(self.recreate_pods).await;
        let was_there = lease.was_there;
        // Released in any case, so that the next attempt need not wait until it expires.
        lease.release().await;
        cleaned?;
        session.remove_secret().await;
        session.remove_lease(was_there).await;
        Ok(session.summary())
    }
}

impl Session {
    async fn clean_objects(&mut self, recreate_pods: bool) -> anyhow::Result<()> {
        // First, because the webhook would restore what is removed below.
        self.remove_configuration().await;
        self.remove_gates().await.context("cannot list pods")?;
        self.untaint_nodes().await.context("cannot list nodes")?;
        self.restore_templates()
            .await
            .context("cannot list DaemonSets")?;
        if recreate_pods {
            self.evict_pods().await.context("cannot list pods")?;
        }
        if !self.dry_run {
            self.verify().await.context("cannot verify the result")?;
        }
        Ok(())
    }

    async fn untaint_nodes(&mut self) -> Result<(), ApiError> {
        let found: Vec<Node> = self
            .api
            .list(None)
            .try_filter(|node: &Node| std::future::ready(node::clean(&node.view()).is_some()))
            .try_collect()
            .await?;
        let describe = |node: &Node| {
            let change = node::clean(&node.view())?;
            let what = match &change.remove {
                Some((_, taint)) => format!("taint {taint}"),
                None => "record of a taint that has changed since; the taint stays".to_owned(),
            };
            Some((what, patch::node(node, change)))
        };
        self.failed_nodes = self.patch(found, describe).await;
        Ok(())
    }

    async fn restore_templates(&mut self) -> Result<(), ApiError> {
        let is_owned =
            |set: &DaemonSet| annotations(&set.metadata).contains_key(annotation::TOLERATIONS);
        let found: Vec<DaemonSet> = self
            .api
            .list(None)
            .try_filter(|set| std::future::ready(is_owned(set)))
            .try_collect()
            .await?;
        let describe = |set: &DaemonSet| {
            if !is_owned(set) {
                return None;
            }
            let existing = set.spec.template.spec.tolerations.as_deref();
            let record = template::owned_tolerations(set);
            let change = daemon_set::clean(existing.unwrap_or_default(), &record);
            let what = match change.remove.len() {
                1 => "1 toleration".to_owned(),
                number => format!("{number} tolerations"),
            };
            Some((what, patch::daemon_set(set, change)))
        };
        self.patch(found, describe).await;
        Ok(())
    }

    /// Lists again: what was restored meanwhile comes from a controller with another Lease.
    async fn verify(&mut self) -> Result<(), ApiError> {
        // A pod may have received a gate while it was being created when the configuration was removed.
        if let Some(since) = self.unregistered {
            tokio::time::sleep(IN_FLIGHT.saturating_sub(since.elapsed())).await;
            self.remove_gates().await?;
        }
        let nodes: Vec<NamespacedName> = self
            .api
            .list(None)
            .try_filter_map(|node: Node| {
                let owned = annotations(&node.metadata).contains_key(annotation::TAINT);
                std::future::ready(Ok(owned.then(|| NamespacedName::of_object(&node))))
            })
            .try_collect()
            .await?;
        for name in nodes {
            if !self.failed_nodes.contains(&name) {
                let why =
                    "its taint came back: does archaware run in another namespace (--namespace)?";
                self.remaining.push(format!("Node {name} ({why})"));
            }
        }
        Ok(())
    }

    /// Removes scheduling gates. Without archaware nothing else would remove them, and their pods would wait forever.
    async fn remove_gates(&mut self) -> Result<(), ApiError> {
        let found: Vec<Pod> = self
            .api
            .list(Some("spec.nodeName="))
            .try_filter(|pod: &Pod| std::future::ready(pod.spec.gate().is_some()))
            .try_collect()
            .await?;
        let describe = |pod: &Pod| {
            let gated = pod.spec.gate().is_some();
            gated.then(|| {
                (
                    format!("scheduling gate {GATE}"),
                    patch::pod::remove_gate(pod),
                )
            })
        };
        self.patch(found, describe).await;
        Ok(())
    }

    /// Patches objects. `describe` returns a description and the patch, or `None` if nothing is left to do. Returns
    /// the objects that could not be patched.
    async fn patch<K>(
        &mut self,
        found: Vec<K>,
        describe: impl Fn(&K) -> Option<(String, JsonPatch)>,
    ) -> Vec<NamespacedName>
    where
        K: ApiObject + DeserializeOwned,
    {
        let (api, writer, describe) = (self.api.clone(), self.writer.clone(), &describe);
        let what = |object: &K| describe(object).map(|(what, _)| what).unwrap_or_default();
        let act = |object: K| {
            let (api, writer) = (api.clone(), writer.clone());
            async move { patch_until_done(&api, &writer, object, describe).await }
        };
        self.for_each_object(found, what, act).await
    }

    /// Tolerations cannot be removed from existing pods, so they are recreated.
    async fn evict_pods(&mut self) -> Result<(), ApiError> {
        let found: Vec<Pod> = self
            .api
            .list(None)
            .try_filter(|pod: &Pod| {
                let decided = annotations(&pod.metadata).contains_key(annotation::DECISION);
                let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
                let controlled = owners.iter().any(|owner| owner.controller == Some(true));
                std::future::ready(decided && controlled && pod.is_in_scope())
            })
            .try_collect()
            .await?;
        let api = self.api.clone();
        let act = |pod: Pod| {
            let api = api.clone();
            async move {
                match api.evict(&pod).await {
                    Ok(()) | Err(ApiError::NotFound(_) | ApiError::Conflict(_)) => Ok(()),
                    Err(error) => Err(error.to_string()),
                }
            }
        };
        self.for_each_object(found, |_| "evicted".to_owned(), act)
            .await;
        Ok(())
    }

    /// Applies an operation to objects, some concurrently, and reports the outcomes. Returns the objects where it
    /// failed.
    async fn for_each_object<K, F>(
        &mut self,
        found: Vec<K>,
        what: impl Fn(&K) -> String,
        act: impl Fn(K) -> F,
    ) -> Vec<NamespacedName>
    where
        K: Resource<DynamicType = ()>,
        F: Future<Output = Result<(), String>>,
    {
        self.progress.expect(found.len());
        let (dry_run, act) = (self.dry_run, &act);
        let items = futures::stream::iter(found).map(|object| {
            let name = NamespacedName::of_object(&object);
            let what = format!("{} {name}: {}", K::kind(&()), what(&object));
            async move {
                let outcome = if dry_run { Ok(()) } else { act(object).await };
                (name, CleanedObject { what, outcome })
            }
        });
        let items: Vec<(NamespacedName, CleanedObject)> = items
            .buffer_unordered(CONCURRENCY)
            .inspect(|(_, item)| self.progress.report(&item.what, &item.outcome, dry_run))
            .collect()
            .await;
        let mut failed = Vec::new();
        for (name, item) in items {
            if item.outcome.is_err() {
                failed.push(name);
            }
            self.count(item);
        }
        failed
    }

    fn count(&mut self, item: CleanedObject) {
        match item.outcome {
            Ok(()) => self.done += 1,
            Err(why) => self.remaining.push(format!("{} ({why})", item.what)),
        }
    }

    fn summary(self) -> CommandStatus {
        self.progress.finish();
        let objects = if self.done == 1 { "object" } else { "objects" };
        match (self.dry_run, self.done, self.remaining.is_empty()) {
            (_, 0, true) => println!("Nothing of archaware is left."),
            (true, ..) => println!("Would clean {} {objects}; nothing was changed.", self.done),
            (false, ..) => println!("Cleaned {} {objects}.", self.done),
        }
        if self.remaining.is_empty() {
            return CommandStatus::Done;
        }
        println!("{} remain:", self.remaining.len());
        for item in &self.remaining {
            println!("  {item}");
        }
        CommandStatus::Failed
    }
}

/// If another writer changes the object at the same time, it is read again and the patch computed anew.
async fn patch_until_done<K: ApiObject + DeserializeOwned>(
    api: &ApiClient,
    writer: &Writer,
    mut object: K,
    describe: &impl Fn(&K) -> Option<(String, JsonPatch)>,
) -> Result<(), String> {
    let name = NamespacedName::of_object(&object);
    for _ in 0..MAX_ATTEMPTS {
        let Some((_, patch)) = describe(&object) else {
            return Ok(());
        };
        match writer.patch::<K>(&name, patch).await {
            PatchOutcome::Applied | PatchOutcome::Gone => return Ok(()),
            PatchOutcome::Stale => match api.find(&name).await {
                Ok(Some(now)) => object = now,
                Ok(None) => return Ok(()),
                Err(error) => return Err(chain(&error)),
            },
            PatchOutcome::Failed(error) => return Err(chain(&error)),
            PatchOutcome::Stopping => return Err("archaware is stopping".to_owned()),
        }
    }
    Err(format!(
        "another writer changed it {MAX_ATTEMPTS} times in a row; run clean again"
    ))
}
