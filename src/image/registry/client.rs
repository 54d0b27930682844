//! Requests to a registry: bounded in time, size and number, with what the registry wants to see.

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
        tree::Kind,
    },
    platform::MAX_DOCUMENT,
};

use super::{
    auth::{Asking, Authorization, Authorizations, Slot},
    challenge::Challenge,
    exchange::{Clients, HttpAnswer, Limits, exchange},
    gate::{Gates, Quota},
    hosts::{Host, Hosts, Role},
    question::{Question, refusal},
};

/// Further tries of a request that the registry answered with 5xx.
const SERVER_ERROR_RETRIES: usize = 2;

/// How to talk to registries.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// Of one request, its body included.
    pub timeout: Duration,
    /// Requests under way to one host.
    pub per_host: usize,
    /// Hosts (`host[:port]`) that speak plain http, besides loopback.
    pub plain_http: Vec<String>,
    /// Trees of containerd's `hosts.toml` files.
    pub hosts_directories: Vec<PathBuf>,
    /// Certificate authorities beside the system's, PEM.
    pub ca_bundle: Option<PathBuf>,
    /// Whether mirrors are shown the credentials of the registry that they mirror.
    pub mirror_credentials: bool,
}

pub(crate) struct Registry {
    mirror_credentials: bool,
    hosts: Hosts,
    asking: Asking,
    authorizations: Arc<Authorizations>,
}

/// A successful response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// The credential that was needed; `None` when anybody would have got this answer.
    pub(crate) credential: Option<Fingerprint>,
}

/// What a tag points at.
pub(crate) enum Head {
    /// The registry named the digest.
    Digest(Digest, Option<Fingerprint>),
    /// It did not, so the document itself was fetched.
    Document(Digest, Answer),
}

impl Answer {
    pub(crate) fn content_type(&self) -> Option<&str> {
        self.headers.get(CONTENT_TYPE)?.to_str().ok()
    }

    /// `Docker-Content-Digest`, which proxies sometimes leave out.
    fn digest(&self) -> Option<Result<Digest, DigestError>> {
        let said = self.headers.get("docker-content-digest")?.to_str().ok()?;
        Some(said.parse())
    }
}

impl Registry {
    pub(crate) fn new(settings: Settings) -> Self {
        let clients = Clients::new(settings.timeout, settings.per_host);
        Self {
            hosts: Hosts::new(&settings),
            mirror_credentials: settings.mirror_credentials,
            asking: Asking {
                clients: Arc::new(clients),
                gates: Arc::new(Gates::new(settings.per_host)),
            },
            authorizations: Arc::new(Authorizations::new()),
        }
    }

    /// Hosts that somebody is kept from asking at the moment.
    pub(crate) fn gated(&self) -> usize {
        self.asking.gates.closed()
    }

    /// What registries said of their limits.
    pub(crate) fn quotas(&self) -> Vec<(String, Quota)> {
        self.asking.gates.quotas()
    }

    /// The digest of a tag, by HEAD: registries with pull limits do not count those.
    pub(crate) async fn head(
        &self,
        reference: &Reference,
        tag: &str,
        credentials: &[Credential],
    ) -> Result<Head, ImageError> {
        let path = format!("manifests/{tag}");
        let hosts = self.hosts.of(reference).await?;
        let mut failed = None;
        for host in hosts.iter().filter(|host| host.pulls && host.resolves) {
            if host.role == Role::Fallback && failed.as_ref().is_some_and(ImageError::is_answer) {
                continue;
            }
            let credentials = self.shown(host, credentials);
            match self.head_at(host, reference, &path, credentials).await {
                Ok(head) => return Ok(head),
                Err(error) => failed = Some(failed_at(host, failed, error)),
            }
        }
        Err(failed.unwrap_or_else(|| none_suits(reference)))
    }

    /// A document by digest, at most 4 MiB.
    pub(crate) async fn get(
        &self,
        reference: &Reference,
        kind: Kind,
        digest: &Digest,
        credentials: &[Credential],
    ) -> Result<Answer, ImageError> {
        let path = match kind {
            Kind::Manifest => format!("manifests/{digest}"),
            Kind::Config => format!("blobs/{digest}"),
        };
        let question = Question {
            method: Method::GET,
            repository: reference.repository(),
            path: &path,
            manifest: kind == Kind::Manifest,
        };
        let hosts = self.hosts.of(reference).await?;
        let mut failed = None;
        for host in hosts.iter().filter(|host| host.pulls) {
            if host.role == Role::Fallback && failed.as_ref().is_some_and(ImageError::is_answer) {
                continue;
            }
            let credentials = self.shown(host, credentials);
            match self.ask(host, &question, credentials).await {
                // A mirror that holds something else is as good as one that holds nothing.
                Ok(answer) if !digest.verify(&answer.body) => {
                    let what = format!("{} {digest}", kind.as_str());
                    let why = "its content has another digest".to_owned();
                    let error = ImageError::Corrupt { what, why };
                    failed = Some(failed_at(host, failed, error));
                }
                Ok(answer) => return Ok(answer),
                Err(error) => failed = Some(failed_at(host, failed, error)),
            }
        }
        Err(failed.unwrap_or_else(|| none_suits(reference)))
    }

    /// Mirrors are other people's machines: they see no credential unless the operator says so.
    fn shown<'a>(&self, host: &Host, credentials: &'a [Credential]) -> &'a [Credential] {
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
        let mut question = Question {
            method: Method::HEAD,
            repository: reference.repository(),
            path,
            manifest: true,
        };
        match self.ask(host, &question, credentials).await {
            Err(ImageError::MethodRefused { .. }) => {}
            Err(error) => return Err(error),
            Ok(answer) => {
                if let Some(Ok(digest)) = answer.digest() {
                    return Ok(Head::Digest(digest, answer.credential));
                }
            }
        }
        question.method = Method::GET;
        let answer = self.ask(host, &question, credentials).await?;
        match answer.digest() {
            Some(Ok(said)) if !said.verify(&answer.body) => Err(ImageError::Corrupt {
                what: reference.to_string(),
                why: "its content is not what Docker-Content-Digest says".to_owned(),
            }),
            _ => Ok(Head::Document(Digest::of(&answer.body), answer)),
        }
    }

    /// Tries each credential until one works; anonymous only when there is none, as the kubelet does.
    async fn ask(
        &self,
        host: &Host,
        question: &Question<'_>,
        credentials: &[Credential],
    ) -> Result<Answer, ImageError> {
        let mut failed: Option<ImageError> = None;
        for credential in credentials {
            match self.ask_as(host, question, credential.shown()).await {
                // An account that is limited, refused or unknown says nothing of the next one.
                Err(error) if error.is_answer() => {
                    failed = Some(failed.map_or(error.clone(), |before| telling(before, error)));
                }
                other => return other,
            }
        }
        match failed {
            Some(error) => Err(error),
            None => self.ask_as(host, question, None).await,
        }
    }

    async fn ask_as(
        &self,
        host: &Host,
        question: &Question<'_>,
        credential: Option<&Credential>,
    ) -> Result<Answer, ImageError> {
        let what = question.on(host);
        let slot = Slot {
            endpoint: host.endpoint.clone(),
            repository: question.repository.to_owned(),
            credential: credential.map(Credential::fingerprint),
        };
        let mut authorization = self.authorizations.known(&slot);
        // Three times: a token that has died early is refused once, its successor's challenge answered.
        for attempt in 0..3 {
            let answer = self.send(host, question, &slot, authorization.as_ref());
            let HttpAnswer {
                status,
                headers,
                body,
            } = answer.await?;
            if status == StatusCode::UNAUTHORIZED && attempt < 2 {
                if let Some(refused) = authorization.take() {
                    self.authorizations.forget(&slot, &refused);
                    if attempt > 0 {
                        break;
                    }
                }
                let challenge = Challenge::choose(&headers).ok_or_else(|| ImageError::Denied {
                    what: what.clone(),
                    why: "its challenge cannot be answered".to_owned(),
                })?;
                let answered = self.authorizations.answer(
                    &self.asking,
                    host,
                    slot.clone(),
                    challenge,
                    credential.cloned(),
                );
                authorization = Some(answered.await?);
                continue;
            }
            if status.is_success() {
                let used = authorization.is_some().then_some(slot.credential).flatten();
                return Ok(Answer {
                    headers,
                    body,
                    credential: used,
                });
            }
            return Err(refusal(status, what));
        }
        Err(refusal(StatusCode::UNAUTHORIZED, what))
    }

    /// One exchange, repeated when the registry fails with 5xx.
    async fn send(
        &self,
        host: &Host,
        question: &Question<'_>,
        slot: &Slot,
        authorization: Option<&Authorization>,
    ) -> Result<HttpAnswer, ImageError> {
        let pause = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_times(SERVER_ERROR_RETRIES)
            .with_jitter();
        let once = || async {
            let answer = self.exchange(host, question, slot, authorization).await;
            let answer = answer.map_err(|error| (error, false))?;
            if answer.status.is_server_error() && answer.status != StatusCode::NOT_IMPLEMENTED {
                Err((refusal(answer.status, question.on(host)), true))
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
        question: &Question<'_>,
        slot: &Slot,
        authorization: Option<&Authorization>,
    ) -> Result<HttpAnswer, ImageError> {
        let Asking { clients, gates } = &self.asking;
        let what = question.on(host);
        let call = question.call(host, authorization).ok_or_else(|| {
            ImageError::unavailable(&what, "its address cannot be written as a URL")
        })?;
        let gate = gates.host(host.endpoint.host());
        // Mirrors that are silent must leave time for the registry itself.
        let share = if host.role == Role::Origin { 1 } else { 2 };
        let limits = Limits {
            time: clients.timeout() / share,
            body: MAX_DOCUMENT,
        };
        exchange(clients, &gate, slot.credential, &what, call, limits).await
    }
}

fn none_suits(reference: &Reference) -> ImageError {
    let why = "hosts.toml names no host that may answer this";
    ImageError::unavailable(reference.registry(), why)
}

/// The next host is asked, whatever went wrong.
fn failed_at(host: &Host, before: Option<ImageError>, error: ImageError) -> ImageError {
    if host.role != Role::Origin {
        let (mirror, error) = (host.endpoint.host(), error.chain());
        tracing::debug!(mirror, error, "the mirror does not help");
    }
    match (before, error) {
        // Who looks for the reason has to know what the mirrors said, too.
        (
            Some(before),
            ImageError::Unavailable {
                what,
                why,
                answered,
                source,
            },
        ) if before.is_answer() => {
            let why = format!("{why}; before that: {}", before.chain());
            let error = ImageError::Unavailable {
                what,
                why,
                answered,
                source,
            };
            telling(before, error)
        }
        (Some(before), error) => telling(before, error),
        (None, error) => error,
    }
}

/// The one of two errors that counts: the later one, because the registry itself is asked last; but a limit
/// ends by itself, and then there is more to be known.
fn telling(first: ImageError, second: ImageError) -> ImageError {
    if matches!(first, ImageError::RateLimited { .. }) {
        first
    } else {
        second
    }
}
