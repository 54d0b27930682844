//! A pod in an admission request.

use std::{borrow::Cow, collections::BTreeMap};

use crate::{
    cluster::{
        objects::{Pod, PodSpec, annotations, labels},
        patch,
    },
    evaluate::{AuthorPod, Stage, Subject},
    placement::{Decision, PlacementPolicy, annotation, change::PodChange, record::FoundAdditions},
};

/// A pod that is being created, with and without the additions of an earlier call of the webhook.
pub(super) struct ReviewedPod {
    pub(super) pod: Pod,
    /// Without the additions of an earlier call; `None` if there are no additions.
    spec: Option<PodSpec>,
    annotations: Option<BTreeMap<String, String>>,
    pub(super) namespace: String,
    /// The recorded additions of an earlier call.
    pub(super) recorded: PodChange,
    pub(super) found: FoundAdditions,
}

impl ReviewedPod {
    pub(super) fn new(pod: Pod, namespace: String) -> Self {
        let AuthorPod {
            spec,
            annotations,
            recorded,
            found,
        } = AuthorPod::new(&pod.spec, annotations(&pod.metadata));
        let (spec, annotations) = (owned(spec), owned(annotations));
        Self {
            pod,
            spec,
            annotations,
            namespace,
            recorded,
            found,
        }
    }

    /// The spec as its author wrote it.
    fn spec(&self) -> &PodSpec {
        self.spec.as_ref().unwrap_or(&self.pod.spec)
    }

    /// The annotations without the record of an earlier decision. An earlier call made this record,
    /// or the author copied it from the YAML of another pod.
    pub(super) fn annotations(&self) -> &BTreeMap<String, String> {
        let given = || annotations(&self.pod.metadata);
        self.annotations.as_ref().unwrap_or_else(given)
    }

    pub(super) fn subject(&self) -> Subject<'_> {
        Subject {
            spec: self.spec(),
            annotations: self.annotations(),
            labels: labels(&self.pod.metadata),
            namespace: &self.namespace,
            stage: Stage::Creation,
            decided_by_policy: None,
        }
    }

    /// A toleration for every architecture, unless the pod has one already.
    pub(super) fn tolerate_all(&self, policy: &PlacementPolicy) -> PodChange {
        let existing = self.spec().tolerations.as_deref();
        let mut existing = existing.unwrap_or_default().iter();
        let mut change = PodChange::default();
        if !existing.any(|toleration| policy.taint.is_tolerated_by(toleration)) {
            change.tolerations.push(policy.taint.toleration_of_all());
        }
        change
    }

    /// The runtime class that an earlier call set.
    fn kept_class(&self) -> Option<String> {
        let class = self.recorded.runtime_class.clone();
        let current_class = self.pod.spec.runtime_class_name.as_ref();
        class.filter(|class| current_class == Some(class))
    }

    /// `None` if the pod needs no change. `class`: the runtime class that it gets.
    pub(super) fn patch(
        &self,
        decision: Option<(Decision, PodChange)>,
        class: Option<String>,
        gate: bool,
    ) -> Option<patch::JsonPatch> {
        let (decision, change) = decision.unzip();
        let mut change = change.unwrap_or_default();
        change.runtime_class = class.or_else(|| self.kept_class());
        // A pod that no architecture can run gets only the annotation with the decision.
        let decision = decision
            .filter(|decision| !change.is_empty() || *decision == Decision::NoCommonArchitecture);
        let annotations = annotations(&self.pod.metadata);
        let recorded_decision = annotations.get(annotation::DECISION).cloned();
        // The gate is archaware's, so it is removed as soon as the pod does not have to wait.
        let gated = self.pod.spec.gate().is_some();
        let same = change == self.recorded
            && self.found.is_complete(&self.recorded)
            && decision.as_ref().map(Decision::annotation) == recorded_decision;
        if same && gate == gated {
            return None;
        }
        let admission = patch::pod::AdmissionPatch {
            undo: self.found.clone(),
            change,
            decision: decision.as_ref(),
            gate,
        };
        Some(patch::pod::admit(&self.pod, self.spec(), admission))
    }
}

fn owned<T: Clone>(value: Cow<'_, T>) -> Option<T> {
    match value {
        Cow::Owned(value) => Some(value),
        Cow::Borrowed(_) => None,
    }
}
