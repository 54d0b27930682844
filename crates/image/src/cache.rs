//! In-memory caches of the resolver. They keep at most `resolution.cache.images` tags and
//! summaries, and an eighth as many failures and incomplete summaries. `quick_cache` evicts the
//! entries that are least likely to be used again.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quick_cache::{Weighter, sync::Cache};

use super::{
    artifact::ArtifactContent, credentials::Fingerprint, digest::Digest, error::ImageError,
    summary::ImageSummary,
};

/// How long a cached tag is used when the registry does not answer.
pub(crate) const STALE_IF_ERROR: Duration = Duration::from_hours(24);
/// Maximum number of interned summaries. A cluster has some dozens; more summaries are not
/// deduplicated.
const MAX_INTERNED: usize = 4096;

/// Estimated number of cached artifacts; sets the initial size of their cache.
const ESTIMATED_ARTIFACTS: usize = 512;
/// Maximum bytes of all artifacts. A typical artifact has a few KiB.
const MAX_ARTIFACT_BYTES: u64 = 16 * 1024 * 1024;
/// Cost of an entry beside its content, so that 16,384 images without attached artifacts fit.
const MIN_ARTIFACT_BYTES: u64 = 1024;

/// Which pods may use a cached answer: all, or those with the credential that was needed to get it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum CacheScope {
    Public,
    Credential(Fingerprint),
}

#[derive(Clone)]
struct TagEntry {
    digest: Digest,
    seen: Instant,
}

/// A cached answer about an artifact: its content, or that no artifact is attached to the image.
#[derive(Clone)]
pub(crate) enum Attached {
    Content(Arc<ArtifactContent>),
    Nothing,
}

/// An answer about an artifact. Answers about attached artifacts expire.
#[derive(Clone)]
struct ArtifactEntry {
    content: Attached,
    expires: Option<Instant>,
}

#[derive(Clone)]
struct ArtifactBytes;

impl Weighter<Fingerprint, ArtifactEntry> for ArtifactBytes {
    fn weight(&self, _: &Fingerprint, entry: &ArtifactEntry) -> u64 {
        let content_size = match &entry.content {
            Attached::Content(content) => content.size(),
            Attached::Nothing => 0,
        };
        MIN_ARTIFACT_BYTES + content_size
    }
}

/// Key of artifacts: the kind of artifact and where it was looked for; the digest of the artifact
/// or of the image; the repository, because another one may have other artifacts for the same
/// image; and the credentials.
type ArtifactKey<'a> = (&'a str, &'a Digest, &'a str, &'a [Fingerprint]);

#[derive(Clone)]
struct FailureEntry {
    error: ImageError,
    until: Instant,
    delay: Duration,
}

#[derive(Clone)]
struct PartialEntry {
    summary: Arc<ImageSummary>,
    until: Instant,
}

/// A summary, and the day on which its lease in containerd was last renewed.
#[derive(Clone)]
pub(crate) struct CachedSummary {
    pub(crate) summary: Arc<ImageSummary>,
    pub(crate) last_touched: u32,
}

/// Keys are hashes, because names are long and numerous.
pub(crate) struct Caches {
    /// Content-addressed and therefore never stale. Shared by all pods unless `perCredential` is
    /// set.
    summaries: Cache<Fingerprint, CachedSummary>,
    tags: Cache<Fingerprint, TagEntry>,
    failures: Cache<Fingerprint, FailureEntry>,
    /// Summaries of images with missing children, each for one repository and its credentials.
    partial: Cache<Fingerprint, PartialEntry>,
    /// Keyed by the hash of an [`ArtifactKey`].
    artifacts: Cache<Fingerprint, ArtifactEntry, ArtifactBytes>,
    /// Most images have one of a few sets of platforms, so equal summaries share one allocation.
    interned: Mutex<HashSet<Arc<ImageSummary>>>,
}

/// A cached tag and its freshness.
pub(crate) enum CachedTag {
    Fresh(Digest),
    /// Older than its TTL, to be used only if the registry does not answer; with its age.
    Stale(Digest, Duration),
}

impl Caches {
    pub(crate) fn new(images: usize) -> Self {
        // Failures are rarer than images.
        let failures = (images / 8).max(64);
        Self {
            summaries: Cache::new(images),
            tags: Cache::new(images),
            failures: Cache::new(failures),
            partial: Cache::new(failures),
            artifacts: Cache::with_weighter(ESTIMATED_ARTIFACTS, MAX_ARTIFACT_BYTES, ArtifactBytes),
            interned: Mutex::default(),
        }
    }

    /// Stores an artifact by its digest. Unlike an image's platforms, its content is shown to pod
    /// authors. So the key includes the repository and the credentials, and only pods that may read
    /// the artifact get it.
    pub(crate) fn store_artifact(&self, key: ArtifactKey<'_>, content: Arc<ArtifactContent>) {
        let entry = ArtifactEntry {
            content: Attached::Content(content),
            expires: None,
        };
        self.artifacts.insert(artifact_key(key), entry);
    }

    /// An artifact, or the artifacts attached to an image, if they are known.
    pub(crate) fn artifact(&self, key: ArtifactKey<'_>) -> Option<Attached> {
        let entry = self.artifacts.get(&artifact_key(key))?;
        let is_valid = entry.expires.is_none_or(|expires| Instant::now() < expires);
        is_valid.then_some(entry.content)
    }

    /// Stores the artifacts attached to an image. They expire after `ttl`, because another artifact
    /// may be attached later.
    pub(crate) fn store_attached(&self, key: ArtifactKey<'_>, content: Attached, ttl: Duration) {
        let expires = Some(Instant::now() + ttl);
        let entry = ArtifactEntry { content, expires };
        self.artifacts.insert(artifact_key(key), entry);
    }

    pub(crate) fn summary(&self, digest: &Digest, scope: CacheScope) -> Option<CachedSummary> {
        self.summaries.get(&summary_key(digest, scope))
    }

    pub(crate) fn store_summary(&self, digest: &Digest, scope: CacheScope, known: CachedSummary) {
        self.summaries.insert(summary_key(digest, scope), known);
    }

    /// The summary of an image with missing children, for the same repository and credentials.
    pub(crate) fn partial(
        &self,
        digest: &Digest,
        name: &str,
        fingerprints: &[Fingerprint],
    ) -> Option<Arc<ImageSummary>> {
        let found = self.partial.get(&partial_key(digest, name, fingerprints))?;
        (Instant::now() < found.until).then_some(found.summary)
    }

    /// Stores the summary of an image with missing children for a short time.
    pub(crate) fn store_partial(
        &self,
        digest: &Digest,
        name: &str,
        fingerprints: &[Fingerprint],
        summary: Arc<ImageSummary>,
        ttl: Duration,
    ) {
        let until = Instant::now() + ttl;
        let key = partial_key(digest, name, fingerprints);
        self.partial.insert(key, PartialEntry { summary, until });
    }

    /// Returns the shared copy of a summary.
    pub(crate) fn intern(&self, summary: ImageSummary) -> Arc<ImageSummary> {
        let mut shared = self.interned.lock();
        if let Some(same) = shared.get(&summary) {
            return same.clone();
        }
        let summary = Arc::new(summary);
        if shared.len() < MAX_INTERNED {
            shared.insert(summary.clone());
        }
        summary
    }

    /// The most recently seen digest of a tag in any of `scopes`.
    pub(crate) fn tag(
        &self,
        reference: &str,
        scopes: &[CacheScope],
        ttl: Duration,
    ) -> Option<CachedTag> {
        let newest = scopes
            .iter()
            .filter_map(|scope| self.tags.get(&tag_key(reference, *scope)))
            .max_by_key(|tag| tag.seen)?;
        let age = newest.seen.elapsed();
        if age < ttl {
            Some(CachedTag::Fresh(newest.digest))
        } else {
            (age < STALE_IF_ERROR).then_some(CachedTag::Stale(newest.digest, age))
        }
    }

    /// Stores the digest that a tag had at the time `seen`, unless a newer entry exists.
    pub(crate) fn store_tag(
        &self,
        reference: &str,
        scope: CacheScope,
        digest: &Digest,
        seen: Instant,
    ) {
        let key = tag_key(reference, scope);
        if self.tags.peek(&key).is_none_or(|tag| tag.seen < seen) {
            let digest = digest.clone();
            self.tags.insert(key, TagEntry { digest, seen });
        }
    }

    /// Removes a tag whose document turned out not to be an image.
    pub(crate) fn forget_tag(&self, reference: &str, scopes: &[CacheScope]) {
        for scope in scopes {
            self.tags.remove(&tag_key(reference, *scope));
        }
    }

    /// A cached failure that must not be retried yet.
    pub(crate) fn failure(
        &self,
        subject: &str,
        fingerprints: &[Fingerprint],
    ) -> Option<ImageError> {
        let failure = self.failures.get(&failure_key(subject, fingerprints))?;
        (Instant::now() < failure.until).then_some(failure.error)
    }

    /// Stores a failure. The delay doubles with each repetition.
    pub(crate) fn store_failure(
        &self,
        subject: &str,
        fingerprints: &[Fingerprint],
        error: &ImageError,
    ) {
        // The host limiter already prevents retries.
        if matches!(error, ImageError::HostPaused { .. }) {
            return;
        }
        let Some(backoff) = error.reason().backoff() else {
            return;
        };
        let key = failure_key(subject, fingerprints);
        let now = Instant::now();
        let delay = match self.failures.get(&key) {
            // A failure long ago does not lengthen today's delay.
            Some(before)
                if before.error.reason() == error.reason() && now < before.until + backoff.max =>
            {
                backoff.next(before.delay)
            }
            _ => backoff.first,
        };
        let until = now + delay;
        let error = error.clone();
        self.failures.insert(
            key,
            FailureEntry {
                error,
                until,
                delay,
            },
        );
    }

    pub(crate) fn forget_failure(&self, subject: &str, fingerprints: &[Fingerprint]) {
        self.failures.remove(&failure_key(subject, fingerprints));
    }
}

fn summary_key(digest: &Digest, scope: CacheScope) -> Fingerprint {
    Fingerprint::from_parts(&[b"summary", digest.to_string().as_bytes(), scope.bytes()])
}

fn partial_key(digest: &Digest, name: &str, fingerprints: &[Fingerprint]) -> Fingerprint {
    repository_key(b"partial", digest, name, fingerprints)
}

fn artifact_key((what, digest, name, fingerprints): ArtifactKey<'_>) -> Fingerprint {
    repository_key(what.as_bytes(), digest, name, fingerprints)
}

/// The key of answers that hold for one repository and these credentials.
fn repository_key(
    kind: &[u8],
    digest: &Digest,
    name: &str,
    fingerprints: &[Fingerprint],
) -> Fingerprint {
    let (digest, fingerprints) = (digest.to_string(), Fingerprint::combine(fingerprints));
    let parts = [
        kind,
        digest.as_bytes(),
        name.as_bytes(),
        fingerprints.bytes(),
    ];
    Fingerprint::from_parts(&parts)
}

fn tag_key(reference: &str, scope: CacheScope) -> Fingerprint {
    Fingerprint::from_parts(&[b"tag", reference.as_bytes(), scope.bytes()])
}

/// A failure with some credentials does not apply to requests with other credentials.
fn failure_key(subject: &str, fingerprints: &[Fingerprint]) -> Fingerprint {
    let fingerprints = Fingerprint::combine(fingerprints);
    Fingerprint::from_parts(&[b"failure", subject.as_bytes(), fingerprints.bytes()])
}

impl CacheScope {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Public => &[],
            Self::Credential(fingerprint) => fingerprint.bytes(),
        }
    }
}
