//! One reconcile in three steps, the same for pods, DaemonSets and nodes: evaluate, plan, apply.

use std::{
    fmt::Debug,
    future::Future,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use kube::Resource;
use kube_runtime::{controller::Action, reflector::Store};
use serde::de::DeserializeOwned;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        api::ApiObject,
        events::{EventReason, Events},
        name::NamespacedName,
        namespaces::Namespaces,
        writer::{PatchOutcome, Writer},
    },
    error::chain,
    metrics::Metrics,
    plan::{
        EventDraft, FollowUp, GATE_RETRY, Plan, PlannedChange, PlannedPatch, Remembered,
        after_gate_removal, after_patch,
    },
};

use super::{durable::Durable, initial::InitialObjects, object_state::ObjectStates};

/// How many retries of a gated pod's patch follow soon if the API server rejected the client.
const MAX_GATE_RETRIES: u32 = 4;

/// Delay before an object is reconciled again after a panic. A repetition does not fix the bug, but
/// the object may change meanwhile.
const PANIC_RETRY: Duration = Duration::from_mins(1);

/// The two steps that differ between kinds.
pub(super) trait ReconcileSteps: Send + Sync + 'static {
    /// The reconciled kind.
    type Object: ApiObject + Clone + DeserializeOwned + Debug + Send + Sync + 'static;
    /// The result of the first step.
    type Evaluation: Send;
    /// Name of the controller in logs and metrics.
    const NAME: &'static str;

    /// Step 1: reads what the plan needs; `None` if archaware does not decide about the object.
    fn evaluate(
        &self,
        object: &Self::Object,
    ) -> impl Future<Output = Option<Self::Evaluation>> + Send;

    /// Step 2: decides what to do. Pure.
    fn plan(
        &self,
        object: &Self::Object,
        evaluation: Self::Evaluation,
        remembered: Remembered,
        now: Instant,
    ) -> Plan;

    /// Whether the plan may be applied now. If not, the missing preparation is started, and the
    /// object is reconciled again after it.
    fn may_apply(&self, _object: &Self::Object, _plan: &Plan) -> bool {
        true
    }

    /// Called once when nothing remains to be decided about an object.
    fn decided(&self, _object: &Self::Object) {}
}

/// Where plans are applied.
#[derive(Clone)]
pub(super) struct Outputs {
    pub(super) writer: Writer,
    pub(super) events: Events,
    pub(super) metrics: Metrics,
    pub(super) namespaces: Namespaces,
    pub(super) durable: Durable,
}

/// Reconciles the objects of one kind.
pub(super) struct Reconciler<R: ReconcileSteps> {
    pub(super) steps: R,
    pub(super) outputs: Outputs,
    pub(super) store: Store<R::Object>,
    pub(super) states: ObjectStates,
    /// Tracks the initial objects; `None` if the startup sequence does not wait for this kind.
    pub(super) initial: Option<InitialObjects>,
}

impl<R: ReconcileSteps> Reconciler<R> {
    /// Reconciles an object once, or until `stop`.
    pub(super) async fn reconcile(
        self: Arc<Self>,
        object: Arc<R::Object>,
        stop: CancellationToken,
    ) -> Action {
        let started = Instant::now();
        let attempt = AssertUnwindSafe(self.attempt(&object, &stop)).catch_unwind();
        // A panic ends only this reconcile and counts as an attempt. The panic hook has logged its
        // location.
        let follow = attempt.await.unwrap_or_else(|_| {
            self.outputs.metrics.panics.count(R::NAME);
            follow_up(Some(PANIC_RETRY), true)
        });
        if let Some(initial) = &self.initial {
            self.outputs.metrics.attempt_took(started.elapsed());
            if follow.is_complete {
                initial.attempted(&*object);
            }
        }
        follow
            .requeue
            .map_or_else(Action::await_change, Action::requeue)
    }

    async fn attempt(&self, object: &R::Object, stop: &CancellationToken) -> FollowUp {
        // Resolution may take long, but shutdown must not wait for it.
        let evaluated = stop.run_until_cancelled(self.steps.evaluate(object)).await;
        let Some(evaluated) = evaluated else {
            return follow_up(None, false);
        };
        let Some(evaluation) = evaluated else {
            self.states.set(object, None, &self.store);
            return follow_up(None, true);
        };
        let remembered = Remembered {
            state: self.states.get(object),
            written: self
                .outputs
                .durable
                .written(R::NAME, object.meta().uid.as_deref()),
        };
        let now = tokio::time::Instant::now().into_std();
        let plan = self.steps.plan(object, evaluation, remembered, now);
        if !self.steps.may_apply(object, &plan) {
            return follow_up(None, false);
        }
        self.apply(object, plan).await
    }

    /// Step 3: sends the patch and handles its outcome.
    async fn apply(&self, object: &R::Object, plan: Plan) -> FollowUp {
        let Plan {
            events,
            counts,
            patch,
            requeue,
            decides,
            state,
        } = plan;
        self.publish(object, events);
        self.count(counts);
        // Stored before the patch: events that were published must not be repeated, whatever the
        // outcome.
        self.states.set(object, state.clone(), &self.store);
        if let Some(patch) = patch
            && let Some(failed) = self.write(object, patch).await
        {
            return failed;
        }
        if let Some(mut state) = state
            && state.is_decided() != decides
        {
            let is_new = state.set_decided(decides);
            self.states.set(object, Some(state), &self.store);
            if is_new {
                self.steps.decided(object);
            }
        }
        follow_up(requeue, true)
    }

    /// Sends the patch; `None` if it was applied.
    async fn write(&self, object: &R::Object, write: PlannedPatch) -> Option<FollowUp> {
        let name = NamespacedName::of_object(object);
        let outcome = self
            .outputs
            .writer
            .patch::<R::Object>(&name, write.patch)
            .await;
        let refused = matches!(&outcome, PatchOutcome::Failed(error) if error.is_refusal());
        // If the API server rejected the client, not the content, the gate must stay. The API
        // server would probably reject its removal too; if it accepted the removal a moment
        // later, the pod would be scheduled without its decision.
        let is_about_content =
            matches!(&outcome, PatchOutcome::Failed(error) if error.is_about_content());
        let refusals = if refused {
            self.states.refused(object, &self.store)
        } else {
            0
        };
        let next = match write.change {
            PlannedChange::GateRemoved => after_gate_removal(&outcome, refusals),
            _ => after_patch(&outcome, refusals),
        };
        let Some(next) = next else {
            self.states.accepted(object);
            if let Some(written) = write.written {
                let uid = object.meta().uid.as_deref();
                self.outputs.durable.record(R::NAME, uid, written);
            }
            log(&write.change, &name);
            self.publish(object, write.events);
            self.count(write.counts);
            return None;
        };
        let mut failed = self.failed(object, &outcome, next);
        let Some(release) = write.gate_removal.filter(|_| refused) else {
            return Some(failed);
        };
        if !is_about_content {
            // The pod waits behind its gate, so the first retries follow soon.
            if refusals <= MAX_GATE_RETRIES {
                failed.requeue = failed.requeue.map(|pause| pause.min(GATE_RETRY));
            }
            failed.is_complete = false;
            return Some(failed);
        }
        let outcome = self.outputs.writer.patch::<R::Object>(&name, release).await;
        let Some(next) = after_gate_removal(&outcome, refusals) else {
            log(&PlannedChange::GateRemoved, &name);
            return Some(follow_up(failed.requeue, true));
        };
        Some(self.failed(object, &outcome, next))
    }

    fn failed(&self, object: &R::Object, outcome: &PatchOutcome, mut next: FollowUp) -> FollowUp {
        if let PatchOutcome::Failed(error) = outcome {
            let name = NamespacedName::of_object(object);
            tracing::warn!(kind = %R::Object::kind(&()), %name, error = chain(error), "cannot patch the object");
        }
        self.publish(object, next.event.take());
        next
    }

    fn publish(&self, object: &R::Object, drafts: impl IntoIterator<Item = EventDraft>) {
        for draft in drafts {
            let EventDraft {
                on_namespace,
                reason,
                note,
            } = draft;
            // Events expire after an hour, so problems of nodes are logged too.
            if matches!(
                reason,
                EventReason::TaintConflict
                    | EventReason::TaintReverted
                    | EventReason::UnknownArchitecture
                    | EventReason::ArchitectureLabelDiffers
            ) {
                tracing::warn!(node = %NamespacedName::of_object(object), "{note}");
            }
            if !on_namespace {
                self.outputs.events.publish(object, reason, note);
            } else if let Some(namespace) = &object.meta().namespace
                && let Some(carrier) = self.outputs.namespaces.get(namespace)
            {
                self.outputs.events.publish(&*carrier, reason, note);
            }
        }
    }

    fn count(&self, results: Vec<&'static str>) {
        let kind = match &*R::Object::kind(&()) {
            "Pod" => "Pod",
            _ => "DaemonSet",
        };
        for result in results {
            self.outputs.metrics.decided(kind, result);
        }
    }
}

fn follow_up(requeue: Option<Duration>, is_complete: bool) -> FollowUp {
    FollowUp {
        requeue,
        is_complete,
        event: None,
    }
}

/// Logs an applied change.
fn log(change: &PlannedChange, name: &NamespacedName) {
    match change {
        PlannedChange::PodPlaced { decision, .. } if decision == "none" => {
            tracing::info!(pod = %name, "no architecture can run the pod; it waits");
        }
        PlannedChange::PodPlaced {
            decision,
            by_policy,
        } => tracing::info!(pod = %name, decision, by_policy, "pod placed"),
        PlannedChange::GateRemoved => {
            tracing::info!(pod = %name, "scheduling gate removed without a decision");
        }
        PlannedChange::TemplateChanged {
            decision,
            by_policy,
        } => tracing::info!(daemonset = %name, decision, by_policy, "template changed"),
        PlannedChange::RecordChanged => {}
        PlannedChange::NodeTainted { taint, removed } => {
            tracing::info!(node = %name, %taint, removed, "node tainted");
        }
        PlannedChange::NodeUntainted { removed } => {
            tracing::info!(node = %name, removed, "taint or its record removed from node");
        }
    }
}

#[cfg(test)]
mod tests;
