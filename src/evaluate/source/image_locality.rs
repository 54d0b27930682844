//! Prefers nodes that already hold images that archaware could not resolve.

use futures::{
    FutureExt,
    future::{BoxFuture, join_all},
};

use crate::{
    cluster::objects::{ImageKey, PodSpec},
    evaluate::{Evaluator, Stage, Verdict},
    image::{ImageError, Reference},
    placement::image_locality::ImageLocality,
};

use super::{DemandSource, Evaluating};

/// Maximum number of images for which nodes are looked up. Pods rarely have more.
const MAX_UNKNOWN: usize = 16;

/// Prefers nodes that hold unresolved images.
pub struct ImageLocalitySource;

impl DemandSource for ImageLocalitySource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        let subject = pod.subject();
        // The affinity of a pod behind the gate can be set once: the same patch removes the gate.
        let is_used = subject.stage == Stage::Pod && subject.spec.gate().is_some();
        let is_unresolved = matches!(pod.evaluation.verdict, Verdict::Unresolved { .. });
        if !is_unresolved || !(is_used || evaluator.explains) {
            return None;
        }
        let ask = async move {
            if let Verdict::Unresolved { failed, .. } = &pod.evaluation.verdict {
                let locality = evaluator.image_locality(pod.subject().spec, failed).await;
                let demand = locality.and_then(|locality| locality.demand());
                pod.evaluation.demands.extend(demand);
            }
        };
        Some(ask.boxed())
    }
}

impl Evaluator {
    /// The nodes that hold all unresolved images of a pod; `None` if the pod has no or too many
    /// unresolved images, or if the name of one is invalid.
    async fn image_locality(
        &self,
        spec: &PodSpec,
        failed: &[(String, ImageError)],
    ) -> Option<ImageLocality> {
        let pod_images = spec.images();
        let unknown: Option<Vec<_>> = failed
            .iter()
            .filter(|(image, _)| pod_images.contains_key(image.as_str()))
            // A string that is not an image name cannot be in any node's image list, so no node
            // holds all images. Nodes list images by the names in pods; `rewrites` do not apply.
            .map(|(image, error)| Some((image, Reference::parse(image).ok()?, error)))
            .collect();
        let unknown = unknown.filter(|images| !images.is_empty() && images.len() <= MAX_UNKNOWN)?;
        let mut keys: Vec<_> = unknown
            .iter()
            .map(|(_, reference, _)| ImageKey::from_name(&reference.to_string()))
            .collect();
        keys.sort_unstable();
        let copies = join_all(
            unknown
                .iter()
                .map(|(_, reference, error)| self.resolver.local_copy(reference, error)),
        );
        let copies: Vec<_> = copies.await.into_iter().flatten().collect();
        let shared = self
            .policy
            .shared_architectures(&copies, spec.runtime(&spec.os()));
        Some(ImageLocality {
            images: unknown.iter().map(|(image, ..)| (*image).clone()).collect(),
            nodes: (*self.nodes.holding(&keys)).clone(),
            copies: shared.map(|set| self.policy.within_schedulable(set)),
        })
    }
}
