//! What a tag points at: the node's record if it is good enough, else the registry's word.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use crate::image::{
    cache::Audience,
    containerd::{Broken, Containerd, Record, Store},
    digest::Digest,
    error::{ImageError, Reason},
    reference::Version,
    registry::{Answer, Head},
};

use super::{Asker, Inner, PullPolicy, Source};

/// What a tag points at.
#[derive(Clone)]
pub(super) struct Found {
    pub(super) digest: Digest,
    pub(super) source: Source,
    /// The root, when the registry gave it along.
    pub(super) root: Option<Arc<Answer>>,
    /// containerd gave no answer just now: it is not asked again for this image.
    pub(super) without_containerd: bool,
    /// Set for what the registry has just said to everybody: worth telling to what survives this process, by
    /// one of all who wait for it.
    news: Option<Arc<AtomicBool>>,
}

/// Why the registry did not say what a tag points at, and what the node says instead.
pub(super) type NotFound = (ImageError, Option<Record>);

impl Found {
    /// By the reference itself, or by memory.
    pub(super) fn given(digest: Digest) -> Self {
        Self {
            digest,
            source: Source::Memory,
            root: None,
            without_containerd: false,
            news: None,
        }
    }

    pub(super) fn recorded(digest: Digest) -> Self {
        Self {
            source: Source::Containerd,
            ..Self::given(digest)
        }
    }

    /// Whether this one is to tell it.
    pub(super) fn is_news(&self) -> bool {
        let news = self.news.as_ref();
        news.is_some_and(|news| news.swap(false, Ordering::Relaxed))
    }
}

/// Failures that say nothing about the image.
pub(super) fn may_be_stale(error: &ImageError) -> bool {
    matches!(error.reason(), Reason::Unavailable | Reason::RateLimited)
}

impl Inner {
    pub(super) fn ttl(&self, asker: &Asker) -> Duration {
        let latest = matches!(asker.reference.version(), Version::Tag(tag) if tag == "latest");
        if latest || asker.policy == PullPolicy::Always {
            self.settings.latest_ttl
        } else {
            self.settings.tag_ttl
        }
    }

    /// containerd, for who may use what others left there.
    pub(super) fn shared_containerd(&self, asker: &Asker) -> Option<&Containerd> {
        self.containerd.as_ref().filter(|_| asker.alone.is_none())
    }

    pub(super) fn store(&self, asker: &Asker) -> Option<&Store> {
        self.shared_containerd(asker)?.store()
    }

    /// Waits, not for long, until what an earlier process knew has been read.
    pub(super) async fn recalled(&self) -> Result<(), Broken> {
        match self.containerd.as_ref().and_then(Containerd::store) {
            Some(store) => store.recalled().await,
            None => Ok(()),
        }
    }

    /// Asks for a tag. A record is not remembered: it is the node's word, which the next question may
    /// not accept.
    pub(super) async fn look_up(
        &self,
        asker: &Asker,
        ttl: Duration,
        recalled: Result<(), Broken>,
    ) -> Result<Found, NotFound> {
        let asked = match (self.shared_containerd(asker), recalled) {
            (Some(containerd), Ok(())) => containerd.record(&asker.reference).await,
            (Some(_), Err(Broken)) => Err(Broken),
            (None, _) => Ok(None),
        };
        let without_containerd = asked.is_err();
        let record = match asked.unwrap_or_default() {
            // The kubelet runs what the node has unless the policy is Always; a record that is younger
            // than a tag is believed anyway serves those, too.
            Some(record) if asker.policy == PullPolicy::IfNotPresent || record.age < ttl => {
                return Ok(Found::recorded(record.digest));
            }
            other => other,
        };
        match self.ask(asker).await {
            Ok(found) => Ok(Found {
                without_containerd,
                ..found
            }),
            Err(error) => Err((error, record)),
        }
    }

    /// Asks the registry what a tag points at, unless it has failed to say so just now.
    async fn ask(&self, asker: &Asker) -> Result<Found, ImageError> {
        let (name, rights) = (asker.reference.to_string(), asker.rights());
        let Version::Tag(tag) = asker.reference.version() else {
            return Err(ImageError::NotFound { what: name });
        };
        if let Some(error) = self.caches.failure(&name, &rights) {
            return Err(error);
        }
        let head = self
            .registry
            .head(&asker.reference, tag, &asker.credentials);
        let (digest, root, credential) = match head.await {
            Ok(Head::Digest(digest, credential)) => (digest, None, credential),
            Ok(Head::Document(digest, answer)) => {
                let credential = answer.credential;
                (digest, Some(Arc::new(answer)), credential)
            }
            Err(error) => {
                self.caches.keep_failure(&name, &rights, &error);
                return Err(error);
            }
        };
        self.caches.forget_failure(&name, &rights);
        let audience = asker.audience(credential);
        self.caches
            .keep_tag(&name, audience, &digest, Instant::now());
        Ok(Found {
            source: Source::Registry,
            root,
            news: (audience == Audience::Everybody).then(|| Arc::new(AtomicBool::new(true))),
            ..Found::given(digest)
        })
    }
}
