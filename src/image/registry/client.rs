//! The registry client. Requests are bounded in time, size and number.

use std::{path::PathBuf, sync::Arc, time::Duration};

use backon::{ExponentialBuilder, Retryable};
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header::CONTENT_TYPE};

use crate::{
    image::{
        credentials::{Credential, Fingerprint},
        digest::{Digest, DigestError},
        error::ImageError,
        reference::Reference,
        summary::DocumentKind,
    },
    platform::MAX_DOCUMENT,
};

use super::{
    auth::{Authorization, AuthorizationCache, HttpContext, TokenKey},
    challenge::Challenge,
    exchange::{Clients, HttpResponse, Limits, exchange},
    host_limiter::{HostLimiters, Quota},
    hosts::{Host, Hosts, Role},
    request::{RegistryRequest, status_error},
};

/// Retries of a request that the registry answered with 5xx.
const SERVER_ERROR_RETRIES: usize = 2;

/// Settings of the registry client.
#[derive(Clone, Debug, Default)]
pub struct RegistryClient {
    /// Timeout of one request, including its body.
    pub timeout: Duration,
    /// Maximum number of concurrent requests per host.
    pub per_host: usize,
    /// Hosts (`host[:port]`) that use plain HTTP; loopback does by default.
    pub plain_http: Vec<String>,
    /// Directories with containerd's `hosts.toml` files.
    pub hosts_directories: Vec<PathBuf>,
    /// Certificate authorities in addition to the system's, PEM.
    pub ca_bundle: Option<PathBuf>,
    /// Whether mirrors get the credentials of the registry that they mirror.
    pub mirror_credentials: bool,
}

pub(crate) struct Registry {
    mirror_credentials: bool,
    hosts: Hosts,
    http: HttpContext,
    authorizations: Arc<AuthorizationCache>,
}

/// A successful response.
#[derive(Debug)]
pub(crate) struct RegistryResponse {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The credential that was needed; `None` if the document is public.
    pub(crate) credential: Option<Fingerprint>,
}

/// What a tag points at.
pub(crate) enum Head {
    /// The registry returned the digest.
    Digest(Digest, Option<Fingerprint>),
    /// The registry returned no digest, so the document was fetched.
    Document(Digest, RegistryResponse),
}

impl RegistryResponse {
    pub(crate) fn content_type(&self) -> Option<&str> {
        self.headers.get(CONTENT_TYPE)?.to_str().ok()
    }

    /// `Docker-Content-Digest`; some proxies omit it.
    fn digest(&self) -> Option<Result<Digest, DigestError>> {
        let said = self.headers.get("docker-content-digest")?.to_str().ok()?;
        Some(said.parse())
    }
}

impl Registry {
    pub(crate) fn new(settings: RegistryClient) -> Self {
        let clients = Clients::new(settings.timeout, settings.per_host);
        Self {
            hosts: Hosts::new(&settings),
            mirror_credentials: settings.mirror_credentials,
            http: HttpContext {
                clients: Arc::new(clients),
                limiters: Arc::new(HostLimiters::new(settings.per_host)),
            },
            authorizations: Arc::new(AuthorizationCache::new()),
        }
    }

    /// Number of hosts that get no requests from at least one principal at the moment.
    pub(crate) fn paused_hosts(&self) -> usize {
        self.http.limiters.paused_hosts()
    }

    /// Rate limits as hosts last reported them.
    pub(crate) fn quotas(&self) -> Vec<(String, Quota)> {
        self.http.limiters.quotas()
    }

    /// Gets the digest of a tag by HEAD, which registries with pull limits do not count.
    pub(crate) async fn head(
        &self,
        reference: &Reference,
        tag: &str,
        credentials: &[Credential],
    ) -> Result<Head, ImageError> {
        let path = format!("manifests/{tag}");
        let hosts = self.hosts.for_reference(reference).await?;
        let mut failed = None;
        for host in hosts.iter().filter(|host| host.pulls && host.resolves) {
            if host.role == Role::Fallback && failed.as_ref().is_some_and(ImageError::is_answer) {
                continue;
            }
            let credentials = self.effective_credentials(host, credentials);
            match self.head_at(host, reference, &path, credentials).await {
                Ok(head) => return Ok(head),
                Err(error) => failed = Some(combine_errors(host, failed, error)),
            }
        }
        Err(failed.unwrap_or_else(|| no_usable_host(reference)))
    }

    /// Gets a document by digest, at most 4 MiB.
    pub(crate) async fn get(
        &self,
        reference: &Reference,
        kind: DocumentKind,
        digest: &Digest,
        credentials: &[Credential],
    ) -> Result<RegistryResponse, ImageError> {
        let path = match kind {
            DocumentKind::Manifest => format!("manifests/{digest}"),
            DocumentKind::Config => format!("blobs/{digest}"),
        };
        let request = RegistryRequest {
            method: Method::GET,
            repository: reference.repository(),
            path: &path,
            manifest: kind == DocumentKind::Manifest,
        };
        let hosts = self.hosts.for_reference(reference).await?;
        let mut failed = None;
        for host in hosts.iter().filter(|host| host.pulls) {
            if host.role == Role::Fallback && failed.as_ref().is_some_and(ImageError::is_answer) {
                continue;
            }
            let credentials = self.effective_credentials(host, credentials);
            match self.request(host, &request, credentials).await {
                // A mirror that returns other content is treated as one that does not have the document.
                Ok(answer) if !digest.verify(&answer.body) => {
                    let what = format!("{} {digest}", kind.as_str());
                    let why = "its content has another digest".to_owned();
                    let error = ImageError::Corrupt { what, why };
                    failed = Some(combine_errors(host, failed, error));
                }
                Ok(answer) => return Ok(answer),
                Err(error) => failed = Some(combine_errors(host, failed, error)),
            }
        }
        Err(failed.unwrap_or_else(|| no_usable_host(reference)))
    }

    /// The credentials for a host. Mirrors get none, unless `mirrorCredentials` is set.
    fn effective_credentials<'a>(
        &self,
        host: &Host,
        credentials: &'a [Credential],
    ) -> &'a [Credential] {
        if host.role == Role::Origin || self.mirror_credentials {
            credentials
        } else {
            &[]
        }
    }

    async fn head_at(
        &self,
        host: &Host,
        reference: &Reference,
        path: &str,
        credentials: &[Credential],
    ) -> Result<Head, ImageError> {
        let mut request = RegistryRequest {
            method: Method::HEAD,
            repository: reference.repository(),
            path,
            manifest: true,
        };
        match self.request(host, &request, credentials).await {
            Err(ImageError::MethodRefused { .. }) => {}
            Err(error) => return Err(error),
            Ok(answer) => {
                if let Some(Ok(digest)) = answer.digest() {
                    return Ok(Head::Digest(digest, answer.credential));
                }
            }
        }
        request.method = Method::GET;
        let answer = self.request(host, &request, credentials).await?;
        match answer.digest() {
            Some(Ok(said)) if !said.verify(&answer.body) => Err(ImageError::Corrupt {
                what: reference.to_string(),
                why: "its content is not what Docker-Content-Digest says".to_owned(),
            }),
            _ => Ok(Head::Document(Digest::sha256(&answer.body), answer)),
        }
    }

    /// Tries each credential until one works. Anonymous access is tried only if there is no credential, as the
    /// kubelet does.
    async fn request(
        &self,
        host: &Host,
        request: &RegistryRequest<'_>,
        credentials: &[Credential],
    ) -> Result<RegistryResponse, ImageError> {
        let mut failed: Option<ImageError> = None;
        for credential in credentials {
            match self
                .request_as(host, request, credential.authenticated())
                .await
            {
                // A limited or invalid account does not affect the next one.
                Err(error) if error.is_answer() => {
                    failed =
                        Some(failed.map_or(error.clone(), |before| prefer_error(before, error)));
                }
                other => return other,
            }
        }
        match failed {
            Some(error) => Err(error),
            None => self.request_as(host, request, None).await,
        }
    }

    async fn request_as(
        &self,
        host: &Host,
        request: &RegistryRequest<'_>,
        credential: Option<&Credential>,
    ) -> Result<RegistryResponse, ImageError> {
        let what = request.describe(host);
        let token_key = TokenKey {
            endpoint: host.endpoint.clone(),
            repository: request.repository.to_owned(),
            credential: credential.map(Credential::fingerprint),
        };
        let mut authorization = self.authorizations.cached(&token_key);
        // At most three attempts: the first may use an expired token, the second gets the challenge for a new one.
        for attempt in 0..3 {
            let answer = self.send(host, request, &token_key, authorization.as_ref());
            let HttpResponse {
                status,
                headers,
                body,
            } = answer.await?;
            if status == StatusCode::UNAUTHORIZED && attempt < 2 {
                if let Some(refused) = authorization.take() {
                    self.authorizations.forget(&token_key, &refused);
                    if attempt > 0 {
                        break;
                    }
                }
                let challenge = Challenge::choose(&headers).ok_or_else(|| ImageError::Denied {
                    what: what.clone(),
                    why: "its WWW-Authenticate header has neither Basic nor Bearer with a realm"
                        .to_owned(),
                })?;
                let answered = self.authorizations.answer_challenge(
                    &self.http,
                    host,
                    token_key.clone(),
                    challenge,
                    credential.cloned(),
                );
                authorization = Some(answered.await?);
                continue;
            }
            if status.is_success() {
                let used = authorization
                    .is_some()
                    .then_some(token_key.credential)
                    .flatten();
                return Ok(RegistryResponse {
                    headers,
                    body,
                    credential: used,
                });
            }
            return Err(status_error(status, what));
        }
        Err(status_error(StatusCode::UNAUTHORIZED, what))
    }

    /// Sends a request, and repeats it after 5xx.
    async fn send(
        &self,
        host: &Host,
        request: &RegistryRequest<'_>,
        token_key: &TokenKey,
        authorization: Option<&Authorization>,
    ) -> Result<HttpResponse, ImageError> {
        let pause = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_times(SERVER_ERROR_RETRIES)
            .with_jitter();
        let once = || async {
            let answer = self.exchange(host, request, token_key, authorization).await;
            let answer = answer.map_err(|error| (error, false))?;
            if answer.status.is_server_error() && answer.status != StatusCode::NOT_IMPLEMENTED {
                Err((status_error(answer.status, request.describe(host)), true))
            } else {
                Ok(answer)
            }
        };
        let result = once.retry(pause).when(|(_, again)| *again).await;
        result.map_err(|(error, _)| error)
    }

    async fn exchange(
        &self,
        host: &Host,
        request: &RegistryRequest<'_>,
        token_key: &TokenKey,
        authorization: Option<&Authorization>,
    ) -> Result<HttpResponse, ImageError> {
        let HttpContext { clients, limiters } = &self.http;
        let what = request.describe(host);
        let call = request.http_request(host, authorization).ok_or_else(|| {
            ImageError::unavailable(&what, "its address cannot be written as a URL")
        })?;
        let limiter = limiters.host(host.endpoint.host());
        // A silent mirror must leave time for the registry itself.
        let share = if host.role == Role::Origin { 1 } else { 2 };
        let limits = Limits {
            time: clients.timeout() / share,
            body: MAX_DOCUMENT,
        };
        exchange(clients, &limiter, token_key.credential, &what, call, limits).await
    }
}

fn no_usable_host(reference: &Reference) -> ImageError {
    let why = "hosts.toml allows no host for this request";
    ImageError::unavailable(reference.registry(), why)
}

/// Combines the errors of hosts that were tried one after the other.
fn combine_errors(host: &Host, before: Option<ImageError>, error: ImageError) -> ImageError {
    if host.role != Role::Origin {
        let (mirror, error) = (host.endpoint.host(), error.chain());
        tracing::debug!(mirror, error, "mirror failed; trying the next host");
    }
    match (before, error) {
        // The user needs to see the errors of mirrors too.
        (
            Some(before),
            ImageError::Unavailable {
                what,
                why,
                answered,
                source,
            },
        ) if before.is_answer() => {
            let why = format!("{why}; earlier: {}", before.chain());
            let error = ImageError::Unavailable {
                what,
                why,
                answered,
                source,
            };
            prefer_error(before, error)
        }
        (Some(before), error) => prefer_error(before, error),
        (None, error) => error,
    }
}

/// The error to report: the later one, because the registry itself is asked last. Rate limits are preferred because
/// they are transient and a retry may succeed.
fn prefer_error(first: ImageError, second: ImageError) -> ImageError {
    if matches!(first, ImageError::RateLimited { .. }) {
        first
    } else {
        second
    }
}
