//! What is asked for in a repository, and what an answer that is none means.

use http::{
    HeaderMap, Method, StatusCode,
    header::{ACCEPT, AUTHORIZATION},
};
use reqwest::Url;

use crate::{image::error::ImageError, platform::media_type};

use super::{auth::Authorization, exchange::Call, hosts::Host};

/// What is asked for in a repository.
pub(super) struct Question<'a> {
    pub(super) method: Method,
    pub(super) repository: &'a str,
    pub(super) path: &'a str,
    /// A manifest; blobs are what they are.
    pub(super) manifest: bool,
}

impl Question<'_> {
    pub(super) fn call(&self, host: &Host, authorization: Option<&Authorization>) -> Option<Call> {
        let mut headers = HeaderMap::new();
        if self.manifest {
            headers.insert(ACCEPT, media_type::MANIFESTS.join(", ").parse().ok()?);
        }
        let mut own_headers = host.headers.clone();
        if let Some(authorization) = authorization {
            own_headers.insert(AUTHORIZATION, authorization.header());
        }
        Some(Call {
            method: self.method.clone(),
            url: Url::parse(&host.endpoint.url(self.repository, self.path)).ok()?,
            headers,
            own_headers,
            form: None,
            transport: host.transport.clone(),
        })
    }

    /// `host/repository/manifests/tag`, for errors.
    pub(super) fn on(&self, host: &Host) -> String {
        let Self {
            repository, path, ..
        } = self;
        // In the clear is worth a word: the other end may expect TLS.
        let scheme = if host.endpoint.is_plain() {
            "http://"
        } else {
            ""
        };
        format!("{scheme}{}/{repository}/{path}", host.endpoint.host())
    }
}

/// What a status that is no success means.
pub(super) fn refusal(status: StatusCode, what: impl Into<String>) -> ImageError {
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
