//! Answers to questions about pods, nodes and DaemonSets. Nothing here writes to the API server.

use std::{
    collections::BTreeMap, future::Future, panic::AssertUnwindSafe, pin::Pin, sync::Arc,
    time::Duration,
};

use futures::FutureExt;
use kube::ResourceExt;
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cluster::{
        namespaces::Namespaces,
        objects::{DaemonSet, Node, Pod, annotations},
        patch,
    },
    config::{AdmissionConfig, DaemonSets, OnMiss, OnNoCommonArchitecture},
    evaluate::{Evaluation, Evaluator, Stage, Subject, Verdict, template::Template},
    metrics::Panics,
    placement::{Decision, added, annotation, daemon_set, mode, node, pod::Change},
    plan,
};

use super::review::Answer;

/// Evaluations that nobody waits for. The controller comes by anyway; more would only hold memory.
const BACKGROUND: usize = 512;

/// What is known is known at once; but whether a private image is known to this pod takes its pull secret,
/// and that is a call to the API server.
const GLANCE: Duration = Duration::from_millis(25);

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is no business of archaware's.
    Skipped,
    /// It holds more than any object that could ever be stored.
    Oversized,
    /// Its images were not known in time.
    Missed,
    /// Its images cannot be resolved.
    Unresolved,
    /// It is left alone, by the rule that applies to it.
    Ignored,
    /// Its images share no architecture.
    NoCommonArchitecture,
    /// The same, and it is refused.
    Denied,
    /// It waits behind archaware's gate.
    Gated,
    /// It is changed.
    Changed,
    /// It is as it should be.
    Unchanged,
    /// A bug: it passes as it is.
    Panicked,
}

impl Outcome {
    /// Its name in metrics.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Skipped => "skipped",
            Self::Oversized => "oversized",
            Self::Missed => "missed",
            Self::Unresolved => "unresolved",
            Self::Ignored => "ignored",
            Self::NoCommonArchitecture => "none",
            Self::Denied => "denied",
            Self::Gated => "gated",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
            Self::Panicked => "panicked",
        }
    }
}

/// Decides about objects on their way into the API.
pub(super) struct Webhook {
    evaluator: Evaluator,
    namespaces: Namespaces,
    nodes: node::Policy,
    /// Evaluations that go on although nobody waits any more: the next pod of a rollout finds their result.
    /// Each holds what was read of a pod.
    background: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
    panics: Panics,
}

/// A pod, and the same without what an earlier call has added to it.
struct Case {
    pod: Pod,
    authored: Pod,
    namespace: String,
    recorded: Change,
    undo: added::Undo,
}

impl Webhook {
    pub(super) fn new(
        evaluator: Evaluator,
        namespaces: Namespaces,
        tasks: TaskTracker,
        stop: CancellationToken,
        panics: Panics,
    ) -> Self {
        Self {
            nodes: node::Policy::from(&*evaluator.config),
            background: Arc::new(Semaphore::new(BACKGROUND)),
            evaluator,
            namespaces,
            tasks,
            stop,
            panics,
        }
    }

    fn config(&self) -> &AdmissionConfig {
        &self.evaluator.config.admission
    }

    /// A pod that is being created. Unless it `may_go_on`, its images are looked up only while it is waited
    /// for: a large one is not to be held in memory.
    pub(super) async fn pod(
        &self,
        pod: Pod,
        namespace: String,
        may_go_on: bool,
    ) -> (Answer, Outcome) {
        if pod.is_bound() || pod.is_mirror() {
            return (Answer::default(), Outcome::Skipped);
        }
        if pod.spec.is_oversized() {
            return (Answer::default(), Outcome::Oversized);
        }
        let case = Arc::new(Case::new(pod, namespace));
        let evaluation = {
            let (case, evaluator, namespaces) = (
                case.clone(),
                self.evaluator.clone(),
                self.namespaces.clone(),
            );
            self.within_budget(may_go_on, async move {
                // The pod's own word needs no namespace that may not be known yet.
                let own = annotations(&case.authored.metadata);
                let of_namespace = if mode::is_own(own) && namespaces.get(&case.namespace).is_none()
                {
                    BTreeMap::new()
                } else {
                    of_namespace(&namespaces, &case.namespace).await
                };
                evaluator.evaluate(case.subject(), &of_namespace).await
            })
            .await
        };
        let mut answer = Answer::default();
        let invalid = evaluation.iter().flat_map(|evaluation| &evaluation.invalid);
        for invalid in invalid {
            answer.warn(&invalid.to_string());
        }
        let policy = &self.evaluator.policy;
        // What is decided, and the outcome unless that is told by the patch.
        let (decided, outcome) = match &evaluation {
            None => (None, Some(Outcome::Missed)),
            Some(evaluation) => match &evaluation.verdict {
                Verdict::Unresolved(_) => (None, Some(Outcome::Unresolved)),
                Verdict::Skip => (None, Some(Outcome::Ignored)),
                Verdict::Decided(decision) => {
                    let mut outcome = None;
                    if *decision == Decision::NoCommonArchitecture {
                        let why = evaluation.explain_no_common_architecture(policy);
                        if self.config().on_no_common_architecture == OnNoCommonArchitecture::Deny {
                            tracing::info!(namespace = case.namespace, why, "pod refused");
                            answer.refused = Some(format!("archaware: {why}"));
                            return (answer, Outcome::Denied);
                        }
                        answer.warn(&why);
                        outcome = Some(Outcome::NoCommonArchitecture);
                    }
                    let preferences = &evaluation.preferences;
                    let change = case.subject().change(policy, decision, preferences);
                    (Some((decision.clone(), change)), outcome)
                }
            },
        };
        // The cluster's own pods never wait for a controller.
        let gate = self.config().on_miss == OnMiss::Gate
            && matches!(outcome, Some(Outcome::Missed | Outcome::Unresolved))
            && !case.pod.spec.is_system_critical();
        answer.patch = case.patch(decided, gate);
        let outcome = match outcome {
            _ if gate => Outcome::Gated,
            Some(outcome) => outcome,
            None if answer.patch.is_some() => Outcome::Changed,
            None => Outcome::Unchanged,
        };
        (answer, outcome)
    }

    /// A node that registers: tainted before anything can be bound to it.
    pub(super) fn node(&self, node: &Node) -> (Answer, Outcome) {
        // What stands in the way of a taint is told by the controller, on the node itself.
        let (change, _) = node::decide(&self.nodes, &node.view());
        let patch = change.map(|change| patch::node(node, change).unguarded());
        let outcome = if patch.is_some() {
            tracing::info!(node = node.name_any(), "node tainted as it registers");
            Outcome::Changed
        } else {
            Outcome::Unchanged
        };
        (
            Answer {
                patch,
                ..Answer::default()
            },
            outcome,
        )
    }

    /// A DaemonSet that is created or changed: its template is right at once, so that it is rolled once.
    pub(super) async fn daemon_set(
        &self,
        mut set: DaemonSet,
        namespace: String,
        may_go_on: bool,
    ) -> (Answer, Outcome) {
        let manage = self.evaluator.config.daemon_sets == DaemonSets::Manage;
        if !manage || set.metadata.deletion_timestamp.is_some() {
            return (Answer::default(), Outcome::Skipped);
        }
        if set.spec.template.spec.is_oversized() {
            return (Answer::default(), Outcome::Oversized);
        }
        set.metadata.namespace = Some(namespace.clone());
        let set = Arc::new(set);
        let (own, evaluator, namespaces) =
            (set.clone(), self.evaluator.clone(), self.namespaces.clone());
        let evaluation = self.within_budget(may_go_on, async move {
            let of_namespace = of_namespace(&namespaces, &namespace).await;
            let template = Template::of(&own);
            evaluator.evaluate(template.subject(), &of_namespace).await
        });
        let (change, outcome) = match evaluation.await {
            None => (None, Outcome::Missed),
            Some(evaluation) => self.template_change(&Template::of(&set), &evaluation),
        };
        let mut answer = Answer {
            patch: change.map(|change| patch::daemon_set(&set, change).unguarded()),
            ..Answer::default()
        };
        if outcome == Outcome::NoCommonArchitecture {
            answer.warn("the images of its template share no architecture: it will run nowhere");
        }
        (answer, outcome)
    }

    fn template_change(
        &self,
        template: &Template<'_>,
        evaluation: &Evaluation,
    ) -> (Option<daemon_set::Change>, Outcome) {
        let decision = match &evaluation.verdict {
            Verdict::Unresolved(_) => return (None, Outcome::Unresolved),
            Verdict::Skip => return (None, Outcome::Ignored),
            Verdict::Decided(decision) => decision,
        };
        let (policy, by_policy) = (&self.evaluator.policy, evaluation.by_policy);
        let change = plan::daemon_set::change(policy, template, decision, by_policy);
        let outcome = match (decision, &change) {
            (Decision::NoCommonArchitecture, _) => Outcome::NoCommonArchitecture,
            (_, Some(_)) => Outcome::Changed,
            (_, None) => Outcome::Unchanged,
        };
        (change, outcome)
    }

    /// The result of `work`, if it is there in time. What takes longer goes on in the background, within the
    /// budget of an attempt; what has to be fetched is fetched once for all who ask.
    async fn within_budget<T: Send + 'static>(
        &self,
        may_go_on: bool,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let mut work: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(work);
        let patience = match self.config().on_miss {
            OnMiss::Wait => self.config().budget,
            OnMiss::Pass | OnMiss::Gate => GLANCE,
        };
        let result = tokio::time::timeout(patience, &mut work).await.ok();
        if result.is_none()
            && may_go_on
            && let Ok(slot) = self.background.clone().try_acquire_owned()
        {
            let (stop, panics) = (self.stop.clone(), self.panics.clone());
            self.tasks.spawn(async move {
                let work = AssertUnwindSafe(stop.run_until_cancelled(work)).catch_unwind();
                if work.await.is_err() {
                    panics.count("admission");
                }
                drop(slot);
            });
        }
        result
    }
}

async fn of_namespace(namespaces: &Namespaces, name: &str) -> BTreeMap<String, String> {
    // Before the first list is complete, nobody knows what a namespace asks for.
    let _ = namespaces.ready().wait_for(|ready| *ready).await;
    namespaces.annotations(name).await
}

impl Case {
    fn new(pod: Pod, namespace: String) -> Self {
        let recorded = added::recorded(annotations(&pod.metadata));
        let mut authored = pod.clone();
        let undo = added::undo(
            &recorded,
            authored.spec.tolerations.as_mut(),
            authored.spec.affinity.as_mut(),
        );
        // What was decided about the pod that this one is a copy of, or before it was changed, is no word of
        // its author's.
        if let Some(annotations) = &mut authored.metadata.annotations {
            annotations.remove(annotation::DECISION);
            annotations.remove(annotation::ADDED);
        }
        Self {
            pod,
            authored,
            namespace,
            recorded,
            undo,
        }
    }

    fn subject(&self) -> Subject<'_> {
        Subject {
            spec: &self.authored.spec,
            annotations: annotations(&self.authored.metadata),
            namespace: &self.namespace,
            stage: Stage::Creation,
            tolerated_all_by_policy: false,
        }
    }

    /// `None` when the pod is as it should be.
    fn patch(&self, decision: Option<(Decision, Change)>, gate: bool) -> Option<patch::JsonPatch> {
        let (decision, change) = decision.unzip();
        let change = change.unwrap_or_default();
        let decision = decision.filter(|_| !change.is_empty());
        let annotations = annotations(&self.pod.metadata);
        let was = annotations.get(annotation::DECISION).cloned();
        // A gate is archaware's alone, so it goes as soon as there is nothing to wait for.
        let gated = self.pod.spec.gate().is_some();
        let same = change == self.recorded
            && self.undo.is_whole(&self.recorded)
            && decision.as_ref().map(Decision::annotation) == was;
        if same && gate == gated {
            return None;
        }
        let admission = patch::pod::Admission {
            undo: self.undo.clone(),
            change,
            decision: decision.as_ref(),
            gate,
        };
        Some(patch::pod::admit(&self.pod, &self.authored, admission))
    }
}
