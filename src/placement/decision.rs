//! Where a pod may run.

use std::collections::BTreeSet;

use crate::platform::Architecture;

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
