//! Documents that are attached to the images of a pod, except images that a selection chose. The
//! weights become preferred node affinity. The documents require nothing, and are ignored if they
//! cannot be read in time.

use futures::{
    FutureExt,
    future::{BoxFuture, join_all},
};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};

use crate::{
    config,
    evaluate::{
        Evaluator, ImageAlternatives, MAX_CONCURRENT_IMAGES, Stage, Subject, Verdict,
        source::{DemandSource, Evaluating},
    },
    placement::{
        Decision,
        affinity::WeightedTerm,
        demand::{Demand, Demands, Source},
        node_set::MAX_TERMS,
    },
    platform::Architectures,
};

use super::{
    COMPATIBILITY, ImageSelector, Selecting,
    alternatives::alternative,
    compatibility::{
        Candidate, CandidateOutcome, Choice, CompatibilityDocument, Fits, ImageFit, MAX_MEMORY,
        NodeGroup,
    },
    landing::{Pod, count},
};

/// Prefers nodes by the documents that are attached to images, except selected images.
pub struct AttachedDocumentSource(pub ImageSelector);

impl DemandSource for AttachedDocumentSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        let architectures = match &pod.evaluation.verdict {
            Verdict::Decided(Decision::Architectures(set)) => Some(set.clone()),
            Verdict::Decided(Decision::TolerateAll) => None,
            _ => return None,
        };
        let demands = &pod.evaluation.demands;
        // These demands already prefer nodes that run the images natively.
        let is_emulated = [Source::Emulation, Source::RuntimeClass]
            .iter()
            .any(|source| demands.find(source).is_some());
        pod.read.as_ref()?;
        let selecting = Selecting {
            evaluator,
            parts: &self.0.0,
        };
        if is_emulated || !selecting.reads_attached(pod.subject()) {
            return None;
        }
        let ask = async move {
            let (demand, candidates) = selecting.prefer_by_attached(pod, architectures).await;
            pod.evaluation.demands.extend(demand);
            pod.evaluation.alternatives.extend(candidates);
        };
        Some(ask.boxed())
    }
}

impl Selecting<'_> {
    /// Whether attached documents are read: only if the pod can still get a preference, and the
    /// scheduler has a choice.
    fn reads_attached(&self, subject: Subject<'_>) -> bool {
        // For an existing pod, documents are read only once: the patch that adds the preferences
        // also removes the pod's scheduling gate.
        let is_decided_now = match subject.stage {
            Stage::Creation => true,
            Stage::Pod => subject.spec.gate().is_some(),
            Stage::Template => false,
        };
        self.evaluator.config.selection.attached == config::AttachedDocuments::Prefer
            && is_decided_now
            && !subject.spec.author_nodes().names_nodes()
    }

    /// Prefers nodes by the documents that are attached to the images of a pod.
    async fn prefer_by_attached(
        &self,
        evaluating: &Evaluating<'_>,
        architectures: Option<Architectures>,
    ) -> (Option<Demand>, Vec<ImageAlternatives>) {
        let nothing = (None, Vec::new());
        let Some(read_images) = &evaluating.read else {
            return nothing;
        };
        let (subject, evaluation) = (evaluating.subject(), &evaluating.evaluation);
        let rules: Demands = evaluation.demands.of_rules().cloned().collect();
        let pod = &Pod {
            subject,
            credentials: &read_images.credentials,
            deadline: self.latest(subject.stage, evaluating.deadline),
            limit: architectures,
            required: rules.required(),
            tolerations: rules.tolerations().collect(),
        };
        // For a selected image, the selection has already added preferences.
        let is_selected = |image: &str| {
            let mut changes = evaluation.demands.images();
            changes.any(|change| change.to == image)
        };
        let images = evaluation.images.iter().map(|image| image.name.as_str());
        let images = images.filter(|image| !is_selected(image));
        let slots = &Semaphore::new(MAX_CONCURRENT_IMAGES);
        let reads = images.map(|image| async move {
            let _slot = slots.acquire().await;
            let resolver = &self.evaluator.resolver;
            let reading = resolver.attached_by(&COMPATIBILITY, pod.request(image), pod.deadline);
            (image, reading.await)
        });
        let contents = join_all(reads).await;
        let place = self.parts.pods.enter(subject.namespace);
        let Ok(_place) = timeout_at(pod.deadline, place).await else {
            return nothing;
        };
        let mut documents = Vec::new();
        let mut memory = 0;
        for (image, content) in contents {
            let parsed = match content {
                Ok(content) => self.parts.documents.parse(content).await,
                Err(error) => Err(error),
            };
            match parsed {
                Ok(document) if memory + document.memory <= MAX_MEMORY => {
                    memory += document.memory;
                    documents.push((image, document));
                }
                Ok(_) => tracing::debug!(image, "the attached document is too large"),
                Err(error) => {
                    tracing::debug!(image, error = %error.chain(), "no attached document counts");
                }
            }
        }
        if documents.is_empty() {
            return nothing;
        }
        let all_documents: Vec<_> = documents.iter().map(|(_, document)| &**document).collect();
        let Ok(alike) = self.landing(pod, &all_documents).await else {
            return nothing;
        };
        let groups = pod.groups(&alike);
        let mut terms = Vec::new();
        let mut candidates = Vec::new();
        for (image, document) in &documents {
            let explained_candidates = self.evaluator.explains.then_some(&mut candidates);
            match self.fits(pod, document, &alike, &groups).await {
                Ok(fits) => {
                    terms.extend(self.preferred(
                        pod,
                        image,
                        document,
                        (&groups, &fits),
                        explained_candidates,
                    ));
                }
                Err(why) => tracing::debug!(image, %why, "the attached document does not count"),
            }
        }
        terms.sort_by_key(|term: &WeightedTerm| std::cmp::Reverse(term.weight));
        terms.truncate(MAX_TERMS);
        let demand = Demand {
            prefer: terms,
            ..Demand::from_source(Source::AttachedDocuments)
        };
        (Some(demand), candidates)
    }

    /// The deadline for reading the documents. While a pod is created, it is ¾ of the time that the
    /// webhook waits for the evaluation, so that architectures are applied even if documents are
    /// slow. Otherwise, and for `explain`, it is the deadline of the evaluation.
    fn latest(&self, stage: Stage, deadline: Instant) -> Instant {
        let started = deadline - self.evaluator.config.resolution.budget;
        let patience = self.evaluator.config.admission.patience();
        match stage {
            Stage::Creation if !self.evaluator.explains => deadline.min(started + patience * 3 / 4),
            _ => deadline,
        }
    }

    fn preferred(
        &self,
        pod: &Pod<'_>,
        image: &str,
        document: &CompatibilityDocument,
        (groups, fits): (&[NodeGroup<'_>], &Fits),
        explained_candidates: Option<&mut Vec<ImageAlternatives>>,
    ) -> Vec<WeightedTerm> {
        let runs = |_: &_, group: &NodeGroup<'_>| {
            if self.can_run(pod, None, group) {
                ImageFit::Runs
            } else {
                ImageFit::OtherArchitecture
            }
        };
        let choice = Choice::choose(document, groups, fits, &runs).ok();
        let terms = choice.as_ref().map(Choice::preferred).unwrap_or_default();
        if let Some(explained_candidates) = explained_candidates {
            let mut candidates = Candidate::list(document, choice.as_ref(), groups, fits, &runs);
            for (candidate, entry) in candidates.iter_mut().zip(&document.entries) {
                let mut preferences = terms.iter();
                select_nothing(
                    candidate,
                    preferences.any(|(preferred, _)| std::ptr::eq(*preferred, entry)),
                );
            }
            let containers = pod.subject.spec.selectable();
            let containers =
                containers.filter(|(_, container)| container.image.as_deref() == Some(image));
            explained_candidates.extend(containers.map(|(_, container)| ImageAlternatives {
                container: container.name.clone(),
                document: image.to_owned(),
                selects_image: false,
                nodes: count(groups),
                candidates: candidates.iter().map(alternative).collect(),
            }));
        }
        terms.into_iter().map(|(_, term)| term).collect()
    }
}

/// Turns the result for a candidate into the result for a container that keeps its image.
fn select_nothing(candidate: &mut Candidate, is_preferred: bool) {
    if matches!(
        candidate.outcome,
        CandidateOutcome::Chosen | CandidateOutcome::SameImage
    ) {
        candidate.outcome = if is_preferred {
            CandidateOutcome::Preferred
        } else {
            CandidateOutcome::NotPreferred
        };
    }
}
