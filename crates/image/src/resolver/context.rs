//! The identity of a resolve request: which credentials it has, and which cached answers it may
//! use.

use std::sync::Arc;

use crate::{
    cache::CacheScope,
    credentials::{Credential, Fingerprint},
    reference::Reference,
    summary::ImageSummary,
};

use super::{Origin, PullPolicy, Resolved, tag::ResolvedDigest};

/// One resolve request.
#[derive(Clone)]
pub(super) struct RequestContext {
    pub(super) reference: Reference,
    pub(super) policy: PullPolicy,
    pub(super) credentials: Arc<[Credential]>,
    /// With `perCredential`: the combined fingerprint of all credentials. Such a request shares
    /// answers only with requests that have the same credentials.
    pub(super) isolated: Option<Fingerprint>,
}

impl RequestContext {
    pub(super) fn resolved(
        self,
        found: ResolvedDigest,
        summary: &ImageSummary,
        origin: Origin,
    ) -> Resolved {
        let origin = found.origin.and(origin);
        let credentials = self.credentials.iter();
        let credential = origin.credential.and_then(|needed| {
            let mut matching = credentials.filter(|credential| credential.fingerprint() == needed);
            matching
                .next()
                .map(|credential| credential.source().clone())
        });
        Resolved {
            reference: self.reference,
            digest: found.digest,
            platforms: summary.platforms.clone(),
            media_type: summary.media_type,
            source: origin.source,
            credential,
        }
    }

    pub(super) fn fingerprints(&self) -> Vec<Fingerprint> {
        self.credentials
            .iter()
            .map(Credential::fingerprint)
            .collect()
    }

    /// Scope of summaries. Content is addressed by digest, so all requests share it unless this
    /// request is isolated.
    pub(super) fn summary_scope(&self) -> CacheScope {
        self.isolated
            .map_or(CacheScope::Public, CacheScope::Credential)
    }

    /// Scopes of cached tags that this request may use.
    pub(super) fn cache_scopes(&self) -> Vec<CacheScope> {
        if self.isolated.is_some() {
            return vec![self.summary_scope()];
        }
        let credential_scopes = self.fingerprints().into_iter().map(CacheScope::Credential);
        std::iter::once(CacheScope::Public)
            .chain(credential_scopes)
            .collect()
    }

    /// Scope of an answer. `credential`: the credential that the registry required, if any.
    pub(super) fn cache_scope(&self, credential: Option<Fingerprint>) -> CacheScope {
        match (self.isolated, credential) {
            (Some(_), _) => self.summary_scope(),
            (None, Some(credential)) => CacheScope::Credential(credential),
            (None, None) => CacheScope::Public,
        }
    }
}
