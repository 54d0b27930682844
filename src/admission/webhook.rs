//! Decides about pods, nodes and DaemonSets in admission requests. Never writes to the API server.

use std::{future::Future, panic::AssertUnwindSafe, pin::Pin, sync::Arc, time::Duration};

use futures::FutureExt;
use kube::ResourceExt;
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    cluster::{
        namespaces::Namespaces,
        objects::{DaemonSet, Namespace, Node, Pod},
        patch,
    },
    config::{
        AdmissionConfig, BoundPods, CACHED_ONLY_TIMEOUT, DaemonSets, OnMiss,
        OnNoCommonArchitecture, OnNoMatch,
    },
    evaluate::{Evaluation, Evaluator, Notice, Verdict, template::Template},
    metrics::{AdmissionMetrics, Panics},
    placement::{Decision, MAX_LIST, PlacementPolicy, change::PodChange, mode, node},
    plan, tasks,
};

use super::{review::AdmissionResponse, reviewed_pod::ReviewedPod};

/// Maximum number of background evaluations. The controller handles further pods, so more would
/// only use memory.
const MAX_BACKGROUND_EVALUATIONS: usize = 512;

/// Time that is reserved for the answer to reach the API server before its timeout ends.
pub(super) const ANSWER_TIME: Duration = Duration::from_millis(500);

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum AdmissionOutcome {
    /// archaware does not decide about the object.
    Skipped,
    /// The object is larger than archaware reads.
    Oversized,
    /// The images were not resolved in time.
    Missed,
    /// The images cannot be resolved.
    Unresolved,
    /// The mode of the object is `ignore`, or the object tolerates every architecture already.
    Ignored,
    /// The images share no architecture.
    #[strum(serialize = "none")]
    NoCommonArchitecture,
    /// The images share no architecture, and the pod is rejected.
    Denied,
    /// The pod gets archaware's scheduling gate.
    Gated,
    /// The object is changed.
    Changed,
    /// The object needs no change.
    Unchanged,
    /// A bug: the object is admitted unchanged.
    Panicked,
}

impl AdmissionOutcome {
    /// The label value in metrics.
    pub(super) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// Decides about objects that are being created or updated.
pub(super) struct Webhook {
    evaluator: Evaluator,
    namespaces: Namespaces,
    nodes: node::TaintPolicy,
    /// Permits for evaluations that continue after their request was answered, so that the next pod
    /// of a rollout finds the result. Limited, because each evaluation holds a parsed pod.
    background: Arc<Semaphore>,
    tasks: TaskTracker,
    stop: CancellationToken,
    metrics: AdmissionMetrics,
    panics: Panics,
}

/// The limits of one request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestLimits {
    /// The timeout of the API server, if the request states it.
    pub(super) timeout: Option<Duration>,
    /// Whether archaware may continue to resolve the images after the answer. It keeps the object
    /// in memory for that time.
    pub(super) may_continue_in_background: bool,
}

impl Webhook {
    pub(super) fn new(
        evaluator: Evaluator,
        namespaces: Namespaces,
        tasks: TaskTracker,
        stop: CancellationToken,
        metrics: AdmissionMetrics,
        panics: Panics,
    ) -> Self {
        let rules = evaluator.config.rules.iter();
        metrics.begin_rules(rules.map(|rule| rule.name.as_str()));
        Self {
            nodes: node::TaintPolicy::from(&*evaluator.config),
            background: Arc::new(Semaphore::new(MAX_BACKGROUND_EVALUATIONS)),
            evaluator,
            namespaces,
            tasks,
            stop,
            metrics,
            panics,
        }
    }

    fn config(&self) -> &AdmissionConfig {
        &self.evaluator.config.admission
    }

    /// A pod that is being created.
    pub(super) async fn pod(
        &self,
        pod: Pod,
        namespace: String,
        limits: RequestLimits,
    ) -> (AdmissionResponse, AdmissionOutcome) {
        if pod.is_mirror() {
            return (AdmissionResponse::default(), AdmissionOutcome::Skipped);
        }
        if pod.oversized {
            return oversized("pod");
        }
        let review = Arc::new(ReviewedPod::new(pod, namespace));
        if review.pod.is_bound() {
            return self.bound_pod(&review).await;
        }
        let evaluation = {
            let (review, evaluator, namespaces) = (
                review.clone(),
                self.evaluator.clone(),
                self.namespaces.clone(),
            );
            self.within_budget(limits, async move {
                // With a mode of its own, the pod does not depend on its namespace, which may not
                // be known yet.
                let annotations = review.annotations();
                let is_unknown = || namespaces.get(&review.namespace).is_none();
                let no_rules = evaluator.config.rules.is_empty();
                let namespace = if mode::has_own_handling(annotations) && no_rules && is_unknown() {
                    Arc::default()
                } else {
                    find_namespace(&namespaces, &review.namespace).await
                };
                evaluator.evaluate(review.subject(), &namespace).await
            })
            .await
        };
        // A repeated call for the same pod finds the additions of the first.
        let left_out = evaluation.iter().flat_map(Evaluation::left_out_rules);
        for rule in left_out.filter(|_| review.recorded.is_empty()) {
            self.metrics.rule_left_out(&rule.name);
        }
        let mut answer = AdmissionResponse::default();
        let policy = &self.evaluator.policy;
        let notices = evaluation
            .iter()
            .flat_map(|evaluation| warnings(evaluation, policy));
        let (denying, others): (Vec<_>, Vec<_>) = notices.partition(|notice| self.denies(notice));
        for notice in others {
            answer.warn(&notice.to_string());
        }
        if let Some(notice) = denying.first() {
            let metadata = &review.pod.metadata;
            let pod = metadata
                .name
                .as_deref()
                .or(metadata.generate_name.as_deref());
            tracing::info!(namespace = review.namespace, pod, why = %notice, "pod refused");
            answer.refused = Some(format!("archaware: {notice}"));
            return (answer, AdmissionOutcome::Denied);
        }
        let verdict = evaluation.as_ref().map(|evaluation| &evaluation.verdict);
        let outcome = match verdict {
            None => Some(AdmissionOutcome::Missed),
            Some(Verdict::Unresolved { .. }) => Some(AdmissionOutcome::Unresolved),
            Some(Verdict::Skip) => Some(AdmissionOutcome::Ignored),
            Some(Verdict::Decided(Decision::NoCommonArchitecture)) => {
                Some(AdmissionOutcome::NoCommonArchitecture)
            }
            // The patch determines the outcome.
            Some(Verdict::Decided(_)) => None,
        };
        let gate = outcome.is_some_and(|outcome| self.gates(&review.pod, outcome));
        let mut decided = None;
        if let Some(evaluation) = &evaluation
            && let Verdict::Decided(decision) = &evaluation.verdict
        {
            let change = if gate {
                PodChange::default()
            } else {
                let change = review.subject().change(policy, decision, evaluation);
                change.with_images_kept(&review.recorded, &review.found.images)
            };
            decided = Some((decision.clone(), change));
        }
        // The runtime class is set even if images are unknown, because it cannot be set later.
        let class = match &evaluation {
            Some(evaluation) => evaluation.demands.class().map(str::to_owned),
            None => self.class_by_rules(&review),
        };
        // If an earlier call selected images, its additions stay: without a gate, the controller
        // cannot select images after the creation.
        let keeps_earlier_additions = matches!(
            outcome,
            Some(AdmissionOutcome::Missed | AdmissionOutcome::Unresolved)
        ) && !gate
            && !review.recorded.images.is_empty();
        if !keeps_earlier_additions {
            answer.patch = review.patch(decided, class, gate);
        }
        let outcome = match outcome {
            _ if gate => AdmissionOutcome::Gated,
            Some(outcome) => outcome,
            None if answer.patch.is_some() => AdmissionOutcome::Changed,
            None => AdmissionOutcome::Unchanged,
        };
        (answer, outcome)
    }

    /// A pod whose author sets `nodeName` runs on that node, whatever its images are: it bypasses
    /// the scheduler, and Kubernetes allows it no scheduling gate.
    async fn bound_pod(&self, review: &ReviewedPod) -> (AdmissionResponse, AdmissionOutcome) {
        if self.evaluator.config.taint.bound_pods == BoundPods::Leave {
            return (AdmissionResponse::default(), AdmissionOutcome::Skipped);
        }
        let namespace = find_namespace(&self.namespaces, &review.namespace).await;
        if self.evaluator.is_ignored(review.subject(), &namespace) {
            return (AdmissionResponse::default(), AdmissionOutcome::Ignored);
        }
        let change = review.tolerate_all(&self.evaluator.policy);
        let decided = Some((Decision::TolerateAll, change));
        let patch = review.patch(decided, None, false);
        let outcome = match patch {
            Some(_) => AdmissionOutcome::Changed,
            None => AdmissionOutcome::Unchanged,
        };
        let answer = AdmissionResponse {
            patch,
            ..AdmissionResponse::default()
        };
        (answer, outcome)
    }

    /// The runtime class that rules give to a pod whose images are not known in time.
    fn class_by_rules(&self, review: &ReviewedPod) -> Option<String> {
        // Rules may depend on the labels of the namespace, so a pod whose namespace is not known
        // gets no runtime class by rules.
        let namespace = self.namespaces.get(&review.namespace)?;
        self.evaluator.class_by_rules(review.subject(), &namespace)
    }

    /// Whether the configuration refuses pods with this notice.
    fn denies(&self, notice: &Notice) -> bool {
        let selection = &self.evaluator.config.selection;
        match notice {
            Notice::ImageNotSelected {
                fits_no_node: true, ..
            } => selection.on_no_match == OnNoMatch::Deny,
            notice => {
                notice.is_conflict()
                    && self.config().on_no_common_architecture == OnNoCommonArchitecture::Deny
            }
        }
    }

    /// Whether a pod waits behind the gate. Pods of system-critical priority classes must not wait
    /// for a controller. Pods of DaemonSets need no gate, because no autoscaler makes nodes for
    /// them.
    fn gates(&self, pod: &Pod, outcome: AdmissionOutcome) -> bool {
        use AdmissionOutcome::{Missed, NoCommonArchitecture, Unresolved};
        self.config().on_miss == OnMiss::Gate
            && matches!(outcome, Missed | Unresolved | NoCommonArchitecture)
            && !pod.spec.is_system_critical()
            && !pod.is_daemon()
    }

    /// A node that registers gets its taint before any pod can be bound to it.
    pub(super) fn node(&self, node: &Node) -> (AdmissionResponse, AdmissionOutcome) {
        // The second value is a problem, which the controller reports on the node.
        let (change, _) = node::decide(&self.nodes, &node.view(), &self.evaluator.keys.get());
        let patch = change.map(|change| patch::node(node, change).unguarded());
        let outcome = if patch.is_some() {
            tracing::info!(node = node.name_any(), "node tainted as it registers");
            AdmissionOutcome::Changed
        } else {
            AdmissionOutcome::Unchanged
        };
        (
            AdmissionResponse {
                patch,
                ..AdmissionResponse::default()
            },
            outcome,
        )
    }

    /// A DaemonSet that is created or updated gets its tolerations at once, so that there is only
    /// one rollout.
    pub(super) async fn daemon_set(
        &self,
        mut set: DaemonSet,
        namespace: String,
        limits: RequestLimits,
    ) -> (AdmissionResponse, AdmissionOutcome) {
        let manage = self.evaluator.config.daemon_sets == DaemonSets::Manage;
        if !manage || set.metadata.deletion_timestamp.is_some() {
            return (AdmissionResponse::default(), AdmissionOutcome::Skipped);
        }
        if set.oversized {
            return oversized("DaemonSet");
        }
        set.metadata.namespace = Some(namespace.clone());
        let set = Arc::new(set);
        let (own, evaluator, namespaces) =
            (set.clone(), self.evaluator.clone(), self.namespaces.clone());
        let evaluation = self.within_budget(limits, async move {
            let namespace = find_namespace(&namespaces, &namespace).await;
            let template = evaluator.template(&own);
            evaluator.evaluate(template.subject(), &namespace).await
        });
        match evaluation.await {
            None => (AdmissionResponse::default(), AdmissionOutcome::Missed),
            Some(evaluation) => self.complete(&self.evaluator.template(&set), &evaluation),
        }
    }

    /// The answer for a DaemonSet.
    fn complete(
        &self,
        template: &Template<'_>,
        evaluation: &Evaluation,
    ) -> (AdmissionResponse, AdmissionOutcome) {
        let mut answer = AdmissionResponse::default();
        let (policy, by) = (&self.evaluator.policy, evaluation.decided_by());
        for notice in warnings(evaluation, policy) {
            answer.warn(&notice.to_string());
        }
        let decision = match &evaluation.verdict {
            Verdict::Unresolved { .. } => return (answer, AdmissionOutcome::Unresolved),
            Verdict::Skip => return (answer, AdmissionOutcome::Ignored),
            Verdict::Decided(decision) => decision,
        };
        let mode = self.evaluator.config.daemon_sets;
        let change = plan::daemon_set::change(policy, template, decision, by);
        let outcome = match &change {
            _ if *decision == Decision::NoCommonArchitecture => {
                AdmissionOutcome::NoCommonArchitecture
            }
            Some(_) => AdmissionOutcome::Changed,
            None => AdmissionOutcome::Unchanged,
        };
        let Some(change) = change else {
            return (answer, outcome);
        };
        if let Some(why) = plan::daemon_set::report_only(template, &change, decision, mode) {
            answer.warn(&why);
            return (answer, AdmissionOutcome::Unchanged);
        }
        answer.patch = Some(patch::daemon_set(template.set, change).unguarded());
        (answer, outcome)
    }

    /// The result of `work` if it is ready within the budget. Otherwise the work continues in the
    /// background if `limits` allow that and a permit is free; `resolution.budget` limits it there.
    /// Concurrent lookups of the same image share one request.
    async fn within_budget<T: Send + 'static>(
        &self,
        limits: RequestLimits,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let mut work: Pin<Box<dyn Future<Output = T> + Send>> = Box::pin(work);
        let patience = self.config().patience();
        let patience = limits.timeout.map_or(patience, |timeout| {
            let rest = timeout.saturating_sub(ANSWER_TIME).max(CACHED_ONLY_TIMEOUT);
            patience.min(rest)
        });
        let result = tokio::time::timeout(patience, &mut work).await.ok();
        if result.is_none()
            && limits.may_continue_in_background
            && let Ok(slot) = self.background.clone().try_acquire_owned()
        {
            let (stop, panics) = (self.stop.clone(), self.panics.clone());
            let finishing = async move {
                let work = AssertUnwindSafe(stop.run_until_cancelled(work)).catch_unwind();
                if work.await.is_err() {
                    panics.count("admission");
                }
                drop(slot);
            };
            self.tasks.spawn(tasks::timed("late admission", finishing));
        }
        result
    }
}

/// The answer for an object that is larger than archaware reads.
fn oversized(kind: &str) -> (AdmissionResponse, AdmissionOutcome) {
    let mut answer = AdmissionResponse::default();
    answer.warn(&format!(
        "archaware leaves the {kind} unchanged, because one of its lists has more than {MAX_LIST} entries"
    ));
    (answer, AdmissionOutcome::Oversized)
}

/// Messages for the author of an object, without messages about missing permissions: authors cannot
/// grant permissions.
fn warnings(evaluation: &Evaluation, policy: &PlacementPolicy) -> impl Iterator<Item = Notice> {
    let notices = evaluation.notices(policy).into_iter();
    notices.filter(|notice| !notice.is_for_administrators())
}

async fn find_namespace(namespaces: &Namespaces, name: &str) -> Arc<Namespace> {
    // Before the initial list is complete, namespaces are unknown.
    let _ = namespaces.ready().wait_for(|ready| *ready).await;
    namespaces.find(name).await
}
