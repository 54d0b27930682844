//! Step 1 of 3 (evaluate, plan, apply): finds the rule that applies to a pod or template,
//! reads its pull secrets and the platforms of its images, and decides by them. Changes nothing.

mod evaluation;
mod known_keys;
mod locality;
pub mod predictor;
pub mod pull_secrets;
mod selection;
mod spec;
mod subject;
pub mod template;
pub mod wrong_architecture;

use std::{collections::BTreeSet, sync::Arc};

use futures::future::join_all;
use tokio::sync::Semaphore;

use crate::{
    cluster::{
        nodes::ClusterNodes,
        objects::{DaemonSet, Namespace, PodSpec, annotations, labels},
    },
    config::Config,
    image::{ImageError, ResolveRequest, Resolver},
    placement::{
        Mode, PodRuntime, annotation,
        author_selection::AuthorSelection,
        decision::Decision,
        emulation::Emulation,
        mode::{self, InvalidAnnotation, Rule, RuleSource},
        pod::{AffinityAccess, PlacementPolicy},
        preference::{self, Preferences},
        reinvocation,
        rule::{self, AppliedRules, RuledPod},
    },
    platform::{Os, PlatformSet},
};

use predictor::Predictor;
use pull_secrets::{PodCredentials, PullSecrets};
use template::Template;

pub use evaluation::{Conflict, EvaluatedImage, Evaluation, ResolvedImages, Verdict};
pub use known_keys::KnownKeys;
pub use selection::{ContainerCandidates, NoMatch, SelectedImages, SelectionProblem};
pub use subject::{Stage, Subject};

/// Maximum number of images of a pod, many times that of the largest pods. Beyond it, every architecture is
/// tolerated.
const MAX_IMAGES: usize = 256;
/// Maximum number of images of one pod that are being resolved.
const MAX_CONCURRENT_IMAGES: usize = 16;

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
    /// Whether somebody asks why: which images could have been selected is kept, and what nodes hold of images that are not known, also
    /// where it is not used.
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

    /// What the images of a pod or template allow, with its runtime class or with one that it gets because no CPU runs them.
    async fn decide_by_images(
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
        let sets = images.iter().map(|image| &image.resolved.platforms);
        let author = spec.author_selection();
        // Terms that name nodes get no requirements, and those of a pod that exists no alternatives.
        let can_be_limited = match subject.affinity_access() {
            AffinityAccess::Open => !author.names_fields(),
            AffinityAccess::Narrowing => !author.has_terms(),
            AffinityAccess::Closed => false,
        };
        let emulation = self.policy.emulation(sets, runtime).filter(|emulation| {
            !author.excludes_all(&emulation.architectures())
                && (can_be_limited || emulation.covers(author))
        });
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
        evaluation.unusable = keys.unusable();
        verdict
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

    /// An autoscaler would make the nodes that the author selects, and they would be tainted: so that is said to be a
    /// conflict, also before all images are known, unless the author tolerates the taint.
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
    async fn resolve_images(
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
    fn verdict(
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
