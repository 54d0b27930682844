//! What is known of one image: the platforms it exists for.

use std::collections::BTreeSet;

use super::{Architecture, Os, Platform};

/// Why an image has no opinion on where it runs. This is an answer, not an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Note {
    /// The manifest's config is no image config: a Helm chart, an SBOM, a WebAssembly module, …
    NotAnImage,
    /// The config, or every entry of the index, names no architecture.
    NoArchitecture,
}

impl Note {
    /// The name used in `inspect -o json`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotAnImage => "NotAnImage",
            Self::NoArchitecture => "NoArchitecture",
        }
    }
}

/// The platforms of one image, sorted and each once; or the reason why it names none.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PlatformSet {
    /// At least one platform.
    Platforms(Box<[Platform]>),
    /// No opinion: such an image does not limit where its pod may run.
    None(Note),
}

impl PlatformSet {
    /// The set of `platforms`, or no opinion with `note` when there are none.
    pub fn new(mut platforms: Vec<Platform>, note: Note) -> Self {
        if platforms.is_empty() {
            return Self::None(note);
        }
        platforms.sort();
        platforms.dedup();
        Self::Platforms(platforms.into_boxed_slice())
    }

    /// All platforms, of every OS.
    pub fn platforms(&self) -> &[Platform] {
        match self {
            Self::Platforms(platforms) => platforms,
            Self::None(_) => &[],
        }
    }

    /// Why there are no platforms.
    pub fn note(&self) -> Option<Note> {
        match self {
            Self::Platforms(_) => None,
            Self::None(note) => Some(*note),
        }
    }

    /// The architectures for pods of `os`; `None` when the image has no opinion. An image that only
    /// exists for other operating systems has an opinion: the empty set.
    pub fn architectures(&self, os: &Os) -> Option<BTreeSet<Architecture>> {
        match self {
            Self::Platforms(platforms) => Some(
                platforms
                    .iter()
                    .filter(|platform| platform.is_for(os))
                    .map(|platform| platform.architecture().clone())
                    .collect(),
            ),
            Self::None(_) => None,
        }
    }
}
