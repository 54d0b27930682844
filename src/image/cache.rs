//! What is remembered between questions, in memory. Every cache here is bounded by
//! `resolution.cache.images`; the least useful entries go first.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use quick_cache::sync::Cache;

use super::{
    credentials::Fingerprint,
    digest::Digest,
    error::{ImageError, Reason},
    tree::Tree,
};

/// A tag is believed for this long when the registry cannot be asked again.
const STALE_IF_ERROR: Duration = Duration::from_hours(24);

/// Who may use an answer: everybody, or the holder of the credential that got it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Audience {
    Everybody,
    Holder(Fingerprint),
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    /// The normalised reference.
    reference: Box<str>,
    audience: Audience,
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

pub(crate) struct Caches {
    /// Immutable: content-addressed, so shared by all.
    trees: Cache<Digest, Arc<Tree>>,
    tags: Cache<Key, Tag>,
    failures: Cache<FailureKey, Failure>,
}

/// Failing with some rights says nothing of those with others.
#[derive(Clone, PartialEq, Eq, Hash)]
struct FailureKey {
    subject: Box<str>,
    rights: Box<[Fingerprint]>,
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
        }
    }

    pub(crate) fn tree(&self, digest: &Digest) -> Option<Arc<Tree>> {
        self.trees.get(digest)
    }

    pub(crate) fn keep_tree(&self, digest: &Digest, tree: &Arc<Tree>) {
        self.trees.insert(digest.clone(), tree.clone());
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
            .filter_map(|audience| self.tags.get(&Key::new(reference, *audience)))
            .max_by_key(|tag| tag.seen)?;
        let age = newest.seen.elapsed();
        if age < ttl {
            Some(Remembered::Fresh(newest.digest))
        } else {
            (age < STALE_IF_ERROR).then_some(Remembered::Stale(newest.digest, age))
        }
    }

    pub(crate) fn keep_tag(&self, reference: &str, audience: Audience, digest: &Digest) {
        self.tags.insert(
            Key::new(reference, audience),
            Tag {
                digest: digest.clone(),
                seen: Instant::now(),
            },
        );
    }

    /// A failure that need not be tried again yet.
    pub(crate) fn failure(&self, subject: &str, rights: &[Fingerprint]) -> Option<ImageError> {
        let failure = self.failures.get(&FailureKey::new(subject, rights))?;
        (Instant::now() < failure.until).then_some(failure.error)
    }

    /// Remembers a failure for a time that doubles with each repetition.
    pub(crate) fn keep_failure(&self, subject: &str, rights: &[Fingerprint], error: &ImageError) {
        let Some((first, most)) = quiet_time(error) else {
            return;
        };
        let key = FailureKey::new(subject, rights);
        let delay = match self.failures.get(&key) {
            Some(before) if before.error.reason() == error.reason() => (before.delay * 2).min(most),
            _ => first,
        };
        let until = Instant::now() + delay;
        self.failures.insert(
            key,
            Failure {
                error: error.clone(),
                until,
                delay,
            },
        );
    }

    pub(crate) fn forget_failure(&self, subject: &str, rights: &[Fingerprint]) {
        self.failures.remove(&FailureKey::new(subject, rights));
    }
}

impl FailureKey {
    fn new(subject: &str, rights: &[Fingerprint]) -> Self {
        Self {
            subject: subject.into(),
            rights: rights.into(),
        }
    }
}

/// How long the registry is not asked again, first and at most. `None`: a host's gate does it better.
fn quiet_time(error: &ImageError) -> Option<(Duration, Duration)> {
    let seconds = Duration::from_secs;
    match error.reason() {
        Reason::RateLimited | Reason::InvalidReference => None,
        Reason::Unavailable => match error {
            ImageError::Gated { .. } => None,
            _ => Some((seconds(1), seconds(60))),
        },
        Reason::NotFound | Reason::Denied => Some((seconds(5), seconds(600))),
        // A tag may be pushed again with better content.
        Reason::TooLarge | Reason::Corrupt | Reason::Unsupported => {
            Some((seconds(60), seconds(600)))
        }
    }
}

impl Key {
    fn new(reference: &str, audience: Audience) -> Self {
        Self {
            reference: reference.into(),
            audience,
        }
    }
}
