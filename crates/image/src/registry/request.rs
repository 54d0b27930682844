//! Requests to a repository, and the errors that HTTP statuses mean.

use http::{
    HeaderMap, Method, StatusCode,
    header::{ACCEPT, AUTHORIZATION},
};
use reqwest::Url;

use crate::{error::ImageError, trace::Peer};
use archaware_platform::media_type;

use super::{auth::Authorization, exchange::HttpRequest, hosts::Host};

/// A request to a repository.
pub(super) struct RegistryRequest<'a> {
    pub(super) method: Method,
    pub(super) repository: &'a str,
    pub(super) path: &'a str,
    /// Whether a manifest is requested, so that `Accept` lists media types.
    pub(super) manifest: bool,
}

impl RegistryRequest<'_> {
    pub(super) fn http_request(
        &self,
        host: &Host,
        authorization: Option<&Authorization>,
        attempt: u32,
    ) -> Option<HttpRequest> {
        let mut headers = HeaderMap::new();
        if self.manifest {
            headers.insert(ACCEPT, media_type::MANIFESTS.join(", ").parse().ok()?);
        }
        let mut origin_headers = host.headers.clone();
        if let Some(authorization) = authorization {
            origin_headers.insert(AUTHORIZATION, authorization.header());
        }
        Some(HttpRequest {
            peer: Peer::Registry,
            method: self.method.clone(),
            url: Url::parse(
                &host
                    .endpoint
                    .url(&host.rewrites.apply(self.repository), self.path),
            )
            .ok()?,
            headers,
            origin_headers,
            form: None,
            transport: host.transport.clone(),
            check: host.check,
            // A manifest may be requested by its tag.
            has_known_digest: self.path.starts_with("blobs/"),
            attempt,
        })
    }

    /// `host/repository/manifests/tag`, for errors.
    pub(super) fn describe(&self, host: &Host) -> String {
        let (repository, path) = (host.rewrites.apply(self.repository), self.path);
        // Plain HTTP is shown, because the server may expect TLS.
        let scheme = if host.endpoint.is_plain() {
            "http://"
        } else {
            ""
        };
        format!("{scheme}{}/{repository}/{path}", host.endpoint.host())
    }
}

/// The error that a status means. [`super::exchange`] has already reported 429, and 503 with
/// `Retry-After`.
pub(super) fn status_error(status: StatusCode, what: impl Into<String>) -> ImageError {
    let what = what.into();
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => ImageError::NotFound { what },
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ImageError::Denied {
            what,
            why: format!("the registry answered {status}"),
        },
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
            ImageError::MethodRefused { what }
        }
        status => ImageError::unavailable(what, format!("the registry answered {status}")),
    }
}
