//! Errors of image resolution.

use std::{sync::Arc, time::Duration};

use archaware_base::backoff::Backoff;
use archaware_platform::DocumentError;

use super::{digest::DigestError, reference::ReferenceError};

/// The fixed set of reasons, used in metric labels, events and `error.reason` of `archaware
/// inspect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, strum::IntoStaticStr)]
pub enum Reason {
    /// The reference does not follow the grammar.
    InvalidReference,
    /// The image, its config or every child of its index does not exist.
    NotFound,
    /// The registry denied access, or required authentication that is not possible.
    Denied,
    /// The registry answered 429.
    RateLimited,
    /// No connection, no answer in time, 5xx, a redirect loop, a truncated answer, not HTTP.
    Unavailable,
    /// A document over 4 MiB after decompression, or an image or artifact over its limit.
    TooLarge,
    /// Not JSON, not a manifest, wrong digest or length, or ambiguous.
    Corrupt,
    /// Docker schema 1, an unknown digest algorithm, or an index that is nested too deeply or has
    /// too many entries.
    Unsupported,
}

impl Reason {
    /// The name in metrics and events.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Delays between retries; `None` when a retry of the same request cannot help or the registry
    /// sets the delay.
    pub fn backoff(self) -> Option<Backoff> {
        match self {
            // The registry sets the delay. An invalid reference stays invalid.
            Self::RateLimited | Self::InvalidReference => None,
            Self::Unavailable => Some(Backoff::seconds(1, 60)),
            Self::NotFound | Self::Denied => Some(Backoff::seconds(5, 600)),
            // The tag may be pushed again with valid content.
            Self::TooLarge | Self::Corrupt | Self::Unsupported => Some(Backoff::seconds(60, 600)),
        }
    }
}

/// A cause that is shared by all callers that waited for the same request.
pub(crate) type SharedError = Arc<dyn std::error::Error + Send + Sync>;

/// Why an image could not be resolved. Cheap to clone: all callers that waited for a request get
/// the same error.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ImageError {
    /// The text is not an image reference.
    #[error("invalid image reference")]
    Reference(#[from] ReferenceError),
    /// A document refers to another one by an invalid digest.
    #[error("a document of the image refers to another document by an invalid digest")]
    Digest(#[from] DigestError),
    /// The registry does not have the document.
    #[error("{what} not found")]
    NotFound {
        /// The document and its address.
        what: String,
    },
    /// The registry denied access.
    #[error("access to {what} denied: {why}")]
    Denied {
        /// The requested document.
        what: String,
        /// The registry's status or requirement.
        why: String,
    },
    /// The registry limits the rate of requests.
    #[error("{host} limits the rate of requests; next request in {} s", retry_after.as_secs())]
    RateLimited {
        /// Host of the registry.
        host: String,
        /// Delay that the registry asked for.
        retry_after: Duration,
    },
    /// The registry does not support the method; a HEAD is followed by a GET.
    #[error("{what} unavailable: the registry does not support the method")]
    MethodRefused {
        /// The requested document.
        what: String,
    },
    /// The registry gave no usable answer.
    #[error("{what} unavailable: {why}")]
    Unavailable {
        /// The requested document.
        what: String,
        /// Why there is no usable answer, in words.
        why: String,
        /// Whether the registry answered at all.
        answered: bool,
        /// The cause, if known.
        #[source]
        source: Option<SharedError>,
    },
    /// The host is overloaded (503 with `Retry-After`) or did not answer several times in a row.
    /// archaware pauses requests to an overloaded host for this principal only, and to a silent
    /// host for all principals.
    #[error("{host} is overloaded or does not answer; next request in {} s", retry_after.as_secs())]
    HostPaused {
        /// Host of the registry.
        host: String,
        /// Time until the next request.
        retry_after: Duration,
    },
    /// The document is not an image document.
    #[error("{what} is unusable")]
    Document {
        /// The document and its digest.
        what: String,
        /// The problem in the document.
        #[source]
        source: DocumentError,
    },
    /// An artifact is too large, malformed, or has no layer of the requested kind.
    #[error("{what} is unusable")]
    Artifact {
        /// The artifact or its layer, and its digest.
        what: String,
        /// The problem in the artifact.
        #[source]
        source: ArtifactError,
    },
    /// The content does not match its digest or descriptor.
    #[error("{what} is corrupt: {why}")]
    Corrupt {
        /// The document and its digest.
        what: String,
        /// The difference.
        why: String,
    },
    /// Indexes are nested too deeply, or an index has too many children to read.
    #[error("{0}")]
    TooDeep(&'static str),
}

/// Why an artifact is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArtifactError {
    /// The artifact exceeds a limit of bytes or elements, which the text names.
    #[error("{0}")]
    TooLarge(String),
    /// Its content contradicts its media type. With the reason, in words.
    #[error("{0}")]
    Malformed(String),
    /// It has no layer of this kind.
    #[error("it has no layer with a {0}, and no {0} is attached to it")]
    NoLayer(&'static str),
}

impl ImageError {
    /// The reason in the fixed set.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Reference(ReferenceError::Invalid { .. }) => Reason::InvalidReference,
            Self::Digest(DigestError::Malformed) | Self::Corrupt { .. } => Reason::Corrupt,
            Self::Reference(ReferenceError::Algorithm(_))
            | Self::Digest(DigestError::Algorithm)
            | Self::TooDeep(_) => Reason::Unsupported,
            Self::NotFound { .. } => Reason::NotFound,
            Self::Denied { .. } => Reason::Denied,
            Self::RateLimited { .. } => Reason::RateLimited,
            Self::Unavailable { .. } | Self::MethodRefused { .. } | Self::HostPaused { .. } => {
                Reason::Unavailable
            }
            Self::Artifact { source, .. } => match source {
                ArtifactError::TooLarge(_) => Reason::TooLarge,
                ArtifactError::Malformed(_) | ArtifactError::NoLayer(_) => Reason::Corrupt,
            },
            Self::Document { source, .. } => match source {
                DocumentError::TooLarge(_) => Reason::TooLarge,
                DocumentError::Malformed(_) | DocumentError::Ambiguous(_) => Reason::Corrupt,
                DocumentError::Schema1 | DocumentError::TooManyEntries => Reason::Unsupported,
            },
        }
    }

    /// The delay that the registry or the host limiter requires.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after, .. } | Self::HostPaused { retry_after, .. } => {
                Some(*retry_after)
            }
            _ => None,
        }
    }

    /// The host that gets no requests for a while.
    pub(crate) fn paused_host(&self) -> Option<&str> {
        match self {
            Self::RateLimited { host, .. } | Self::HostPaused { host, .. } => Some(host),
            _ => None,
        }
    }

    /// An [`ImageError::Unavailable`] that counts as an answer. `what` names the registry or the
    /// requested document.
    pub fn unavailable(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unavailable {
            what: what.into(),
            why: why.into(),
            answered: true,
            source: None,
        }
    }

    /// An [`ImageError::Unavailable`] without an answer of the registry.
    pub fn unanswered(
        what: impl Into<String>,
        why: impl Into<String>,
        source: Option<SharedError>,
    ) -> Self {
        Self::Unavailable {
            what: what.into(),
            why: why.into(),
            answered: false,
            source,
        }
    }

    /// Whether the registry answered. A 503 with `Retry-After` does not count as an answer.
    pub(crate) fn is_answer(&self) -> bool {
        match self {
            Self::Unavailable { answered, .. } => *answered,
            Self::HostPaused { .. } => false,
            _ => true,
        }
    }

    pub(crate) fn too_large(what: impl Into<String>, size: u64) -> Self {
        Self::Document {
            what: what.into(),
            source: DocumentError::TooLarge(size),
        }
    }

    /// The message with its causes, on one line.
    pub fn chain(&self) -> String {
        archaware_base::error::chain(self)
    }

    /// The message without remaining time, for events: events with equal notes form one series.
    pub fn note(&self) -> String {
        let text = self.chain();
        let (note, _) = text.split_once("; next request in ").unwrap_or((&text, ""));
        note.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The note of an event must not change while its cause stays: equal notes are one series.
    #[test]
    fn notes_contain_no_remaining_time() {
        let (host, retry_after) = ("r.example".to_owned(), Duration::from_secs(17));
        for error in [
            ImageError::RateLimited {
                host: host.clone(),
                retry_after,
            },
            ImageError::HostPaused { host, retry_after },
        ] {
            assert!(error.chain().contains("17 s"), "{}", error.chain());
            let note = error.note();
            assert!(
                note.starts_with("r.example ") && !note.contains("17"),
                "{note}"
            );
        }
        let other = ImageError::unavailable("a", "no answer");
        assert_eq!(other.note(), other.chain());
    }
}
