//! The sources of demands: each feature that asks something of the nodes of a pod.

mod architectures;
mod author;
mod emulation;
mod image_locality;
mod rules;
mod runtime_class;

use futures::future::BoxFuture;
use tokio::time::Instant;

use crate::{
    cluster::objects::{Namespace, PodSpec},
    image::ImageError,
    placement::{Decision, emulation::Emulation, mode::Rule},
};

use super::{
    Conflict, Evaluation, Evaluator, Subject, Verdict, pull_secrets::PodCredentials, selection,
};

pub(super) use rules::applied_rules;

/// A feature that asks something of the nodes of a pod. A new feature is a file with its source, and a line in [`SOURCES`].
pub(super) trait DemandSource: Sync {
    /// Adds demands and notices to the evaluation, by what the sources before it asked. Returns the rest of the work if something has
    /// to be read for it.
    fn ask<'a>(
        &self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>>;
}

/// All sources, in their order.
pub(super) const SOURCES: [&dyn DemandSource; 8] = [
    &rules::Rules,
    &selection::Selection,
    &architectures::Architectures,
    &emulation::EmulatingNodes,
    &runtime_class::RuntimeClass,
    &author::Author,
    &selection::AttachedDocuments,
    &image_locality::HoldingNodes,
];

/// A pod or template whose sources of demands are being asked.
pub(super) struct Evaluating<'a> {
    given: Subject<'a>,
    /// The spec with what demands have set so far: runtime class and images. `None`: as it was given.
    spec: Option<PodSpec>,
    pub(super) namespace: &'a Namespace,
    pub(super) rule: Rule,
    pub(super) deadline: Instant,
    /// What is known so far.
    pub(super) evaluation: Evaluation,
    /// What the selection of images could not read in time.
    pub(super) unread: Vec<(String, ImageError)>,
    /// `None`: its images do not decide.
    pub(super) read: Option<ReadImages>,
    pub(super) emulation: Option<Emulation>,
}

/// What reading the images of a pod leaves behind, beside the images.
pub(super) struct ReadImages {
    pub(super) credentials: PodCredentials,
    /// Images that could not be read in time, and why.
    pub(super) failed: Vec<(String, ImageError)>,
}

impl<'a> Evaluating<'a> {
    pub(super) fn new(
        given: Subject<'a>,
        namespace: &'a Namespace,
        rule: Rule,
        deadline: Instant,
        evaluation: Evaluation,
    ) -> Self {
        Self {
            given,
            spec: None,
            namespace,
            rule,
            deadline,
            evaluation,
            unread: Vec::new(),
            read: None,
            emulation: None,
        }
    }

    /// With the runtime class and images that demands have set so far.
    pub(super) fn subject(&self) -> Subject<'_> {
        Subject {
            spec: self.spec.as_ref().unwrap_or(self.given.spec),
            ..self.given
        }
    }

    /// Changes what the following sources see.
    pub(super) fn spec_mut(&mut self) -> &mut PodSpec {
        self.spec.get_or_insert_with(|| self.given.spec.clone())
    }

    /// Decides, if nothing that could not be read has an influence.
    pub(super) fn decide(&mut self, verdict: Verdict) {
        self.evaluation.verdict = if self.unread.is_empty() {
            verdict
        } else {
            verdict.without(self.unread.clone())
        };
    }

    /// Whether no node runs all images.
    pub(super) fn has_no_architecture(&self) -> bool {
        matches!(
            self.evaluation.verdict,
            Verdict::Decided(Decision::NoCommonArchitecture)
        )
    }

    /// The evaluation, when all sources have been asked.
    pub(super) fn finish(mut self, evaluator: &Evaluator) -> Evaluation {
        if let Some(read) = &self.read {
            self.evaluation.unusable = read.credentials.unusable();
            if self.has_no_architecture() && self.evaluation.conflict.is_none() {
                let images = self.evaluation.images.iter();
                let sets = images.filter_map(|image| image.architectures.clone());
                let sets = evaluator.policy.disjoint(sets);
                self.evaluation.conflict = Some(Conflict::Disjoint(sets));
            }
        }
        self.evaluation
    }
}
