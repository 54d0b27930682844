//! The way from a reference to platforms: memory, containerd, registry, in this order, each answer
//! shared by all who wait for it.

mod asker;
mod document;
mod tag;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;

use crate::{metrics::Resolutions, platform::PlatformSet};

use super::{
    cache::{Caches, Remembered},
    containerd::{Containerd, Patience, Store},
    credentials::{Fingerprint, Keys, NodeCredentials},
    digest::Digest,
    error::ImageError,
    flight::Flights,
    reference::{Reference, Version},
    registry::{self, Quota, Registry},
    rewrite::{Rewrite, rewrite},
    tree::Tree,
};

use asker::Asker;
use tag::{Found, NotFound};

/// How the resolver is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Registries.
    pub registry: registry::Settings,
    /// Names that stand for other names.
    pub rewrites: Vec<Rewrite>,
    /// Entries of each cache.
    pub images: usize,
    /// How long a tag is believed.
    pub tag_ttl: Duration,
    /// The same for `latest`, and for pull policy `Always`.
    pub latest_ttl: Duration,
    /// Whether who asks with credentials shares nothing with others.
    pub per_credential: bool,
}

/// A container's `imagePullPolicy`, as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PullPolicy {
    /// `IfNotPresent`, `Never`, or not said.
    #[default]
    IfNotPresent,
    /// The tag is to be looked up anew.
    Always,
}

/// One question.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The image as the pod names it.
    pub image: &'a str,
    /// Of its container.
    pub policy: PullPolicy,
    /// The asker's own credentials; those of the node come after them.
    pub keys: &'a Keys,
}

/// Where an answer came from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Source {
    /// Known to this process.
    Memory,
    /// Only containerd was asked.
    Containerd,
    /// A registry was asked.
    Registry,
}

/// What an image is.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The normalised name, after `registries.rewrites`.
    pub reference: Reference,
    /// Of its root document.
    pub digest: Digest,
    /// Its platforms, or why it names none.
    pub platforms: PlatformSet,
    /// Of its root document.
    pub media_type: &'static str,
    /// Where the answer came from.
    pub source: Source,
}

impl Source {
    /// Its name in `inspect` and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Containerd => "containerd",
            Self::Registry => "registry",
        }
    }
}

/// Resolves images. Cheap to clone; all clones share caches, connections and work in progress.
#[derive(Clone)]
pub struct Resolver(Arc<Inner>);

struct Inner {
    settings: Settings,
    caches: Arc<Caches>,
    registry: Registry,
    containerd: Option<Containerd>,
    node_credentials: NodeCredentials,
    tags: Flights<TagKey, Result<Found, NotFound>>,
    trees: Flights<TreeKey, Result<(Arc<Tree>, Source), ImageError>>,
    metrics: Resolutions,
}

/// Questions with the same answer: same reference, same rights, same demands on freshness.
#[derive(Clone, PartialEq, Eq, Hash)]
struct TagKey {
    reference: Reference,
    rights: Vec<Fingerprint>,
    policy: PullPolicy,
}

/// A document is fetched with the rights of those who wait for it: who may not see it fails alone.
#[derive(Clone, PartialEq, Eq, Hash)]
struct TreeKey {
    digest: Digest,
    name: String,
    rights: Vec<Fingerprint>,
}

impl Resolver {
    /// A resolver with empty caches. What containerd holds of earlier processes is read in the background.
    pub fn new(
        settings: Settings,
        containerd: Option<Containerd>,
        node_credentials: NodeCredentials,
        metrics: Resolutions,
    ) -> Self {
        let caches = Arc::new(Caches::new(settings.images));
        if let Some(store) = containerd.as_ref().and_then(Containerd::store) {
            store.recall(&caches, settings.images);
        }
        Self(Arc::new(Inner {
            registry: Registry::new(settings.registry.clone()),
            caches,
            settings,
            containerd,
            node_credentials,
            tags: Flights::new(),
            trees: Flights::new(),
            metrics,
        }))
    }

    /// The platforms of an image. Takes as long as its registry does, bounded by the timeout of each
    /// request; give a whole attempt its own limit.
    pub async fn resolve(&self, request: Request<'_>) -> Result<Resolved, ImageError> {
        let (started, metrics) = (Instant::now(), &self.0.metrics);
        let result = self.resolve_inner(request).await;
        match &result {
            Ok(resolved) => {
                let asked = resolved.source == Source::Registry;
                let registry = asked.then(|| resolved.reference.registry());
                metrics.observe(started, registry, Ok(resolved.source.as_str()));
            }
            // Parsed again: that costs less than keeping a copy for every answer.
            Err(error) => {
                let reference = self.reference(request.image).ok();
                let registry = reference.as_ref().map(Reference::registry);
                metrics.observe(started, registry, Err(error.reason().as_str()));
            }
        }
        result
    }

    /// The normalised name of an image after `registries.rewrites`.
    pub fn reference(&self, image: &str) -> Result<Reference, ImageError> {
        let reference = Reference::parse(image)?;
        Ok(rewrite(reference, &self.0.settings.rewrites)?)
    }

    /// Whether containerd is configured and answers; `None` when it is not configured.
    pub fn containerd_is_up(&self) -> Option<bool> {
        self.0.containerd.as_ref().map(Containerd::is_up)
    }

    /// Asks containerd for content that nobody has, so that it is known whether it answers.
    pub async fn probe_containerd(&self) {
        if let Some(containerd) = &self.0.containerd {
            let nothing = Digest::of(b"archaware asks whether containerd answers");
            // The outcome is what `containerd_is_up` tells.
            let _ = containerd.read(Patience::new(), &nothing).await;
        }
    }

    /// Registry hosts that are left alone at the moment.
    pub fn gated_hosts(&self) -> usize {
        self.0.registry.gated()
    }

    /// What registries last said of their rate limits, by host.
    pub fn quotas(&self) -> Vec<(String, Quota)> {
        self.0.registry.quotas()
    }

    /// The same, given up at a deadline.
    pub async fn resolve_by(
        &self,
        request: Request<'_>,
        deadline: tokio::time::Instant,
    ) -> Result<Resolved, ImageError> {
        let answer = tokio::time::timeout_at(deadline, self.resolve(request)).await;
        let why = "not resolved within resolution.budget";
        answer.unwrap_or_else(|_| Err(ImageError::unanswered(request.image, why, None)))
    }

    async fn resolve_inner(&self, request: Request<'_>) -> Result<Resolved, ImageError> {
        let mut asker = Asker {
            reference: self.reference(request.image)?,
            policy: request.policy,
            credentials: [].into(),
            alone: None,
        };
        let inner = &self.0;
        // What everybody may know needs no credential, and no Secret is read for it.
        if !inner.settings.per_credential
            && let Some((found, tree)) = inner.known(&asker)
        {
            return Ok(asker.resolved(found, &tree, Source::Memory));
        }
        let mut credentials = request.keys.clone().await.lookup(&asker.reference);
        for credential in inner.node_credentials.lookup(&asker.reference).await {
            if !credentials
                .iter()
                .any(|own| own.fingerprint() == credential.fingerprint())
            {
                credentials.push(credential);
            }
        }
        asker.credentials = credentials.into();
        if inner.settings.per_credential && !asker.credentials.is_empty() {
            asker.alone = Some(Fingerprint::of_all(&asker.rights()));
        }
        let found = match asker.reference.version() {
            Version::Digest(digest) => Found::given(digest.clone()),
            Version::Tag(_) => self.tag(&asker).await?,
        };
        let (tree, source) = match self.tree(&asker, &found).await {
            Ok(read) => read,
            Err(error) => {
                inner.doubt(&asker, &error);
                return Err(error);
            }
        };
        if let Some(store) = inner.store(&asker).filter(|_| found.is_news()) {
            store.tag(&asker.reference.to_string(), &found.digest);
        }
        Ok(asker.resolved(found, &tree, source))
    }

    async fn tag(&self, asker: &Asker) -> Result<Found, ImageError> {
        let name = asker.reference.to_string();
        let ttl = self.0.ttl(asker);
        let remembered = || self.0.caches.tag(&name, &asker.audiences(), ttl);
        let (mut known, mut recalled) = (remembered(), Ok(()));
        if known.is_none() {
            // Soon after the start, what an earlier process knew may be on its way.
            recalled = self.0.recalled().await;
            known = remembered();
        }
        let stale = match known {
            Some(Remembered::Fresh(digest)) => return Ok(Found::given(digest)),
            Some(Remembered::Stale(digest, age)) => Some((Found::given(digest), age)),
            None => None,
        };
        let key = TagKey {
            reference: asker.reference.clone(),
            rights: asker.rights(),
            policy: asker.policy,
        };
        let (inner, asker) = (self.0.clone(), asker.clone());
        // Made only when needed, and boxed: thousands of pods wait here at once.
        let look_up = move || async move { inner.look_up(&asker, ttl, recalled).await }.boxed();
        let (error, record) = match self.0.tags.run(key, look_up).await {
            Ok(found) => return Ok(found),
            Err(failed) => failed,
        };
        if !tag::may_be_stale(&error) {
            return Err(error);
        }
        // The registry is silent, not the image gone: what is known still holds, the newer the better.
        let record = record.map(|record| (Found::recorded(record.digest), record.age));
        let newest = stale.into_iter().chain(record).min_by_key(|(_, age)| *age);
        newest.map(|(found, _)| found).ok_or(error)
    }

    async fn tree(&self, asker: &Asker, found: &Found) -> Result<(Arc<Tree>, Source), ImageError> {
        if let Some(tree) = self.0.known_tree(asker, &found.digest) {
            return Ok((tree, Source::Memory));
        }
        let key = TreeKey {
            digest: found.digest.clone(),
            name: asker.reference.name(),
            rights: asker.rights(),
        };
        let (inner, asker, found) = (self.0.clone(), asker.clone(), found.clone());
        let read = move || async move { inner.read_tree(&asker, &found).await }.boxed();
        self.0.trees.run(key, read).await
    }
}

impl Inner {
    /// A tag whose document is none (a sign-in page, content that is gone) may be right a moment later: it is
    /// asked for again when the failure has been kept long enough.
    fn doubt(&self, asker: &Asker, error: &ImageError) {
        if matches!(asker.reference.version(), Version::Digest(_)) || tag::may_be_stale(error) {
            return;
        }
        let name = asker.reference.to_string();
        self.caches.forget_tag(&name, &asker.audiences());
        self.caches.keep_failure(&name, &asker.rights(), error);
    }

    /// What memory holds for this asker, both tag and tree.
    fn known(&self, asker: &Asker) -> Option<(Found, Arc<Tree>)> {
        let digest = match asker.reference.version() {
            Version::Digest(digest) => digest.clone(),
            Version::Tag(_) => {
                let (name, ttl) = (asker.reference.to_string(), self.ttl(asker));
                match self.caches.tag(&name, &asker.audiences(), ttl)? {
                    Remembered::Fresh(digest) => digest,
                    Remembered::Stale(..) => return None,
                }
            }
        };
        let tree = self.known_tree(asker, &digest)?;
        Some((Found::given(digest), tree))
    }

    fn known_tree(&self, asker: &Asker, digest: &Digest) -> Option<Arc<Tree>> {
        let mut known = self.caches.tree(digest, asker.owner())?;
        // Content that survives this process goes away unless somebody says that it is in use.
        if let Some(store) = self.store(asker)
            && known.told != Store::today()
        {
            known.told = Store::today();
            store.touch(digest);
            self.caches.keep_tree(digest, asker.owner(), known.clone());
        }
        Some(known.tree)
    }
}
