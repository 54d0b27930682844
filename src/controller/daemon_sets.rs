//! Reconciles DaemonSets: their templates get the tolerations that their images allow.

use std::time::Instant;

use crate::{
    cluster::{namespaces::Namespaces, objects::DaemonSet},
    evaluate::{Evaluation, Evaluator},
    placement::failure::FailurePolicy,
    plan::{self, Plan, Policies, Remembered},
};

use super::reconcile::ReconcileSteps;

/// The reconciler of DaemonSets.
pub(super) struct DaemonSetSteps {
    pub(super) evaluator: Evaluator,
    pub(super) namespaces: Namespaces,
    pub(super) failure: FailurePolicy,
}

/// Compares what matters; the DaemonSet controller updates the status often.
pub(super) fn same(old: &DaemonSet, new: &DaemonSet) -> bool {
    old.metadata.uid == new.metadata.uid
        // Patches contain a `test` operation for the generation.
        && old.metadata.generation == new.metadata.generation
        && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
        && old.applied_tolerations == new.applied_tolerations
        && old.managers.appliers().eq(new.managers.appliers())
}

impl ReconcileSteps for DaemonSetSteps {
    type Object = DaemonSet;
    type Evaluation = Evaluation;
    const NAME: &'static str = "daemonsets";

    async fn evaluate(&self, set: &DaemonSet) -> Option<Evaluation> {
        // If idle, nothing is left to do here: the webhook sees every change of a template, and as
        // no node is tainted, existing templates need no toleration.
        let is_idle = self.evaluator.config.webhook_handles_daemon_sets();
        if set.metadata.deletion_timestamp.is_some() || set.oversized || is_idle {
            return None;
        }
        let template = self.evaluator.template(set);
        let subject = template.subject();
        let namespace = self.namespaces.find(subject.namespace).await;
        Some(self.evaluator.evaluate(subject, &namespace).await)
    }

    fn plan(
        &self,
        set: &DaemonSet,
        evaluation: Evaluation,
        remembered: Remembered,
        now: Instant,
    ) -> Plan {
        let policies = Policies {
            placement: &self.evaluator.policy,
            failure: &self.failure,
            gates: self.evaluator.config.admission.enabled,
        };
        let template = self.evaluator.template(set);
        let mode = self.evaluator.config.daemon_sets;
        plan::daemon_set::plan(&template, &evaluation, policies, mode, remembered, now)
    }
}
