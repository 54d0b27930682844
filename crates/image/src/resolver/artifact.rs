//! Reads artifacts that have their own reference or are attached to an image. References,
//! credentials, mirrors and host limits work as for images.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::FutureExt;
use tokio::time::{Instant, timeout, timeout_at};

use archaware_base::tasks;

use crate::{
    artifact::{ArtifactContent, ArtifactKind, ArtifactLayer},
    cache::Attached,
    digest::Digest,
    error::{ArtifactError, ImageError},
    summary::{self, DocumentKind, Fetch},
};
use archaware_platform::{Artifact, Descriptor};

use super::{
    RequestContext, ResolveRequest, Resolver, ResolverInner, SummaryKey, document::DocumentSource,
    tag::ResolvedDigest,
};

/// Maximum number of images of an index that are checked for attached artifacts: each costs a
/// request. Real indexes have up to twenty images.
const MAX_IMAGES: usize = 32;
/// How many images of an index are looked up concurrently, like layers in an image pull.
const CONCURRENT_READS: usize = 4;
/// Maximum number of concurrent reads for [`Place::Attached`].
pub(super) const MAX_ATTACHED_READS: usize = 16;
/// Timeout of one read for [`Place::Attached`], enough for three requests. The read continues when
/// no pod waits for it any more.
const MAX_ATTACHED_READ: Duration = Duration::from_secs(15);

/// Which kind of artifact to read, and where to look for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ArtifactQuery {
    kind: &'static ArtifactKind,
    place: Place,
}

/// Where an artifact is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    /// The artifact itself or, if it is an image, the artifacts attached to it or to the images of
    /// its platforms.
    Named,
    /// Only the artifacts attached to the image itself: those of its platforms would cost a request
    /// for each platform.
    Attached,
}

impl Resolver {
    /// Reads an artifact of a kind by the reference in `request`. If the reference names an image,
    /// reads the artifacts attached to it or to the images of its platforms. Gives up at the
    /// deadline.
    ///
    /// # Errors
    ///
    /// When the artifact cannot be read in time, or no artifact of this kind is found.
    pub async fn artifact_by(
        &self,
        kind: &'static ArtifactKind,
        request: ResolveRequest<'_>,
        deadline: Instant,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let place = Place::Named;
        self.read_by(request, ArtifactQuery { kind, place }, deadline)
            .await
    }

    /// The content of the artifact attached to an image, within a deadline. Content that arrives
    /// later is cached for the next pod.
    ///
    /// # Errors
    ///
    /// When it cannot be read in time, or there is none.
    pub async fn attached_by(
        &self,
        kind: &'static ArtifactKind,
        request: ResolveRequest<'_>,
        deadline: Instant,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let place = Place::Attached;
        self.read_by(request, ArtifactQuery { kind, place }, deadline)
            .await
    }

    async fn read_by(
        &self,
        request: ResolveRequest<'_>,
        query: ArtifactQuery,
        deadline: Instant,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let answer = timeout_at(deadline, self.read(request, query, deadline)).await;
        let content = answer.unwrap_or_else(|_| Err(budget_exceeded(request.image)));
        if let Some(host) = content.as_ref().err().and_then(ImageError::paused_host) {
            self.0.registry.keep_pause(request.tenant, host);
        }
        content
    }

    async fn read(
        &self,
        request: ResolveRequest<'_>,
        query: ArtifactQuery,
        deadline: Instant,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let (mut context, inner) = (self.context(&request)?, &self.0);
        inner.add_credentials(&mut context, request.keyring).await;
        let digest = inner.cached_digest(&context);
        if let Some(digest) = &digest
            && let Some(known) = inner.cached_artifact(&context, digest, query)
        {
            return query.content(known, digest);
        }
        match query.place {
            Place::Named => {
                let registry = context.reference.registry();
                let _slot = inner.fetch_slots.enter(request.tenant, registry).await;
                self.fetch(&context, query).await
            }
            Place::Attached => {
                let image = request.image;
                let read = self.fetch_attached(image, context, query, digest, deadline);
                read.await
            }
        }
    }

    /// The read continues when the pod stops waiting, so that the next pod finds the answer.
    async fn fetch_attached(
        &self,
        image: &str,
        context: RequestContext,
        query: ArtifactQuery,
        digest: Option<Digest>,
        deadline: Instant,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let failed = digest.and_then(|digest| {
            let subject = failure_subject(&context, &digest, query);
            self.0.recent_failure(&subject, &context.fingerprints())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        let (resolver, slots) = (self.clone(), self.0.attached_reads.clone());
        let read = async {
            // Reads of attached artifacts have permits of their own, so that they do not delay
            // reads of images, for which pods wait.
            let slot = slots.acquire_owned().await.ok()?;
            let reading = async move {
                let _slot = slot;
                let read = resolver.fetch(&context, query);
                timeout(MAX_ATTACHED_READ, read).await.ok()
            };
            let read = tasks::spawn("attached artifacts", reading);
            read.await.ok()?
        };
        let answer = timeout_at(deadline, read).await;
        answer
            .ok()
            .flatten()
            .unwrap_or_else(|| Err(budget_exceeded(image)))
    }

    async fn fetch(
        &self,
        context: &RequestContext,
        query: ArtifactQuery,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let found = self.resolve_digest(context).await?;
        let key = SummaryKey {
            digest: found.digest.clone(),
            name: context.reference.name(),
            fingerprints: context.fingerprints(),
        };
        let (inner, shared) = (self.0.clone(), (context.clone(), found));
        let read =
            move || async move { inner.read_artifact(&shared.0, &shared.1, query).await }.boxed();
        self.0.artifacts.run((key, query), read).await
    }
}

fn budget_exceeded(image: &str) -> ImageError {
    ImageError::unanswered(image, "not read within resolution.budget", None)
}

/// The subject under which failures of this query are cached.
fn failure_subject(context: &RequestContext, digest: &Digest, query: ArtifactQuery) -> String {
    format!("{} {}@{digest}", query.key(), context.reference.name())
}

impl ArtifactQuery {
    /// Kind and place, as a part of cache keys.
    fn key(self) -> String {
        let place = match self.place {
            Place::Named => "named",
            Place::Attached => "attached to",
        };
        format!("{} {place}", self.kind.name)
    }

    /// The content of a cached answer, or an error if nothing is attached to the image.
    fn content(self, known: Attached, image: &Digest) -> Result<Arc<ArtifactContent>, ImageError> {
        match known {
            Attached::Content(content) => Ok(content),
            Attached::Nothing => Err(self.nothing_attached(image)),
        }
    }

    fn nothing_attached(self, image: &Digest) -> ImageError {
        unusable(
            format!("artifact {image}"),
            ArtifactError::NoLayer(self.kind.name),
        )
    }

    /// The name of a layer in errors.
    fn name_of(self, layer: &Descriptor) -> String {
        format!("{} {}", self.kind.name, layer.digest)
    }

    /// The first layer for each group of media types; `None` if no layer matches.
    async fn read_layers(
        self,
        source: &DocumentSource<'_>,
        artifact: &Artifact,
        groups: &[&[&str]],
    ) -> Result<Option<ArtifactContent>, ImageError> {
        let mut content = ArtifactContent::default();
        for group in groups {
            let mut layers = artifact.layers.iter();
            let found = layers.find(|layer| group.contains(&&*layer.media_type));
            if let Some(layer) = found {
                content.layers.push(self.read_layer(source, layer).await?);
            }
        }
        Ok(Some(content).filter(|content| !content.layers.is_empty()))
    }

    fn check_size(self, layer: &Descriptor, size: u64) -> Result<(), ImageError> {
        let limit = self.kind.max_size;
        if size <= limit {
            return Ok(());
        }
        let limit = limit / 1024;
        let why = format!("{size} bytes are more than the limit of {limit} KiB");
        Err(unusable(self.name_of(layer), ArtifactError::TooLarge(why)))
    }

    async fn read_layer(
        self,
        source: &DocumentSource<'_>,
        layer: &Descriptor,
    ) -> Result<ArtifactLayer, ImageError> {
        let digest: Digest = layer.digest.parse()?;
        self.check_size(layer, layer.size.unwrap_or_default())?;
        let bytes = source.fetch(DocumentKind::Layer, &digest).await?;
        summary::verify(DocumentKind::Layer, &digest, layer.size, &bytes)?;
        // A descriptor may lack its size.
        self.check_size(layer, bytes.len() as u64)?;
        Ok(ArtifactLayer {
            media_type: layer.media_type.clone(),
            digest: layer.digest.clone(),
            // A copy, because a large response body takes part of a memory budget until it is
            // dropped.
            bytes: Bytes::copy_from_slice(&bytes),
        })
    }
}

impl ResolverInner {
    fn cached_artifact(
        &self,
        context: &RequestContext,
        digest: &Digest,
        query: ArtifactQuery,
    ) -> Option<Attached> {
        let (name, fingerprints) = (context.reference.name(), context.fingerprints());
        let known = |what: &str| {
            let key = (what, digest, &*name, &*fingerprints);
            self.caches.artifact(key)
        };
        let itself = (query.place == Place::Named).then(|| known(query.kind.name));
        itself.flatten().or_else(|| known(&query.key()))
    }

    async fn read_artifact(
        &self,
        context: &RequestContext,
        found: &ResolvedDigest,
        query: ArtifactQuery,
    ) -> Result<Arc<ArtifactContent>, ImageError> {
        let digest = &found.digest;
        if let Some(known) = self.cached_artifact(context, digest, query) {
            return query.content(known, digest);
        }
        let fingerprints = context.fingerprints();
        let subject = failure_subject(context, digest, query);
        let source = self.document_source(context, found, &subject);
        let read = async {
            let mut artifact = Artifact::default();
            if query.place == Place::Named {
                let (root, _) = source.root(found).await?;
                summary::verify(DocumentKind::Manifest, digest, None, &root)?;
                artifact = parse(digest, &root)?;
                let layers = query.kind.layers;
                let own_content = query.read_layers(&source, &artifact, layers).await?;
                if let Some(mut content) = own_content {
                    content.digest = digest.to_string();
                    content.subject = artifact.subject.map(|subject| subject.digest);
                    return Ok((content, false));
                }
            }
            // The reference may name an image, to which the artifact is attached. The result
            // expires, because attached artifacts can change while the image does not.
            let content = self.read_attached(context, &source, query, digest, &artifact);
            Ok((content.await?, true))
        };
        let (name, ttl) = (context.reference.name(), self.settings.tag_ttl);
        let what = query.key();
        let key = (&*what, digest, &*name, &*fingerprints);
        match read.await {
            Ok((content, is_attached)) => {
                self.caches.forget_failure(&subject, &fingerprints);
                let content = Arc::new(content);
                let kept = content.clone();
                if is_attached {
                    self.caches
                        .store_attached(key, Attached::Content(kept), ttl);
                } else {
                    let key = (query.kind.name, digest, &*name, &*fingerprints);
                    self.caches.store_artifact(key, kept);
                }
                Ok(content)
            }
            Err(error) => {
                // Most images have no attached artifact. That is not a failure.
                let has_none = matches!(
                    &error,
                    ImageError::Artifact {
                        source: ArtifactError::NoLayer(_),
                        ..
                    }
                );
                if has_none && query.place == Place::Attached {
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

    /// The artifacts attached to an image or, if it is an index, to the images of its platforms.
    async fn read_attached(
        &self,
        context: &RequestContext,
        source: &DocumentSource<'_>,
        query: ArtifactQuery,
        digest: &Digest,
        artifact: &Artifact,
    ) -> Result<ArtifactContent, ImageError> {
        if let Some(error) = &source.failed {
            return Err(error.clone());
        }
        if let Some(content) = self.read_referrer(context, source, query, digest).await? {
            return Ok(content);
        }
        let mut digests: Vec<&String> = artifact.images.iter().map(|(_, digest)| digest).collect();
        digests.sort_unstable();
        digests.dedup();
        if digests.len() > MAX_IMAGES {
            return Err(ImageError::TooDeep(
                "an index has more than 32 images, to each of which an artifact may be attached",
            ));
        }
        let mut attached = BTreeMap::new();
        for chunk in digests.chunks(CONCURRENT_READS) {
            let mut reads = Vec::new();
            for digest in chunk {
                let digest: Digest = digest.parse()?;
                reads
                    .push(async move { self.read_referrer(context, source, query, &digest).await });
            }
            let contents = futures::future::try_join_all(reads).await?;
            let by_digest = chunk.iter().copied().zip(contents);
            let by_digest =
                by_digest.filter_map(|(digest, content)| Some((digest, Arc::new(content?))));
            attached.extend(by_digest);
        }
        if attached.is_empty() {
            return Err(query.nothing_attached(digest));
        }
        let sizes = attached
            .values()
            .map(|content: &Arc<ArtifactContent>| content.size());
        let (size, limit) = (sizes.sum::<u64>(), 2 * query.kind.max_size);
        if size > limit {
            let what = format!("artifact {digest}");
            let limit = limit / 1024;
            let why = format!("{size} bytes are attached to its images, more than {limit} KiB");
            return Err(unusable(what, ArtifactError::TooLarge(why)));
        }
        let images = artifact.images.iter();
        let images =
            images.map(|(platform, digest)| (platform.clone(), attached.get(digest).cloned()));
        Ok(ArtifactContent {
            digest: digest.to_string(),
            platforms: images.collect(),
            ..ArtifactContent::default()
        })
    }

    /// The newest artifact of a kind that is attached to an image, if there is one.
    async fn read_referrer(
        &self,
        context: &RequestContext,
        source: &DocumentSource<'_>,
        query: ArtifactQuery,
        image: &Digest,
    ) -> Result<Option<ArtifactContent>, ImageError> {
        let RequestContext {
            reference,
            credentials,
            ..
        } = context;
        let found = self
            .registry
            .referrers(reference, image, query.kind.attached_type, credentials)
            .await?;
        // Parsed, because RFC 3339 allows offsets and fractions: texts do not sort like times.
        let time = |text: &str| (text.parse::<jiff::Timestamp>().ok(), text.to_owned());
        let newest = found
            .0
            .into_iter()
            .max_by_key(|artifact| time(&artifact.created));
        let Some(newest) = newest else {
            return Ok(None);
        };
        let digest: Digest = newest.manifest.digest.parse()?;
        let manifest = source.fetch(DocumentKind::Manifest, &digest).await?;
        summary::verify(DocumentKind::Manifest, &digest, None, &manifest)?;
        let artifact = parse(&digest, &manifest)?;
        let none = || query.nothing_attached(image);
        let subject = artifact.subject.as_ref().map(|subject| &*subject.digest);
        // The registry's list of referrers is not trusted: the artifact's `subject` must be the
        // image.
        if subject != Some(&*image.to_string()) {
            return Err(none());
        }
        let layers = query.kind.attached_layers;
        let content = query.read_layers(source, &artifact, layers).await?;
        content.ok_or_else(none).map(Some)
    }
}

fn parse(digest: &Digest, manifest: &[u8]) -> Result<Artifact, ImageError> {
    Artifact::parse(manifest).map_err(|source| ImageError::Document {
        what: format!("manifest {digest}"),
        source,
    })
}

fn unusable(what: String, source: ArtifactError) -> ImageError {
    ImageError::Artifact { what, source }
}
