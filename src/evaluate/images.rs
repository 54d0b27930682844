//! What the images of a pod or template allow.

use std::collections::BTreeSet;

use futures::future::join_all;
use tokio::sync::Semaphore;

use crate::{
    cluster::objects::PodSpec,
    image::{ImageError, ResolveRequest},
    placement::{Decision, PodRuntime, emulation::Emulation},
    platform::{Os, PlatformSet},
};

use super::{
    EvaluatedImage, Evaluator, ResolvedImages, Stage, Subject, Verdict,
    pull_secrets::PodCredentials, source::Evaluating,
};

/// Maximum number of images of a pod, many times that of the largest pods. Beyond it, every architecture is
/// tolerated.
const MAX_IMAGES: usize = 256;
/// Maximum number of images of one pod that are being resolved.
pub(crate) const MAX_CONCURRENT_IMAGES: usize = 16;

impl Evaluator {
    /// Decides by the images that are read, and by what demands have changed since.
    pub(super) fn decide_by_images(&self, pod: &mut Evaluating<'_>) {
        let Some(read) = &pod.read else { return };
        let (images, failed) = (&pod.evaluation.images, &read.failed);
        let spec = pod.subject().spec;
        let os = spec.os();
        let verdict = self.verdict(
            spec,
            spec.runtime(&os),
            (images, failed),
            pod.emulation.as_ref(),
        );
        pod.decide(verdict);
    }

    /// Resolves the images of a pod or template, whatever its rule and its tolerations are.
    pub async fn resolve_all(&self, subject: Subject<'_>) -> ResolvedImages {
        let is_template = subject.stage == Stage::Template;
        let (spec, namespace) = (subject.spec, subject.namespace);
        let credentials = self.pull_secrets.for_pod(namespace, spec, is_template);
        let deadline = tokio::time::Instant::now() + self.config.resolution.budget;
        let each = self.resolve_each(spec, namespace, &credentials, deadline);
        let (images, failed) = each.await;
        ResolvedImages {
            images,
            failed,
            unusable: credentials.unusable(),
        }
    }

    /// The images that are resolved, and why the others are not.
    async fn resolve_each(
        &self,
        spec: &PodSpec,
        namespace: &str,
        credentials: &PodCredentials,
        deadline: tokio::time::Instant,
    ) -> (Vec<EvaluatedImage>, Vec<(String, ImageError)>) {
        let slots = &Semaphore::new(MAX_CONCURRENT_IMAGES);
        let all = spec.images().into_iter().take(MAX_IMAGES);
        let resolved = join_all(all.map(|(image, policy)| async move {
            let _slot = slots.acquire().await;
            let request = ResolveRequest {
                image,
                policy,
                keyring: &credentials.keyring,
                tenant: namespace,
            };
            let answer = self.resolver.resolve_by(request, deadline).await;
            (image.to_owned(), answer)
        }))
        .await;
        let os = spec.os();
        let mut images: Vec<EvaluatedImage> = Vec::new();
        let mut failed = Vec::new();
        for (name, answer) in resolved {
            match answer {
                Ok(resolved) => images.push(EvaluatedImage {
                    name,
                    architectures: self.policy.of_image(&resolved.platforms, spec.runtime(&os)),
                    resolved,
                }),
                Err(error) => failed.push((name, error)),
            }
        }
        (images, failed)
    }

    /// The images that limit a pod: none if there are too many of them.
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

    /// What the images that are known allow, and the nodes that emulate.
    pub(crate) fn verdict(
        &self,
        spec: &PodSpec,
        runtime: PodRuntime<'_>,
        (images, failed): (&[EvaluatedImage], &[(String, ImageError)]),
        emulation: Option<&Emulation>,
    ) -> Verdict {
        let sets = images.iter().map(|image| &image.resolved.platforms);
        let known = if are_for_other_nodes(spec, sets.clone()) {
            None
        } else if let Some(emulation) = emulation {
            Some(emulation.architectures())
        } else {
            self.policy.shared_architectures(sets, runtime)
        };
        let decision = self.policy.decide(known.clone());
        // The images that are not known could only leave fewer architectures.
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

/// Whether images exist for Windows and not for linux, in a pod that does not state its OS: it may well select Windows nodes in
/// another way (by a taint, by a label of its own), so they do not limit it.
pub fn are_for_other_nodes<'a>(
    spec: &PodSpec,
    images: impl Iterator<Item = &'a PlatformSet> + Clone,
) -> bool {
    spec.stated_os().is_none() && are_for_windows(images)
}

/// Whether images exist for Windows and not for linux.
fn are_for_windows<'a>(images: impl Iterator<Item = &'a PlatformSet> + Clone) -> bool {
    let is_for = |os: &Os| {
        let named = images.clone().filter_map(|image| image.architectures(os));
        named.map(|set| !set.is_empty()).collect::<BTreeSet<bool>>()
    };
    is_for(&Os::linux()) == [false].into() && is_for(&Os::windows()) == [true].into()
}
