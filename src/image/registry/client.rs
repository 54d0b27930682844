//! Requests to a registry: bounded in time, size and number, with what the registry wants to see.

use std::{
    fmt::Write as _,
    future::Future,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use backon::{ExponentialBuilder, Retryable};
use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, Method, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER},
};

use crate::{
    image::{
        credentials::{Credential, Fingerprint},
        digest::Digest,
        error::ImageError,
        reference::Reference,
        tree::Kind,
    },
    platform::{MAX_DOCUMENT, media_type},
};

use super::{
    Endpoint,
    auth::{Authorization, Authorizations, Challenge, Slot, Tokens},
    gate::{DEFAULT_RETRY_AFTER, Gates, Host, LONGEST_RETRY_AFTER},
};

/// As containerd and Go's client do.
const MAX_REDIRECTS: usize = 10;
/// Further tries of a request that the registry answered with 5xx.
const SERVER_ERROR_RETRIES: usize = 2;
const USER_AGENT: &str = concat!("archaware/", env!("CARGO_PKG_VERSION"));

/// How to talk to registries.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Of one request, its body included.
    pub timeout: Duration,
    /// Requests under way to one host.
    pub per_host: usize,
    /// Hosts (`host[:port]`) that speak plain http, besides loopback.
    pub plain_http: Vec<String>,
}

/// The TLS client could not be set up.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot set up TLS for registries; are CA certificates installed?")]
pub struct TlsError(#[source] Arc<reqwest::Error>);

pub(crate) struct Registry {
    settings: Settings,
    /// Made at first use: reading the system's CA bundle costs time and memory.
    clients: Clients,
    gates: Gates,
    authorizations: Arc<Authorizations>,
}

/// What is asked of which repository, and as whom.
struct Question<'a> {
    method: Method,
    endpoint: &'a Endpoint,
    repository: &'a str,
    path: String,
    accept: Option<&'a str>,
    limit: u64,
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
}

impl Registry {
    pub(crate) fn new(settings: Settings) -> Self {
        let gates = Gates::new(settings.per_host);
        Self {
            clients: Clients {
                timeout: settings.timeout,
                per_host: settings.per_host,
                ..Clients::default()
            },
            settings,
            gates,
            authorizations: Arc::new(Authorizations::new()),
        }
    }

    /// The digest of a tag, by HEAD: registries with pull limits do not count those.
    pub(crate) async fn head(
        &self,
        reference: &Reference,
        tag: &str,
        credentials: &[Credential],
    ) -> Result<Head, ImageError> {
        let path = format!("manifests/{tag}");
        let head = self
            .ask(reference, Method::HEAD, &path, true, credentials)
            .await;
        let answer = match head {
            Err(ImageError::Unavailable { why, .. }) if why == METHOD_REFUSED => None,
            other => Some(other?),
        };
        let named = answer.as_ref().and_then(|answer| {
            let digest = answer
                .headers
                .get("docker-content-digest")?
                .to_str()
                .ok()?
                .parse()
                .ok()?;
            Some(Head::Digest(digest, answer.credential))
        });
        if let Some(named) = named {
            return Ok(named);
        }
        let answer = self
            .ask(reference, Method::GET, &path, true, credentials)
            .await?;
        let digest = Digest::of(&answer.body);
        let said = answer
            .headers
            .get("docker-content-digest")
            .and_then(|said| said.to_str().ok());
        if let Some(Ok(said)) = said.map(str::parse::<Digest>)
            && !said.verify(&answer.body)
        {
            let why = "its content is not what Docker-Content-Digest says".to_owned();
            return Err(ImageError::Corrupt {
                what: format!("{reference}"),
                why,
            });
        }
        Ok(Head::Document(digest, answer))
    }

    /// A document by digest, at most 4 MiB. Its content is not verified here.
    pub(crate) async fn get(
        &self,
        reference: &Reference,
        kind: Kind,
        digest: &Digest,
        credentials: &[Credential],
    ) -> Result<Answer, ImageError> {
        let (path, manifest) = match kind {
            Kind::Manifest => (format!("manifests/{digest}"), true),
            Kind::Config => (format!("blobs/{digest}"), false),
        };
        self.ask(reference, Method::GET, &path, manifest, credentials)
            .await
    }

    /// Tries each credential until one works; anonymous only when there is none, as the kubelet does.
    async fn ask(
        &self,
        reference: &Reference,
        method: Method,
        path: &str,
        manifest: bool,
        credentials: &[Credential],
    ) -> Result<Answer, ImageError> {
        let endpoint = Endpoint::of(reference, &self.settings.plain_http);
        let accept = media_type::MANIFESTS.join(", ");
        let question = Question {
            method,
            endpoint: &endpoint,
            repository: reference.repository(),
            path: path.to_owned(),
            accept: manifest.then_some(accept.as_str()),
            limit: MAX_DOCUMENT,
        };
        let mut denied = None;
        for credential in credentials {
            match self.ask_as(&question, Some(credential)).await {
                // Some registries hide what one may not see.
                Err(error @ (ImageError::Denied { .. } | ImageError::NotFound { .. })) => {
                    denied = Some(error);
                }
                other => return other,
            }
        }
        match denied {
            Some(error) => Err(error),
            None => self.ask_as(&question, None).await,
        }
    }

    async fn ask_as(
        &self,
        question: &Question<'_>,
        credential: Option<&Credential>,
    ) -> Result<Answer, ImageError> {
        let what = question.to_string();
        let slot = Slot {
            endpoint: question.endpoint.clone(),
            repository: question.repository.to_owned(),
            credential: credential.map(Credential::fingerprint),
        };
        let mut authorization = self.authorizations.known(&slot);
        // Three times: a token that has died early is refused once, its successor's challenge answered.
        for attempt in 0..3 {
            let response = self.send(question, &what, authorization.as_ref()).await?;
            let (status, headers, body) = response;
            if status == StatusCode::UNAUTHORIZED && attempt < 2 {
                if authorization.take().is_some() {
                    self.authorizations.forget(&slot);
                    if attempt > 0 {
                        break;
                    }
                }
                let challenge = Challenge::choose(&headers).ok_or_else(|| ImageError::Denied {
                    what: what.clone(),
                    why: "its challenge cannot be answered".to_owned(),
                })?;
                let tokens = Tokens {
                    clients: &self.clients,
                    gates: &self.gates,
                };
                let answered = self.authorizations.answer(
                    tokens,
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
        question: &Question<'_>,
        what: &str,
        authorization: Option<&Authorization>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), ImageError> {
        let pause = ExponentialBuilder::default()
            .with_min_delay(Duration::from_millis(100))
            .with_max_times(SERVER_ERROR_RETRIES)
            .with_jitter();
        let once = || async {
            let answer = self.exchange(question, what, authorization).await?;
            if answer.0.is_server_error() && answer.0 != StatusCode::NOT_IMPLEMENTED {
                Err(refusal(answer.0, what))
            } else {
                Ok(answer)
            }
        };
        let retried = |error: &ImageError| matches!(error, ImageError::Unavailable { source: None, why, .. } if why != NO_ANSWER);
        once.retry(pause).when(retried).await
    }

    async fn exchange(
        &self,
        question: &Question<'_>,
        what: &str,
        authorization: Option<&Authorization>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), ImageError> {
        let name = &question.endpoint.host;
        let url = format!(
            "{}{}/{}",
            question.endpoint.base(),
            question.repository,
            question.path
        );
        let mut request = self.clients.to(name)?.request(question.method.clone(), url);
        if let Some(accept) = question.accept {
            request = request.header(ACCEPT, accept);
        }
        if let Some(authorization) = authorization {
            request = authorization.apply(request);
        }
        let asked = async {
            let response = request.send().await?;
            let (status, headers) = (response.status(), response.headers().clone());
            // An error's body is for people; it is neither needed nor to be trusted.
            let wanted = question.method == Method::GET && status.is_success();
            let body = if wanted {
                read_body(what, response, question.limit).await?
            } else {
                Bytes::new()
            };
            Ok((status, headers, body))
        };
        exchange(
            &self.gates.host(name),
            name,
            what,
            self.settings.timeout,
            asked,
        )
        .await
    }
}

/// The connections: one set for this machine's own registries, one for the world.
#[derive(Default)]
pub(super) struct Clients {
    timeout: Duration,
    per_host: usize,
    world: OnceLock<Result<reqwest::Client, TlsError>>,
    loopback: OnceLock<Result<reqwest::Client, TlsError>>,
}

impl Clients {
    /// For a URL's host. No proxy is asked about loopback, as in Go, and no CA is needed there.
    pub(super) fn to(&self, host: &str) -> Result<reqwest::Client, ImageError> {
        let loopback = super::is_loopback(host);
        let cell = if loopback {
            &self.loopback
        } else {
            &self.world
        };
        cell.get_or_init(|| {
            let builder = reqwest::Client::builder()
                .user_agent(USER_AGENT)
                .referer(false)
                .pool_idle_timeout(Duration::from_mins(1))
                .pool_max_idle_per_host(self.per_host)
                .redirect(reqwest::redirect::Policy::custom(redirect));
            let builder = if loopback {
                builder.no_proxy().tls_certs_only([])
            } else {
                builder
            };
            builder.build().map_err(|error| TlsError(Arc::new(error)))
        })
        .clone()
        .map_err(|error| ImageError::Unavailable {
            what: host.to_owned(),
            why: "no TLS".to_owned(),
            source: Some(Arc::new(error)),
        })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }
}

/// Not for ever, and never from https into the clear.
fn redirect(attempt: reqwest::redirect::Attempt<'_>) -> reqwest::redirect::Action {
    let secure = attempt
        .previous()
        .last()
        .is_some_and(|url| url.scheme() == "https");
    if attempt.previous().len() > MAX_REDIRECTS {
        attempt.error("too many redirects")
    } else if secure && attempt.url().scheme() != "https" {
        attempt.error("a redirect from https to http")
    } else {
        attempt.follow()
    }
}

/// How an exchange failed.
pub(super) enum Broken {
    Transport(reqwest::Error),
    Other(ImageError),
}

impl From<reqwest::Error> for Broken {
    fn from(error: reqwest::Error) -> Self {
        Self::Transport(error)
    }
}

/// One exchange with a host: a slot for it, a total timeout (a body that trickles never ends by itself),
/// and what the outcome says about the host.
pub(super) async fn exchange<T>(
    host: &Host,
    name: &str,
    what: &str,
    timeout: Duration,
    exchange: impl Future<Output = Result<(StatusCode, HeaderMap, T), Broken>>,
) -> Result<(StatusCode, HeaderMap, T), ImageError> {
    let _slot = host.enter(name).await?;
    let answer = match tokio::time::timeout(timeout, exchange).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Broken::Transport(error))) => {
            if error.is_timeout() {
                host.timed_out();
            }
            return Err(transport(what, error));
        }
        Ok(Err(Broken::Other(error))) => return Err(error),
        Err(_) => {
            host.timed_out();
            return Err(ImageError::unavailable(what, NO_ANSWER));
        }
    };
    host.answered();
    let (status, headers, _) = &answer;
    let limited = *status == StatusCode::TOO_MANY_REQUESTS;
    let overloaded =
        *status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key(RETRY_AFTER);
    if limited || overloaded {
        let retry_after = retry_after(headers, SystemTime::now());
        host.close(retry_after, limited);
        let host = name.to_owned();
        return Err(if limited {
            ImageError::RateLimited { host, retry_after }
        } else {
            ImageError::Gated { host, retry_after }
        });
    }
    Ok(answer)
}

const METHOD_REFUSED: &str = "it does not answer HEAD";
const NO_ANSWER: &str = "no answer in time";

impl std::fmt::Display for Question<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}/{}/{}",
            self.endpoint.host, self.repository, self.path
        )
    }
}

fn refusal(status: StatusCode, what: impl Into<String>) -> ImageError {
    let what = what.into();
    match status {
        StatusCode::NOT_FOUND | StatusCode::GONE => ImageError::NotFound { what },
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ImageError::Denied {
            what,
            why: format!("the registry answered {status}"),
        },
        StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => {
            ImageError::unavailable(what, METHOD_REFUSED)
        }
        status => ImageError::unavailable(what, format!("the registry answered {status}")),
    }
}

/// Reads a whole body, unpacked, and stops at the limit instead of filling the memory.
pub(super) async fn read_body(
    what: &str,
    mut response: reqwest::Response,
    limit: u64,
) -> Result<Bytes, Broken> {
    let too_large = |size| Err(Broken::Other(ImageError::too_large(what, size)));
    if let Some(length) = response.content_length().filter(|length| *length > limit) {
        return too_large(length);
    }
    let mut body = BytesMut::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() as u64 > limit {
            return too_large(body.len() as u64);
        }
    }
    Ok(body.freeze())
}

/// Addresses in errors are the ones archaware asked for: a redirect's may carry a signature.
fn transport(what: &str, error: reqwest::Error) -> ImageError {
    let mut why = String::from(if error.is_redirect() {
        "too many redirects"
    } else if error.is_connect() {
        "no connection"
    } else if error.is_body() || error.is_decode() {
        "its answer was cut short"
    } else {
        "the request failed"
    });
    if error.is_timeout() {
        let _ = write!(why, " in time");
    }
    let source = Some(Arc::new(error.without_url()) as _);
    ImageError::Unavailable {
        what: what.to_owned(),
        why,
        source,
    }
}

/// Seconds or a date (RFC 9110, 10.2.3).
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Duration {
    let text = headers
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let seconds = text.trim().parse().ok().map(Duration::from_secs);
    let date = || {
        httpdate::parse_http_date(text)
            .ok()?
            .duration_since(now)
            .ok()
    };
    let asked = seconds.or_else(date).unwrap_or(DEFAULT_RETRY_AFTER);
    asked.clamp(Duration::from_secs(1), LONGEST_RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_in_seconds_and_dates() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let read = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers, now)
        };
        assert_eq!(read("7"), Duration::from_secs(7));
        assert_eq!(read("0"), Duration::from_secs(1));
        assert_eq!(read("31536000"), LONGEST_RETRY_AFTER);
        assert_eq!(
            read("Sun, 09 Sep 2001 01:47:40 GMT"),
            Duration::from_mins(1)
        );
        assert_eq!(read("Sun, 09 Sep 2001 01:40:00 GMT"), DEFAULT_RETRY_AFTER);
        assert_eq!(read("soon"), DEFAULT_RETRY_AFTER);
        assert_eq!(retry_after(&HeaderMap::new(), now), DEFAULT_RETRY_AFTER);
    }
}
