//! The only module that turns a decision and demands into the tolerations, node affinity, images
//! and runtime class of a pod.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use archaware_platform::{Architectures, Os};

use super::PlacementPolicy;
use crate::{
    affinity_change::{self, AffinityChange, AffinityDemand, Preference},
    author_nodes::AuthorNodes,
    decision::Decision,
    demand::{Demands, ImageChange},
    preference::Preferences,
    toleration::covers,
    unlabelled::UnlabelledNodes,
};

/// The parts of a pod that the change depends on.
#[derive(Clone, Copy, Debug)]
pub struct PodView<'a> {
    /// OS of the pod: additional tolerations may be for one OS only.
    pub os: &'a Os,
    /// Tolerations in the API's form.
    pub tolerations: &'a [Value],
    /// The node selector and affinity that the author of the pod wrote.
    pub author: AuthorNodes<'a>,
    /// How its affinity may be changed.
    pub affinity: AffinityAccess,
}

/// How the affinity of a pod may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AffinityAccess {
    /// It cannot be changed.
    Closed,
    /// It can be narrowed, as long as the pod has a scheduling gate.
    Narrowing,
    /// It can be changed in any way, because the pod is being created.
    Open,
}

/// Changes to a pod, applied in one patch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodChange {
    /// Tolerations to append.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Value>,
    /// Additions to the node affinity.
    #[serde(skip_serializing_if = "AffinityChange::is_empty")]
    pub affinity: AffinityChange,
    /// Images to replace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<ImageChange>,
    /// The runtime class to set. archaware does not remove it later, because Kubernetes has by then
    /// added the overhead and the scheduling of the class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_class: Option<String>,
}

/// Demands and preferences for a pod, beside its decision.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The demands of features.
    pub demands: &'a Demands,
    /// Preferred architectures.
    pub preferences: &'a Preferences,
    /// Sets of architectures that share nothing, if no node can run the pod.
    pub disjoint: &'a [Architectures],
    /// The nodes without the label for their architecture.
    pub unlabelled: &'a UnlabelledNodes,
    /// Whether the failure policy decides, because not all images are known.
    pub by_policy: bool,
}

impl PodChange {
    /// This change followed by a later change.
    #[must_use]
    pub fn and(mut self, later: &Self) -> Self {
        self.tolerations.extend(later.tolerations.iter().cloned());
        if !later.affinity.is_empty() {
            self.affinity = later.affinity.clone();
        }
        self.images.extend(later.images.iter().cloned());
        self.runtime_class = later.runtime_class.clone().or(self.runtime_class);
        self
    }

    /// Keeps the current name of an image that is selected again: another webhook may have changed
    /// it, e.g. to the name of a mirror.
    #[must_use]
    pub fn with_images_kept(mut self, recorded: &Self, undone: &[ImageChange]) -> Self {
        for image in &mut self.images {
            let is_same =
                |recorded_image: &&ImageChange| recorded_image.container == image.container;
            let before = recorded.images.iter().find(is_same);
            if before.is_some_and(|before| before.to == image.to)
                && let Some(now) = undone.iter().find(is_same)
            {
                image.to.clone_from(&now.to);
            }
        }
        self
    }

    /// Whether the pod needs no change.
    pub fn is_empty(&self) -> bool {
        self.tolerations.is_empty()
            && self.affinity.is_empty()
            && self.images.is_empty()
            && self.runtime_class.is_none()
    }
}

impl PlacementPolicy {
    /// The changes that a decision and demands mean for a pod.
    pub fn change(&self, decision: &Decision, pod: PodView<'_>, asked: Asked<'_>) -> PodChange {
        let (demands, set) = match decision {
            Decision::Architectures(set) => (asked.demands, Some(set)),
            Decision::TolerateAll => (asked.demands, None),
            // Nothing else matters for a pod that no node can run.
            Decision::NoCommonArchitecture => (&Demands::default(), None),
        };
        let mut tolerations = self.missing_tolerations(decision, pod.os, pod.tolerations);
        for new in demands.tolerations() {
            let mut all = pod.tolerations.iter().chain(&tolerations);
            if !all.any(|toleration| covers(toleration, new)) {
                tolerations.push(new.clone());
            }
        }
        let mut change = PodChange {
            tolerations,
            runtime_class: asked.demands.class().map(str::to_owned),
            ..PodChange::default()
        };
        if pod.affinity != AffinityAccess::Closed {
            change.images = demands.images().cloned().collect();
            // If the author selects only other architectures, and taints do not keep the pod away
            // from these, archaware does not require `set`.
            let stays = |set: &&Architectures| {
                pod.author.excludes_all(set) && !self.is_excluded(set, pod.author, pod.tolerations)
            };
            let required = match set {
                Some(set) => Some(set)
                    .filter(|set| !stays(set))
                    .map(std::slice::from_ref),
                None if *decision == Decision::NoCommonArchitecture => Some(asked.disjoint),
                None => None,
            };
            let required = required.filter(|_| self.requires_affinity);
            let preferences = set.map(|set| preferred_among(set, asked.preferences));
            let wanted = AffinityDemand {
                required: required.unwrap_or_default(),
                suitable: set,
                variants: &self.variants,
                unlabelled: asked.unlabelled,
                nodes: &demands.required(),
                prefer: demands.preferred(asked.by_policy),
                terms_are_open: pod.affinity == AffinityAccess::Open,
            };
            change.affinity =
                affinity_change::decide(&wanted, preferences.unwrap_or_default(), pod.author);
        }
        change
    }
}

/// The preferences for these architectures, without those of weight 0.
fn preferred_among(set: &Architectures, preferences: &Preferences) -> Vec<Preference> {
    let preferences = preferences.iter();
    let preferences =
        preferences.filter(|(name, weight)| **weight > 0 && set.contains(name.as_str()));
    let preferred = preferences.map(|(name, weight)| Preference {
        architecture: name.clone(),
        weight: *weight,
    });
    preferred.collect()
}
