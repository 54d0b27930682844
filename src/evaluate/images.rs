//! What the images of a pod or template allow.

use std::collections::BTreeSet;

use futures::future::join_all;
use tokio::sync::Semaphore;

use crate::{
    cluster::objects::PodSpec,
    image::{ImageError, ResolveRequest},
    placement::{Decision, PodRuntime, emulation::Emulation, pod::AffinityAccess},
    platform::{Os, PlatformSet},
};

use super::{
    Conflict, EvaluatedImage, Evaluation, Evaluator, ResolvedImages, Stage, Subject, Verdict,
    pull_secrets::PodCredentials,
};

/// Maximum number of images of a pod, many times that of the largest pods. Beyond it, every architecture is
/// tolerated.
const MAX_IMAGES: usize = 256;
/// Maximum number of images of one pod that are being resolved.
pub(super) const MAX_CONCURRENT_IMAGES: usize = 16;

impl Evaluator {
    /// What the images of a pod or template allow, with its runtime class or with one that it gets because no CPU runs them.
    pub(super) async fn decide_by_images(
        &self,
        subject: Subject<'_>,
        evaluation: &mut Evaluation,
        deadline: tokio::time::Instant,
    ) -> Verdict {
        let is_none =
            |verdict: &Verdict| matches!(verdict, Verdict::Decided(Decision::NoCommonArchitecture));
        let is_template = subject.stage == Stage::Template;
        let (spec, namespace) = (subject.spec, subject.namespace);
        let keys = self.pull_secrets.for_pod(namespace, spec, is_template);
        let each = self.resolve_images(spec, namespace, &keys, deadline);
        let (mut images, failed) = each.await;
        let os = spec.os();
        let mut runtime = spec.runtime(&os);
        let emulation = self.emulation(subject, &images, runtime);
        let mut verdict = self.verdict(spec, runtime, (&images, &failed), emulation.as_ref());
        if is_none(&verdict) && runtime.class.is_none() && self.config.assign_runtime_class {
            let sets = images.iter().map(|image| &image.resolved.platforms);
            let class = self.policy.class_for(sets, &os);
            let assigned = class.map(str::to_owned);
            if subject.stage != Stage::Creation {
                evaluation.lacking_class = assigned;
            } else if class.is_some() {
                evaluation.runtime_class = assigned;
                runtime.class = class;
                for image in &mut images {
                    image.architectures = self.policy.of_image(&image.resolved.platforms, runtime);
                }
                verdict = self.verdict(spec, runtime, (&images, &failed), None);
            }
        }
        if is_none(&verdict) {
            let of_images = images.iter().filter_map(|one| one.architectures.clone());
            let sets = self.policy.disjoint(of_images);
            evaluation.conflict = Some(Conflict::Disjoint(sets));
        }
        let sets = images.iter().map(|image| &image.resolved.platforms);
        evaluation.native = self.policy.native_architectures(sets, runtime);
        evaluation.images = images;
        evaluation.emulation = emulation.map(Box::new);
        let decided = match &verdict {
            Verdict::Decided(Decision::Architectures(set)) => Some(Some(set.clone())),
            Verdict::Decided(Decision::TolerateAll) => Some(None),
            _ => None,
        };
        // Where images are emulated, native nodes come first.
        let is_emulated = evaluation.emulation.is_some() || evaluation.native.is_some();
        let selected = evaluation.selected.as_ref();
        let waits = selected.is_some_and(|selected| !selected.failed.is_empty());
        if let Some(set) = decided
            && self.reads_attached(subject)
            && !is_emulated
            && !waits
        {
            let prefers = self.prefer_by_attached(subject, evaluation, &keys, set, deadline);
            Box::pin(prefers).await;
        }
        evaluation.unusable = keys.unusable();
        verdict
    }

    /// Where images run by emulation, if the pod can be limited to such nodes.
    fn emulation(
        &self,
        subject: Subject<'_>,
        images: &[EvaluatedImage],
        runtime: PodRuntime<'_>,
    ) -> Option<Emulation> {
        let sets = images.iter().map(|image| &image.resolved.platforms);
        let emulation = self.policy.emulation(sets, runtime)?;
        let author = subject.spec.author_selection();
        // Terms that name nodes get no requirements, and those of a pod that exists no alternatives.
        let can_be_limited = match subject.affinity_access() {
            AffinityAccess::Open => !author.names_fields(),
            AffinityAccess::Narrowing => !author.has_terms(),
            AffinityAccess::Closed => false,
        };
        let helps = !author.excludes_all(&emulation.architectures());
        (helps && (can_be_limited || emulation.covers(author))).then_some(emulation)
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
    pub(super) async fn resolve_images(
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

    /// What images allow that are known, and where they are emulated, if others are not known.
    pub(super) fn verdict(
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
