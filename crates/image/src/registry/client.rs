//! The registry client. Requests are bounded in time, size and number.

mod referrers;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use backon::{ExponentialBuilder, Retryable};
use bytes::Bytes;
use http::{
    HeaderMap, Method, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE},
};
use reqwest::Url;

use crate::{
    credentials::{Credential, Fingerprint},
    digest::{Digest, DigestError},
    error::ImageError,
    reference::Reference,
    summary::DocumentKind,
};
use archaware_platform::MAX_DOCUMENT;

use super::{
    auth::{Authorization, AuthorizationCache, Challenged, TokenKey},
    challenge::Challenge,
    exchange::{Http, HttpRequest, HttpResponse, Limits},
    exchange_error::speaks_no_tls,
    host_limiter::Quota,
    hosts::{Endpoint, Host, Hosts, Role},
    request::{RegistryRequest, status_error},
    settings::RegistryClient,
    token_endpoint::TokenEndpoints,
};

/// Maximum number of challenges that archaware answers after a redirect: the first challenge, and a
/// second one if the cached token has expired.
const MAX_REDIRECTED_CHALLENGES: usize = 2;
/// Retries of a request that the registry answered with 5xx.
const SERVER_ERROR_RETRIES: usize = 2;

pub(crate) struct Registry {
    mirror_credentials: bool,
    hosts: Hosts,
    http: Http,
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
        let digest = self.headers.get("docker-content-digest")?.to_str().ok()?;
        Some(digest.parse())
    }
}

impl Registry {
    pub(crate) fn new(settings: RegistryClient) -> Self {
        let token_endpoints = TokenEndpoints::new(settings.token_endpoints.clone());
        let allowed = settings.allow_local_addresses.clone();
        Self {
            hosts: Hosts::new(&settings),
            mirror_credentials: settings.mirror_credentials,
            http: Http::new(settings.timeout, settings.per_host, allowed),
            authorizations: Arc::new(AuthorizationCache::new(token_endpoints)),
        }
    }

    /// Keeps the pause of a host that has delayed a tenant.
    pub(crate) fn keep_pause(&self, tenant: &str, host: &str) {
        self.http.limiters().keep(tenant, host);
    }

    /// Number of hosts that are paused for at least one principal.
    pub(crate) fn paused_hosts(&self) -> usize {
        self.http.limiters().paused_hosts()
    }

    /// Rate limits as hosts last reported them.
    pub(crate) fn quotas(&self) -> Vec<(String, Quota)> {
        self.http.limiters().quotas()
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
        let mut failed = Failed::default();
        for host in hosts.iter().filter(|host| host.pulls && host.resolves) {
            if failed.skips(host) {
                continue;
            }
            let credentials = self.effective_credentials(host, credentials);
            match self.head_at(host, reference, &path, credentials).await {
                Ok(head) => return Ok(head),
                Err(error) => failed.add(host, error),
            }
        }
        Err(failed.into_error(reference))
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
            DocumentKind::Config | DocumentKind::Layer => format!("blobs/{digest}"),
        };
        let request = RegistryRequest {
            method: Method::GET,
            repository: reference.repository(),
            path: &path,
            manifest: kind == DocumentKind::Manifest,
        };
        let hosts = self.hosts.for_reference(reference).await?;
        let mut failed = Failed::default();
        for host in hosts.iter().filter(|host| host.pulls) {
            if failed.skips(host) {
                continue;
            }
            let credentials = self.effective_credentials(host, credentials);
            match self.request(host, &request, credentials).await {
                // A mirror that returns other content is treated as one that does not have the
                // document.
                Ok(answer) if !digest.verify(&answer.body) => {
                    let what = format!("{} {digest}", kind.as_str());
                    let why = "its content has another digest".to_owned();
                    failed.add(host, ImageError::Corrupt { what, why });
                }
                Ok(answer) => return Ok(answer),
                Err(error) => failed.add(host, error),
            }
        }
        Err(failed.into_error(reference))
    }

    /// The hosts of a reference, in the order of their use.
    pub(super) async fn hosts_of(&self, reference: &Reference) -> Result<Arc<[Host]>, ImageError> {
        self.hosts.for_reference(reference).await
    }

    /// The credentials for a host. Mirrors get none, unless `mirrorCredentials` is set.
    pub(super) fn effective_credentials<'a>(
        &self,
        host: &Host,
        credentials: &'a [Credential],
    ) -> &'a [Credential] {
        match host.role {
            Role::Origin => credentials,
            Role::Mirror if self.mirror_credentials => credentials,
            Role::Mirror | Role::Fallback => &[],
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
            Some(Ok(digest)) if !digest.verify(&answer.body) => Err(ImageError::Corrupt {
                what: reference.to_string(),
                why: "its content is not what Docker-Content-Digest says".to_owned(),
            }),
            _ => Ok(Head::Document(Digest::sha256(&answer.body), answer)),
        }
    }

    /// Tries each credential until one works. Anonymous access is tried only if there is no
    /// credential, as the kubelet does.
    pub(super) async fn request(
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
            repository: host.rewrites.apply(request.repository).into_owned(),
            credential: credential.map(Credential::fingerprint),
        };
        let mut authorization = self.authorizations.cached(&token_key);
        let sender = Sender {
            http: &self.http,
            host,
            request,
            principal: token_key.credential,
            sent: AtomicU32::new(0),
        };
        // The first attempt may use a cached token that has expired. The second attempt uses the
        // authorization that answers the challenge of the first one.
        for attempt in 0..2 {
            let mut answer = sender.send(authorization.as_ref()).await?;
            if answer.status == StatusCode::UNAUTHORIZED && !host.endpoint.is_at(&answer.url) {
                answer = self.answer_redirected(&sender, answer).await?;
            } else if answer.status == StatusCode::UNAUTHORIZED {
                if let Some(refused) = authorization.take() {
                    self.authorizations.forget(&token_key, &refused);
                    if attempt > 0 {
                        break;
                    }
                }
                let challenged = Challenged {
                    token_key: token_key.clone(),
                    transport: &host.transport,
                    check: host.check,
                    headers: &host.headers,
                    credential,
                };
                authorization = Some(self.answer_challenge(challenged, &what, &answer).await?);
                continue;
            }
            if answer.status.is_success() {
                let used = authorization
                    .is_some()
                    .then_some(token_key.credential)
                    .flatten();
                return Ok(RegistryResponse {
                    headers: answer.headers,
                    body: answer.body,
                    credential: used,
                });
            }
            return Err(status_error(answer.status, what));
        }
        Err(status_error(StatusCode::UNAUTHORIZED, what))
    }

    async fn answer_challenge(
        &self,
        challenged: Challenged<'_>,
        what: &str,
        answer: &HttpResponse,
    ) -> Result<Authorization, ImageError> {
        let challenge = Challenge::choose(&answer.headers).ok_or_else(|| ImageError::Denied {
            what: what.to_owned(),
            why: "the registry asked for authentication, but its WWW-Authenticate header has neither Basic nor Bearer with a realm".to_owned(),
        })?;
        let authorizations = &self.authorizations;
        authorizations
            .answer_challenge(&self.http, challenged, challenge)
            .await
    }

    /// Answers the challenge of a host that the registry redirected to. Answers it anonymously,
    /// because the registry's credentials must not be sent to that host.
    async fn answer_redirected(
        &self,
        sender: &Sender<'_>,
        mut answer: HttpResponse,
    ) -> Result<HttpResponse, ImageError> {
        for _ in 0..MAX_REDIRECTED_CHALLENGES {
            let request = sender.http_request(None)?;
            let mut request = request.redirected_to_host(answer.url.clone());
            let token_key = TokenKey {
                endpoint: Endpoint::new_base(&answer.url),
                repository: repository_of(&answer.url),
                credential: None,
            };
            let challenged = Challenged {
                token_key: token_key.clone(),
                transport: &request.transport,
                check: request.check,
                headers: &HeaderMap::new(),
                credential: None,
            };
            let what = format!("{}{}", token_key.endpoint.host(), answer.url.path());
            let authorization = self.answer_challenge(challenged, &what, &answer).await?;
            let header = authorization.header();
            request.origin_headers.insert(AUTHORIZATION, header);
            let requested_origin = request.url.origin();
            answer = sender.exchange(request).await?;
            if answer.status != StatusCode::UNAUTHORIZED {
                break;
            }
            if answer.url.origin() == requested_origin {
                // The token has expired, or does not suffice.
                self.authorizations.forget(&token_key, &authorization);
            }
        }
        Ok(answer)
    }
}

/// Sends one request to one host, if necessary repeatedly, and numbers the attempts.
struct Sender<'a> {
    http: &'a Http,
    host: &'a Host,
    request: &'a RegistryRequest<'a>,
    principal: Option<Fingerprint>,
    sent: AtomicU32,
}

impl Sender<'_> {
    /// Sends the request, and repeats it after 5xx.
    async fn send(
        &self,
        authorization: Option<&Authorization>,
    ) -> Result<HttpResponse, ImageError> {
        let pause = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_times(SERVER_ERROR_RETRIES)
            .with_jitter();
        let once = || async {
            let request = self.http_request(authorization);
            let request = request.map_err(|error| (error, false))?;
            let answer = self.exchange(request).await;
            let answer = answer.map_err(|error| (error, false))?;
            if answer.status.is_server_error() && answer.status != StatusCode::NOT_IMPLEMENTED {
                let what = self.request.describe(self.host);
                Err((status_error(answer.status, what), true))
            } else {
                Ok(answer)
            }
        };
        let result = once.retry(pause).when(|(_, again)| *again).await;
        result.map_err(|(error, _)| error)
    }

    fn http_request(
        &self,
        authorization: Option<&Authorization>,
    ) -> Result<HttpRequest, ImageError> {
        let attempt = self.sent.fetch_add(1, Ordering::Relaxed) + 1;
        let request = self.request.http_request(self.host, authorization, attempt);
        request.ok_or_else(|| {
            let what = self.request.describe(self.host);
            ImageError::unavailable(what, "its address cannot be written as a URL")
        })
    }

    async fn exchange(&self, request: HttpRequest) -> Result<HttpResponse, ImageError> {
        // A silent mirror must leave time for the registry itself.
        let share = if self.host.role == Role::Origin { 1 } else { 2 };
        let limits = Limits {
            time: self.http.timeout() / share,
            body: MAX_DOCUMENT,
        };
        let is_own = self.host.endpoint.is_at(&request.url);
        let principal = self.principal.filter(|_| is_own);
        let what = self.request.describe(self.host);
        self.http.exchange(principal, &what, request, limits).await
    }
}

/// The repository that a URL is about: the path between `/v2/` and `/manifests/` or `/blobs/`.
fn repository_of(url: &Url) -> String {
    let path = url.path().trim_start_matches('/');
    let path = path.strip_prefix("v2/").unwrap_or(path);
    let end = path.rfind("/manifests/").or_else(|| path.rfind("/blobs/"));
    let end = end.unwrap_or(path.len());
    path.get(..end).unwrap_or(path).to_owned()
}

/// The combined error of the hosts of a registry that failed so far.
#[derive(Default)]
pub(super) struct Failed {
    error: Option<ImageError>,
    /// Whether the last host that failed answered the TLS handshake without TLS.
    speaks_no_tls: bool,
}

impl Failed {
    /// Skips the plain HTTP fallback, unless the previous host speaks no TLS (containerd's
    /// `httpFallback`).
    pub(super) fn skips(&self, host: &Host) -> bool {
        host.role == Role::Fallback && !self.speaks_no_tls
    }

    pub(super) fn is_any(&self) -> bool {
        self.error.is_some()
    }

    pub(super) fn add(&mut self, host: &Host, error: ImageError) {
        self.speaks_no_tls = speaks_no_tls(&error);
        self.error = Some(combine_errors(host, self.error.take(), error));
    }

    pub(super) fn into_error(self, reference: &Reference) -> ImageError {
        self.error.unwrap_or_else(|| no_usable_host(reference))
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

/// The error to report: the later one, because the registry itself is asked last. Rate limits are
/// preferred because they are transient and a retry may succeed.
fn prefer_error(first: ImageError, second: ImageError) -> ImageError {
    if matches!(first, ImageError::RateLimited { .. }) {
        first
    } else {
        second
    }
}
