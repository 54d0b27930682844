//! What nodes hold of images that cannot be resolved.

use futures::future::join_all;

use crate::{
    cluster::objects::{ImageKey, PodSpec},
    image::{ImageError, Reference},
    placement::image_locality::ImageLocality,
};

use super::Evaluator;

/// Maximum number of images for which nodes are looked up. Pods rarely have more.
const MAX_UNKNOWN: usize = 16;

impl Evaluator {
    /// What nodes hold of the images of a pod that are not known. `None`: nothing.
    pub(super) async fn image_locality(
        &self,
        spec: &PodSpec,
        failed: &[(String, ImageError)],
    ) -> Option<Box<ImageLocality>> {
        let own = spec.images();
        let unknown: Option<Vec<_>> = failed
            .iter()
            .filter(|(image, _)| own.contains_key(image.as_str()))
            // What is no name is held by no node. Nodes name images as pods do, whatever is rewritten for archaware.
            .map(|(image, error)| Some((image, Reference::parse(image).ok()?, error)))
            .collect();
        let unknown = unknown.filter(|all| !all.is_empty() && all.len() <= MAX_UNKNOWN)?;
        let mut keys: Vec<_> = unknown
            .iter()
            .map(|(_, reference, _)| ImageKey::of(&reference.to_string()))
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
        let locality = ImageLocality {
            images: unknown.iter().map(|(image, ..)| (*image).clone()).collect(),
            nodes: (*self.nodes.holding(&keys)).clone(),
            copies: shared.map(|set| self.policy.within_schedulable(set)),
        };
        (!locality.is_empty()).then(|| Box::new(locality))
    }
}
