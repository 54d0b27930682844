//! Documents that are attached to the images of a pod which does not ask for a selection: their weights become preferred node affinity.
//! Nothing is required by them, and what cannot be read in time does not count.

use futures::future::join_all;
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    config::AttachedDocuments,
    evaluate::{
        Evaluation, Evaluator, Stage, Subject, images::MAX_CONCURRENT_IMAGES,
        pull_secrets::PodCredentials,
    },
    placement::{
        affinity::WeightedTerm,
        node_set::MAX_TERMS,
        selection::{
            Candidate, CandidateOutcome, Choice, CompatibilityDocument, ImageFit, NodeGroup,
        },
    },
    platform::Architectures,
};

use super::{
    ContainerCandidates,
    choose::{Pod, count},
};

impl Evaluator {
    /// Whether they are looked for: only if the pod can get a preference, and its scheduler a choice.
    pub(in crate::evaluate) fn reads_attached(&self, subject: Subject<'_>) -> bool {
        // A pod gets them once: the patch of one that exists removes the gate.
        let is_decided_now = match subject.stage {
            Stage::Creation => true,
            Stage::Pod => subject.spec.gate().is_some(),
            Stage::Template => false,
        };
        self.config.selection.attached == AttachedDocuments::Prefer
            && is_decided_now
            && !subject.spec.author_selection().names_nodes()
    }

    /// Prefers nodes by what is attached to the images of a pod, whose architectures are known.
    pub(in crate::evaluate) async fn prefer_by_attached(
        &self,
        subject: Subject<'_>,
        evaluation: &mut Evaluation,
        credentials: &PodCredentials,
        architectures: Option<Architectures>,
        deadline: Instant,
    ) {
        let pod = &Pod {
            subject,
            credentials,
            deadline: self.latest(subject.stage, deadline),
            limit: architectures,
            rules: evaluation.rules.as_deref(),
        };
        // The nodes of selected images follow the choice.
        let selected = evaluation.selected.as_deref();
        let is_selected = |image: &str| {
            let mut all = selected.iter().flat_map(|selected| &selected.images);
            all.any(|change| change.to == image)
        };
        let images = evaluation.images.iter().map(|image| image.name.as_str());
        let images = images.filter(|image| !is_selected(image));
        let slots = &Semaphore::new(MAX_CONCURRENT_IMAGES);
        let reads = images.map(|image| async move {
            let _slot = slots.acquire().await;
            let read = self.resolver.attached_by(pod.request(image), pod.deadline);
            match read.await {
                Ok(document) => Some((image, document)),
                Err(error) => {
                    tracing::debug!(image, error = %error.chain(), "no attached document counts");
                    None
                }
            }
        });
        let documents: Vec<_> = join_all(reads).await.into_iter().flatten().collect();
        if documents.is_empty() {
            return;
        }
        let all: Vec<_> = documents.iter().map(|(_, document)| &**document).collect();
        let Ok(alike) = self.landing(pod, &all).await else {
            return;
        };
        let groups = pod.groups(&alike);
        let mut terms = Vec::new();
        let mut candidates = Vec::new();
        for (image, document) in &documents {
            let kept = self.explains.then_some(&mut candidates);
            let new = self.preferred(pod, image, document, &groups, kept);
            terms.extend(new);
        }
        terms.sort_by_key(|term: &WeightedTerm| std::cmp::Reverse(term.weight));
        terms.truncate(MAX_TERMS);
        let selected = evaluation.selected.get_or_insert_default();
        selected.nodes.preferred.extend(terms);
        selected.candidates.extend(candidates);
    }

    /// Three quarters of what the creation of a pod waits for its evaluation, so that it gets what is known of its architectures in
    /// any case. `deadline`: of the evaluation.
    fn latest(&self, stage: Stage, deadline: Instant) -> Instant {
        let started = deadline - self.config.resolution.budget;
        let patience = self.config.admission.patience();
        match stage {
            Stage::Creation if !self.explains => deadline.min(started + patience * 3 / 4),
            _ => deadline,
        }
    }

    fn preferred(
        &self,
        pod: &Pod<'_>,
        image: &str,
        document: &CompatibilityDocument,
        groups: &[NodeGroup<'_>],
        kept: Option<&mut Vec<ContainerCandidates>>,
    ) -> Vec<WeightedTerm> {
        let runs = |_: &_, group: &NodeGroup<'_>| {
            if self.can_run(pod, None, group) {
                ImageFit::Runs
            } else {
                ImageFit::OtherArchitecture
            }
        };
        let choice = document.choose(groups, &runs).ok();
        let terms = choice.as_ref().map(Choice::preferred).unwrap_or_default();
        if let Some(kept) = kept {
            let mut candidates = document.candidates_of(choice.as_ref(), groups, &runs);
            for (candidate, entry) in candidates.iter_mut().zip(&document.entries) {
                let mut all = terms.iter();
                candidate.select_nothing(all.any(|(one, _)| std::ptr::eq(*one, entry)));
            }
            let containers = pod.subject.spec.selectable();
            let containers = containers.filter(|(_, one)| one.image.as_deref() == Some(image));
            kept.extend(containers.map(|(_, one)| ContainerCandidates {
                container: one.name.clone(),
                document: image.to_owned(),
                selects_image: false,
                nodes: count(groups),
                candidates: candidates.clone(),
            }));
        }
        terms.into_iter().map(|(_, term)| term).collect()
    }
}

impl Candidate {
    /// What becomes of it if the image of its container stays.
    fn select_nothing(&mut self, is_preferred: bool) {
        if matches!(
            self.outcome,
            CandidateOutcome::Chosen | CandidateOutcome::SameImage
        ) {
            self.outcome = if is_preferred {
                CandidateOutcome::Preferred
            } else {
                CandidateOutcome::NotPreferred
            };
        }
    }
}
