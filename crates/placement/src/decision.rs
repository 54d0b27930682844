//! The result of a decision.

use archaware_platform::Architectures;

/// Where a pod may run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// On these architectures; never empty.
    Architectures(Architectures),
    /// On every architecture.
    TolerateAll,
    /// On none: the images share no architecture.
    NoCommonArchitecture,
}

/// Who made a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The images, or annotations.
    Images,
    /// The failure policy; the images may change the decision once they are known.
    Policy,
    /// The failure policy, until the images change.
    StandingPolicy,
}

/// The annotation of a decision to tolerate every architecture.
const ANY: &str = "any";

impl Decision {
    /// Parses a value that [`Self::annotation`] writes; `None` if the text is not such a value.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            ANY => Some(Self::TolerateAll),
            "none" => Some(Self::NoCommonArchitecture),
            list => list.parse().ok().map(Self::Architectures),
        }
    }

    /// The value of the annotation `archaware.dev/decision`.
    pub fn annotation(&self) -> String {
        match self {
            Self::Architectures(set) => set.to_string(),
            Self::TolerateAll => ANY.to_owned(),
            Self::NoCommonArchitecture => "none".to_owned(),
        }
    }

    /// The value of the metric label `result`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Architectures(_) => "architectures",
            Self::TolerateAll => "any",
            Self::NoCommonArchitecture => "none",
        }
    }
}
