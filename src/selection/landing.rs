//! The nodes that a pod can land on, and which of them run an image.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::Value;
use tokio::time::{Instant, error::Elapsed, timeout_at};

use crate::{
    evaluate::{Subject, pull_secrets::PodCredentials},
    image::{ImageError, PullPolicy, ResolveRequest},
    placement::{UnknownVariants, affinity, keeps_away, node_set::NodeSet, suffices},
    platform::Architectures,
};

use super::{
    COMPATIBILITY, Selecting,
    compatibility::{CompatibilityDocument, FeatureKeys, LabelKeys, NodeGroup, SelectedNodes},
    groups::{AlikeNodes, GroupBy},
    problem::SelectionProblem,
};

/// An image that was chosen for one container.
pub(super) struct Chosen<'a> {
    pub(super) image: String,
    pub(super) nodes: SelectedNodes,
    /// The node groups that the image fits.
    pub(super) groups: Vec<NodeGroup<'a>>,
}

/// Why no image was chosen for one container.
pub(super) enum Unselected {
    /// The document or image could not be read in time.
    Failed(String, Box<ImageError>),
    /// The container keeps its image, for this reason.
    Because(SelectionProblem),
}

/// The limits of the choice for one pod.
pub(super) struct Pod<'a> {
    pub(super) subject: Subject<'a>,
    pub(super) credentials: &'a PodCredentials,
    pub(super) deadline: Instant,
    /// The architectures that the pod's other images share.
    pub(super) limit: Option<Architectures>,
    /// The nodes that earlier demands require.
    pub(super) required: NodeSet,
    /// The tolerations of earlier demands.
    pub(super) tolerations: Vec<&'a Value>,
}

impl Selecting<'_> {
    pub(super) async fn compatibility(
        &self,
        pod: &Pod<'_>,
        document: &str,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let (resolver, request) = (&self.evaluator.resolver, pod.request(document));
        let content = resolver.artifact_by(&COMPATIBILITY, request, pod.deadline);
        self.parts.documents.parse(content.await?).await
    }

    /// Waits until the nodes are known, and returns them in groups. Nodes of a group do not differ
    /// for the documents, nor for the node selector and affinity of the pod.
    ///
    /// # Errors
    ///
    /// When the nodes are not known in time.
    pub(super) async fn landing(
        &self,
        pod: &Pod<'_>,
        documents: &[&CompatibilityDocument],
    ) -> Result<Arc<[AlikeNodes]>, Elapsed> {
        let features = documents
            .iter()
            .flat_map(|document| document.features.names());
        let features: BTreeSet<String> = features.cloned().collect();
        let wait = async {
            self.parts.nodes.nodes.wait_until_known().await;
            if !features.is_empty() {
                let tenant = pod.subject.namespace;
                self.parts.nodes.features.wait_for(tenant, &features).await;
            }
        };
        timeout_at(pod.deadline, wait).await?;
        Ok(self.group(pod, documents))
    }

    fn group(&self, pod: &Pod<'_>, documents: &[&CompatibilityDocument]) -> Arc<[AlikeNodes]> {
        let author = pod.subject.spec.author_nodes();
        let mut keys = LabelKeys::default();
        // The pod's affinity also gets the architectures of the images.
        keys.keys.insert(affinity::LABEL.to_owned());
        keys.keys.extend(author.label_keys().map(str::to_owned));
        let required = pod.required.terms().iter().flatten();
        keys.keys
            .extend(required.map(|requirement| requirement.key.clone()));
        let mut features = FeatureKeys::default();
        for document in documents {
            keys.add(&document.labels);
            let predictor = self.parts.predictor.as_ref();
            if let Some(predictor) = predictor.filter(|_| !document.models.is_empty()) {
                keys.add(predictor.labels());
            }
            features.add(&document.features);
        }
        let criteria = GroupBy {
            labels: &keys,
            features: &features,
            own_taint: &self.evaluator.policy.taint,
            variants: &self.evaluator.policy.variants,
        };
        if author.names_fields() {
            // The pod selects nodes by name, as pods of DaemonSets do.
            return self.parts.nodes.groups_of(criteria, |node| {
                let name = node.metadata.name.as_deref().unwrap_or_default();
                author.selects(node.view().labels, name)
            });
        }
        self.parts.nodes.groups(criteria)
    }

    /// The node architectures that run an image; `None` if the image does not limit its pod.
    pub(super) async fn runs_on(
        &self,
        pod: &Pod<'_>,
        image: &str,
    ) -> Result<Option<Architectures>, Unselected> {
        let resolved = self
            .evaluator
            .resolver
            .resolve_by(pod.request(image), pod.deadline);
        let resolved = resolved
            .await
            .map_err(|error| Unselected::Failed(image.to_owned(), Box::new(error)))?;
        let set = self.evaluator.policy.of_image(
            &resolved.platforms,
            pod.subject.spec.runtime(&pod.subject.spec.os()),
        );
        let runs_on = set.map(|set| self.evaluator.policy.widen(&set));
        Ok(runs_on.map(|set| self.evaluator.policy.within_schedulable(set)))
    }

    /// Whether the nodes of a group can run both an image for these architectures and the pod's
    /// other images. As in node affinity, nodes of unknown variant count as able unless `unknown`
    /// is `Require`.
    pub(super) fn can_run(
        &self,
        pod: &Pod<'_>,
        image: Option<&Architectures>,
        group: &NodeGroup<'_>,
    ) -> bool {
        let is_possible = self.evaluator.policy.variants.unknown != UnknownVariants::Require;
        let mut sets = image.into_iter().chain(&pod.limit);
        sets.all(|set| suffices(set, group.architecture, group.variant).unwrap_or(is_possible))
    }
}

pub(super) fn count(groups: &[NodeGroup<'_>]) -> usize {
    groups.iter().map(|group| group.count).sum()
}

impl Pod<'_> {
    pub(super) fn request<'a>(&'a self, image: &'a str) -> ResolveRequest<'a> {
        ResolveRequest {
            image,
            policy: PullPolicy::IfNotPresent,
            keyring: &self.credentials.keyring,
            tenant: self.subject.namespace,
        }
    }

    /// The groups of nodes that can take the pod.
    pub(super) fn groups<'a>(&self, alike: &'a [AlikeNodes]) -> Vec<NodeGroup<'a>> {
        let nodes = alike.iter().enumerate();
        let nodes = nodes.filter(|(_, nodes)| self.can_land_on(nodes));
        nodes.map(|(index, nodes)| nodes.group(index)).collect()
    }

    /// Whether the author, the pod's tolerations and earlier demands allow these nodes.
    fn can_land_on(&self, nodes: &AlikeNodes) -> bool {
        let spec = self.subject.spec;
        let author = spec.author_nodes();
        let pod_tolerations = spec.tolerations.as_deref().unwrap_or_default();
        let demanded_tolerations = || self.tolerations.iter().copied();
        let mut taints = nodes.taints.iter();
        // `group` has already applied a selection by name to each node.
        (author.names_fields() || author.selects(&nodes.labels, ""))
            && self.required.selects(&nodes.labels)
            && !taints.any(|taint| {
                keeps_away(taint, pod_tolerations) && keeps_away(taint, demanded_tolerations())
            })
    }

    pub(super) fn image_of(&self, container: &str) -> String {
        let mut containers = self.subject.spec.selectable();
        let found = containers.find(|(_, candidate)| candidate.name == container);
        found
            .and_then(|(_, candidate)| candidate.image.clone())
            .unwrap_or_default()
    }
}
