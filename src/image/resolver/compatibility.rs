//! Compatibility documents: artifacts that say which image is for which nodes (`placement::selection`). They are read as images are:
//! with the same names, credentials, mirrors, slots and limits.

use std::sync::Arc;

use futures::FutureExt;

use crate::{
    image::{
        digest::Digest,
        error::ImageError,
        summary::{self, DocumentKind, Fetch},
    },
    placement::selection::{CompatibilityDocument, DocumentFormat, InvalidDocument, MAX_SIZE},
    platform::Layers,
};

use super::{
    RequestContext, ResolveRequest, Resolver, ResolverInner, SummaryKey, tag::ResolvedDigest,
};

/// The layers that hold a document, by media type.
const LAYERS: [(&str, DocumentFormat); 2] = [
    (
        "application/vnd.oci.image.compatibilities.v1+json",
        DocumentFormat::Labels,
    ),
    (
        "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml",
        DocumentFormat::Features,
    ),
];

impl Resolver {
    /// The compatibility document of an artifact, within a deadline.
    ///
    /// # Errors
    ///
    /// When it cannot be read in time, or is none.
    pub async fn compatibility_by(
        &self,
        request: ResolveRequest<'_>,
        deadline: tokio::time::Instant,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let answer = tokio::time::timeout_at(deadline, self.compatibility(request)).await;
        let why = "not read within resolution.budget";
        answer.unwrap_or_else(|_| Err(ImageError::unanswered(request.image, why, None)))
    }

    async fn compatibility(
        &self,
        request: ResolveRequest<'_>,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let (mut context, inner) = (self.context(&request)?, &self.0);
        inner.add_credentials(&mut context, request.keyring).await;
        if let Some(document) = inner.cached_compatibility(&context) {
            return Ok(document);
        }
        let registry = context.reference.registry();
        let _slot = inner.fetch_slots.enter(request.tenant, registry).await;
        let found = self.resolve_digest(&context).await?;
        let key = SummaryKey {
            digest: found.digest.clone(),
            name: context.reference.name(),
            fingerprints: context.fingerprints(),
        };
        let (inner, shared) = (self.0.clone(), (context.clone(), found.clone()));
        let read =
            move || async move { inner.read_compatibility(&shared.0, &shared.1).await }.boxed();
        self.0.compatibilities.run(key, read).await
    }
}

impl ResolverInner {
    fn cached_compatibility(&self, context: &RequestContext) -> Option<Arc<CompatibilityDocument>> {
        let digest = self.cached_digest(context)?;
        self.caches.compatibility(&digest, context.summary_scope())
    }

    async fn read_compatibility(
        &self,
        context: &RequestContext,
        found: &ResolvedDigest,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let (digest, scope) = (&found.digest, context.summary_scope());
        if let Some(document) = self.caches.compatibility(digest, scope) {
            return Ok(document);
        }
        let fingerprints = context.fingerprints();
        let subject = format!("compatibility of {}@{digest}", context.reference.name());
        let source = self.document_source(context, found, &subject);
        let read = async {
            let (root, _) = source.root(found).await?;
            summary::verify(DocumentKind::Manifest, digest, None, &root)?;
            let layers = Layers::parse(&root).map_err(|source| ImageError::Document {
                what: format!("manifest {digest}"),
                source,
            })?;
            let mut layers = layers.0.into_iter();
            let found = layers.find_map(|layer| {
                let mut known = LAYERS.iter().filter(|(name, _)| *name == layer.media_type);
                known.next().map(|(_, format)| (layer, *format))
            });
            let invalid = |what, source| ImageError::Compatibility { what, source };
            let none = || invalid(format!("artifact {digest}"), InvalidDocument::NoLayer);
            let (layer, format) = found.ok_or_else(none)?;
            let what = format!("compatibility document {}", layer.digest);
            let digest: Digest = layer.digest.parse()?;
            if let Some(size) = layer.size.filter(|size| *size > MAX_SIZE) {
                return Err(invalid(what, InvalidDocument::TooLarge(size)));
            }
            let bytes = source.fetch(DocumentKind::Layer, &digest).await?;
            summary::verify(DocumentKind::Layer, &digest, layer.size, &bytes)?;
            CompatibilityDocument::parse(format, &bytes).map_err(|source| invalid(what, source))
        };
        match read.await {
            Ok(document) => {
                self.caches.forget_failure(&subject, &fingerprints);
                let document = Arc::new(document);
                let kept = document.clone();
                self.caches.store_compatibility(digest, scope, kept);
                Ok(document)
            }
            Err(error) => {
                // A cached failure must not be counted twice.
                if source.failed.is_none() {
                    self.caches.store_failure(&subject, &fingerprints, &error);
                }
                Err(error)
            }
        }
    }
}
