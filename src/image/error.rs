//! Why an image could not be resolved.

use std::{sync::Arc, time::Duration};

use crate::{backoff::Backoff, platform::DocumentError};

use super::{digest::DigestError, reference::ReferenceError};

/// The closed set of reasons: labels of metrics, reasons in events, `error.reason` of `inspect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The reference does not follow the grammar.
    InvalidReference,
    /// No such image, or its config, or every child of its index, is gone.
    NotFound,
    /// The registry refused, or asked for what cannot be given.
    Denied,
    /// The registry said 429.
    RateLimited,
    /// No connection, no answer in time, 5xx, a redirect loop, cut short, not HTTP.
    Unavailable,
    /// A document over 4 MiB, unpacked size counted.
    TooLarge,
    /// Not JSON, no manifest, wrong digest or length, or ambiguous.
    Corrupt,
    /// Schema 1, an unknown digest algorithm, or nested too deep.
    Unsupported,
}

impl Reason {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidReference => "InvalidReference",
            Self::NotFound => "NotFound",
            Self::Denied => "Denied",
            Self::RateLimited => "RateLimited",
            Self::Unavailable => "Unavailable",
            Self::TooLarge => "TooLarge",
            Self::Corrupt => "Corrupt",
            Self::Unsupported => "Unsupported",
        }
    }
}

impl Reason {
    /// How soon it is worth to ask again; `None` when repeating the same request is not what helps.
    pub fn backoff(self) -> Option<Backoff> {
        match self {
            // The registry says when. A reference does not get better.
            Self::RateLimited | Self::InvalidReference => None,
            Self::Unavailable => Some(Backoff::seconds(1, 60)),
            Self::NotFound | Self::Denied => Some(Backoff::seconds(5, 600)),
            // A tag may be pushed again with better content.
            Self::TooLarge | Self::Corrupt | Self::Unsupported => Some(Backoff::seconds(60, 600)),
        }
    }
}

/// A cause shared by all who waited for the same answer.
pub(crate) type Source = Arc<dyn std::error::Error + Send + Sync>;

/// Why an image could not be resolved. Cheap to clone: one failure answers everybody who waited for it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ImageError {
    /// The text is no reference.
    #[error("invalid image reference")]
    Reference(#[from] ReferenceError),
    /// A document names another one by something that is no digest.
    #[error("a descriptor is invalid")]
    Digest(#[from] DigestError),
    /// The registry has no such thing.
    #[error("{what} not found")]
    NotFound {
        /// Manifest, config, …, with its address.
        what: String,
    },
    /// The registry refused.
    #[error("access to {what} denied: {why}")]
    Denied {
        /// What was asked for.
        what: String,
        /// What the registry wanted.
        why: String,
    },
    /// The registry limits the rate of requests.
    #[error("{host} limits the rate of requests; next try in {} s", retry_after.as_secs())]
    RateLimited {
        /// Host of the registry.
        host: String,
        /// How long the registry wants to be left alone.
        retry_after: Duration,
    },
    /// The registry does not answer this method; a HEAD is then followed by a GET.
    #[error("{what} unavailable: it does not answer HEAD")]
    MethodRefused {
        /// What was asked for.
        what: String,
    },
    /// No usable answer.
    #[error("{what} unavailable: {why}")]
    Unavailable {
        /// What was asked for.
        what: String,
        /// What happened.
        why: String,
        /// Whether the registry answered at all.
        answered: bool,
        /// The cause, where there is one.
        #[source]
        source: Option<Source>,
    },
    /// The host did not answer three times in a row and is left alone for a while.
    #[error("{host} did not answer lately; next try in {} s", retry_after.as_secs())]
    Gated {
        /// Host of the registry.
        host: String,
        /// Until the gate opens.
        retry_after: Duration,
    },
    /// A document that is no image's.
    #[error("{what} is unusable")]
    Document {
        /// Manifest, config, …, with its digest.
        what: String,
        /// What is wrong with it.
        #[source]
        source: DocumentError,
    },
    /// The content is not what its digest or descriptor promises.
    #[error("{what} is corrupt: {why}")]
    Corrupt {
        /// Manifest, config, …, with its digest.
        what: String,
        /// What differs.
        why: String,
    },
    /// Indexes in indexes, or more children to read than is reasonable.
    #[error("{0}")]
    TooDeep(&'static str),
}

impl ImageError {
    /// Its place in the closed set.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Reference(ReferenceError::Invalid { .. }) => Reason::InvalidReference,
            Self::Digest(DigestError::Malformed(_)) | Self::Corrupt { .. } => Reason::Corrupt,
            Self::Reference(ReferenceError::Algorithm(_))
            | Self::Digest(DigestError::Algorithm(_))
            | Self::TooDeep(_) => Reason::Unsupported,
            Self::NotFound { .. } => Reason::NotFound,
            Self::Denied { .. } => Reason::Denied,
            Self::RateLimited { .. } => Reason::RateLimited,
            Self::Unavailable { .. } | Self::MethodRefused { .. } | Self::Gated { .. } => {
                Reason::Unavailable
            }
            Self::Document { source, .. } => match source {
                DocumentError::TooLarge(_) => Reason::TooLarge,
                DocumentError::Malformed(_) | DocumentError::Ambiguous(_) => Reason::Corrupt,
                DocumentError::Schema1 | DocumentError::TooManyEntries => Reason::Unsupported,
            },
        }
    }

    /// When the registry itself, or its gate, says to come back.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::RateLimited { retry_after, .. } | Self::Gated { retry_after, .. } => {
                Some(*retry_after)
            }
            _ => None,
        }
    }

    pub(crate) fn unavailable(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Unavailable {
            what: what.into(),
            why: why.into(),
            answered: true,
            source: None,
        }
    }

    /// Nothing came back.
    pub(crate) fn unanswered(
        what: impl Into<String>,
        why: impl Into<String>,
        source: Option<Source>,
    ) -> Self {
        Self::Unavailable {
            what: what.into(),
            why: why.into(),
            answered: false,
            source,
        }
    }

    /// Whether the registry answered, whatever it was.
    pub(crate) fn is_answer(&self) -> bool {
        match self {
            Self::Unavailable { answered, .. } => *answered,
            Self::Gated { .. } => false,
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
        crate::error::chain(self)
    }
}
