//! The pod or template that is evaluated, and the effect of a decision on it.

use std::collections::BTreeMap;

use crate::{
    cluster::objects::PodSpec,
    placement::{
        Decision, PlacementPolicy,
        change::{AffinityAccess, Asked, PodChange, PodView},
        record,
    },
};

use super::{Conflict, Evaluation};

/// A pod or template to evaluate.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Spec of the pod or template.
    pub spec: &'a PodSpec,
    /// Annotations of the pod or template.
    pub annotations: &'a BTreeMap<String, String>,
    /// Labels of the pod or template.
    pub labels: &'a BTreeMap<String, String>,
    /// Namespace of the pod or DaemonSet.
    pub namespace: &'a str,
    /// Which fields can still be changed.
    pub stage: Stage,
    /// The failure policy's earlier decision, if it is for exactly these images and remains valid
    /// until the images change.
    pub decided_by_policy: Option<&'a Decision>,
}

/// The stage of the pod or template, which decides which fields can still be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A template: only its tolerations can be changed. Its pods get the other fields on creation.
    Template,
    /// A pod that is being created: everything can be set.
    Creation,
    /// An existing pod: its affinity can be set while it has a scheduling gate.
    Pod,
}

impl Subject<'_> {
    pub(crate) fn affinity_access(&self) -> AffinityAccess {
        match self.stage {
            Stage::Creation => AffinityAccess::Open,
            Stage::Pod if self.spec.is_gated() => AffinityAccess::Narrowing,
            Stage::Template | Stage::Pod => AffinityAccess::Closed,
        }
    }

    /// The changes to the pod or template for a decision that follows from its images.
    pub fn change(
        self,
        policy: &PlacementPolicy,
        decision: &Decision,
        evaluation: &Evaluation,
    ) -> PodChange {
        self.change_with(policy, decision, evaluation, false)
    }

    /// The change for a decision of the failure policy: nodes that already hold the images are
    /// preferred.
    pub fn change_by_policy(
        self,
        policy: &PlacementPolicy,
        decision: &Decision,
        evaluation: &Evaluation,
    ) -> PodChange {
        self.change_with(policy, decision, evaluation, true)
    }

    fn change_with(
        self,
        policy: &PlacementPolicy,
        decision: &Decision,
        evaluation: &Evaluation,
        by_policy: bool,
    ) -> PodChange {
        let spec = self.spec;
        let pod = PodView {
            os: &spec.os(),
            tolerations: spec.tolerations.as_deref().unwrap_or_default(),
            author: spec.author_nodes(),
            affinity: self.affinity_access(),
        };
        let conflict = evaluation.conflict.as_ref();
        let asked = Asked {
            demands: &evaluation.demands,
            preferences: &evaluation.preferences,
            unlabelled: &evaluation.unlabelled,
            disjoint: conflict.map(Conflict::sets).unwrap_or_default(),
            by_policy,
        };
        record::fitting(policy.change(decision, pod, asked))
    }
}
