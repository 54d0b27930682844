//! Removes what archaware added to nodes, DaemonSets and pods.

use std::future::Future;

use futures::{StreamExt, TryStreamExt};
use kube::Resource;
use serde::de::DeserializeOwned;

use crate::{
    cluster::{
        api::{ApiClient, ApiError, ApiObject},
        evictor::{EvictionReason, EvictionResult},
        name::NamespacedName,
        objects::{DaemonSet, Node, Pod, annotations},
        patch::{self, JsonPatch},
        writer::{PatchOutcome, Writer},
    },
    error::chain,
    evaluate::template::Template,
    placement::{GATE, annotation, daemon_set, node},
};

use super::{CONCURRENCY, CleanedObject, Session};

/// Attempts per object when other writers change it at the same time.
const MAX_ATTEMPTS: usize = 5;

/// Whether archaware recorded something on an object.
pub(super) fn has_record<K: Resource>(object: &K, name: &str) -> bool {
    annotations(object.meta()).contains_key(name)
}

impl Session {
    /// Reports an object that stays unchanged, because archaware does not know the key in the
    /// object's record.
    fn unknown<K: Resource<DynamicType = ()>>(&mut self, object: &K, what: &str) {
        let (kind, name) = (K::kind(&()).to_string(), NamespacedName::of_object(object));
        self.remaining.push(format!(
            "{kind} {name} (its {what} may come from an earlier configuration: name the file of that configuration with --config, or remove the {what} by hand)"
        ));
        self.failed.insert((kind, name));
        self.is_record_left = true;
    }

    pub(super) async fn untaint_nodes(&mut self) -> Result<(), ApiError> {
        let found: Vec<Node> = self
            .api
            .list(None)
            .try_filter(|node: &Node| std::future::ready(has_record(node, annotation::TAINT)))
            .try_collect()
            .await?;
        let keys = self.keys.get();
        let (unknown, found): (Vec<Node>, Vec<Node>) = found
            .into_iter()
            .partition(|node| node::of_unknown_key(&node.view(), &keys).is_some());
        for node in unknown {
            let taint = node::of_unknown_key(&node.view(), &keys).map(|taint| taint.to_string());
            self.unknown(&node, &format!("taint {}", taint.unwrap_or_default()));
        }
        let describe = |node: &Node| {
            let change = node::clean(&node.view(), &keys)?;
            let what = match &change.remove {
                Some((_, taint)) => format!("taint {taint}"),
                None => "record of a taint that is not archaware's (any more); the taint stays"
                    .to_owned(),
            };
            Some((what, patch::node(node, change)))
        };
        self.is_record_left |= !self.patch(found, describe).await.is_empty();
        Ok(())
    }

    pub(super) async fn restore_templates(&mut self) -> Result<(), ApiError> {
        let found: Vec<DaemonSet> = self
            .api
            .list(None)
            .try_filter(|set: &DaemonSet| {
                std::future::ready(has_record(set, annotation::TOLERATIONS))
            })
            .try_collect()
            .await?;
        let keys = self.keys.get();
        let unknown = |set: &DaemonSet| Template::new(set, &keys).has_unknown_key(&keys);
        let (unknown, found): (Vec<DaemonSet>, Vec<DaemonSet>) =
            found.into_iter().partition(unknown);
        for set in unknown {
            self.unknown(&set, "tolerations");
        }
        let describe = |set: &DaemonSet| {
            if !has_record(set, annotation::TOLERATIONS) {
                return None;
            }
            let change = daemon_set::clean(&Template::new(set, &keys).owned);
            let what = match change.remove.len() {
                1 => "1 toleration".to_owned(),
                number => format!("{number} tolerations"),
            };
            Some((what, patch::daemon_set(set, change)))
        };
        self.is_record_left |= !self.patch(found, describe).await.is_empty();
        Ok(())
    }

    /// Removes scheduling gates. Without archaware nothing else would remove them, and their pods
    /// would wait forever.
    pub(super) async fn remove_gates(&mut self) -> Result<(), ApiError> {
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

    /// Patches objects. `describe` returns a description and the patch, or `None` if nothing is
    /// left to do. Returns the objects that could not be patched.
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

    /// Evicts pods, so that their controllers recreate them without archaware's tolerations:
    /// Kubernetes forbids removing tolerations from a pod.
    pub(super) async fn evict_pods(&mut self) -> Result<(), ApiError> {
        let found: Vec<Pod> = self
            .api
            .list(None)
            .try_filter(|pod: &Pod| {
                let decided = annotations(&pod.metadata).contains_key(annotation::DECISION);
                std::future::ready(decided && pod.controller().is_some() && pod.is_in_scope())
            })
            .try_collect()
            .await?;
        let evictor = self.evictor.clone();
        let act = |pod: Pod| {
            let evictor = evictor.clone();
            async move {
                evictor.turn().await;
                match evictor.evict(&pod, EvictionReason::Clean).await {
                    EvictionResult::Evicted | EvictionResult::Gone => Ok(()),
                    EvictionResult::NotLeading => Err("the Lease is lost".to_owned()),
                    EvictionResult::Budget(error) | EvictionResult::Failed(error) => {
                        Err(error.to_string())
                    }
                }
            }
        };
        self.for_each_object(found, |_| "eviction".to_owned(), act)
            .await;
        Ok(())
    }

    /// Applies an operation to objects, some concurrently, and reports the outcomes. Returns the
    /// objects where it failed.
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
                self.failed.insert((K::kind(&()).to_string(), name.clone()));
                failed.push(name);
            }
            self.count(item);
        }
        failed
    }
}

/// Patches an object. If another writer changed it meanwhile, reads it again and computes a new
/// patch, up to [`MAX_ATTEMPTS`] times.
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
