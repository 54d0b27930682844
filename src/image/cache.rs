//! In-memory caches of the resolver. `resolution.cache.images` bounds tags and summaries, an eighth of it failures and
//! incomplete summaries; `quick_cache` evicts the entries that are least likely to be used again.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quick_cache::{Weighter, sync::Cache};

use crate::placement::selection::{CompatibilityDocument, MAX_EXPRESSIONS};

use super::{credentials::Fingerprint, digest::Digest, error::ImageError, summary::ImageSummary};

/// How long a cached tag is used when the registry does not answer.
pub(crate) const STALE_IF_ERROR: Duration = Duration::from_hours(24);
/// Maximum number of interned summaries. A cluster has some dozens; further ones are not deduplicated.
const MAX_INTERNED: usize = 4096;

/// Number of compatibility documents, for the size of their cache.
const ESTIMATED_COMPATIBILITIES: usize = 512;
/// Maximum number of expressions and values in them: as many as 64 documents of the largest size have, which are a few megabytes each
/// with compiled patterns. Documents of a usual size are thousands.
const MAX_COMPATIBILITY_COST: u64 = 64 * MAX_EXPRESSIONS as u64;
/// What an entry costs without expressions: 16,384 images to which nothing is attached have room.
const MIN_COMPATIBILITY_COST: usize = 16;

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

/// What is attached to an image, as far as it is known.
#[derive(Clone)]
pub(crate) enum Attached {
    Document(Arc<CompatibilityDocument>),
    Nothing,
}

/// A compatibility document, or that none is attached, and until when it is used, if it expires.
#[derive(Clone)]
struct CompatibilityEntry {
    document: Attached,
    expires: Option<Instant>,
}

/// What a document costs, in expressions.
#[derive(Clone)]
struct CompatibilityCost;

impl Weighter<Fingerprint, CompatibilityEntry> for CompatibilityCost {
    fn weight(&self, _: &Fingerprint, entry: &CompatibilityEntry) -> u64 {
        let cost = match &entry.document {
            Attached::Document(document) => document.cost + document.entries.len(),
            Attached::Nothing => 0,
        };
        (MIN_COMPATIBILITY_COST + cost) as u64
    }
}

/// What a document is attached to: a part of keys, the image, its repository (another one may have the same image), and the
/// credentials.
type AttachedKey<'a> = (&'static str, &'a Digest, &'a str, &'a [Fingerprint]);

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
    /// Content-addressed and therefore never stale. Shared by all pods unless `perCredential` is set.
    summaries: Cache<Fingerprint, CachedSummary>,
    tags: Cache<Fingerprint, TagEntry>,
    failures: Cache<Fingerprint, FailureEntry>,
    /// Summaries of images with missing children, each for one repository and its credentials.
    partial: Cache<Fingerprint, PartialEntry>,
    /// Parsed compatibility documents, by the digest of the artifact or of the image to which it is attached.
    compatibilities: Cache<Fingerprint, CompatibilityEntry, CompatibilityCost>,
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
            compatibilities: Cache::with_weighter(
                ESTIMATED_COMPATIBILITIES,
                MAX_COMPATIBILITY_COST,
                CompatibilityCost,
            ),
            interned: Mutex::default(),
        }
    }

    /// A document that is the artifact of this digest.
    pub(crate) fn compatibility(
        &self,
        digest: &Digest,
        scope: CacheScope,
    ) -> Option<Arc<CompatibilityDocument>> {
        let entry = self.compatibilities.get(&summary_key(digest, scope))?;
        match entry.document {
            Attached::Document(document) => Some(document),
            Attached::Nothing => None,
        }
    }

    pub(crate) fn store_compatibility(
        &self,
        digest: &Digest,
        scope: CacheScope,
        document: Arc<CompatibilityDocument>,
    ) {
        let entry = CompatibilityEntry {
            document: Attached::Document(document),
            expires: None,
        };
        self.compatibilities
            .insert(summary_key(digest, scope), entry);
    }

    /// What is attached to an image, if that is known.
    pub(crate) fn attached(&self, key: AttachedKey<'_>) -> Option<Attached> {
        let entry = self.compatibilities.get(&attached_key(key))?;
        let is_valid = entry.expires.is_none_or(|expires| Instant::now() < expires);
        is_valid.then_some(entry.document)
    }

    /// Stores what is attached to an image for a time, because another document may be attached.
    pub(crate) fn store_attached(&self, key: AttachedKey<'_>, document: Attached, ttl: Duration) {
        let expires = Some(Instant::now() + ttl);
        let entry = CompatibilityEntry { document, expires };
        self.compatibilities.insert(attached_key(key), entry);
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

    /// The digest that a tag had for one of `scopes`, the most recent one.
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

    /// Stores what a tag pointed at when it was `seen`, unless a newer entry exists.
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

fn attached_key((what, digest, name, fingerprints): AttachedKey<'_>) -> Fingerprint {
    repository_key(what.as_bytes(), digest, name, fingerprints)
}

/// The key of what is true for one repository and these credentials.
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

/// A failure with some credentials does not apply to requests with others.
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
