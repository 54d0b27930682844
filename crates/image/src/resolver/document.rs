//! From a digest to platforms: reads documents from containerd first, and missing documents from
//! the registry.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use bytes::Bytes;

use crate::{
    cache::CachedSummary,
    containerd::{Containerd, Deadline, Store},
    credentials::Fingerprint,
    digest::Digest,
    error::ImageError,
    summary::{self, DocumentKind, Fetch, ImageSummary, ReadImage},
};

use super::{Origin, RequestContext, ResolutionSource, ResolverInner, tag::ResolvedDigest};

impl ResolverInner {
    /// Reads and caches the summary of an image.
    pub(super) async fn read_summary(
        &self,
        context: &RequestContext,
        found: &ResolvedDigest,
    ) -> Result<(Arc<ImageSummary>, Origin), ImageError> {
        let fingerprints = context.fingerprints();
        let subject = format!("{}@{}", context.reference.name(), found.digest);
        let document_source = self.document_source(context, found, &subject);
        let read = async {
            let (root, content_type) = document_source.root(found).await?;
            summary::read(
                &document_source,
                &found.digest,
                &root,
                content_type.as_deref(),
            )
            .await
        };
        let ReadImage {
            summary,
            documents,
            is_complete,
        } = match read.await {
            Ok(read) => read,
            Err(error) => {
                // A cached failure must not be counted twice.
                if document_source.failed.is_none() {
                    self.caches.store_failure(&subject, &fingerprints, &error);
                }
                return Err(error);
            }
        };
        self.caches.forget_failure(&subject, &fingerprints);
        let asked_registry = document_source.asked_registry.load(Ordering::Relaxed);
        let summary = self.caches.intern(summary);
        let source = if asked_registry {
            ResolutionSource::Registry
        } else {
            ResolutionSource::Containerd
        };
        let credential = document_source.credential.get().copied();
        let origin = Origin { source, credential };
        if !is_complete {
            let (name, ttl) = (context.reference.name(), self.settings.latest_ttl);
            let kept = summary.clone();
            self.caches
                .store_partial(&found.digest, &name, &fingerprints, kept, ttl);
            return Ok((summary, origin));
        }
        let mut known = CachedSummary {
            summary: summary.clone(),
            last_touched: 0,
        };
        if let Some(store) = self.store() {
            known.last_touched = Store::today();
            if asked_registry {
                store.store_documents(&found.digest, documents);
            } else {
                store.touch(&found.digest);
            }
        }
        self.caches
            .store_summary(&found.digest, context.summary_scope(), known);
        Ok((summary, origin))
    }
}

impl ResolverInner {
    /// The source of an image's documents. `subject`: the key of cached failures.
    pub(super) fn document_source<'a>(
        &'a self,
        context: &'a RequestContext,
        found: &ResolvedDigest,
        subject: &str,
    ) -> DocumentSource<'a> {
        DocumentSource {
            inner: self,
            context,
            containerd: self
                .containerd
                .as_ref()
                .map(|containerd| (containerd, containerd.deadline())),
            failed: self.recent_failure(subject, &context.fingerprints()),
            containerd_failed: AtomicBool::new(found.without_containerd),
            asked_registry: AtomicBool::new(found.root.is_some()),
            credential: OnceLock::new(),
        }
    }
}

pub(super) struct DocumentSource<'a> {
    inner: &'a ResolverInner,
    context: &'a RequestContext,
    /// containerd and the deadline of all reads from it.
    containerd: Option<(&'a Containerd, Deadline)>,
    /// A recent failure of the registry. containerd may have the document by now, but the registry
    /// is not asked again.
    pub(super) failed: Option<ImageError>,
    /// After one timeout of containerd the remaining documents do not wait for it again.
    containerd_failed: AtomicBool,
    asked_registry: AtomicBool,
    /// The credential that the registry asked for.
    credential: OnceLock<Fingerprint>,
}

impl DocumentSource<'_> {
    /// The root document, and the `Content-Type` if a registry returned it.
    pub(super) async fn root(
        &self,
        found: &ResolvedDigest,
    ) -> Result<(Bytes, Option<String>), ImageError> {
        if let Some(answer) = &found.root {
            let content_type = answer.content_type().map(str::to_owned);
            return Ok((answer.body.clone(), content_type));
        }
        self.fetch_typed(DocumentKind::Manifest, &found.digest)
            .await
    }

    async fn fetch_typed(
        &self,
        kind: DocumentKind,
        digest: &Digest,
    ) -> Result<(Bytes, Option<String>), ImageError> {
        let usable = !self.containerd_failed.load(Ordering::Relaxed);
        if let Some((containerd, deadline)) = self.containerd.filter(|_| usable) {
            match containerd.read(deadline, digest).await {
                Ok(Some(bytes)) => return Ok((bytes, None)),
                Ok(None) => {}
                Err(_) => self.containerd_failed.store(true, Ordering::Relaxed),
            }
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.asked_registry.store(true, Ordering::Relaxed);
        let RequestContext {
            reference,
            credentials,
            ..
        } = self.context;
        let registry = &self.inner.registry;
        let answer = registry.get(reference, kind, digest, credentials).await?;
        if let Some(credential) = answer.credential {
            // All documents of an image need the same credential.
            let _ = self.credential.set(credential);
        }
        let content_type = answer.content_type().map(str::to_owned);
        Ok((answer.body, content_type))
    }
}

impl Fetch for DocumentSource<'_> {
    async fn fetch(&self, kind: DocumentKind, digest: &Digest) -> Result<Bytes, ImageError> {
        self.fetch_typed(kind, digest).await.map(|(bytes, _)| bytes)
    }
}
