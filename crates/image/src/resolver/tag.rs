//! Resolves a tag to a digest: from the node's image record if it is younger than the lifetime of
//! cached tags, otherwise from the registry.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    cache::CacheScope,
    containerd::{Containerd, ContainerdUnavailable, ImageRecord, Store},
    credentials::Fingerprint,
    digest::Digest,
    error::{ImageError, Reason},
    reference::Version,
    registry::{Head, RegistryResponse},
    trace,
};

use super::{MEMORY, Origin, PullPolicy, RequestContext, ResolutionSource, ResolverInner};

/// The digest of an image, and where it came from.
#[derive(Clone)]
pub(super) struct ResolvedDigest {
    pub(super) digest: Digest,
    pub(super) origin: Origin,
    /// The root document, if the registry returned it with the digest.
    pub(super) root: Option<Arc<RegistryResponse>>,
    /// containerd did not answer for this image and is not asked again.
    pub(super) without_containerd: bool,
    /// Set if a registry just returned this digest without a credential. One of the concurrent
    /// callers then persists the tag to containerd.
    persist_once: Option<Arc<AtomicBool>>,
}

/// The registry's error, and the node's image record to fall back to.
pub(super) type TagLookupError = (ImageError, Option<ImageRecord>);

impl ResolvedDigest {
    /// A digest from the reference itself or from memory.
    pub(super) fn known(digest: Digest) -> Self {
        Self {
            digest,
            origin: MEMORY,
            root: None,
            without_containerd: false,
            persist_once: None,
        }
    }

    pub(super) fn recorded(digest: Digest) -> Self {
        Self {
            origin: Origin::without_credential(ResolutionSource::Containerd),
            ..Self::known(digest)
        }
    }

    /// Whether this caller should persist the tag; true for one caller only.
    pub(super) fn needs_persisting(&self) -> bool {
        let flag = self.persist_once.as_ref();
        flag.is_some_and(|flag| flag.swap(false, Ordering::Relaxed))
    }
}

/// Whether an error reveals nothing about the image itself, so that a stale tag may be used.
pub(super) fn allows_stale_tag(error: &ImageError) -> bool {
    matches!(error.reason(), Reason::Unavailable | Reason::RateLimited)
}

impl ResolverInner {
    pub(super) fn ttl(&self, context: &RequestContext) -> Duration {
        let latest = matches!(context.reference.version(), Version::Tag(tag) if tag == "latest");
        if latest || context.policy == PullPolicy::Always {
            self.settings.latest_ttl
        } else {
            self.settings.tag_ttl
        }
    }

    pub(super) fn store(&self) -> Option<&Store> {
        self.containerd.as_ref()?.store()
    }

    /// A recent failure, after which the registry is not asked again yet.
    pub(super) fn recent_failure(
        &self,
        subject: &str,
        fingerprints: &[Fingerprint],
    ) -> Option<ImageError> {
        let failure = self.caches.failure(subject, fingerprints)?;
        trace::cached("failure", subject, failure.reason().as_str());
        Some(failure)
    }

    /// Waits a short time until persisted tags are loaded.
    pub(super) async fn wait_until_loaded(&self) -> Result<(), ContainerdUnavailable> {
        match self.containerd.as_ref().and_then(Containerd::store) {
            Some(store) => store.wait_until_loaded().await,
            None => Ok(()),
        }
    }

    /// Looks a tag up. An image record is not cached, because the next request may require a
    /// fresher answer.
    pub(super) async fn look_up(
        &self,
        context: &RequestContext,
        ttl: Duration,
        loaded: Result<(), ContainerdUnavailable>,
    ) -> Result<ResolvedDigest, TagLookupError> {
        let recorded = match (self.containerd.as_ref(), loaded) {
            (Some(containerd), Ok(())) => containerd.record(&context.reference).await,
            (Some(_), Err(ContainerdUnavailable)) => Err(ContainerdUnavailable),
            (None, _) => Ok(None),
        };
        let without_containerd = recorded.is_err();
        let record = match recorded.unwrap_or_default() {
            // An older record is only a fallback: this node would run the recorded image (unless
            // the policy is `Always`), but the pod may run on another node.
            Some(record) if record.age < ttl => {
                return Ok(ResolvedDigest::recorded(record.digest));
            }
            other => other,
        };
        match self.request_tag(context).await {
            Ok(found) => Ok(ResolvedDigest {
                without_containerd,
                ..found
            }),
            Err(error) => Err((error, record)),
        }
    }

    /// Asks the registry for the digest of a tag, unless this lookup failed recently.
    async fn request_tag(&self, context: &RequestContext) -> Result<ResolvedDigest, ImageError> {
        let (name, fingerprints) = (context.reference.to_string(), context.fingerprints());
        let Version::Tag(tag) = context.reference.version() else {
            return Err(ImageError::NotFound { what: name });
        };
        if let Some(error) = self.recent_failure(&name, &fingerprints) {
            return Err(error);
        }
        let head = self
            .registry
            .head(&context.reference, tag, &context.credentials);
        let (digest, root, credential) = match head.await {
            Ok(Head::Digest(digest, credential)) => (digest, None, credential),
            Ok(Head::Document(digest, answer)) => {
                let credential = answer.credential;
                (digest, Some(Arc::new(answer)), credential)
            }
            Err(error) => {
                self.caches.store_failure(&name, &fingerprints, &error);
                return Err(error);
            }
        };
        self.caches.forget_failure(&name, &fingerprints);
        let scope = context.cache_scope(credential);
        self.caches.store_tag(&name, scope, &digest, Instant::now());
        Ok(ResolvedDigest {
            origin: Origin {
                source: ResolutionSource::Registry,
                credential,
            },
            root,
            persist_once: (scope == CacheScope::Public).then(|| Arc::new(AtomicBool::new(true))),
            ..ResolvedDigest::known(digest)
        })
    }
}
