//! Resolves the images of workloads.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use futures::future::join_all;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    cluster::{
        api::ApiClient,
        objects::{Node, PodSpec, labels},
    },
    config::Config,
    evaluate::{
        counting_platforms, limiting,
        pull_secrets::{PullSecrets, UnusablePullSecret},
        wrong_architecture::WrongArchitectureCause,
    },
    image::{
        ResolveRequest, Resolver,
        credentials::{self, Keyring},
    },
    placement::{
        NodePlatform, NodeVariant, PlacementPolicy,
        affinity::{HOSTNAME, LABELS},
    },
    platform::{Architecture, Architectures, with_variant},
    report::{KnownImage, KnownWorkload, MisplacedPod},
};

use super::{
    super::permissions::MissingPermissions,
    cache::ReportCache,
    found::{BoundPod, FoundSpec, FoundWorkload, stated_architectures},
};

/// Images that are resolved concurrently. The time budget of an image starts with its resolution,
/// so only few images may wait for a registry's slots.
const CONCURRENT_IMAGES: usize = 64;

/// Resolves images, and knows the nodes.
pub(super) struct Inspector {
    resolver: Resolver,
    cache: Option<ReportCache>,
    config: Config,
    policy: PlacementPolicy,
    asked_architectures: Vec<Architecture>,
    /// `None` for manifests, because no cluster is read for them.
    pull_secrets: Option<PullSecrets>,
    nodes: HashMap<String, KnownNode>,
    slots: Semaphore,
    missing: Mutex<MissingPermissions>,
}

/// The platform of a node.
struct KnownNode {
    architecture: String,
    variant: Option<NodeVariant>,
    /// The node's labels: `emulation` in the configuration selects emulating nodes by label.
    labels: BTreeMap<String, String>,
}

impl Inspector {
    pub(super) fn new(
        resolver: Resolver,
        cache: Option<ReportCache>,
        config: Config,
        asked_architectures: Vec<Architecture>,
    ) -> Self {
        Self {
            policy: PlacementPolicy::from(&config),
            resolver,
            cache,
            config,
            asked_architectures,
            pull_secrets: None,
            nodes: HashMap::new(),
            slots: Semaphore::new(CONCURRENT_IMAGES),
            missing: Mutex::default(),
        }
    }

    /// Permissions without which images could not be resolved.
    pub(super) fn missing_permissions(self) -> MissingPermissions {
        self.missing.into_inner()
    }

    /// Uses the nodes and the pull secrets of a cluster.
    pub(super) fn use_cluster(&mut self, api: &ApiClient, nodes: Vec<Node>) {
        self.pull_secrets = Some(PullSecrets::new(api.clone()));
        let nodes = nodes.into_iter().filter_map(|node| {
            let view = node.view();
            let known = KnownNode {
                architecture: view.architecture.to_owned(),
                variant: self.policy.variants.of_node(&view),
                labels: labels(&node.metadata).clone(),
            };
            Some((node.metadata.name?, known))
        });
        self.nodes = nodes.collect();
    }

    /// Facts about a workload.
    pub(super) async fn inspect(&self, found: FoundWorkload) -> KnownWorkload {
        let mut images = BTreeMap::new();
        let mut stated = None;
        let mut excluded = BTreeSet::new();
        let mut unread = found.unread;
        let namespace = found.namespace.clone().unwrap_or_default();
        for found_spec in &found.specs {
            stated = stated.or_else(|| stated_architectures(&found_spec.annotations));
            let author = found_spec.spec.author_nodes();
            let excludes = |architecture: &&Architecture| {
                let alone: Architectures = [(*architecture).clone()].into_iter().collect();
                author.excludes_all(&alone)
            };
            excluded.extend(self.asked_architectures.iter().filter(excludes).cloned());
            unread.extend(unread_containers(&found_spec.spec));
            for (name, known) in self.resolve(found_spec, &namespace).await {
                // Keep a resolved image: it may be unreadable with the credentials of another spec.
                let is_new = !matches!(images.get(&name), Some(KnownImage::Resolved { .. }));
                if is_new {
                    images.insert(name, known);
                }
            }
        }
        let mut runs_on: BTreeMap<String, u64> = BTreeMap::new();
        for pod in &found.bound {
            let node = self.nodes.get(&pod.node);
            let architecture = node.map_or("unknown", |node| &node.architecture);
            *runs_on.entry(architecture.to_owned()).or_default() += 1;
        }
        let misplaced = found.bound.iter();
        unread.sort();
        unread.dedup();
        KnownWorkload {
            pinned_to: self.pinned_to(&found.specs),
            unread,
            misplaced: misplaced
                .filter_map(|pod| {
                    let node = self.nodes.get(&pod.node)?;
                    node.misplaced(&self.policy, pod, &images)
                })
                .collect(),
            kind: found.kind,
            namespace: found.namespace,
            name: found.name,
            pods: found.pods,
            requests: found.requests,
            images,
            stated,
            excluded,
            runs_on,
        }
    }

    /// The architectures of the nodes that the specs select by labels of pools; `None` if a spec
    /// selects no pool, or no existing node: an autoscaler may make one.
    fn pinned_to(&self, specs: &[FoundSpec]) -> Option<BTreeSet<String>> {
        let mut architectures = BTreeSet::new();
        for found in specs {
            let author = found.spec.author_nodes();
            let mut keys = author.label_keys();
            let names_pool = keys.any(|key| ONE_POOL_KEYS.contains(&key));
            let mut keys = author.label_keys();
            let may_pin = keys.any(|key| !ANY_POOL_KEYS.contains(&key) && !LABELS.contains(&key));
            if !may_pin {
                return None;
            }
            let nodes = self.nodes.iter();
            let selected = nodes.filter(|(name, node)| author.selects(&node.labels, name));
            let selected: Vec<_> = selected.map(|(_, node)| &node.architecture).collect();
            // Nodes that are added later may have the label, too, if every node has it.
            let selects_all = selected.len() == self.nodes.len();
            if selected.is_empty() || (selects_all && !names_pool) {
                return None;
            }
            architectures.extend(selected.into_iter().cloned());
        }
        (!architectures.is_empty()).then_some(architectures)
    }

    async fn resolve(&self, found: &FoundSpec, namespace: &str) -> Vec<(String, KnownImage)> {
        let mut spec = found.spec.clone();
        if let Some(secrets) = self.pull_secrets.as_ref().filter(|_| found.is_template)
            && secrets.add_of_account(namespace, &mut spec).await
        {
            self.missing
                .lock()
                .add(format!("get serviceaccounts in {namespace}"));
        }
        let secrets = self.pull_secrets.as_ref();
        let credentials = secrets.map(|secrets| secrets.for_pod(namespace, &spec, false));
        let keyring = credentials
            .as_ref()
            .map(|credentials| credentials.keyring.clone());
        let keyring = keyring.unwrap_or_else(|| credentials::ready_keyring(Keyring::default()));
        let images = spec.images().into_iter();
        let resolved = join_all(images.map(|(image, uses)| {
            let keyring = &keyring;
            async move {
                if uses.never_pulled {
                    return (image.to_owned(), uses, None);
                }
                // This cannot fail, because the semaphore is never closed.
                let _slot = self.slots.acquire().await;
                let deadline = Instant::now() + self.config.resolution.budget;
                let request = ResolveRequest {
                    image,
                    policy: uses.policy,
                    keyring,
                    tenant: namespace,
                };
                let answer = self.resolver.resolve_by(request, deadline).await;
                (image.to_owned(), uses, Some(answer))
            }
        }))
        .await;
        let unusable = credentials.map(|credentials| credentials.unusable());
        if unusable
            .iter()
            .flatten()
            .any(UnusablePullSecret::is_forbidden)
        {
            self.missing
                .lock()
                .add(format!("get secrets in {namespace}"));
        }
        let counting = resolved.iter().filter_map(|(_, uses, answer)| {
            let resolved = answer.as_ref()?.as_ref().ok()?;
            Some(counting_platforms(resolved, *uses))
        });
        let counting: Vec<_> = counting.collect();
        let mut sets = limiting(&self.policy, &spec, counting.iter()).into_iter();
        let known = resolved.into_iter().map(|(image, _, answer)| {
            let known = match answer {
                None => KnownImage::Failed {
                    reason: NEVER_PULLED,
                    message: "its pull policy is Never, so nodes run the copies that they hold, whatever the registry has under this name".to_owned(),
                },
                Some(Ok(resolved)) => {
                    if let Some(cache) = &self.cache {
                        cache.keep(&self.resolver, &resolved);
                    }
                    let platforms = resolved.platforms.platforms().iter();
                    let set = sets.next().flatten();
                    KnownImage::Resolved {
                        platforms: platforms.map(ToString::to_string).collect(),
                        architectures: set.as_ref().map(|set| self.policy.widen(set)),
                        built_for: set,
                    }
                }
                Some(Err(error)) => KnownImage::Failed {
                    reason: error.reason().as_str(),
                    message: error.chain(),
                },
            };
            (image, known)
        });
        known.collect()
    }
}

/// Labels that select a single pool of nodes, a single type of machine or a single node.
const ONE_POOL_KEYS: [&str; 7] = [
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "cloud.google.com/gke-nodepool",
    "kubernetes.azure.com/agentpool",
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
    HOSTNAME,
];
/// Labels that nodes of every architecture have.
const ANY_POOL_KEYS: [&str; 6] = [
    "kubernetes.io/os",
    "beta.kubernetes.io/os",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

/// Why some images of a spec are not known: it is a patch for another manifest.
fn unread_containers(spec: &PodSpec) -> impl Iterator<Item = String> {
    let none = spec.containers.is_empty();
    let none = none.then(|| "it names no container".to_owned());
    let containers = spec.init_containers.iter().chain(&spec.containers);
    let without_image = containers.filter(|container| {
        let image = container.image.as_deref().unwrap_or_default();
        image.is_empty()
    });
    let without_image = without_image.map(|container| {
        let name = &container.name;
        format!("container {name} names no image")
    });
    none.into_iter().chain(without_image)
}

/// The reason for images whose registry is not asked.
const NEVER_PULLED: &str = "NeverPulled";

impl KnownNode {
    /// The pod, if one of its images, or a program in an image, does not run on this node.
    fn misplaced(
        &self,
        policy: &PlacementPolicy,
        pod: &BoundPod,
        images: &BTreeMap<String, KnownImage>,
    ) -> Option<MisplacedPod> {
        let platform = NodePlatform {
            architecture: &self.architecture,
            variant: self.variant,
            labels: Some(&self.labels),
        };
        let lacks = |image: &&String| {
            let built_for = match images.get(*image) {
                Some(KnownImage::Resolved { built_for, .. }) => built_for.as_ref(),
                _ => None,
            };
            policy.runs(platform, pod.stated.as_ref(), built_for) == Some(false)
        };
        let lacking: BTreeSet<&String> = pod.images.iter().filter(lacks).collect();
        let failing = pod.failing.iter().filter(|container| {
            container.cause != WrongArchitectureCause::ImageLacksArchitecture
                || lacking.contains(&container.image)
        });
        let failing: Vec<_> = failing.collect();
        let wrong = lacking
            .into_iter()
            .chain(failing.iter().map(|container| &container.image));
        let wrong: BTreeSet<String> = wrong.cloned().collect();
        (!wrong.is_empty()).then(|| MisplacedPod {
            pod: pod.name.clone(),
            node: pod.node.clone(),
            architecture: with_variant(&self.architecture, self.variant.map(NodeVariant::name)),
            images: wrong.into_iter().collect(),
            failure: failing
                .first()
                .map(|container| container.cause.as_str().to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_whose_node_does_not_run_them_are_reported() {
        let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
        let yaml = "emulation: [{nodes: qemu, architecture: arm64, runs: [amd64]}]\n";
        let config = crate::config::parse("c", &format!("{head}{yaml}")).unwrap();
        let policy = PlacementPolicy::from(&config);
        let node = KnownNode {
            architecture: "arm64".to_owned(),
            variant: None,
            labels: [("qemu".to_owned(), String::new())].into(),
        };
        for (built_for, stated, expected) in [
            ("arm64", None, false),
            ("amd64", None, false),
            // amd64 nodes run 386 images, but an emulator of amd64 does not.
            ("386", None, true),
            ("s390x", None, true),
            ("s390x", Some("arm64"), false),
            ("arm64", Some("amd64"), true),
        ] {
            let set = built_for.parse().unwrap();
            let image = KnownImage::Resolved {
                platforms: Vec::new(),
                architectures: Some(policy.widen(&set)),
                built_for: Some(set),
            };
            let images = [("app".to_owned(), image)].into();
            let pod = BoundPod {
                name: "p".to_owned(),
                node: "n".to_owned(),
                images: ["app".to_owned()].into(),
                stated: stated.map(|set| set.parse().unwrap()),
                failing: Vec::new(),
            };
            let found = node.misplaced(&policy, &pod, &images);
            assert_eq!(found.is_some(), expected, "{built_for} {stated:?}");
        }
    }
}
