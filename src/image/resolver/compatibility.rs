//! Compatibility documents: artifacts that say which image is for which nodes (`placement::selection`), named by themselves or
//! attached to an image. They are read as images are: with the same names, credentials, mirrors, slots and limits.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::FutureExt;
use tokio::time::{Instant, timeout, timeout_at};

use crate::{
    image::{
        cache::Attached,
        digest::Digest,
        error::ImageError,
        summary::{self, DocumentKind, Fetch},
    },
    placement::selection::{
        CompatibilityDocument, DocumentFormat, InvalidDocument, MAX_SIZE, Model,
    },
    platform::{Artifact, Descriptor},
};

use super::{
    RequestContext, ResolveRequest, Resolver, ResolverInner, SummaryKey, document::DocumentSource,
    tag::ResolvedDigest,
};

/// The layer that leaves the choice to models.
const MODELS: &str = "application/vnd.oci.image.model-compatibilities.v1+json";
/// The type of NFD's artifacts, which are attached to images.
const NFD_ARTIFACT: &str = "application/vnd.nfd.image-compatibility.v1alpha1";
/// The layers that hold a document, by media type.
const LAYERS: [(&str, DocumentFormat); 3] = [
    (
        "application/vnd.oci.image.compatibilities.v1+json",
        DocumentFormat::Labels,
    ),
    (
        "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml",
        DocumentFormat::Features,
    ),
    (
        "application/vnd.nfd.image-compatibility.spec.v1alpha1+json",
        DocumentFormat::Features,
    ),
];

/// Maximum number of images of an index to which documents may be attached: each costs a request. Real indexes have up to twenty.
const MAX_IMAGES: usize = 32;
/// How many of them are asked for at a time, as the layers of an image are pulled.
const CONCURRENT_READS: usize = 4;
/// Maximum number of reads of what is attached to the images of pods that do not ask for it.
pub(super) const MAX_ATTACHED_READS: usize = 16;
/// How long one of them goes on when no pod waits any more: three requests.
const MAX_ATTACHED_READ: Duration = Duration::from_secs(15);

/// What is looked for under the name of an image or artifact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sought {
    /// The artifact itself or, if it is an image, what is attached to it or to the images of its platforms.
    Document,
    /// What is attached to the image itself: what is attached to the images of its platforms would cost a request for each.
    Attached,
}

impl Resolver {
    /// The compatibility document of an artifact, within a deadline.
    ///
    /// # Errors
    ///
    /// When it cannot be read in time, or is none.
    pub async fn compatibility_by(
        &self,
        request: ResolveRequest<'_>,
        deadline: Instant,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        self.read_by(request, Sought::Document, deadline).await
    }

    /// The compatibility document that is attached to an image, within a deadline. What does not come by then is there for the
    /// next pod.
    ///
    /// # Errors
    ///
    /// When it cannot be read in time, or there is none.
    pub async fn attached_by(
        &self,
        request: ResolveRequest<'_>,
        deadline: Instant,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        self.read_by(request, Sought::Attached, deadline).await
    }

    async fn read_by(
        &self,
        request: ResolveRequest<'_>,
        sought: Sought,
        deadline: Instant,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let answer = timeout_at(deadline, self.read(request, sought, deadline)).await;
        answer.unwrap_or_else(|_| Err(late(request.image)))
    }

    async fn read(
        &self,
        request: ResolveRequest<'_>,
        sought: Sought,
        deadline: Instant,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let (mut context, inner) = (self.context(&request)?, &self.0);
        inner.add_credentials(&mut context, request.keyring).await;
        let digest = inner.cached_digest(&context);
        if let Some(digest) = &digest
            && let Some(known) = inner.cached_document(&context, digest, sought)
        {
            return known.document(digest);
        }
        match sought {
            Sought::Document => {
                let registry = context.reference.registry();
                let _slot = inner.fetch_slots.enter(request.tenant, registry).await;
                self.fetch(&context, sought).await
            }
            Sought::Attached => {
                let image = request.image;
                self.fetch_attached(image, context, digest, deadline).await
            }
        }
    }

    /// Reads on when the pod stops waiting, so that the next one finds the answer.
    async fn fetch_attached(
        &self,
        image: &str,
        context: RequestContext,
        digest: Option<Digest>,
        deadline: Instant,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let failed = digest.and_then(|digest| {
            let subject = failure_subject(&context, &digest, Sought::Attached);
            self.0.recent_failure(&subject, &context.fingerprints())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let (resolver, slots) = (self.clone(), self.0.attached_reads.clone());
        let read = async {
            // They take no slots from images, for which pods wait.
            let slot = slots.acquire_owned().await.ok()?;
            let read = tokio::spawn(async move {
                let _slot = slot;
                let read = resolver.fetch(&context, Sought::Attached);
                timeout(MAX_ATTACHED_READ, read).await.ok()
            });
            read.await.ok()?
        };
        let answer = timeout_at(deadline, read).await;
        answer.ok().flatten().unwrap_or_else(|| Err(late(image)))
    }

    async fn fetch(
        &self,
        context: &RequestContext,
        sought: Sought,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let found = self.resolve_digest(context).await?;
        let key = SummaryKey {
            digest: found.digest.clone(),
            name: context.reference.name(),
            fingerprints: context.fingerprints(),
        };
        let (inner, shared) = (self.0.clone(), (context.clone(), found));
        let read =
            move || async move { inner.read_document(&shared.0, &shared.1, sought).await }.boxed();
        self.0.compatibilities.run((key, sought), read).await
    }
}

fn late(image: &str) -> ImageError {
    ImageError::unanswered(image, "not read within resolution.budget", None)
}

/// The name of failures.
fn failure_subject(context: &RequestContext, digest: &Digest, sought: Sought) -> String {
    let (what, name) = (sought.as_str(), context.reference.name());
    format!("{what} {name}@{digest}")
}

impl Attached {
    fn document(self, image: &Digest) -> Result<Arc<CompatibilityDocument>, ImageError> {
        match self {
            Self::Document(document) => Ok(document),
            Self::Nothing => Err(nothing_attached(image)),
        }
    }
}

impl Sought {
    /// A part of keys.
    fn as_str(self) -> &'static str {
        match self {
            Self::Document => "compatibility of",
            Self::Attached => "attached to",
        }
    }
}

impl ResolverInner {
    fn cached_document(
        &self,
        context: &RequestContext,
        digest: &Digest,
        sought: Sought,
    ) -> Option<Attached> {
        let (name, fingerprints) = (context.reference.name(), context.fingerprints());
        let attached = || {
            self.caches
                .attached((sought.as_str(), digest, &*name, &*fingerprints))
        };
        match sought {
            Sought::Document => self
                .caches
                .compatibility(digest, context.summary_scope())
                .map(Attached::Document)
                .or_else(attached),
            Sought::Attached => attached(),
        }
    }

    async fn read_document(
        &self,
        context: &RequestContext,
        found: &ResolvedDigest,
        sought: Sought,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let digest = &found.digest;
        if let Some(known) = self.cached_document(context, digest, sought) {
            return known.document(digest);
        }
        let fingerprints = context.fingerprints();
        let subject = failure_subject(context, digest, sought);
        let source = self.document_source(context, found, &subject);
        let read = async {
            let mut artifact = Artifact::default();
            if sought == Sought::Document {
                let (root, _) = source.root(found).await?;
                summary::verify(DocumentKind::Manifest, digest, None, &root)?;
                artifact = parse(digest, &root)?;
                if let Some(mut document) = read_layer(&source, &artifact).await? {
                    document.subject = artifact.subject.map(|subject| subject.digest);
                    return Ok((document, false));
                }
            }
            // It may be attached to an image. What is attached can change while the image does not.
            let document = self.read_attached(context, &source, digest, &artifact);
            Ok((document.await?, true))
        };
        let (name, ttl) = (context.reference.name(), self.settings.tag_ttl);
        let key = (sought.as_str(), digest, &*name, &*fingerprints);
        match read.await {
            Ok((document, is_attached)) => {
                self.caches.forget_failure(&subject, &fingerprints);
                let document = Arc::new(document);
                let kept = document.clone();
                if is_attached {
                    self.caches
                        .store_attached(key, Attached::Document(kept), ttl);
                } else {
                    let scope = context.summary_scope();
                    self.caches.store_compatibility(digest, scope, kept);
                }
                Ok(document)
            }
            Err(error) => {
                // Most images have nothing: that is no failure.
                let has_none = matches!(
                    &error,
                    ImageError::Compatibility {
                        source: InvalidDocument::NoLayer,
                        ..
                    }
                );
                if has_none && sought == Sought::Attached {
                    self.caches.forget_failure(&subject, &fingerprints);
                    self.caches.store_attached(key, Attached::Nothing, ttl);
                    return Err(error);
                }
                // A cached failure must not be counted twice.
                if source.failed.is_none() {
                    self.caches.store_failure(&subject, &fingerprints, &error);
                }
                Err(error)
            }
        }
    }

    /// What is attached to an image or, if it is an index, to the images of its platforms.
    async fn read_attached(
        &self,
        context: &RequestContext,
        source: &DocumentSource<'_>,
        digest: &Digest,
        artifact: &Artifact,
    ) -> Result<CompatibilityDocument, ImageError> {
        if let Some(error) = &source.failed {
            return Err(error.clone());
        }
        if let Some(document) = self.read_referrer(context, source, digest).await? {
            return Ok(document);
        }
        let mut digests: Vec<&String> = artifact.images.iter().map(|(_, digest)| digest).collect();
        digests.sort_unstable();
        digests.dedup();
        if digests.len() > MAX_IMAGES {
            return Err(ImageError::TooDeep(
                "an index has more than 32 images, to each of which a compatibility document may be attached",
            ));
        }
        let mut attached = BTreeMap::new();
        for some in digests.chunks(CONCURRENT_READS) {
            let mut reads = Vec::new();
            for digest in some {
                let digest: Digest = digest.parse()?;
                reads.push(async move { self.read_referrer(context, source, &digest).await });
            }
            let documents = futures::future::try_join_all(reads).await?;
            let found = some.iter().copied().zip(documents);
            attached.extend(found.filter_map(|(digest, document)| Some((digest, document?))));
        }
        if attached.is_empty() {
            return Err(nothing_attached(digest));
        }
        let images = artifact.images.iter();
        let images = images.map(|(platform, digest)| (platform, attached.get(digest)));
        CompatibilityDocument::of_platforms(images)
            .map_err(|source| invalid(format!("artifact {digest}"), source))
    }

    /// The newest of NFD's documents that are attached to an image; `None`: there is none.
    async fn read_referrer(
        &self,
        context: &RequestContext,
        source: &DocumentSource<'_>,
        image: &Digest,
    ) -> Result<Option<CompatibilityDocument>, ImageError> {
        let RequestContext {
            reference,
            credentials,
            ..
        } = context;
        let found = self
            .registry
            .referrers(reference, image, NFD_ARTIFACT, credentials)
            .await?;
        // RFC 3339 allows offsets and fractions, so that the order of texts is not that of times.
        let time = |text: &str| (text.parse::<jiff::Timestamp>().ok(), text.to_owned());
        let newest = found.0.into_iter().max_by_key(|one| time(&one.created));
        let Some(newest) = newest else {
            return Ok(None);
        };
        let digest: Digest = newest.manifest.digest.parse()?;
        let manifest = source.fetch(DocumentKind::Manifest, &digest).await?;
        summary::verify(DocumentKind::Manifest, &digest, None, &manifest)?;
        let artifact = parse(&digest, &manifest)?;
        let none = || nothing_attached(image);
        let subject = artifact.subject.as_ref().map(|subject| &*subject.digest);
        // A registry may claim anything of what refers to an image.
        if subject != Some(&*image.to_string()) {
            return Err(none());
        }
        let document = read_layer(source, &artifact).await?;
        let document = document.filter(|found| found.format == DocumentFormat::Features);
        document.ok_or_else(none).map(Some)
    }
}

fn parse(digest: &Digest, manifest: &[u8]) -> Result<Artifact, ImageError> {
    Artifact::parse(manifest).map_err(|source| ImageError::Document {
        what: format!("manifest {digest}"),
        source,
    })
}

fn nothing_attached(image: &Digest) -> ImageError {
    invalid(format!("artifact {image}"), InvalidDocument::NoLayer)
}

fn invalid(what: String, source: InvalidDocument) -> ImageError {
    ImageError::Compatibility { what, source }
}

/// The document in the layers of known types; `None` if there is no such layer.
async fn read_layer(
    source: &DocumentSource<'_>,
    artifact: &Artifact,
) -> Result<Option<CompatibilityDocument>, ImageError> {
    let mut known = artifact.layers.iter().filter_map(|layer| {
        let mut types = LAYERS.iter();
        let (_, format) = types.find(|(name, _)| *name == layer.media_type)?;
        Some((layer, *format))
    });
    let mut models = artifact
        .layers
        .iter()
        .filter(|layer| layer.media_type == MODELS);
    let (rules, models) = (known.next(), models.next());
    if rules.is_none() && models.is_none() {
        return Ok(None);
    }
    let mut document = CompatibilityDocument::without_rules();
    if let Some((layer, format)) = rules {
        let bytes = fetch_layer(source, layer).await?;
        let parsed = CompatibilityDocument::parse(format, &bytes);
        document = parsed.map_err(|source| invalid(name_of(layer), source))?;
    }
    if let Some(layer) = models {
        let bytes = fetch_layer(source, layer).await?;
        let parsed = Model::parse(&bytes);
        document = document.with_models(parsed.map_err(|source| invalid(name_of(layer), source))?);
    }
    Ok(Some(document))
}

fn name_of(layer: &Descriptor) -> String {
    format!("compatibility document {}", layer.digest)
}

async fn fetch_layer(source: &DocumentSource<'_>, layer: &Descriptor) -> Result<Bytes, ImageError> {
    let digest: Digest = layer.digest.parse()?;
    if let Some(size) = layer.size.filter(|size| *size > MAX_SIZE) {
        return Err(invalid(name_of(layer), InvalidDocument::TooLarge(size)));
    }
    let bytes = source.fetch(DocumentKind::Layer, &digest).await?;
    summary::verify(DocumentKind::Layer, &digest, layer.size, &bytes)?;
    Ok(bytes)
}
