//! In-memory caches of the resolver. `resolution.cache.images` bounds each of them; `quick_cache` evicts the entries
//! that are least likely to be used again.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quick_cache::sync::Cache;

use super::{credentials::Fingerprint, digest::Digest, error::ImageError, summary::ImageSummary};

/// How long a cached tag is used when the registry does not answer.
pub(crate) const STALE_IF_ERROR: Duration = Duration::from_hours(24);
/// Maximum number of interned summaries. A cluster has some dozens; further ones are not deduplicated.
const MAX_INTERNED: usize = 4096;

/// Who may use a cached answer: every pod, or pods with the credential that was needed to get it.
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

#[derive(Clone)]
struct FailureEntry {
    error: ImageError,
    until: Instant,
    delay: Duration,
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
            interned: Mutex::default(),
        }
    }

    pub(crate) fn summary(&self, digest: &Digest, audience: CacheScope) -> Option<CachedSummary> {
        self.summaries.get(&summary_key(digest, audience))
    }

    pub(crate) fn store_summary(
        &self,
        digest: &Digest,
        audience: CacheScope,
        known: CachedSummary,
    ) {
        self.summaries.insert(summary_key(digest, audience), known);
    }

    /// Returns the shared copy of a summary.
    pub(crate) fn intern(&self, tree: ImageSummary) -> Arc<ImageSummary> {
        let mut shared = self.interned.lock();
        if let Some(same) = shared.get(&tree) {
            return same.clone();
        }
        let tree = Arc::new(tree);
        if shared.len() < MAX_INTERNED {
            shared.insert(tree.clone());
        }
        tree
    }

    /// The digest that a tag had for one of `scopes`, the most recent one.
    pub(crate) fn tag(
        &self,
        reference: &str,
        audiences: &[CacheScope],
        ttl: Duration,
    ) -> Option<CachedTag> {
        let newest = audiences
            .iter()
            .filter_map(|audience| self.tags.get(&tag_key(reference, *audience)))
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
        audience: CacheScope,
        digest: &Digest,
        seen: Instant,
    ) {
        let key = tag_key(reference, audience);
        if self.tags.peek(&key).is_none_or(|tag| tag.seen < seen) {
            let digest = digest.clone();
            self.tags.insert(key, TagEntry { digest, seen });
        }
    }

    /// Removes a tag whose document turned out not to be an image.
    pub(crate) fn forget_tag(&self, reference: &str, audiences: &[CacheScope]) {
        for audience in audiences {
            self.tags.remove(&tag_key(reference, *audience));
        }
    }

    /// A cached failure that must not be retried yet.
    pub(crate) fn failure(&self, subject: &str, rights: &[Fingerprint]) -> Option<ImageError> {
        let failure = self.failures.get(&failure_key(subject, rights))?;
        (Instant::now() < failure.until).then_some(failure.error)
    }

    /// Stores a failure. The delay doubles with each repetition.
    pub(crate) fn store_failure(&self, subject: &str, rights: &[Fingerprint], error: &ImageError) {
        // The host limiter already prevents retries.
        if matches!(error, ImageError::Gated { .. }) {
            return;
        }
        let Some(backoff) = error.reason().backoff() else {
            return;
        };
        let key = failure_key(subject, rights);
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

    pub(crate) fn forget_failure(&self, subject: &str, rights: &[Fingerprint]) {
        self.failures.remove(&failure_key(subject, rights));
    }
}

fn summary_key(digest: &Digest, audience: CacheScope) -> Fingerprint {
    Fingerprint::of(&[b"tree", digest.to_string().as_bytes(), audience.bytes()])
}

fn tag_key(reference: &str, audience: CacheScope) -> Fingerprint {
    Fingerprint::of(&[b"tag", reference.as_bytes(), audience.bytes()])
}

/// A failure with some credentials does not apply to requests with others.
fn failure_key(subject: &str, rights: &[Fingerprint]) -> Fingerprint {
    let rights = Fingerprint::of_all(rights);
    Fingerprint::of(&[b"failure", subject.as_bytes(), rights.bytes()])
}

impl CacheScope {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Public => &[],
            Self::Credential(fingerprint) => fingerprint.bytes(),
        }
    }
}
