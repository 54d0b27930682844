//! A DaemonSet's template and the annotation that records which of its tolerations archaware owns,
//! and for which images.

use std::collections::BTreeSet;

use crate::{
    cluster::objects::{DaemonSet, PodSpec, annotations, labels},
    placement::{
        ConfiguredKeys, Decision, annotation,
        daemon_set::{OwnedTolerations, TemplateView},
    },
    platform::{Architecture, Os},
};

use super::{Stage, Subject};

/// A DaemonSet's template, split into its author's part and archaware's.
#[derive(Clone, Debug)]
pub struct Template<'a> {
    /// The DaemonSet.
    pub set: &'a DaemonSet,
    /// The spec without archaware's tolerations, as its author wrote it.
    pub without_owned: PodSpec,
    /// archaware's record.
    pub record: OwnedTolerations,
    /// Indexes of the tolerations that archaware owns, in ascending order.
    pub owned: Vec<usize>,
    /// Images of the template. A decision of the failure policy stands until the images change.
    pub images: BTreeSet<String>,
    /// The failure policy's decision that still stands.
    decided_by_policy: Option<Decision>,
    os: Os,
}

/// Whether a recorded toleration can still be archaware's: it has a key of archaware's
/// configuration, and no author has taken it over, by `kubectl apply` or by server-side apply.
fn is_ours(set: &DaemonSet, keys: &ConfiguredKeys, toleration: &serde_json::Value) -> bool {
    let is_taken_over = set.applied_tolerations.contains(toleration);
    keys.can_own_toleration(toleration)
        && !is_taken_over
        && set.managers.appliers().next().is_none()
}

impl<'a> Template<'a> {
    /// Splits the template of a DaemonSet.
    pub fn new(set: &'a DaemonSet, keys: &ConfiguredKeys) -> Self {
        let text = annotations(&set.metadata).get(annotation::TOLERATIONS);
        let record = OwnedTolerations::parse(text.map(String::as_str));
        let mut without_owned = set.spec.template.spec.clone();
        let existing = without_owned.tolerations.as_deref().unwrap_or_default();
        let owned = record.find(existing, |toleration| is_ours(set, keys, toleration));
        if let Some(tolerations) = &mut without_owned.tolerations {
            for index in owned.iter().rev() {
                tolerations.remove(*index);
            }
        }
        let images = without_owned.images().into_keys().map(str::to_owned);
        let images: BTreeSet<String> = images.collect();
        let standing = record
            .decision_of_policy()
            .filter(|_| record.is_for(&images));
        Self {
            images,
            decided_by_policy: standing,
            os: without_owned.os(),
            set,
            without_owned,
            record,
            owned,
        }
    }

    /// Whether the template has a recorded toleration for an architecture, but archaware does not
    /// know the key of the toleration. An earlier configuration may have had the key.
    pub fn has_unknown_key(&self, keys: &ConfiguredKeys) -> bool {
        let names_architecture = |toleration: &&serde_json::Value| {
            let value = toleration.get("value").and_then(serde_json::Value::as_str);
            let architecture = value.and_then(|value| value.parse::<Architecture>().ok());
            architecture.is_some_and(|architecture| architecture.is_known())
        };
        let mut recorded = self.record.tolerations.iter().filter(names_architecture);
        recorded.any(|toleration| {
            !keys.can_own_toleration(toleration) && self.tolerations().contains(toleration)
        })
    }

    /// Whether another writer removed tolerations that archaware had added.
    pub fn was_reverted(&self) -> bool {
        let existing = self.tolerations();
        let mut recorded = self.record.tolerations.iter();
        recorded.any(|toleration| !existing.contains(toleration))
    }

    /// The recorded decision, if the images of the template decided it and have not changed.
    pub fn decided_by_images(&self) -> Option<Decision> {
        let decision = self.record.decision_of_images();
        decision.filter(|_| self.record.is_for(&self.images))
    }

    /// Limits a decision of the failure policy to its earlier decision for the same images: less
    /// may be known after a restart, and that must not cause a rollout.
    pub fn narrow(&self, decision: Decision) -> Decision {
        if self.record.is_for(&self.images) {
            self.record.narrow(decision)
        } else {
            decision
        }
    }

    /// Whether the failure policy decided about these images.
    pub fn is_decided_by_policy(&self) -> bool {
        let record = &self.record;
        (record.is_by_policy || record.is_until_known) && record.is_for(&self.images)
    }

    /// The subject of the evaluation. A decision of the failure policy for these images stands
    /// until the images change, because each change of the template causes a rollout.
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            spec: &self.without_owned,
            annotations: annotations(&self.set.spec.template.metadata),
            labels: labels(&self.set.spec.template.metadata),
            namespace: self.set.metadata.namespace.as_deref().unwrap_or_default(),
            stage: Stage::Template,
            decided_by_policy: self.decided_by_policy.as_ref(),
        }
    }

    /// All tolerations of the template.
    pub fn tolerations(&self) -> &[serde_json::Value] {
        let spec = &self.set.spec.template.spec;
        spec.tolerations.as_deref().unwrap_or_default()
    }

    /// The tolerations that archaware owns.
    pub fn owned_tolerations(&self) -> Vec<serde_json::Value> {
        let tolerations = self.tolerations();
        let owned = self
            .owned
            .iter()
            .filter_map(|index| tolerations.get(*index));
        owned.cloned().collect()
    }

    /// The parts of the template that the decision on its tolerations depends on.
    pub fn placement_view(&self) -> TemplateView<'_> {
        TemplateView {
            os: &self.os,
            tolerations: self.tolerations(),
            owned: &self.owned,
            images: &self.images,
            record: &self.record,
        }
    }
}
