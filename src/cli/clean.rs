//! `archaware clean`: takes away what is archaware's, and nothing else.

mod evict;
mod own;
mod right;

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use anyhow::Context;
use clap::Args;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        list::{self, ListError},
        objects::{DaemonSet, Node, Pod},
        patch::{self, JsonPatch, annotations},
        writer::{Outcome, Writer},
    },
    image::chain,
    inspect,
    metrics::Metrics,
    placement::{GATE, annotation, daemon_set, node},
};

use evict::evict;
use right::right_to_write;

use super::{Global, Status, progress::Progress};

/// Patches at once.
const AT_ONCE: usize = 16;
/// How long a pod may be on its way into the API, and an API server go by a configuration that is gone.
const ON_THE_WAY: Duration = Duration::from_secs(5);
/// Tries per object when others change it at the same time.
const TRIES: usize = 5;

#[derive(Debug, Args)]
pub(super) struct Clean {
    /// Say what would be removed, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Scale archaware's Deployment to 0 first, and wait until it has stopped
    #[arg(long)]
    stop_controller: bool,
    /// Evict the pods that carry a decision of archaware's and have a controller to make them anew
    #[arg(long)]
    recreate_pods: bool,
}

/// One thing that clean does, and where.
struct Item {
    what: String,
    outcome: Result<(), String>,
}

struct Session {
    client: Client,
    writer: Writer,
    namespace: String,
    dry_run: bool,
    progress: Progress,
    done: usize,
    remaining: Vec<String>,
    /// When the webhook's configuration was removed, if it was there.
    unasked_since: Option<Instant>,
}

impl Clean {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<Status> {
        let metrics = Metrics::default();
        let client = global.client(&metrics).await?;
        let namespace = global.namespace();
        let Some(lease) = right_to_write(&self, &client, &namespace, &metrics).await? else {
            return Ok(Status::Refused);
        };
        let mut session = Session {
            writer: Writer::new(
                AT_ONCE,
                &lease.leadership,
                CancellationToken::new(),
                metrics,
            ),
            client,
            namespace,
            dry_run: self.dry_run,
            progress: Progress::new(),
            done: 0,
            remaining: Vec::new(),
            unasked_since: None,
        };
        // First: it would put back what is removed below.
        session.admission().await;
        session.gates().await.context("cannot list pods")?;
        session.nodes().await.context("cannot list nodes")?;
        session
            .daemon_sets()
            .await
            .context("cannot list DaemonSets")?;
        if self.recreate_pods {
            session.pods().await.context("cannot list pods")?;
        }
        if !self.dry_run {
            session.verify().await.context("cannot look again")?;
        }
        let was_there = lease.was_there;
        lease.give_back().await;
        session.secret().await;
        session.lease(was_there).await;
        Ok(session.summary())
    }
}

impl Session {
    async fn nodes(&mut self) -> Result<(), ListError> {
        let api: Api<Node> = Api::all(self.client.clone());
        let found: Vec<Node> = list::all(api.clone(), None)
            .try_filter(|node| std::future::ready(node::clean(&node.view()).is_some()))
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
        self.patch(found, |_| api.clone(), describe).await;
        Ok(())
    }

    async fn daemon_sets(&mut self) -> Result<(), ListError> {
        let found: Vec<DaemonSet> = list::all(Api::<DaemonSet>::all(self.client.clone()), None)
            .try_filter(|set| {
                let owned = annotations(&set.metadata).contains_key(annotation::TOLERATIONS);
                std::future::ready(owned)
            })
            .try_collect()
            .await?;
        let client = self.client.clone();
        let describe = |set: &DaemonSet| {
            annotations(&set.metadata).get(annotation::TOLERATIONS)?;
            let existing = set
                .spec
                .template
                .spec
                .tolerations
                .as_deref()
                .unwrap_or_default();
            let change = daemon_set::clean(existing, &inspect::daemon_set::record(set));
            Some((
                match change.remove.len() {
                    1 => "1 toleration".to_owned(),
                    number => format!("{number} tolerations"),
                },
                patch::daemon_set(set, change),
            ))
        };
        self.patch(found, |set| namespaced(&client, set), describe)
            .await;
        Ok(())
    }

    /// Looks again: what is back was put there by a controller that holds another Lease.
    async fn verify(&mut self) -> Result<(), ListError> {
        // A pod may have been on its way with a gate when the configuration went.
        if let Some(since) = self.unasked_since {
            tokio::time::sleep(ON_THE_WAY.saturating_sub(since.elapsed())).await;
            self.gates().await?;
        }
        let nodes = list::all(Api::<Node>::all(self.client.clone()), None);
        let nodes: Vec<String> = nodes
            .try_filter_map(|node| {
                let owned = annotations(&node.metadata).contains_key(annotation::TAINT);
                std::future::ready(Ok(owned.then(|| name_of(&node))))
            })
            .try_collect()
            .await?;
        for name in nodes {
            if !self.remaining.iter().any(|item| item.starts_with(&name)) {
                let why =
                    "its taint came back: does archaware run in another namespace (--namespace)?";
                self.remaining.push(format!("{name} ({why})"));
            }
        }
        Ok(())
    }

    /// Gates are taken off: nobody else would do it, and the pods behind them wait for ever.
    async fn gates(&mut self) -> Result<(), ListError> {
        let unbound = list::all(Api::<Pod>::all(self.client.clone()), Some("spec.nodeName="));
        let found: Vec<Pod> = unbound
            .try_filter(|pod| std::future::ready(pod.spec.gate().is_some()))
            .try_collect()
            .await?;
        let describe = |pod: &Pod| {
            let gated = pod.spec.gate().is_some();
            gated.then(|| (format!("scheduling gate {GATE}"), patch::pod::release(pod)))
        };
        let client = self.client.clone();
        self.patch(found, |pod| namespaced(&client, pod), describe)
            .await;
        Ok(())
    }

    /// Patches objects; `describe` says what and how, or `None` when nothing is left to do.
    async fn patch<K>(
        &mut self,
        found: Vec<K>,
        api: impl Fn(&K) -> Api<K>,
        describe: impl Fn(&K) -> Option<(String, JsonPatch)>,
    ) where
        K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
    {
        let (writer, api, describe) = (self.writer.clone(), &api, &describe);
        let what = |object: &K| describe(object).map(|(what, _)| what).unwrap_or_default();
        let act = |object: K| {
            let writer = writer.clone();
            async move { patch_until_done(&writer, &api(&object), object, describe).await }
        };
        self.each(found, what, act).await;
    }

    /// Pods keep their tolerations for life: only new ones are without.
    async fn pods(&mut self) -> Result<(), ListError> {
        let found: Vec<Pod> = list::all(Api::<Pod>::all(self.client.clone()), None)
            .try_filter(|pod| {
                let decided = annotations(&pod.metadata).contains_key(annotation::DECISION);
                let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
                let controlled = owners.iter().any(|owner| owner.controller == Some(true));
                std::future::ready(decided && controlled && pod.is_in_scope())
            })
            .try_collect()
            .await?;
        let client = self.client.clone();
        let act = |pod: Pod| {
            let client = client.clone();
            async move { evict(&client, &pod).await }
        };
        self.each(found, |_| "evicted".to_owned(), act).await;
        Ok(())
    }

    /// Does something to objects, some at once, and tells what became of it.
    async fn each<K, F>(&mut self, found: Vec<K>, what: impl Fn(&K) -> String, act: impl Fn(K) -> F)
    where
        K: Resource<DynamicType = ()>,
        F: Future<Output = Result<(), String>>,
    {
        self.progress.expect(found.len());
        let (dry_run, act) = (self.dry_run, &act);
        let items = futures::stream::iter(found).map(|object| {
            let what = format!("{}: {}", name_of(&object), what(&object));
            async move {
                let outcome = if dry_run { Ok(()) } else { act(object).await };
                Item { what, outcome }
            }
        });
        let items: Vec<Item> = items
            .buffer_unordered(AT_ONCE)
            .inspect(|item| self.progress.report(&item.what, &item.outcome, dry_run))
            .collect()
            .await;
        self.count(items);
    }

    fn count(&mut self, items: Vec<Item>) {
        for item in items {
            match item.outcome {
                Ok(()) => self.done += 1,
                Err(why) => self.remaining.push(format!("{} ({why})", item.what)),
            }
        }
    }

    fn summary(self) -> Status {
        self.progress.finish();
        let objects = if self.done == 1 { "object" } else { "objects" };
        match (self.dry_run, self.done, self.remaining.is_empty()) {
            (_, 0, true) => println!("Nothing of archaware's is left."),
            (true, ..) => println!("Would clean {} {objects}; nothing was changed.", self.done),
            (false, ..) => println!("Cleaned {} {objects}.", self.done),
        }
        if self.remaining.is_empty() {
            return Status::Done;
        }
        println!("{} remain:", self.remaining.len());
        for item in &self.remaining {
            println!("  {item}");
        }
        Status::Failed
    }
}

fn namespaced<K>(client: &Client, object: &K) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    let namespace = object.meta().namespace.as_deref().unwrap_or_default();
    Api::namespaced(client.clone(), namespace)
}

/// `Node a`, `DaemonSet ns/b`
fn name_of<K: Resource<DynamicType = ()>>(object: &K) -> String {
    let name = object.name_any();
    let name = object
        .namespace()
        .map_or(name.clone(), |namespace| format!("{namespace}/{name}"));
    format!("{} {name}", K::kind(&()))
}

/// Others may edit the object at the same time: then it is read again and decided anew.
async fn patch_until_done<K>(
    writer: &Writer,
    api: &Api<K>,
    mut object: K,
    describe: &impl Fn(&K) -> Option<(String, JsonPatch)>,
) -> Result<(), String>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let name = object.name_any();
    for _ in 0..TRIES {
        let Some((_, patch)) = describe(&object) else {
            return Ok(());
        };
        match writer.patch(api, &name, patch).await {
            Ok(Outcome::Applied | Outcome::Gone) => return Ok(()),
            Ok(Outcome::Stale) => match api.get_opt(&name).await {
                Ok(Some(now)) => object = now,
                Ok(None) => return Ok(()),
                Err(error) => return Err(chain(&error)),
            },
            Err(error) => return Err(chain(&error)),
        }
    }
    Err(format!("changed by others {TRIES} times in a row"))
}
