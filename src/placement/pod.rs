//! From the platforms of a pod's images to its tolerations.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::platform::{Architecture, Os, PlatformSet};

use super::{
    TaintKind,
    affinity::{self, Affinity},
    decision::Decision,
    preference::Preferences,
    toleration::{by_rules, covers},
    toleration_rule::TolerationRule,
};

/// Go knows about twenty. An image that names more than this makes them up, and its pod would become too
/// large for the API: archaware steps aside.
const MAX_ARCHITECTURES: usize = 64;

/// What applies to every pod.
#[derive(Clone, Debug)]
pub struct Policy {
    /// archaware's taint.
    pub taint: TaintKind,
    /// Which further architectures' images a node's architecture runs.
    pub compatibility: BTreeMap<Architecture, Vec<Architecture>>,
    /// The only ones considered; empty means all.
    pub schedulable: BTreeSet<Architecture>,
    /// Further tolerations.
    pub rules: Vec<TolerationRule>,
    /// Whether the architectures are required by node affinity, too, where that can still be set.
    pub requires_affinity: bool,
}

/// A pod as far as what it gets depends on what it has.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Its OS.
    pub os: &'a Os,
    /// As the API holds them.
    pub tolerations: &'a [Value],
    /// Required node labels.
    pub node_selector: &'a BTreeMap<String, String>,
    /// Its affinity.
    pub affinity: Option<&'a Affinity>,
}

/// What a pod gets. All of it goes into one patch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Change {
    /// Tolerations to append.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<Value>,
    /// What is added to its node affinity.
    #[serde(skip_serializing_if = "affinity::Change::is_empty")]
    pub affinity: affinity::Change,
}

impl Change {
    /// What has been added when this comes on top of it.
    #[must_use]
    pub fn and(mut self, later: &Self) -> Self {
        self.tolerations.extend(later.tolerations.iter().cloned());
        if !later.affinity.is_empty() {
            self.affinity = later.affinity.clone();
        }
        self
    }

    /// Whether the pod has everything already.
    pub fn is_empty(&self) -> bool {
        self.tolerations.is_empty() && self.affinity.is_empty()
    }
}

impl Policy {
    /// The intersection over the images. Images without an opinion do not limit it; without any
    /// opinion there is nothing to go by, and archaware steps aside.
    pub fn decide<'a>(
        &self,
        images: impl IntoIterator<Item = &'a PlatformSet>,
        os: &Os,
    ) -> Decision {
        images
            .into_iter()
            .filter_map(|image| image.architectures(os))
            .map(|own| self.widen(own))
            .reduce(|shared, own| &shared & &own)
            .map_or(Decision::StepAside, |shared| self.limit(shared))
    }

    /// The decision when the architectures are known without looking at images.
    pub fn limit(&self, mut architectures: BTreeSet<Architecture>) -> Decision {
        if !self.schedulable.is_empty() {
            architectures.retain(|architecture| self.schedulable.contains(architecture));
        }
        if architectures.len() > MAX_ARCHITECTURES {
            Decision::StepAside
        } else if architectures.is_empty() {
            Decision::NoCommonArchitecture
        } else {
            Decision::Architectures(architectures)
        }
    }

    /// What runs images of these architectures. Not transitive: 386 runs on amd64, and what runs
    /// amd64's images does not thereby run 386's.
    fn widen(&self, own: BTreeSet<Architecture>) -> BTreeSet<Architecture> {
        let runs_one = |runs: &&Vec<Architecture>| runs.iter().any(|image| own.contains(image));
        let further: Vec<_> = self
            .compatibility
            .iter()
            .filter(|(_, runs)| runs_one(runs))
            .map(|(architecture, _)| architecture.clone())
            .collect();
        own.into_iter().chain(further).collect()
    }

    /// The tolerations that a decision asks for and that `existing` does not hold by the API's own
    /// matching rule.
    pub fn missing_tolerations(
        &self,
        decision: &Decision,
        os: &Os,
        existing: &[Value],
    ) -> Vec<Value> {
        let mut wanted = match decision {
            Decision::Architectures(set) => {
                let own = set.iter().map(|one| self.taint.toleration(one));
                own.chain(by_rules(&self.rules, set, os)).collect()
            }
            Decision::StepAside => vec![self.taint.toleration_of_all()],
            Decision::NoCommonArchitecture => Vec::new(),
        };
        wanted.retain(|new| !existing.iter().any(|toleration| covers(toleration, new)));
        wanted
    }

    /// What a pod gets by a decision. Affinity is part of it only while the API lets it be set: when the pod
    /// is created, and behind a scheduling gate.
    pub fn change(
        &self,
        decision: &Decision,
        pod: View<'_>,
        preferences: &Preferences,
        affinity_is_open: bool,
    ) -> Change {
        let affinity = if affinity_is_open {
            let required = self.requires_affinity;
            affinity::decide(
                decision,
                required,
                preferences,
                pod.node_selector,
                pod.affinity,
            )
        } else {
            affinity::Change::default()
        };
        Change {
            tolerations: self.missing_tolerations(decision, pod.os, pod.tolerations),
            affinity,
        }
    }
}

#[cfg(test)]
mod tests;
