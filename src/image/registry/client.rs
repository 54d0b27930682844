//! Requests to a registry: bounded in time, size and number, with what the registry wants to see.

use std::{
    fmt::Write as _,
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
    auth::{Authorization, Authorizations, Challenge, Slot},
    gate::{DEFAULT_RETRY_AFTER, Gates},
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
    https: OnceLock<Result<reqwest::Client, TlsError>>,
    http: OnceLock<Result<reqwest::Client, TlsError>>,
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
            settings,
            https: OnceLock::new(),
            http: OnceLock::new(),
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
                Err(error @ ImageError::Denied { .. }) => denied = Some(error),
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
                let answered = self.authorizations.answer(
                    self.client(question.endpoint.plain_http)?,
                    slot.clone(),
                    challenge,
                    credential.cloned(),
                    self.settings.timeout,
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
            if answer.0.is_server_error() {
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
        let host = self.gates.host(&question.endpoint.host);
        let _slot = host.enter(&question.endpoint.host).await?;
        let url = format!(
            "{}{}/{}",
            question.endpoint.base(),
            question.repository,
            question.path
        );
        let client = self.client(question.endpoint.plain_http)?;
        let mut request = client.request(question.method.clone(), url);
        if let Some(accept) = question.accept {
            request = request.header(ACCEPT, accept);
        }
        if let Some(authorization) = authorization {
            request = authorization.apply(request);
        }
        let exchange = async {
            let response = request
                .send()
                .await
                .map_err(|error| transport(what, error))?;
            let (status, headers) = (response.status(), response.headers().clone());
            // An error's body is for people; it is neither needed nor to be trusted.
            let limit = if status.is_success() {
                question.limit
            } else {
                0
            };
            let wanted = question.method == Method::GET && limit > 0;
            let body = if wanted {
                read_body(what, response, limit).await?
            } else {
                Bytes::new()
            };
            Ok::<_, ImageError>((status, headers, body))
        };
        // A total timeout: a body that trickles never ends by itself.
        let Ok(result) = tokio::time::timeout(self.settings.timeout, exchange).await else {
            host.timed_out();
            return Err(ImageError::unavailable(what, NO_ANSWER));
        };
        host.answered();
        let (status, headers, body) = result?;
        let asks_for_quiet =
            status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key(RETRY_AFTER);
        if status == StatusCode::TOO_MANY_REQUESTS || asks_for_quiet {
            let retry_after = retry_after(&headers, SystemTime::now());
            host.rate_limited(retry_after);
            let host = question.endpoint.host.clone();
            return Err(ImageError::RateLimited { host, retry_after });
        }
        Ok((status, headers, body))
    }

    fn client(&self, plain_http: bool) -> Result<reqwest::Client, ImageError> {
        let cell = if plain_http { &self.http } else { &self.https };
        cell.get_or_init(|| {
            let builder = reqwest::Client::builder()
                .user_agent(USER_AGENT)
                .connect_timeout(self.settings.timeout)
                .pool_idle_timeout(Duration::from_mins(1))
                .pool_max_idle_per_host(self.settings.per_host)
                .redirect(reqwest::redirect::Policy::limited(MAX_REDIRECTS));
            let builder = if plain_http {
                builder.tls_certs_only([])
            } else {
                builder
            };
            builder.build().map_err(|error| TlsError(Arc::new(error)))
        })
        .clone()
        .map_err(|error| ImageError::Unavailable {
            what: "every https registry".to_owned(),
            why: "no TLS".to_owned(),
            source: Some(Arc::new(error)),
        })
    }
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
        StatusCode::METHOD_NOT_ALLOWED => ImageError::unavailable(what, METHOD_REFUSED),
        status => ImageError::unavailable(what, format!("the registry answered {status}")),
    }
}

/// Reads a whole body, unpacked, and stops at the limit instead of filling the memory.
pub(super) async fn read_body(
    what: &str,
    mut response: reqwest::Response,
    limit: u64,
) -> Result<Bytes, ImageError> {
    if let Some(length) = response.content_length().filter(|length| *length > limit) {
        return Err(ImageError::too_large(what, length));
    }
    let mut body = BytesMut::new();
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| transport(what, error))?
    {
        body.extend_from_slice(&chunk);
        if body.len() as u64 > limit {
            return Err(ImageError::too_large(what, body.len() as u64));
        }
    }
    Ok(body.freeze())
}

/// Addresses in errors are the ones archaware asked for: a redirect's may carry a signature.
pub(super) fn transport(what: &str, error: reqwest::Error) -> ImageError {
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
    if let Ok(seconds) = text.trim().parse() {
        return Duration::from_secs(seconds);
    }
    httpdate::parse_http_date(text)
        .ok()
        .and_then(|date| date.duration_since(now).ok())
        .unwrap_or(DEFAULT_RETRY_AFTER)
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
        assert_eq!(
            read("Sun, 09 Sep 2001 01:47:40 GMT"),
            Duration::from_mins(1)
        );
        assert_eq!(read("Sun, 09 Sep 2001 01:40:00 GMT"), DEFAULT_RETRY_AFTER);
        assert_eq!(read("soon"), DEFAULT_RETRY_AFTER);
        assert_eq!(retry_after(&HeaderMap::new(), now), DEFAULT_RETRY_AFTER);
    }
}
