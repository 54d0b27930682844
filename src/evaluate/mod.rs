//! Step 1 of 3 (evaluate, plan, apply): finds the rule that applies to a pod or template,
//! reads its pull secrets and the platforms of its images, and decides by them. Changes nothing.

mod evaluation;
mod images;
mod known_keys;
mod locality;
mod notice;
pub mod predictor;
pub mod pull_secrets;
mod selection;
mod spec;
mod subject;
pub mod template;
pub mod wrong_architecture;

use std::sync::Arc;

use crate::{
    cluster::{
        nodes::ClusterNodes,
        objects::{DaemonSet, Namespace, PodSpec, annotations, labels},
    },
    config::Config,
    image::Resolver,
    placement::{
        Mode, annotation,
        author_selection::AuthorSelection,
        decision::Decision,
        mode::{self, InvalidAnnotation, Rule, RuleSource},
        pod::{AffinityAccess, PlacementPolicy},
        preference::{self, Preferences},
        reinvocation,
        rule::{self, AppliedRules, RuledPod},
    },
};

use predictor::Predictor;
use pull_secrets::PullSecrets;
use template::Template;

pub use evaluation::{Conflict, EvaluatedImage, Evaluation, ResolvedImages, Verdict};
pub use images::are_for_other_nodes;
pub use known_keys::KnownKeys;
pub use notice::Notice;
pub use selection::{ContainerCandidates, NoMatch, SelectedImages, SelectionProblem};
pub use subject::{Stage, Subject, without_additions};

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
    /// The nodes for which images are selected.
    pub nodes: ClusterNodes,
    /// Chooses among them by a model.
    pub predictor: Option<Predictor>,
    /// Whether the evaluation is for `explain`. It then keeps which images could have been selected, and which nodes hold images that are
    /// not known, for pods that cannot use it, too.
    pub explains: bool,
}

impl Evaluator {
    /// The template of a DaemonSet, split into its author's part and archaware's.
    pub fn template<'a>(&self, set: &'a DaemonSet) -> Template<'a> {
        Template::new(set, &self.keys.get())
    }

    /// Whether archaware leaves it alone.
    pub fn is_ignored(&self, subject: Subject<'_>, namespace: &Namespace) -> bool {
        let (rule, ..) = self.rule(subject, namespace);
        rule == Rule::Mode(Mode::Ignore)
    }

    /// The rule that applies, where it is set, and annotations with invalid values.
    pub fn rule(
        &self,
        subject: Subject<'_>,
        namespace: &Namespace,
    ) -> (Rule, RuleSource, Vec<InvalidAnnotation>) {
        let default = self.config.pods.mode_in(subject.namespace);
        mode::rule(
            subject.annotations,
            annotations(&namespace.metadata),
            default,
        )
    }

    /// Evaluates a spec, within `resolution.budget`.
    pub async fn evaluate(&self, subject: Subject<'_>, namespace: &Namespace) -> Evaluation {
        let (rule, _, mut invalid) = self.rule(subject, namespace);
        let default = self.config.affinity.preferences();
        let of_namespace = annotations(&namespace.metadata);
        let preferences =
            preference::nearest(subject.annotations, of_namespace, default, &mut invalid);
        let deadline = tokio::time::Instant::now() + self.config.resolution.budget;
        let rules = self.applied_rules(subject, &rule, namespace);
        let class = rules.as_ref().and_then(|rules| rules.runtime_class.clone());
        let with_class = class.as_ref().map(|class| PodSpec {
            runtime_class_name: Some(class.clone()),
            ..subject.spec.clone()
        });
        let subject = Subject {
            spec: with_class.as_ref().unwrap_or(subject.spec),
            ..subject
        };
        let mut selected = None;
        if selection::is_requested(subject, &rule) {
            let found = self.select_images(subject, &rule, rules.as_deref(), deadline);
            selected = Some(Box::new(Box::pin(found).await));
        }
        let spec = selected.as_mut().and_then(|selected| selected.spec.take());
        let subject = Subject {
            spec: spec.as_ref().unwrap_or(subject.spec),
            ..subject
        };
        let mut evaluation = Evaluation {
            preferences,
            invalid,
            selected,
            rules,
            runtime_class: class,
            ..Evaluation::new(Verdict::Skip)
        };
        let selected = evaluation.selected.as_deref();
        let selects = selected.is_some_and(|own| !own.images.is_empty() || !own.failed.is_empty());
        let adds = selects || evaluation.rules.is_some();
        evaluation.verdict = match rule {
            Rule::Mode(Mode::Inspect) if subject.decided_by_policy.is_some() => {
                evaluation.by_policy = true;
                let standing = subject.decided_by_policy.cloned();
                standing.map_or(Verdict::Skip, Verdict::Decided)
            }
            _ if !adds && self.nothing_to_add(subject, &evaluation.preferences) => Verdict::Skip,
            Rule::Mode(Mode::Ignore) => Verdict::Skip,
            Rule::Mode(Mode::Any) => Verdict::Decided(Decision::TolerateAll),
            Rule::Architectures(set) => {
                let decision = self.policy.limit(set.clone());
                if decision == Decision::NoCommonArchitecture {
                    let schedulable = self.policy.schedulable.iter().cloned().collect();
                    evaluation.conflict = Some(Conflict::Disjoint(vec![set, schedulable]));
                }
                Verdict::Decided(decision)
            }
            Rule::Mode(Mode::Inspect) => {
                self.decide_by_images(subject, &mut evaluation, deadline)
                    .await
            }
        };
        if let Some(selected) = &mut evaluation.selected
            && !selected.failed.is_empty()
        {
            let failed = std::mem::take(&mut selected.failed);
            evaluation.verdict = evaluation.verdict.without(failed);
        }
        // With the gate its affinity can be set, once: the same patch removes the gate.
        let is_used = subject.stage == Stage::Pod && subject.spec.gate().is_some();
        if (is_used || self.explains)
            && let Verdict::Unresolved { failed, .. } = &evaluation.verdict
        {
            evaluation.locality = self.image_locality(subject.spec, failed).await;
        }
        self.respect_author(subject, &mut evaluation);
        evaluation
    }

    /// What the rules of the configuration say of a pod; `None`: nothing. Templates get nothing by them: each of their pods does.
    pub fn applied_rules(
        &self,
        subject: Subject<'_>,
        rule: &Rule,
        namespace: &Namespace,
    ) -> Option<Box<AppliedRules>> {
        let rules = self.config.rules.as_slice();
        let is_left_alone = *rule == Rule::Mode(Mode::Ignore);
        if rules.is_empty() || is_left_alone || subject.stage == Stage::Template {
            return None;
        }
        let pod = RuledPod {
            labels: subject.labels,
            namespace_labels: labels(&namespace.metadata),
            author: subject.spec.author_selection(),
            runtime_class: subject.spec.runtime_class_name.as_deref(),
            is_new: subject.stage == Stage::Creation,
        };
        let applied = rule::apply(rules, pod);
        (applied != AppliedRules::default()).then(|| Box::new(applied))
    }

    /// An autoscaler would make the nodes that the author selects, and they would be tainted: so that is said to be a
    /// conflict, also before all images are known. An author from whose choice no taint keeps the pod away has decided, and is told.
    fn respect_author(&self, subject: Subject<'_>, evaluation: &mut Evaluation) {
        let (Verdict::Decided(Decision::Architectures(set))
        | Verdict::Unresolved {
            known: Some(set), ..
        }) = &evaluation.verdict
        else {
            return;
        };
        if !subject.spec.author_selection().excludes_all(set) {
            return;
        }
        // What archaware added is for what the images were then.
        let own = reinvocation::recorded_change(subject.annotations);
        let (mut tolerations, mut affinity) = (
            subject.spec.tolerations.clone().unwrap_or_default(),
            subject.spec.affinity.clone(),
        );
        reinvocation::undo(&own, Some(&mut tolerations), affinity.as_mut());
        let author = AuthorSelection {
            affinity: affinity.as_ref(),
            ..subject.spec.author_selection()
        };
        let conflict = if self.policy.is_excluded(set, author, &tolerations) {
            Conflict::Excluded(set.clone())
        } else if author.excludes_all(set) {
            evaluation.overruled = Some(set.clone());
            return;
        } else {
            Conflict::Outdated(set.clone())
        };
        evaluation.conflict = Some(conflict);
        evaluation.verdict = Verdict::Decided(Decision::NoCommonArchitecture);
    }

    /// A pod that tolerates every architecture needs no further decision, and its registry is not asked, unless
    /// affinity or additional tolerations can still be added. A pod that was decided to tolerate everything is
    /// complete.
    fn nothing_to_add(&self, subject: Subject<'_>, preferences: &Preferences) -> bool {
        let tolerations = subject.spec.tolerations.as_deref().unwrap_or_default();
        let taint = &self.policy.taint;
        let tolerates_all = tolerations.iter().any(|one| taint.is_tolerated_by(one));
        let affinity = self.policy.requires_affinity || !preferences.is_empty();
        let more = !self.policy.tolerations.is_empty()
            || (affinity && subject.affinity_access() != AffinityAccess::Closed);
        let decided = subject.annotations.get(annotation::DECISION);
        tolerates_all && (!more || decided.is_some_and(|decision| decision == "any"))
    }
}
