//! What is remembered between questions, in memory. Every cache here is bounded by
//! `resolution.cache.images`; the least useful entries go first.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quick_cache::sync::Cache;

use super::{credentials::Fingerprint, digest::Digest, error::ImageError, tree::Tree};

/// A tag is believed for this long when the registry cannot be asked again.
pub(crate) const STALE_IF_ERROR: Duration = Duration::from_hours(24);
/// Different sets of platforms that are shared between images. There are some dozens in a cluster; more are
/// kept one by one.
const MAX_SHARED: usize = 4096;

/// Who may use an answer: everybody, or the holder of the credential that got it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Audience {
    Everybody,
    Holder(Fingerprint),
}

#[derive(Clone)]
struct Tag {
    digest: Digest,
    seen: Instant,
}

#[derive(Clone)]
struct Failure {
    error: ImageError,
    until: Instant,
    delay: Duration,
}

/// A tree, and the day on which what survives this process was last told that it is in use.
#[derive(Clone)]
pub(crate) struct Known {
    pub(crate) tree: Arc<Tree>,
    pub(crate) told: u32,
}

/// Keys are hashes: names are long, and there are many.
pub(crate) struct Caches {
    /// Immutable: content-addressed, so shared by all unless the operator wants otherwise.
    trees: Cache<Fingerprint, Known>,
    tags: Cache<Fingerprint, Tag>,
    failures: Cache<Fingerprint, Failure>,
    /// Most images are for one of a few sets of platforms.
    shared: Mutex<HashSet<Arc<Tree>>>,
}

/// How fresh a remembered tag is.
pub(crate) enum Remembered {
    Fresh(Digest),
    /// Too old to be trusted while the registry answers; how old.
    Stale(Digest, Duration),
}

impl Caches {
    pub(crate) fn new(images: usize) -> Self {
        // Failures are rarer than images: an eighth is plenty.
        let failures = (images / 8).max(64);
        Self {
            trees: Cache::new(images),
            tags: Cache::new(images),
            failures: Cache::new(failures),
            shared: Mutex::default(),
        }
    }

    pub(crate) fn tree(&self, digest: &Digest, audience: Audience) -> Option<Known> {
        self.trees.get(&tree_key(digest, audience))
    }

    pub(crate) fn keep_tree(&self, digest: &Digest, audience: Audience, known: Known) {
        self.trees.insert(tree_key(digest, audience), known);
    }

    /// The one copy of a tree.
    pub(crate) fn share(&self, tree: Tree) -> Arc<Tree> {
        let mut shared = self.shared.lock();
        if let Some(same) = shared.get(&tree) {
            return same.clone();
        }
        let tree = Arc::new(tree);
        if shared.len() < MAX_SHARED {
            shared.insert(tree.clone());
        }
        tree
    }

    /// The digest last seen for a tag by one of the audiences, the freshest first.
    pub(crate) fn tag(
        &self,
        reference: &str,
        audiences: &[Audience],
        ttl: Duration,
    ) -> Option<Remembered> {
        let newest = audiences
            .iter()
            .filter_map(|audience| self.tags.get(&tag_key(reference, *audience)))
            .max_by_key(|tag| tag.seen)?;
        let age = newest.seen.elapsed();
        if age < ttl {
            Some(Remembered::Fresh(newest.digest))
        } else {
            (age < STALE_IF_ERROR).then_some(Remembered::Stale(newest.digest, age))
        }
    }

    /// What a tag pointed at when it was `seen`, unless something newer is known.
    pub(crate) fn keep_tag(
        &self,
        reference: &str,
        audience: Audience,
        digest: &Digest,
        seen: Instant,
    ) {
        let key = tag_key(reference, audience);
        if self.tags.peek(&key).is_none_or(|tag| tag.seen < seen) {
            let digest = digest.clone();
            self.tags.insert(key, Tag { digest, seen });
        }
    }

    /// What a tag pointed at turned out to be no image.
    pub(crate) fn forget_tag(&self, reference: &str, audiences: &[Audience]) {
        for audience in audiences {
            self.tags.remove(&tag_key(reference, *audience));
        }
    }

    /// A failure that need not be tried again yet.
    pub(crate) fn failure(&self, subject: &str, rights: &[Fingerprint]) -> Option<ImageError> {
        let failure = self.failures.get(&failure_key(subject, rights))?;
        (Instant::now() < failure.until).then_some(failure.error)
    }

    /// Remembers a failure for a time that doubles with each repetition.
    pub(crate) fn keep_failure(&self, subject: &str, rights: &[Fingerprint], error: &ImageError) {
        // The limiter of its host keeps this one from being asked.
        if matches!(error, ImageError::Gated { .. }) {
            return;
        }
        let Some(backoff) = error.reason().backoff() else {
            return;
        };
        let key = failure_key(subject, rights);
        let now = Instant::now();
        let delay = match self.failures.get(&key) {
            // One of long ago says nothing of today's.
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
            Failure {
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

fn tree_key(digest: &Digest, audience: Audience) -> Fingerprint {
    Fingerprint::of(&[b"tree", digest.to_string().as_bytes(), audience.bytes()])
}

fn tag_key(reference: &str, audience: Audience) -> Fingerprint {
    Fingerprint::of(&[b"tag", reference.as_bytes(), audience.bytes()])
}

/// Failing with some rights says nothing of those with others.
fn failure_key(subject: &str, rights: &[Fingerprint]) -> Fingerprint {
    let rights = Fingerprint::of_all(rights);
    Fingerprint::of(&[b"failure", subject.as_bytes(), rights.bytes()])
}

impl Audience {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Everybody => &[],
            Self::Holder(fingerprint) => fingerprint.bytes(),
        }
    }
}
