//! Why an HTTP request failed, and what that means for the image.

use std::{error::Error as _, fmt::Write as _, io, sync::Arc};

use crate::error::ImageError;

use super::dns::DnsError;

/// Why a request failed.
pub(super) enum ExchangeError {
    Transport(reqwest::Error),
    TimedOut,
    /// The budget for large bodies had no room in time.
    Busy,
    Other(ImageError),
}

impl From<reqwest::Error> for ExchangeError {
    fn from(error: reqwest::Error) -> Self {
        Self::Transport(error)
    }
}

impl ExchangeError {
    pub(super) fn into_image_error(self, what: &str) -> ImageError {
        match self {
            Self::Transport(error) => transport_error(what, error),
            Self::TimedOut => ImageError::unanswered(what, "no answer in time", None),
            Self::Busy => {
                let why = "too many large documents are being received at the moment";
                ImageError::unanswered(what, why, None)
            }
            Self::Other(error) => error,
        }
    }
}

/// The URL is removed from the error: a redirect's URL may contain a signature.
fn transport_error(what: &str, error: reqwest::Error) -> ImageError {
    if let Some(refused @ DnsError::LocalAddress { .. }) = find_cause(&error) {
        return ImageError::Denied {
            what: what.to_owned(),
            why: refused.to_string(),
        };
    }
    let mut why = String::from(if error.is_connect() {
        "no connection"
    } else if error.is_body() || error.is_decode() {
        "its answer was truncated"
    } else {
        "the request failed"
    });
    if error.is_timeout() {
        let _ = write!(why, " in time");
    }
    let source = Some(Arc::new(error.without_url()) as _);
    ImageError::unanswered(what, why, source)
}

/// Whether a host answered the TLS handshake with a message that is not TLS, as a plain HTTP server
/// does. False if the certificate cannot be verified or the host does not answer.
pub(super) fn speaks_no_tls(error: &ImageError) -> bool {
    let tls = error.source().and_then(find_cause::<rustls::Error>);
    matches!(tls, Some(rustls::Error::InvalidMessage(_)))
}

/// The first cause of a type, in the chain of sources.
fn find_cause<'a, E: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        // `io::Error::source` skips the wrapped error and returns the source of that error.
        let wrapped = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        next = match wrapped {
            Some(wrapped) => Some(wrapped),
            None => error.source(),
        };
    }
    None
}
