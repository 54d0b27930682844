//! From the platforms of a pod's images to its tolerations.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{
    config::Config,
    platform::{Architecture, Os, PlatformSet},
};

use super::{TaintKind, tolerates};

/// What applies to every pod.
#[derive(Clone, Debug)]
pub struct Policy {
    /// archaware's taint.
    pub taint: TaintKind,
    /// Which further architectures' images a node's architecture runs.
    pub compatibility: BTreeMap<Architecture, Vec<Architecture>>,
    /// The only ones considered; empty means all.
    pub schedulable: BTreeSet<Architecture>,
}

/// Where a pod may run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// On these architectures; never empty.
    Architectures(BTreeSet<Architecture>),
    /// Wherever the scheduler likes.
    StepAside,
    /// Nowhere: its images share no architecture.
    NoCommonArchitecture,
}

impl Decision {
    /// The value of the annotation `archaware.dev/decision`.
    pub fn annotation(&self) -> String {
        match self {
            Self::Architectures(set) => join(set, ","),
            Self::StepAside => "any".to_owned(),
            Self::NoCommonArchitecture => "none".to_owned(),
        }
    }

    /// Its name in metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Architectures(_) => "architectures",
            Self::StepAside => "any",
            Self::NoCommonArchitecture => "none",
        }
    }
}

/// Names of architectures, sorted.
pub fn join(set: &BTreeSet<Architecture>, separator: &str) -> String {
    set.iter()
        .map(Architecture::as_str)
        .collect::<Vec<_>>()
        .join(separator)
}

impl From<&Config> for Policy {
    fn from(config: &Config) -> Self {
        Self {
            taint: config.taint_kind(),
            compatibility: config.compatibility.clone(),
            schedulable: config.schedulable_architectures.iter().cloned().collect(),
        }
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
        if architectures.is_empty() {
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
    pub fn missing_tolerations(&self, decision: &Decision, existing: &[Value]) -> Vec<Value> {
        match decision {
            Decision::Architectures(set) => set
                .iter()
                .filter(|architecture| {
                    let taint = self.taint.taint(architecture);
                    !existing
                        .iter()
                        .any(|toleration| tolerates(toleration, &taint))
                })
                .map(|architecture| self.taint.toleration(architecture))
                .collect(),
            Decision::StepAside => {
                let tolerated = existing
                    .iter()
                    .any(|toleration| self.taint.is_tolerated_by(toleration));
                if tolerated {
                    Vec::new()
                } else {
                    vec![self.taint.toleration_of_all()]
                }
            }
            Decision::NoCommonArchitecture => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
