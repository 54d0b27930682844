//! Reconciles DaemonSets: their templates get the tolerations that their images allow.

use std::time::Instant;

use crate::{
    cluster::{namespaces::Namespaces, objects::DaemonSet},
    evaluate::{Evaluation, Evaluator, template::Template},
    placement::failure::FailurePolicy,
    plan::{self, ObjectState, Plan, Policies},
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
        && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
}

impl ReconcileSteps for DaemonSetSteps {
    type Object = DaemonSet;
    type Evaluation = Evaluation;
    const NAME: &'static str = "daemonsets";

    async fn evaluate(&self, set: &DaemonSet) -> Option<Evaluation> {
        // The webhook sees every change of a template, and without a taint no toleration is needed.
        let is_idle = self.evaluator.config.webhook_handles_daemon_sets();
        if set.metadata.deletion_timestamp.is_some() || is_idle {
            return None;
        }
        let template = Template::new(set);
        let subject = template.subject();
        let of_namespace = self.namespaces.annotations(subject.namespace).await;
        Some(self.evaluator.evaluate(subject, &of_namespace).await)
    }

    fn plan(
        &self,
        set: &DaemonSet,
        evaluation: Evaluation,
        remembered: Option<ObjectState>,
        now: Instant,
    ) -> Plan {
        let policies = Policies {
            placement: &self.evaluator.policy,
            failure: &self.failure,
        };
        let (template, mode) = (Template::new(set), self.evaluator.config.daemon_sets);
        plan::daemon_set::plan(&template, &evaluation, policies, mode, remembered, now)
    }
}
