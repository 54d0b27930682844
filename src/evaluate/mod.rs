//! The first step of three (evaluate, plan, apply): reads what decides about a pod or a template. That is the
//! rule that applies to it, its pull secrets, and the platforms of its images. Nothing is changed here.

pub mod pull_secrets;
mod spec;
pub mod template;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use futures::future::join_all;

use crate::{
    cluster::objects::PodSpec,
    config::Config,
    image::{ImageError, Request, Resolver},
    placement::{
        Mode, annotation,
        decision::{Decision, join},
        mode::{self, InvalidAnnotation, Rule},
        pod::{Change, Policy, View},
        preference::{self, Preferences},
    },
    platform::{Architecture, PlatformSet},
};

use pull_secrets::{PodKeys, PullSecrets, Unusable};

/// Of one pod: many times what the largest pods have. Beyond, archaware steps aside.
const MAX_IMAGES: usize = 256;

/// Decides about pods and templates.
#[derive(Clone)]
pub struct Evaluator {
    /// Images.
    pub resolver: Resolver,
    /// Credentials of pods.
    pub pull_secrets: PullSecrets,
    /// What applies to every pod.
    pub policy: Arc<Policy>,
    /// Settings.
    pub config: Arc<Config>,
}

/// What a pod is to be.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// Left alone, by the rule that applies to it or because it tolerates every architecture already.
    Skip,
    /// Placed.
    Decided(Decision),
    /// Tried again: these images could not be resolved.
    Unresolved(Vec<(String, ImageError)>),
}

/// A verdict and what led to it.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// What is to be done.
    pub verdict: Verdict,
    /// Whether the failure policy decided this earlier, for the same images.
    pub by_policy: bool,
    /// Architectures that the pod prefers.
    pub preferences: Preferences,
    /// Annotations that mean nothing.
    pub invalid: Vec<InvalidAnnotation>,
    /// The images that were looked at, with the architectures that count for the pod's OS; `None`:
    /// the image has no opinion.
    pub images: Vec<(String, Option<BTreeSet<Architecture>>)>,
    /// Pull secrets that were passed over.
    pub unusable: BTreeSet<Unusable>,
}

/// What is inspected.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// A pod's, or a template's.
    pub spec: &'a PodSpec,
    /// Its annotations.
    pub annotations: &'a BTreeMap<String, String>,
    /// Where it is.
    pub namespace: &'a str,
    /// How far it has come.
    pub stage: Stage,
    /// The failure policy tolerated every architecture for these very images: that stands until they change.
    pub tolerated_all_by_policy: bool,
}

/// What is inspected, and what can still be done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A template: its pods will have more than it says.
    Template,
    /// A pod on its way into the API: everything can be set.
    Creation,
    /// A pod: its affinity can be set while it is gated.
    Pod,
}

impl Subject<'_> {
    fn affinity_is_open(&self) -> bool {
        match self.stage {
            Stage::Template => false,
            Stage::Creation => true,
            Stage::Pod => self.spec.is_gated(),
        }
    }
}

impl Evaluator {
    /// Looks at a pod's or a template's spec, within the budget of one attempt.
    pub async fn evaluate(
        &self,
        subject: Subject<'_>,
        of_namespace: &BTreeMap<String, String>,
    ) -> Evaluation {
        let default = self.config.pods.mode_in(subject.namespace);
        let (rule, mut invalid) = mode::rule(subject.annotations, of_namespace, default);
        let default = self.config.affinity.preferences();
        let preferences =
            preference::nearest(subject.annotations, of_namespace, default, &mut invalid);
        let mut evaluation = Evaluation {
            verdict: Verdict::Skip,
            by_policy: false,
            preferences,
            invalid,
            images: Vec::new(),
            unusable: BTreeSet::new(),
        };
        evaluation.verdict = match rule {
            Rule::Mode(Mode::Inspect) if subject.tolerated_all_by_policy => {
                evaluation.by_policy = true;
                Verdict::Decided(Decision::StepAside)
            }
            _ if self.has_everything(subject, &evaluation.preferences) => Verdict::Skip,
            Rule::Mode(Mode::Ignore) => Verdict::Skip,
            Rule::Mode(Mode::Any) => Verdict::Decided(Decision::StepAside),
            Rule::Architectures(set) => Verdict::Decided(self.policy.limit(set)),
            Rule::Mode(Mode::Inspect) => {
                let is_template = subject.stage == Stage::Template;
                let keys = self
                    .pull_secrets
                    .of(subject.namespace, subject.spec, is_template);
                let (verdict, images) = self.resolve_images(subject.spec, &keys).await;
                evaluation.images = images;
                evaluation.unusable = keys.unusable();
                verdict
            }
        };
        evaluation
    }

    /// Who tolerates every architecture needs nothing, unless there is more to give than tolerations for
    /// architectures: so its registry is not asked either. Who was stepped aside for is done.
    fn has_everything(&self, subject: Subject<'_>, preferences: &Preferences) -> bool {
        let tolerations = subject.spec.tolerations.as_deref().unwrap_or_default();
        let taint = &self.policy.taint;
        let tolerates_all = tolerations.iter().any(|one| taint.is_tolerated_by(one));
        let affinity = self.policy.requires_affinity || !preferences.is_empty();
        let more = !self.policy.rules.is_empty() || (affinity && subject.affinity_is_open());
        let decided = subject.annotations.get(annotation::DECISION);
        tolerates_all && (!more || decided.is_some_and(|decision| decision == "any"))
    }

    async fn resolve_images(
        &self,
        spec: &PodSpec,
        keys: &PodKeys,
    ) -> (Verdict, Vec<(String, Option<BTreeSet<Architecture>>)>) {
        let all = spec.images();
        // Whoever may create pods must not make archaware ask for thousands of images at once.
        if all.len() > MAX_IMAGES {
            return (Verdict::Decided(Decision::StepAside), Vec::new());
        }
        let deadline = tokio::time::Instant::now() + self.config.resolution.budget;
        let resolved = join_all(all.into_iter().map(|(image, policy)| async move {
            let request = Request {
                image,
                policy,
                keys: &keys.keys,
            };
            let answer = self.resolver.resolve_by(request, deadline).await;
            (image.to_owned(), answer)
        }))
        .await;
        let os = spec.os();
        let mut sets: Vec<PlatformSet> = Vec::new();
        let mut images = Vec::new();
        let mut unresolved = Vec::new();
        for (image, answer) in resolved {
            match answer {
                Ok(resolved) => {
                    images.push((image, resolved.platforms.architectures(&os)));
                    sets.push(resolved.platforms);
                }
                Err(error) => unresolved.push((image, error)),
            }
        }
        let verdict = if unresolved.is_empty() {
            Verdict::Decided(self.policy.decide(&sets, &os))
        } else {
            Verdict::Unresolved(unresolved)
        };
        (verdict, images)
    }
}

impl Subject<'_> {
    /// What it gets by a decision.
    pub fn change(self, policy: &Policy, decision: &Decision, preferences: &Preferences) -> Change {
        let spec = self.spec;
        let view = View {
            os: &spec.os(),
            tolerations: spec.tolerations.as_deref().unwrap_or_default(),
            node_selector: &spec.node_selector,
            affinity: spec.affinity.as_ref(),
        };
        policy.change(decision, view, preferences, self.affinity_is_open())
    }
}

impl Evaluation {
    /// Why a pod with these images may run nowhere.
    pub fn explain_no_common_architecture(&self, policy: &Policy) -> String {
        let mut why = if self.images.is_empty() {
            "none of the architectures in its annotation is schedulable".to_owned()
        } else {
            format!("its images share no architecture: {}", self.describe())
        };
        if !policy.schedulable.is_empty() {
            let names = join(&policy.schedulable, ", ");
            why = format!("{why}; schedulableArchitectures are {names}");
        }
        why
    }

    /// `a (amd64, arm64), b (s390x)`: what a person needs to see why images share nothing.
    fn describe(&self) -> String {
        let one = |(image, set): &(String, Option<BTreeSet<Architecture>>)| {
            let architectures = match set {
                None => "any".to_owned(),
                Some(set) if set.is_empty() => "none for this OS".to_owned(),
                Some(set) => join(set, ", "),
            };
            format!("{image} ({architectures})")
        };
        self.images.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}
