//! Step 1 of 3 (evaluate, plan, apply): finds the mode of a pod or template, reads its pull secrets
//! and the platforms of its images, and decides. Changes nothing.

mod alternatives;
mod author_pod;
mod evaluation;
mod images;
mod known_keys;
mod notice;
pub mod pull_secrets;
pub mod source;
mod subject;
pub mod template;
pub mod wrong_architecture;

use std::sync::Arc;

use crate::{
    cluster::{
        cluster_nodes::ClusterNodes,
        objects::{DaemonSet, Namespace, annotations},
    },
    config::Config,
    image::Resolver,
    placement::{
        Mode, PlacementPolicy,
        mode::{self, Handling, HandlingSource, InvalidAnnotation},
        preference,
    },
};

use pull_secrets::PullSecrets;
use template::Template;

pub use alternatives::{ImageAlternative, ImageAlternatives};
pub use author_pod::AuthorPod;
pub use evaluation::{Conflict, EvaluatedImage, Evaluation, ResolvedImages, Verdict};
pub(crate) use images::MAX_CONCURRENT_IMAGES;
pub use images::{counting_platforms, lacking, limiting};
pub use known_keys::KnownKeys;
pub use notice::Notice;
use source::{Evaluating, Sources};
pub use subject::{Stage, Subject};

/// Evaluates pods and templates.
#[derive(Clone)]
pub struct Evaluator {
    /// Resolves images.
    pub resolver: Resolver,
    /// Reads the pods' credentials.
    pub pull_secrets: PullSecrets,
    /// Settings of placement.
    pub policy: Arc<PlacementPolicy>,
    /// The configuration.
    pub config: Arc<Config>,
    /// The keys of this and earlier configurations.
    pub keys: KnownKeys,
    /// The nodes of the cluster.
    pub nodes: ClusterNodes,
    /// The sources of demands.
    pub sources: Sources,
    /// Whether the evaluation is for `explain`. Then it keeps the candidates of image selection,
    /// and finds the nodes that hold unresolved images even if the pod cannot prefer these nodes.
    pub explains: bool,
}

impl Evaluator {
    /// The template of a DaemonSet, split into its author's part and archaware's.
    pub fn template<'a>(&self, set: &'a DaemonSet) -> Template<'a> {
        Template::new(set, &self.keys.get())
    }

    /// Whether archaware leaves the pod alone.
    pub fn is_ignored(&self, subject: Subject<'_>, namespace: &Namespace) -> bool {
        let (handling, ..) = self.handling(subject, namespace);
        handling == Handling::Mode(Mode::Ignore)
    }

    /// The mode or the stated architectures of a pod, the source that sets them, and annotations
    /// with invalid values.
    pub fn handling(
        &self,
        subject: Subject<'_>,
        namespace: &Namespace,
    ) -> (Handling, HandlingSource, Vec<InvalidAnnotation>) {
        let default = self.config.pods.mode_in(subject.namespace);
        mode::handling(
            subject.annotations,
            annotations(&namespace.metadata),
            default,
        )
    }

    /// Evaluates a spec, within `resolution.budget`.
    pub async fn evaluate(&self, subject: Subject<'_>, namespace: &Namespace) -> Evaluation {
        let deadline = tokio::time::Instant::now() + self.config.resolution.budget;
        let (handling, _, mut invalid) = self.handling(subject, namespace);
        let default = self.config.affinity.preferences();
        let of_namespace = annotations(&namespace.metadata);
        let preferences =
            preference::nearest(subject.annotations, of_namespace, default, &mut invalid);
        let evaluation = Evaluation {
            preferences,
            unlabelled: self.nodes.unlabelled(&self.config),
            raised: invalid.into_iter().map(Notice::InvalidAnnotation).collect(),
            ..Evaluation::new(Verdict::Skip)
        };
        let mut pod = Evaluating::new(subject, namespace, handling, deadline, evaluation);
        for source in self.sources.iter() {
            if let Some(rest) = source.ask(self, &mut pod) {
                rest.await;
            }
        }
        pod.finish(self)
    }

    /// Evaluates a pod as if it were recreated.
    pub async fn evaluate_anew(&self, subject: Subject<'_>, namespace: &Namespace) -> Evaluation {
        let author = AuthorPod::new(subject.spec, subject.annotations);
        let mut spec = author.spec.into_owned();
        spec.node_name = None;
        let anew = Subject {
            spec: &spec,
            stage: Stage::Creation,
            ..subject
        };
        self.evaluate(anew, namespace).await
    }

    /// The runtime class that rules give to a pod.
    pub fn class_by_rules(&self, subject: Subject<'_>, namespace: &Namespace) -> Option<String> {
        let (handling, ..) = self.handling(subject, namespace);
        let applied = source::applied_rules(self, subject, &handling, namespace);
        applied.demands.class().map(str::to_owned)
    }
}
