//! The way from a reference to platforms: memory, containerd, registry, in this order, each answer
//! shared by all who wait for it.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt;

use crate::{
    metrics::Resolutions,
    platform::{Note, PlatformSet},
};

use super::{
    cache::{Audience, Caches, Remembered},
    containerd::{Containerd, Record, is_recorded},
    credentials::{Credential, Fingerprint, Keyring},
    digest::Digest,
    error::ImageError,
    flight::Flights,
    reference::{Reference, Version},
    registry::{self, Answer, Head, Registry},
    tree::{self, Fetch, Kind, Tree},
};

/// How the resolver is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Registries.
    pub registry: registry::Settings,
    /// Entries of each cache.
    pub images: usize,
    /// How long a tag is believed.
    pub tag_ttl: Duration,
    /// The same for `latest`, and for pull policy `Always`.
    pub latest_ttl: Duration,
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
    /// Where credentials are looked up.
    pub keyring: &'a Keyring,
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
    /// Of its root document.
    pub digest: Digest,
    /// Its platforms, or why it names none.
    pub platforms: PlatformSet,
    /// Of its root document.
    pub media_type: Box<str>,
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
    caches: Caches,
    registry: Registry,
    containerd: Option<Containerd>,
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

/// What a tag points at.
#[derive(Clone)]
struct Found {
    digest: Digest,
    source: Source,
    /// The root, when the registry gave it along.
    root: Option<Arc<Answer>>,
}

impl Resolver {
    /// A resolver with empty caches.
    pub fn new(settings: Settings, containerd: Option<Containerd>, metrics: Resolutions) -> Self {
        Self(Arc::new(Inner {
            caches: Caches::new(settings.images),
            registry: Registry::new(settings.registry.clone()),
            settings,
            containerd,
            tags: Flights::new(),
            trees: Flights::new(),
            metrics,
        }))
    }

    /// The platforms of an image. Takes as long as its registry does, bounded by the timeout of each
    /// request; give a whole attempt its own limit.
    pub async fn resolve(&self, request: Request<'_>) -> Result<Resolved, ImageError> {
        let timer = self.0.metrics.timer();
        let result = self.resolve_inner(request).await;
        timer.observe(
            result
                .as_ref()
                .map(|resolved| resolved.source)
                .map_err(ImageError::reason),
        );
        result
    }

    /// Whether containerd is configured and answers; `None` when it is not configured.
    pub fn containerd_is_up(&self) -> Option<bool> {
        self.0.containerd.as_ref().map(Containerd::is_up)
    }

    async fn resolve_inner(&self, request: Request<'_>) -> Result<Resolved, ImageError> {
        let reference = Reference::parse(request.image)?;
        let credentials = request.keyring.lookup(&reference);
        let found = match reference.version() {
            Version::Digest(digest) => Found {
                digest: digest.clone(),
                source: Source::Memory,
                root: None,
            },
            Version::Tag(_) => self.tag(&reference, &credentials, request.policy).await?,
        };
        let (tree, source) = self.tree(&reference, &credentials, &found).await?;
        Ok(Resolved {
            digest: found.digest,
            platforms: tree.platforms.clone(),
            media_type: tree.media_type.clone(),
            source: found.source.max(source),
        })
    }

    async fn tag(
        &self,
        reference: &Reference,
        credentials: &[Credential],
        policy: PullPolicy,
    ) -> Result<Found, ImageError> {
        let name = reference.to_string();
        let ttl = self.0.tag_ttl(reference, policy);
        let known = |digest| Found {
            digest,
            source: Source::Memory,
            root: None,
        };
        let stale = match self.0.caches.tag(&name, &audiences(credentials), ttl) {
            Some(Remembered::Fresh(digest)) => return Ok(known(digest)),
            Some(Remembered::Stale(digest, age)) => Some((known(digest), age)),
            None => None,
        };
        let key = TagKey {
            reference: reference.clone(),
            rights: rights(credentials),
            policy,
        };
        let (inner, reference, credentials) =
            (self.0.clone(), reference.clone(), credentials.to_vec());
        // Made only when needed, and boxed: thousands of pods wait here at once.
        let look_up = move || {
            async move { inner.look_up(&reference, &credentials, policy, ttl).await }.boxed()
        };
        let (error, record) = match self.0.tags.run(key, look_up).await {
            Ok(found) => return Ok(found),
            Err(failed) => failed,
        };
        if !may_be_stale(&error) {
            return Err(error);
        }
        // The registry is silent, not the image gone: what is known still holds, the newer the better.
        let record = record.map(|record| (Found::recorded(record.digest), record.age));
        let newest = stale.into_iter().chain(record).min_by_key(|(_, age)| *age);
        newest.map(|(found, _)| found).ok_or(error)
    }

    async fn tree(
        &self,
        reference: &Reference,
        credentials: &[Credential],
        found: &Found,
    ) -> Result<(Arc<Tree>, Source), ImageError> {
        if let Some(tree) = self.0.caches.tree(&found.digest) {
            return Ok((tree, Source::Memory));
        }
        let key = TreeKey {
            digest: found.digest.clone(),
            name: reference.name(),
            rights: rights(credentials),
        };
        let (inner, reference, credentials, found) = (
            self.0.clone(),
            reference.clone(),
            credentials.to_vec(),
            found.clone(),
        );
        let read = move || {
            async move {
                let read = inner.read_tree(&reference, &credentials, &found).await;
                if let Ok((tree, _)) = &read {
                    inner.caches.keep_tree(&found.digest, tree);
                }
                read
            }
            .boxed()
        };
        self.0.trees.run(key, read).await
    }
}

impl Found {
    fn recorded(digest: Digest) -> Self {
        Self {
            digest,
            source: Source::Containerd,
            root: None,
        }
    }
}

/// Why the registry did not say what a tag points at, and what the node says instead.
type NotFound = (ImageError, Option<Record>);

impl Inner {
    fn tag_ttl(&self, reference: &Reference, policy: PullPolicy) -> Duration {
        let latest = matches!(reference.version(), Version::Tag(tag) if tag == "latest");
        if latest || policy == PullPolicy::Always {
            self.settings.latest_ttl
        } else {
            self.settings.tag_ttl
        }
    }

    /// Asks for a tag: the node's record if it is good enough, else the registry. A record is not
    /// remembered: it is the node's word, which the next question may not accept.
    async fn look_up(
        &self,
        reference: &Reference,
        credentials: &[Credential],
        policy: PullPolicy,
        ttl: Duration,
    ) -> Result<Found, NotFound> {
        let record = match self.record(reference).await {
            // The kubelet runs what the node has unless the policy is Always; a record that is younger
            // than a tag is believed anyway serves those, too.
            Some(record) if policy == PullPolicy::IfNotPresent || record.age < ttl => {
                return Ok(Found::recorded(record.digest));
            }
            other => other,
        };
        self.ask(reference, credentials)
            .await
            .map_err(|error| (error, record))
    }

    /// Asks the registry what a tag points at, unless it has failed to say so just now.
    async fn ask(
        &self,
        reference: &Reference,
        credentials: &[Credential],
    ) -> Result<Found, ImageError> {
        let (name, rights) = (reference.to_string(), rights(credentials));
        let Version::Tag(tag) = reference.version() else {
            return Err(ImageError::NotFound { what: name });
        };
        if let Some(error) = self.caches.failure(&name, &rights) {
            return Err(error);
        }
        let (digest, root, credential) = match self.registry.head(reference, tag, credentials).await
        {
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
        let audience = credential.map_or(Audience::Everybody, Audience::Holder);
        self.caches.keep_tag(&name, audience, &digest);
        Ok(Found {
            digest,
            source: Source::Registry,
            root,
        })
    }

    async fn record(&self, reference: &Reference) -> Option<Record> {
        match &self.containerd {
            Some(containerd) if is_recorded(reference) => containerd.record(reference).await,
            _ => None,
        }
    }

    async fn read_tree(
        &self,
        reference: &Reference,
        credentials: &[Credential],
        found: &Found,
    ) -> Result<(Arc<Tree>, Source), ImageError> {
        let rights = rights(credentials);
        let subject = format!("{}@{}", reference.name(), found.digest);
        let layers = Layers {
            inner: self,
            reference,
            credentials,
            failed: self.caches.failure(&subject, &rights),
            asked_registry: AtomicBool::new(found.root.is_some()),
        };
        let read = async {
            let (root, content_type) = match &found.root {
                Some(answer) => (
                    answer.body.clone(),
                    answer.content_type().map(str::to_owned),
                ),
                None => layers.fetch_typed(Kind::Manifest, &found.digest).await?,
            };
            tree::read(&layers, &found.digest, &root, content_type.as_deref()).await
        };
        match read.await {
            Ok(tree) => {
                self.caches.forget_failure(&subject, &rights);
                let asked = layers.asked_registry.load(Ordering::Relaxed);
                let source = if asked {
                    Source::Registry
                } else {
                    Source::Containerd
                };
                Ok((Arc::new(tree), source))
            }
            Err(error) => {
                // One that is remembered already does not count twice.
                if layers.failed.is_none() {
                    self.caches.keep_failure(&subject, &rights, &error);
                }
                Err(error)
            }
        }
    }
}

/// Content in containerd first, the registry for what it lacks.
struct Layers<'a> {
    inner: &'a Inner,
    reference: &'a Reference,
    credentials: &'a [Credential],
    /// The registry has failed lately: containerd may know more by now, the registry is not asked.
    failed: Option<ImageError>,
    asked_registry: AtomicBool,
}

impl Layers<'_> {
    async fn fetch_typed(
        &self,
        kind: Kind,
        digest: &Digest,
    ) -> Result<(Bytes, Option<String>), ImageError> {
        if let Some(containerd) = &self.inner.containerd
            && let Some(bytes) = containerd.read(digest).await
        {
            return Ok((bytes, None));
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.asked_registry.store(true, Ordering::Relaxed);
        let answer = self
            .inner
            .registry
            .get(self.reference, kind, digest, self.credentials)
            .await?;
        let content_type = answer.content_type().map(str::to_owned);
        Ok((answer.body, content_type))
    }
}

impl Fetch for Layers<'_> {
    async fn fetch(&self, kind: Kind, digest: &Digest) -> Result<Bytes, ImageError> {
        self.fetch_typed(kind, digest).await.map(|(bytes, _)| bytes)
    }
}

/// Whose remembered answers serve this asker.
fn audiences(credentials: &[Credential]) -> Vec<Audience> {
    let own = credentials
        .iter()
        .map(|credential| Audience::Holder(credential.fingerprint()));
    std::iter::once(Audience::Everybody).chain(own).collect()
}

fn rights(credentials: &[Credential]) -> Vec<Fingerprint> {
    credentials.iter().map(Credential::fingerprint).collect()
}

/// Failures that say nothing about the image.
fn may_be_stale(error: &ImageError) -> bool {
    use super::error::Reason;
    matches!(error.reason(), Reason::Unavailable | Reason::RateLimited)
}

impl Resolved {
    /// Why it has no opinion, if so.
    pub fn note(&self) -> Option<Note> {
        self.platforms.note()
    }
}
