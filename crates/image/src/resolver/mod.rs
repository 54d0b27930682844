//! Resolves image references to platforms from memory, containerd or a registry, in this order.
//! Concurrent requests for the same image share one lookup.

mod artifact;
mod context;
mod document;
mod local_copy;
mod saved;
mod tag;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use tokio::sync::Semaphore;

use archaware_base::single_flight::SingleFlight;
use archaware_platform::PlatformSet;

use super::{
    artifact::ArtifactContent,
    cache::{CachedTag, Caches},
    containerd::{Containerd, Store},
    credentials::{
        CredentialSource, Fingerprint, LazyKeyring, MAX_CREDENTIALS, OperatorCredentials,
    },
    digest::Digest,
    error::ImageError,
    fetch_slots::FetchSlots,
    metrics::Resolutions,
    reference::{Reference, Version},
    registry::{self, Quota, Registry},
    rewrite::{Rewrite, rewrite},
    summary::ImageSummary,
    trace,
};

pub use saved::SavedImage;

use artifact::{ArtifactQuery, MAX_ATTACHED_READS};
use context::RequestContext;
use tag::{ResolvedDigest, TagLookupError};

/// Settings of a [`Resolver`].
#[derive(Clone, Debug)]
pub struct ResolverSettings {
    /// Access to registries.
    pub registry: registry::RegistryClient,
    /// `registries.rewrites`.
    pub rewrites: Vec<Rewrite>,
    /// Maximum number of cached tags, and of cached summaries.
    pub images: usize,
    /// How long a cached tag is used without asking again.
    pub tag_ttl: Duration,
    /// Lifetime of cached tags for `latest` and for pull policy `Always`.
    pub latest_ttl: Duration,
    /// Whether requests share answers only with requests of the same credentials. containerd is not
    /// used then.
    pub per_credential: bool,
}

/// `imagePullPolicy`, reduced to what matters for resolution. In the order of their strictness.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum PullPolicy {
    /// `IfNotPresent`, `Never` or unset.
    #[default]
    IfNotPresent,
    /// The tag must be looked up again.
    Always,
}

/// A request to resolve one image.
#[derive(Clone, Copy, Debug)]
pub struct ResolveRequest<'a> {
    /// The image as written in the pod.
    pub image: &'a str,
    /// Pull policy of its container.
    pub policy: PullPolicy,
    /// The pod's own credentials; those of the operator are tried after them.
    pub keyring: &'a LazyKeyring,
    /// The pod's namespace. The images of one tenant do not delay the images of other tenants.
    pub tenant: &'a str,
}

/// Where an answer came from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub enum ResolutionSource {
    /// This process's caches.
    Memory,
    /// containerd, without any registry.
    Containerd,
    /// A registry.
    Registry,
}

impl ResolutionSource {
    /// The name in `archaware inspect` and in metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The result of resolving an image: digest, platforms, and the source of the answer.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The normalised name, after `registries.rewrites`.
    pub reference: Reference,
    /// Digest of the root document.
    pub digest: Digest,
    /// Its platforms, or why it has none.
    pub platforms: PlatformSet,
    /// Media type of the root document.
    pub media_type: &'static str,
    /// Where the answer came from.
    pub source: ResolutionSource,
    /// Source of the credential that the registry required; `None` if no registry was asked, or if
    /// it required none.
    pub credential: Option<CredentialSource>,
}

/// Where a part of an answer came from.
#[derive(Clone, Copy)]
struct Origin {
    source: ResolutionSource,
    /// The credential that the registry asked for.
    credential: Option<Fingerprint>,
}

impl Origin {
    const fn without_credential(source: ResolutionSource) -> Self {
        Self {
            source,
            credential: None,
        }
    }

    /// The origin of a result that has two parts.
    fn and(self, other: Self) -> Self {
        Self {
            source: self.source.max(other.source),
            credential: self.credential.or(other.credential),
        }
    }
}

const MEMORY: Origin = Origin::without_credential(ResolutionSource::Memory);

/// Resolves images. Cheap to clone; clones share caches, connections and lookups in progress.
#[derive(Clone)]
pub struct Resolver(Arc<ResolverInner>);

struct ResolverInner {
    settings: ResolverSettings,
    caches: Arc<Caches>,
    registry: Registry,
    containerd: Option<Containerd>,
    operator_credentials: OperatorCredentials,
    fetch_slots: FetchSlots,
    tags: SingleFlight<TagKey, Result<ResolvedDigest, TagLookupError>>,
    summaries: SingleFlight<SummaryKey, Result<(Arc<ImageSummary>, Origin), ImageError>>,
    artifacts: SingleFlight<(SummaryKey, ArtifactQuery), Result<Arc<ArtifactContent>, ImageError>>,
    /// Permits for reads of attached artifacts. Reads of images do not need them.
    attached_reads: Arc<Semaphore>,
    metrics: Resolutions,
}

/// Key of tag lookups. Lookups with the same reference, credentials and policy share a result.
#[derive(Clone, PartialEq, Eq, Hash)]
struct TagKey {
    reference: Reference,
    fingerprints: Vec<Fingerprint>,
    policy: PullPolicy,
}

/// Key of document lookups. Contains the credentials, because a document is fetched with the
/// credentials of the request that started the lookup.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SummaryKey {
    digest: Digest,
    name: String,
    fingerprints: Vec<Fingerprint>,
}

impl Resolver {
    /// A resolver with empty caches. Tags that earlier processes persisted in containerd are loaded
    /// in the background.
    pub fn new(
        settings: ResolverSettings,
        containerd: Option<Containerd>,
        operator_credentials: OperatorCredentials,
        metrics: Resolutions,
    ) -> Self {
        // containerd does not know with which credentials its content was fetched.
        let containerd = containerd.filter(|_| !settings.per_credential);
        let fetch_slots = FetchSlots::new(settings.registry.per_host);
        let caches = Arc::new(Caches::new(settings.images));
        if let Some(store) = containerd.as_ref().and_then(Containerd::store) {
            store.load_persisted(&caches, settings.images);
        }
        Self(Arc::new(ResolverInner {
            registry: Registry::new(settings.registry.clone()),
            caches,
            settings,
            containerd,
            operator_credentials,
            fetch_slots,
            tags: SingleFlight::default(),
            summaries: SingleFlight::default(),
            artifacts: SingleFlight::default(),
            attached_reads: Arc::new(Semaphore::new(MAX_ATTACHED_READS)),
            metrics,
        }))
    }

    /// Resolves an image. Each registry request has a timeout, but the sum has none; use
    /// [`Self::resolve_by`] to bound it.
    ///
    /// # Errors
    ///
    /// When the image cannot be resolved. [`ImageError::reason`] classifies the error.
    pub async fn resolve(&self, request: ResolveRequest<'_>) -> Result<Resolved, ImageError> {
        let (started, metrics) = (Instant::now(), &self.0.metrics);
        let result = self.resolve_inner(request).await;
        match &result {
            Ok(resolved) => {
                let asked_registry = resolved.source == ResolutionSource::Registry;
                let registry = asked_registry.then(|| resolved.reference.registry());
                metrics.observe(started, registry, Ok(resolved.source.as_str()));
            }
            // Errors are rare, so parsing again is cheaper than cloning the reference for every
            // request.
            Err(error) => {
                let reference = self.reference(request.image).ok();
                let registry = reference.as_ref().map(Reference::registry);
                metrics.observe(started, registry, Err(error.reason().as_str()));
                if let Some(host) = error.paused_host() {
                    self.0.registry.keep_pause(request.tenant, host);
                }
            }
        }
        result
    }

    /// The normalised name of an image after `registries.rewrites`.
    ///
    /// # Errors
    ///
    /// When the name, before or after rewriting, is not an image reference.
    pub fn reference(&self, image: &str) -> Result<Reference, ImageError> {
        let reference = Reference::parse(image)?;
        Ok(rewrite(reference, &self.0.settings.rewrites)?)
    }

    /// Whether containerd answers; `None` when it is not configured.
    pub fn containerd_is_up(&self) -> Option<bool> {
        self.0.containerd.as_ref().map(Containerd::is_up)
    }

    /// Reads content that does not exist, to find out whether containerd answers.
    pub async fn probe_containerd(&self) {
        if let Some(containerd) = &self.0.containerd {
            let nothing = Digest::sha256(b"archaware asks whether containerd answers");
            // `containerd_is_up` reports the outcome.
            let _ = containerd.read(containerd.deadline(), &nothing).await;
        }
    }

    /// Finishes the queued writes to containerd, within two seconds. Later writes are dropped.
    pub async fn finish_writes(&self) {
        if let Some(store) = self.0.store() {
            store.finish().await;
        }
    }

    /// Number of registry hosts that get no requests at the moment.
    pub fn paused_hosts(&self) -> usize {
        self.0.registry.paused_hosts()
    }

    /// Rate limits as registries last reported them, by host.
    pub fn quotas(&self) -> Vec<(String, Quota)> {
        self.0.registry.quotas()
    }

    /// Like [`Self::resolve`], but gives up at a deadline.
    ///
    /// # Errors
    ///
    /// When the image cannot be resolved in time.
    pub async fn resolve_by(
        &self,
        request: ResolveRequest<'_>,
        deadline: tokio::time::Instant,
    ) -> Result<Resolved, ImageError> {
        let answer = tokio::time::timeout_at(deadline, self.resolve(request)).await;
        let why = "not resolved within resolution.budget";
        answer.unwrap_or_else(|_| Err(ImageError::unanswered(request.image, why, None)))
    }

    async fn resolve_inner(&self, request: ResolveRequest<'_>) -> Result<Resolved, ImageError> {
        let mut context = self.context(&request)?;
        let inner = &self.0;
        // A cached public image needs no credentials, so no Secret is read for it.
        if !inner.settings.per_credential
            && let Some((found, summary)) = inner.cached(&context)
        {
            return Ok(context.resolved(found, &summary, MEMORY));
        }
        inner.add_credentials(&mut context, request.keyring).await;
        // A cached private image needs no slot.
        if let Some((found, summary)) = inner.cached(&context) {
            return Ok(context.resolved(found, &summary, MEMORY));
        }
        // The slot is taken before any lookup that tenants share, so that other tenants do not wait
        // for this tenant's slot.
        let registry = context.reference.registry();
        let _slot = inner.fetch_slots.enter(request.tenant, registry).await;
        let found = self.resolve_digest(&context).await?;
        let (summary, origin) = match self.resolve_summary(&context, &found).await {
            Ok(read) => read,
            Err(error) => {
                inner.invalidate_tag(&context, &error);
                return Err(error);
            }
        };
        if let Some(store) = inner.store().filter(|_| found.needs_persisting()) {
            store.store_tag(&context.reference.to_string(), &found.digest);
        }
        Ok(context.resolved(found, &summary, origin))
    }

    /// The sources of credentials for an image, in the order of their use.
    ///
    /// # Errors
    ///
    /// When its name is not an image reference.
    pub async fn credential_sources(
        &self,
        request: ResolveRequest<'_>,
    ) -> Result<Vec<CredentialSource>, ImageError> {
        let mut context = self.context(&request)?;
        self.0.add_credentials(&mut context, request.keyring).await;
        let credentials = context.credentials.iter();
        Ok(credentials
            .map(|credential| credential.source().clone())
            .collect())
    }

    /// The context of a request, still without credentials.
    fn context(&self, request: &ResolveRequest<'_>) -> Result<RequestContext, ImageError> {
        Ok(RequestContext {
            reference: self.reference(request.image)?,
            policy: request.policy,
            credentials: [].into(),
            isolated: None,
        })
    }

    async fn resolve_digest(&self, context: &RequestContext) -> Result<ResolvedDigest, ImageError> {
        match context.reference.version() {
            Version::Digest(digest) => Ok(ResolvedDigest::known(digest.clone())),
            Version::Tag(_) => self.resolve_tag(context).await,
        }
    }

    async fn resolve_tag(&self, context: &RequestContext) -> Result<ResolvedDigest, ImageError> {
        let name = context.reference.to_string();
        let ttl = self.0.ttl(context);
        let remembered = || self.0.caches.tag(&name, &context.cache_scopes(), ttl);
        let (mut known, mut loaded) = (remembered(), Ok(()));
        if known.is_none() {
            // Shortly after the start, persisted tags may still be loading.
            loaded = self.0.wait_until_loaded().await;
            known = remembered();
        }
        let stale = match known {
            Some(CachedTag::Fresh(digest)) => {
                trace::cached("tag", &name, &digest);
                return Ok(ResolvedDigest::known(digest));
            }
            Some(CachedTag::Stale(digest, age)) => Some((ResolvedDigest::known(digest), age)),
            None => None,
        };
        let key = TagKey {
            reference: context.reference.clone(),
            fingerprints: context.fingerprints(),
            policy: context.policy,
        };
        let (inner, context) = (self.0.clone(), context.clone());
        // The future is created only when needed, and boxed because thousands of pods may wait
        // here.
        let look_up = move || async move { inner.look_up(&context, ttl, loaded).await }.boxed();
        let (error, record) = match self.0.tags.run(key, look_up).await {
            Ok(found) => return Ok(found),
            Err(failed) => failed,
        };
        if !tag::allows_stale_tag(&error) {
            return Err(error);
        }
        // The registry does not answer, which does not mean that the image is gone: the newest
        // known digest is used.
        let record = record.map(|record| (ResolvedDigest::recorded(record.digest), record.age));
        let newest = stale.into_iter().chain(record).min_by_key(|(_, age)| *age);
        let (found, _) = newest.ok_or(error)?;
        trace::cached("stale tag", &name, &found.digest);
        Ok(found)
    }

    async fn resolve_summary(
        &self,
        context: &RequestContext,
        found: &ResolvedDigest,
    ) -> Result<(Arc<ImageSummary>, Origin), ImageError> {
        if let Some(summary) = self.0.cached_summary(context, &found.digest) {
            return Ok((summary, MEMORY));
        }
        let key = SummaryKey {
            digest: found.digest.clone(),
            name: context.reference.name(),
            fingerprints: context.fingerprints(),
        };
        let (inner, context, found) = (self.0.clone(), context.clone(), found.clone());
        let read = move || async move { inner.read_summary(&context, &found).await }.boxed();
        self.0.summaries.run(key, read).await
    }
}

impl ResolverInner {
    /// Adds the pod's credentials, and those of the operator after them.
    async fn add_credentials(&self, context: &mut RequestContext, keyring: &LazyKeyring) {
        let mut credentials = keyring.clone().await.lookup(&context.reference);
        for credential in self.operator_credentials.lookup(&context.reference).await {
            if !credentials
                .iter()
                .any(|known| known.fingerprint() == credential.fingerprint())
            {
                credentials.push(credential);
            }
        }
        credentials.truncate(MAX_CREDENTIALS);
        context.credentials = credentials.into();
        if self.settings.per_credential && !context.credentials.is_empty() {
            context.isolated = Some(Fingerprint::combine(&context.fingerprints()));
        }
    }

    /// A tag that points at an invalid document (a sign-in page, deleted content) may be fixed
    /// soon: the tag is forgotten and looked up again when the cached failure expires.
    fn invalidate_tag(&self, context: &RequestContext, error: &ImageError) {
        if matches!(context.reference.version(), Version::Digest(_)) || tag::allows_stale_tag(error)
        {
            return;
        }
        let name = context.reference.to_string();
        self.caches.forget_tag(&name, &context.cache_scopes());
        self.caches
            .store_failure(&name, &context.fingerprints(), error);
    }

    /// The digest of an image, if the reference contains it or a fresh tag is cached.
    fn cached_digest(&self, context: &RequestContext) -> Option<Digest> {
        match context.reference.version() {
            Version::Digest(digest) => Some(digest.clone()),
            Version::Tag(_) => {
                let (name, ttl) = (context.reference.to_string(), self.ttl(context));
                match self.caches.tag(&name, &context.cache_scopes(), ttl)? {
                    CachedTag::Fresh(digest) => Some(digest),
                    CachedTag::Stale(..) => None,
                }
            }
        }
    }

    /// Tag and summary from memory, if both are cached.
    fn cached(&self, context: &RequestContext) -> Option<(ResolvedDigest, Arc<ImageSummary>)> {
        let digest = self.cached_digest(context)?;
        let summary = self.cached_summary(context, &digest)?;
        if let Version::Tag(_) = context.reference.version() {
            trace::cached("tag", &context.reference, &digest);
        }
        Some((ResolvedDigest::known(digest), summary))
    }

    fn cached_summary(
        &self,
        context: &RequestContext,
        digest: &Digest,
    ) -> Option<Arc<ImageSummary>> {
        let Some(mut known) = self.caches.summary(digest, context.summary_scope()) else {
            let name = context.reference.name();
            let partial = self
                .caches
                .partial(digest, &name, &context.fingerprints())?;
            trace::cached("platforms", digest, "incomplete");
            return Some(partial);
        };
        trace::cached("platforms", digest, "held");
        // Content in containerd expires some days after its last touch, so content in use is
        // touched once a day.
        if let Some(store) = self.store()
            && known.last_touched != Store::today()
        {
            known.last_touched = Store::today();
            store.touch(digest);
            self.caches
                .store_summary(digest, context.summary_scope(), known.clone());
        }
        Some(known.summary)
    }
}
