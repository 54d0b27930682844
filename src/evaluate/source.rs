//! The sources of demands: features with demands on the nodes of a pod.

mod architectures;
mod author;
mod emulation;
mod image_locality;
mod rules;
mod runtime_class;

use std::sync::Arc;

use futures::future::{BoxFuture, Either, join_all, select};
use tokio::time::Instant;

use crate::{
    cluster::{
        api::ApiClient,
        objects::{Namespace, PodSpec},
    },
    image::ImageError,
    placement::{Decision, emulation::Emulation, mode::Handling},
};

use super::{Conflict, Evaluation, Evaluator, Subject, Verdict, pull_secrets::PodCredentials};

pub use architectures::ArchitectureSource;
pub use author::AuthorSource;
pub use emulation::EmulationSource;
pub use image_locality::ImageLocalitySource;
pub use rules::RuleSource;
pub(super) use rules::applied_rules;
pub use runtime_class::RuntimeClassSource;

/// A feature with demands on the nodes of a pod.
pub trait DemandSource: Send + Sync {
    /// Adds demands and notices to the evaluation. Earlier sources have added theirs. Returns a
    /// future for the rest of the work if the source has to wait for reads.
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>>;

    /// A watch that the source needs as long as the process runs, with a name for logs.
    fn follow(&self, _: &ApiClient) -> Option<(&'static str, BoxFuture<'static, ()>)> {
        None
    }
}

/// Sources of demands in their order. Cheap to clone.
#[derive(Clone)]
pub struct Sources(Arc<[Box<dyn DemandSource>]>);

impl Sources {
    pub fn new(sources: impl IntoIterator<Item = Box<dyn DemandSource>>) -> Self {
        Self(sources.into_iter().collect())
    }

    /// All sources, in their order.
    pub fn iter(&self) -> impl Iterator<Item = &dyn DemandSource> {
        self.0.iter().map(AsRef::as_ref)
    }

    /// The watches of all sources, with names for logs.
    pub fn follow(&self, api: &ApiClient) -> Vec<(&'static str, BoxFuture<'static, ()>)> {
        self.iter()
            .filter_map(|source| source.follow(api))
            .collect()
    }

    /// Does some work while the watches of the sources run.
    pub async fn work_beside<T>(&self, api: &ApiClient, work: impl Future<Output = T>) -> T {
        let following = self.follow(api).into_iter().map(|(_, following)| following);
        match select(Box::pin(work), Box::pin(join_all(following))).await {
            Either::Left((done, _)) => done,
            Either::Right((_, work)) => work.await,
        }
    }
}

/// A pod or template during its evaluation.
pub struct Evaluating<'a> {
    original_subject: Subject<'a>,
    /// The spec with the runtime class and the images of demands; `None` if no demand has changed
    /// it.
    spec: Option<PodSpec>,
    pub(crate) namespace: &'a Namespace,
    pub(crate) handling: Handling,
    pub(crate) deadline: Instant,
    /// The evaluation, which sources complete.
    pub(crate) evaluation: Evaluation,
    /// Documents and images that image selection could not read in time.
    pub(crate) unread: Vec<(String, ImageError)>,
    /// Set when the images were read; `None` if the images do not decide.
    pub(crate) read: Option<ReadImages>,
    pub(crate) emulation: Option<Emulation>,
}

/// Credentials and failures of reading the images of a pod.
pub(crate) struct ReadImages {
    pub(crate) credentials: PodCredentials,
    /// Images that could not be read in time, and why.
    pub(crate) failed: Vec<(String, ImageError)>,
}

impl<'a> Evaluating<'a> {
    pub(crate) fn new(
        original_subject: Subject<'a>,
        namespace: &'a Namespace,
        handling: Handling,
        deadline: Instant,
        evaluation: Evaluation,
    ) -> Self {
        Self {
            original_subject,
            spec: None,
            namespace,
            handling,
            deadline,
            evaluation,
            unread: Vec::new(),
            read: None,
            emulation: None,
        }
    }

    /// The pod or template, with the runtime class and images that demands have set so far.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            spec: self.spec.as_ref().unwrap_or(self.original_subject.spec),
            ..self.original_subject
        }
    }

    /// The spec that the following sources see.
    pub(crate) fn spec_mut(&mut self) -> &mut PodSpec {
        self.spec
            .get_or_insert_with(|| self.original_subject.spec.clone())
    }

    /// Sets the verdict. It stays unresolved while unread documents could change it.
    pub(crate) fn decide(&mut self, verdict: Verdict) {
        self.evaluation.verdict = if self.unread.is_empty() {
            verdict
        } else {
            verdict.without(self.unread.clone())
        };
    }

    /// Whether no node runs all images.
    pub(crate) fn has_no_architecture(&self) -> bool {
        matches!(
            self.evaluation.verdict,
            Verdict::Decided(Decision::NoCommonArchitecture)
        )
    }

    /// The evaluation, after all sources.
    pub(crate) fn finish(mut self, evaluator: &Evaluator) -> Evaluation {
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
