//! Requests to a registry: bounded in time, size and number, with what the registry wants to see.

use std::{sync::Arc, time::Duration};

use backon::{ExponentialBuilder, Retryable};
use bytes::Bytes;
use http::{
    HeaderMap, Method, StatusCode,
    header::{ACCEPT, CONTENT_TYPE},
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
    exchange::{Clients, NO_ANSWER, exchange, read_body},
    gate::Gates,
};

/// Further tries of a request that the registry answered with 5xx.
const SERVER_ERROR_RETRIES: usize = 2;

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
            clients: Clients::new(settings.timeout, settings.per_host),
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

const METHOD_REFUSED: &str = "it does not answer HEAD";

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
