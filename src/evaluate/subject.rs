//! What is evaluated, and what a decision means for it.

use std::collections::BTreeMap;

use crate::{
    cluster::objects::PodSpec,
    placement::{
        Decision, PlacementPolicy,
        affinity::WeightedTerm,
        pod::{AffinityAccess, Circumstances, PodChange, PodView},
        reinvocation,
        runtime_class::prefer_native,
        selection::SelectedNodes,
    },
};

use super::{Conflict, Evaluation};

/// What is evaluated.
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
    /// What can still be changed.
    pub stage: Stage,
    /// What the failure policy decided earlier for exactly these images, if that stands until they change.
    pub decided_by_policy: Option<&'a Decision>,
}

/// What is evaluated and can still be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A template: pods created from it get additional fields.
    Template,
    /// A pod that is being created: everything can be set.
    Creation,
    /// An existing pod: its affinity can be set while it has a scheduling gate.
    Pod,
}

impl Subject<'_> {
    pub(super) fn affinity_access(&self) -> AffinityAccess {
        match self.stage {
            Stage::Creation => AffinityAccess::Open,
            Stage::Pod if self.spec.is_gated() => AffinityAccess::Narrowing,
            Stage::Template | Stage::Pod => AffinityAccess::Closed,
        }
    }

    /// The changes that a decision by its images means for it.
    pub fn change(
        self,
        policy: &PlacementPolicy,
        decision: &Decision,
        evaluation: &Evaluation,
    ) -> PodChange {
        self.change_with(policy, decision, evaluation, Vec::new())
    }

    /// The same for a decision without its images: nodes that hold them are preferred.
    pub fn change_by_policy(
        self,
        policy: &PlacementPolicy,
        decision: &Decision,
        evaluation: &Evaluation,
    ) -> PodChange {
        let locality = evaluation.locality.as_ref();
        let preferred = locality.map(|locality| locality.preferred());
        self.change_with(policy, decision, evaluation, preferred.unwrap_or_default())
    }

    fn change_with(
        self,
        policy: &PlacementPolicy,
        decision: &Decision,
        evaluation: &Evaluation,
        preferred: Vec<WeightedTerm>,
    ) -> PodChange {
        let spec = self.spec;
        let view = PodView {
            os: &spec.os(),
            tolerations: spec.tolerations.as_deref().unwrap_or_default(),
            author: spec.author_selection(),
            affinity: self.affinity_access(),
        };
        let conflict = evaluation.conflict.as_ref();
        let selects =
            view.affinity != AffinityAccess::Closed && *decision != Decision::NoCommonArchitecture;
        let selected = evaluation.selected.as_ref().filter(|_| selects);
        let rules = evaluation.rules.as_ref();
        let rules = rules.filter(|_| *decision != Decision::NoCommonArchitecture);
        let native = prefer_native(evaluation.native.as_ref());
        let preferred = SelectedNodes {
            preferred: native.into_iter().chain(preferred).collect(),
            ..SelectedNodes::default()
        };
        let preferred = Some(preferred).filter(|_| selects);
        let emulation = evaluation.emulation.as_ref().filter(|_| selects);
        let mut preferences = evaluation.preferences.clone();
        if let Some(emulation) = emulation {
            // Native nodes come first, whatever else is preferred.
            preferences.retain(|name, _| emulation.native.contains(name.as_str()));
        }
        let emulation = emulation.map(|emulation| emulation.nodes());
        let of_rules = rules.filter(|_| selects).map(|rules| rules.nodes.clone());
        let of_images = selected.map(|selected| selected.nodes.clone());
        // A pod gets 16 combinations at most. Emulators come last, because that keeps all of them.
        let nodes = [of_rules, of_images, emulation, preferred]
            .into_iter()
            .flatten();
        let nodes = nodes.reduce(SelectedNodes::and);
        let circumstances = Circumstances {
            disjoint: conflict.map(Conflict::sets).unwrap_or_default(),
            nodes: nodes.as_ref(),
            tolerations: rules
                .map(|rules| rules.tolerations.as_slice())
                .unwrap_or_default(),
        };
        let change = policy.change(decision, view, &preferences, circumstances);
        PodChange {
            images: selected.map_or_else(Vec::new, |selected| selected.images.clone()),
            runtime_class: self.runtime_class(evaluation),
            ..change
        }
    }

    /// The runtime class that it gets, whatever is decided about nodes.
    pub fn runtime_class(self, evaluation: &Evaluation) -> Option<String> {
        let class = evaluation.runtime_class.as_ref();
        class.filter(|_| self.stage == Stage::Creation).cloned()
    }
}

/// The spec of a pod without what archaware added to it, as far as that is recorded and still there.
pub fn without_additions(mut spec: PodSpec, annotations: &BTreeMap<String, String>) -> PodSpec {
    let own = reinvocation::recorded_change(annotations);
    reinvocation::undo(&own, spec.tolerations.as_mut(), spec.affinity.as_mut());
    let images = own.images.iter();
    spec.set_images(images.map(|one| (one.container.as_str(), Some(one.from.as_str()))));
    spec
}
