//! Resolves the images of a pod or template, and decides by them.

use std::collections::BTreeSet;

use futures::future::join_all;
use tokio::sync::Semaphore;

use crate::{
    cluster::objects::{ImageKey, ImageUse, PodSpec},
    image::{ImageError, Reference, ResolveRequest, Resolved},
    placement::{Decision, NodePlatform, PlacementPolicy, emulation::Emulation},
    platform::{ImageArchitectures, NoPlatformReason, Os, Platform, PlatformSet, media_type},
};

use super::{
    EvaluatedImage, Evaluator, ResolvedImages, Stage, Subject, Verdict,
    pull_secrets::PodCredentials, source::Evaluating,
};

/// Maximum number of images of a pod, many times that of the largest pods. A pod with more images
/// tolerates every architecture.
const MAX_IMAGES: usize = 256;
/// Maximum number of images of one pod that are resolved at the same time.
pub(crate) const MAX_CONCURRENT_IMAGES: usize = 16;

impl Evaluator {
    /// Decides again by the images that are read, after demands have changed the pod.
    pub(super) fn decide_by_images(&self, pod: &mut Evaluating<'_>) {
        let Some(read_images) = &pod.read else { return };
        let images = &pod.evaluation.images;
        let verdict = self.verdict(images, &read_images.failed, pod.emulation.as_ref());
        pod.decide(verdict);
    }

    /// Resolves the images of a pod or template, whatever its mode and its tolerations are.
    pub async fn resolve_all(&self, subject: Subject<'_>) -> ResolvedImages {
        let is_template = subject.stage == Stage::Template;
        let (spec, namespace) = (subject.spec, subject.namespace);
        let credentials = self.pull_secrets.for_pod(namespace, spec, is_template);
        let deadline = tokio::time::Instant::now() + self.config.resolution.budget;
        let resolving = self.resolve_each(spec, namespace, &credentials, deadline);
        let (images, failed) = resolving.await;
        ResolvedImages {
            images,
            failed,
            unusable: credentials.unusable(),
        }
    }

    /// The resolved images, and the errors of the failed images.
    async fn resolve_each(
        &self,
        spec: &PodSpec,
        namespace: &str,
        credentials: &PodCredentials,
        deadline: tokio::time::Instant,
    ) -> (Vec<EvaluatedImage>, Vec<(String, ImageError)>) {
        let slots = &Semaphore::new(MAX_CONCURRENT_IMAGES);
        let pod_images = spec.images().into_iter().take(MAX_IMAGES);
        let os = &spec.os();
        let answers = join_all(pod_images.map(|(image, uses)| async move {
            let name = image.to_owned();
            if uses.never_pulled {
                return Ok(EvaluatedImage {
                    platforms: self.held_platforms(image, os),
                    resolved: None,
                    architectures: None,
                    name,
                });
            }
            let _slot = slots.acquire().await;
            let request = ResolveRequest {
                image,
                policy: uses.policy,
                keyring: &credentials.keyring,
                tenant: namespace,
            };
            match self.resolver.resolve_by(request, deadline).await {
                Ok(resolved) => Ok(EvaluatedImage {
                    platforms: counting_platforms(&resolved, uses),
                    resolved: Some(resolved),
                    architectures: None,
                    name,
                }),
                Err(error) => Err((name, error)),
            }
        }))
        .await;
        let (mut images, mut failed) = (Vec::new(), Vec::new());
        for answer in answers {
            match answer {
                Ok(image) => images.push(image),
                Err(error) => failed.push(error),
            }
        }
        limit(&self.policy, spec, &mut images);
        (images, failed)
    }

    /// The platforms of an image that is never pulled: it runs only on nodes that hold it. That a
    /// registry has an image of the same name proves nothing about the image of the nodes.
    fn held_platforms(&self, image: &str, os: &Os) -> PlatformSet {
        // A string that is not an image name is in no node's image list.
        let architectures = Reference::parse(image).map(|reference| {
            let key = ImageKey::from_name(&reference.to_string());
            self.nodes.holding(&[key]).architectures.clone()
        });
        let architectures = architectures.unwrap_or_default();
        let names = architectures.names();
        let platforms = names.filter_map(|name| Platform::new(os.as_str(), name.as_str(), ""));
        PlatformSet::new(platforms.collect(), NoPlatformReason::NotHeld)
    }

    /// Resolves the images of a pod. Returns no images if there are more than `MAX_IMAGES`.
    pub(crate) async fn resolve_images(
        &self,
        spec: &PodSpec,
        namespace: &str,
        credentials: &PodCredentials,
        deadline: tokio::time::Instant,
    ) -> (Vec<EvaluatedImage>, Vec<(String, ImageError)>) {
        // Users must not be able to make archaware resolve thousands of images at once.
        if spec.images().len() > MAX_IMAGES {
            return (Vec::new(), Vec::new());
        }
        self.resolve_each(spec, namespace, credentials, deadline)
            .await
    }

    /// The verdict from the resolved images, or from the architectures of nodes that emulate, if
    /// emulation is used.
    pub(crate) fn verdict(
        &self,
        images: &[EvaluatedImage],
        failed: &[(String, ImageError)],
        emulation: Option<&Emulation>,
    ) -> Verdict {
        let sets = images
            .iter()
            .filter_map(|image| image.architectures.as_ref());
        let known = match emulation {
            Some(emulation) => Some(emulation.architectures()),
            None => self.policy.shared(sets),
        };
        let decision = self.policy.decide(known.clone());
        // Unknown images could only leave fewer architectures.
        let is_final = failed.is_empty() || decision == Decision::NoCommonArchitecture;
        if is_final {
            Verdict::Decided(decision)
        } else {
            Verdict::Unresolved {
                failed: failed.to_vec(),
                known,
            }
        }
    }
}

/// The platforms of a resolved image, as far as they limit a pod that uses it in this way.
pub fn counting_platforms(resolved: &Resolved, uses: ImageUse) -> PlatformSet {
    if uses.only_mounted && !media_type::is_index(resolved.media_type) {
        return PlatformSet::None(NoPlatformReason::OnlyMounted);
    }
    resolved.platforms.clone()
}

/// The architectures of each image of a pod, in the order of the images; `None` for an image that
/// does not limit the pod.
///
/// Images that are all for Windows limit only a pod that states its OS. Another pod may select
/// Windows nodes in a different way (by a taint, or by a label of its own).
pub fn limiting<'a>(
    policy: &PlacementPolicy,
    spec: &PodSpec,
    images: impl Iterator<Item = &'a PlatformSet> + Clone,
) -> Vec<Option<ImageArchitectures>> {
    let os = spec.os();
    let is_limited = spec.stated_os().is_some() || !are_for_windows(images.clone());
    let sets = images.map(|image| policy.of_image(image, spec.runtime(&os)));
    sets.map(|set| set.filter(|_| is_limited)).collect()
}

/// Sets the architectures of the images that limit a pod.
pub(super) fn limit(policy: &PlacementPolicy, spec: &PodSpec, images: &mut [EvaluatedImage]) {
    let platforms = images.iter().map(|image| &image.platforms);
    let sets = limiting(policy, spec, platforms);
    for (image, set) in images.iter_mut().zip(sets) {
        image.architectures = set;
    }
}

/// The images that a node is known not to run.
pub fn lacking<'a>(
    images: &'a [EvaluatedImage],
    policy: &PlacementPolicy,
    node: NodePlatform<'_>,
) -> Vec<&'a EvaluatedImage> {
    let lacks = |image: &&EvaluatedImage| {
        policy.runs(node, None, image.architectures.as_ref()) == Some(false)
    };
    images.iter().filter(lacks).collect()
}

/// Whether all images with platforms exist for Windows, and none of them for Linux.
fn are_for_windows<'a>(images: impl Iterator<Item = &'a PlatformSet> + Clone) -> bool {
    let is_for = |os: &Os| {
        let sets = images.clone().filter_map(|image| image.architectures(os));
        sets.map(|set| !set.is_empty()).collect::<BTreeSet<bool>>()
    };
    is_for(&Os::linux()) == [false].into() && is_for(&Os::windows()) == [true].into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn images_for_windows_limit_only_pods_for_windows() {
        let image = |platforms: &[(&str, &str)]| {
            let platforms = platforms
                .iter()
                .map(|(os, architecture)| Platform::new(os, architecture, "").unwrap());
            PlatformSet::new(platforms.collect(), NoPlatformReason::NoArchitecture)
        };
        let linux = || image(&[("linux", "arm64")]);
        let windows = || image(&[("windows", "amd64")]);
        let both = || image(&[("linux", "arm64"), ("windows", "amd64")]);
        let policy = PlacementPolicy::default();
        for (os, images, expected) in [
            (None, vec![windows()], vec![None]),
            (None, vec![windows(), both()], vec![Some(""), Some("arm64")]),
            (
                None,
                vec![windows(), linux()],
                vec![Some(""), Some("arm64")],
            ),
            (
                Some("windows"),
                vec![windows(), both()],
                vec![Some("amd64"); 2],
            ),
            (Some("windows"), vec![linux()], vec![Some("")]),
            (Some("linux"), vec![windows()], vec![Some("")]),
        ] {
            let os = os.map(|name| json!({"name": name}));
            let spec: PodSpec = serde_json::from_value(json!({"os": os})).unwrap();
            let sets = limiting(&policy, &spec, images.iter());
            let names = sets.iter().map(|set| set.as_ref().map(|set| set.join(",")));
            let found: Vec<Option<String>> = names.collect();
            let expected: Vec<Option<String>> = expected
                .into_iter()
                .map(|set| set.map(str::to_owned))
                .collect();
            assert_eq!(found, expected, "{os:?} {images:?}");
        }
    }
}
