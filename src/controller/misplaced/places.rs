//! Whether a node could take a replacement. Avoids evicting a partly working pod that could not be
//! placed elsewhere.

use std::collections::BTreeMap;

use crate::{
    cluster::{
        api::ApiError,
        name::NamespacedName,
        objects::{Node, PersistentVolume, PersistentVolumeClaim, Pod, annotations},
    },
    evaluate::AuthorPod,
    placement::{
        Decision,
        affinity::NodeSelectorTerm,
        demand::Demands,
        landing::{Landing, LandingNode, LandingPod, landing},
    },
    platform::Architectures,
};

use super::MisplacedPods;

impl MisplacedPods {
    /// Whether a node of these architectures could take the pod: by its author's node selector,
    /// affinity and tolerations, and by its volumes. Free resources are not considered.
    pub(super) async fn has_place(&self, pod: &Pod, architectures: &Architectures) -> bool {
        let volumes = match self.volume_terms(pod).await {
            Ok(volumes) => volumes,
            Err(error) => {
                let name = NamespacedName::of_object(pod);
                tracing::warn!(pod = %name, %error, "cannot read the volumes of the pod, so it is not evicted");
                return false;
            }
        };
        let policy = &self.evaluator.policy;
        // archaware adds its tolerations and affinity again, for all of these architectures.
        let author = AuthorPod::new(&pod.spec, annotations(&pod.metadata));
        let mut tolerations = author.spec.tolerations.clone().unwrap_or_default();
        let decision = Decision::Architectures(architectures.clone());
        let added = policy.missing_tolerations(&decision, &pod.spec.os(), &tolerations);
        tolerations.extend(added);
        let wanted = LandingPod {
            author: author.spec.author_nodes(),
            tolerations: &tolerations,
            demands: &Demands::default(),
            architectures: Some(architectures),
            added: &[],
        };
        let takes = |node: &Node| {
            let view = node.view();
            let node = LandingNode {
                name: node.metadata.name.as_deref().unwrap_or_default(),
                architecture: view.architecture,
                variant: policy.variants.of_node(&view),
                labels: view.labels,
                taints: view.taints,
            };
            landing(&wanted, &node, &policy.taint) == Landing::Fits
                && can_use(&volumes, node.labels, node.name)
        };
        self.nodes.state().iter().any(|node| takes(node))
    }

    /// The node affinity of each volume that has one.
    async fn volume_terms(&self, pod: &Pod) -> Result<Vec<Vec<NodeSelectorTerm>>, ApiError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut terms = Vec::new();
        let volumes = pod.spec.volumes.iter();
        for claim in volumes.filter_map(|volume| volume.persistent_volume_claim.as_ref()) {
            let name = NamespacedName::new(namespace, &claim.claim_name);
            let found_claim = self.api.find::<PersistentVolumeClaim>(&name).await?;
            let Some(volume) = found_claim.and_then(|claim| claim.spec.volume_name) else {
                continue;
            };
            let name = NamespacedName::cluster(&volume);
            let found_volume = self.api.find::<PersistentVolume>(&name).await?;
            let required = found_volume.and_then(|volume| volume.spec.node_affinity.required);
            terms.extend(required.map(|required| required.node_selector_terms));
        }
        Ok(terms)
    }
}

/// Whether a node can use all volumes. A node can use a volume if one of its terms matches.
fn can_use(
    volumes: &[Vec<NodeSelectorTerm>],
    labels: &BTreeMap<String, String>,
    name: &str,
) -> bool {
    volumes
        .iter()
        .all(|terms| terms.iter().any(|term| term.selects(labels, name)))
}
