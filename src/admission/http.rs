//! Answers HTTP requests to the webhook. An invalid request gets a 4xx with the reason.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::FutureExt;
use http::{
    HeaderMap, Method, Request, Response, StatusCode,
    header::{ALLOW, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue},
};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{
    cluster::objects::{DaemonSet, Node, Pod},
    metrics::{AdmissionMetrics, Panics},
};

use super::{
    review::{AdmissionResponse, Expected, InvalidReview, Review},
    webhook::{AdmissionOutcome, RequestLimits, Webhook},
};

/// Maximum bytes of a body. The API server accepts no larger request (`maxRequestBodyBytes` of
/// `k8s.io/apiserver`). An update contains the old object too, and etcd stores at most half of
/// this.
const MAX_BODY: usize = 3 << 20;
/// Maximum bytes of all concurrent bodies. Thousands of typical pods fit; beyond that the request
/// fails open.
const MAX_BODIES: usize = 64 << 20;
/// Counted for each body in addition to its bytes, so that the number of small bodies is bounded.
const OVERHEAD: usize = 8 << 10;
/// Maximum bytes of the body of a request whose evaluation may continue in the background after
/// its timeout.
const MAX_BACKGROUND_BODY: usize = 64 << 10;
/// Timeout for receiving a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// Answers requests of all connections.
pub(super) struct Handler {
    webhook: Webhook,
    bodies: Semaphore,
    metrics: AdmissionMetrics,
    panics: Panics,
}

/// A request that gets an HTTP error.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("unknown path; AdmissionReviews are accepted at /pods, /nodes and /daemonsets")]
    Path,
    #[error("only POST is allowed")]
    Method,
    #[error("the content type must be application/json")]
    ContentType,
    #[error("the body is larger than {} MiB", MAX_BODY >> 20)]
    TooLarge,
    #[error("the body was not received within {} s", BODY_TIMEOUT.as_secs())]
    TimedOut,
    #[error("the body is incomplete")]
    Incomplete,
    #[error("too many requests in progress")]
    Busy,
    #[error(transparent)]
    Review(#[from] InvalidReview),
}

impl Refusal {
    fn status(&self) -> StatusCode {
        match self {
            Self::Path => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::ContentType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TimedOut => StatusCode::REQUEST_TIMEOUT,
            Self::Incomplete | Self::Review(_) => StatusCode::BAD_REQUEST,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
        }
    }
}

#[derive(Clone, Copy)]
enum WebhookPath {
    Pods,
    Nodes,
    DaemonSets,
}

impl WebhookPath {
    fn parse(path: &str) -> Option<Self> {
        // With a user-defined URL, the paths are below the path of that URL.
        match path.rsplit('/').next()? {
            "pods" => Some(Self::Pods),
            "nodes" => Some(Self::Nodes),
            "daemonsets" => Some(Self::DaemonSets),
            _ => None,
        }
    }

    fn expected(self) -> Expected {
        let (group, resource, operations): (_, _, &[_]) = match self {
            Self::Pods => ("", "pods", &["CREATE"]),
            Self::Nodes => ("", "nodes", &["CREATE"]),
            Self::DaemonSets => ("apps", "daemonsets", &["CREATE", "UPDATE"]),
        };
        Expected {
            group,
            resource,
            operations,
        }
    }
}

impl Handler {
    pub(super) fn new(webhook: Webhook, metrics: AdmissionMetrics, panics: Panics) -> Self {
        Self {
            webhook,
            panics,
            bodies: Semaphore::new(MAX_BODIES),
            metrics,
        }
    }

    /// Answers a request.
    pub(super) async fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Response<Full<Bytes>> {
        let started = Instant::now();
        let answer = self.answer(request).await;
        match answer {
            Ok((resource, outcome, body)) => {
                self.metrics
                    .answered(resource, outcome.as_str(), started.elapsed());
                let mut response = Response::new(Full::new(body.into()));
                let json = HeaderValue::from_static("application/json");
                response.headers_mut().insert(CONTENT_TYPE, json);
                response
            }
            Err(refusal) => {
                self.metrics.answered("none", "refused", started.elapsed());
                tracing::debug!(%refusal, "admission request rejected");
                let mut response = Response::new(Full::new(format!("{refusal}\n").into()));
                *response.status_mut() = refusal.status();
                if matches!(refusal, Refusal::Method) {
                    let post = HeaderValue::from_static("POST");
                    response.headers_mut().insert(ALLOW, post);
                }
                response
            }
        }
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<(&'static str, AdmissionOutcome, Vec<u8>), Refusal> {
        let path = WebhookPath::parse(request.uri().path()).ok_or(Refusal::Path)?;
        if request.method() != Method::POST {
            return Err(Refusal::Method);
        }
        if !is_json(request.headers()) {
            return Err(Refusal::ContentType);
        }
        let reservation = self.reserve_body(request.headers());
        if matches!(reservation, Err(Refusal::TooLarge)) {
            discard(request.into_body()).await;
            return Err(Refusal::TooLarge);
        }
        let _reservation = reservation?;
        let timeout = request.uri().query().and_then(timeout);
        let body = read(request.into_body()).await?;
        let expected = path.expected();
        let limits = RequestLimits {
            timeout,
            may_continue_in_background: body.len() <= MAX_BACKGROUND_BODY,
        };
        let (uid, (answer, outcome)) = match path {
            WebhookPath::Pods => {
                let (request, pod) = parse::<Pod>(body, &expected)?;
                let answer = self.webhook.pod(pod, request.namespace, limits);
                (request.uid, self.catch_panic(answer).await)
            }
            WebhookPath::Nodes => {
                let (request, node) = parse::<Node>(body, &expected)?;
                let answer = async { self.webhook.node(&node) };
                (request.uid, self.catch_panic(answer).await)
            }
            WebhookPath::DaemonSets => {
                let (request, set) = parse::<DaemonSet>(body, &expected)?;
                let answer = self.webhook.daemon_set(set, request.namespace, limits);
                (request.uid, self.catch_panic(answer).await)
            }
        };
        Ok((expected.resource, outcome, answer.into_body(&uid)))
    }

    /// Runs `answer`. If it panics, the object is admitted unchanged and the controller completes
    /// it.
    async fn catch_panic(
        &self,
        answer: impl Future<Output = (AdmissionResponse, AdmissionOutcome)>,
    ) -> (AdmissionResponse, AdmissionOutcome) {
        let caught = AssertUnwindSafe(answer).catch_unwind().await;
        caught.unwrap_or_else(|_| {
            self.panics.count("admission");
            (AdmissionResponse::default(), AdmissionOutcome::Panicked)
        })
    }

    /// Reserves memory for a body: its declared size, or the maximum.
    fn reserve_body(&self, headers: &HeaderMap) -> Result<SemaphorePermit<'_>, Refusal> {
        let length = headers
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok());
        let length = length
            .and_then(|text| text.parse().ok())
            .unwrap_or(MAX_BODY);
        if length > MAX_BODY {
            return Err(Refusal::TooLarge);
        }
        let reserved = u32::try_from(length + OVERHEAD).map_err(|_| Refusal::TooLarge)?;
        self.bodies
            .try_acquire_many(reserved)
            .map_err(|_| Refusal::Busy)
    }
}

/// How long the API server waits: `?timeout=3s` (`timeoutSeconds` of the registration).
fn timeout(query: &str) -> Option<Duration> {
    let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(name, _)| *name == "timeout")?;
    crate::duration::parse(value)
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let essence = value.and_then(|value| value.split(';').next());
    essence.is_some_and(|essence| essence.trim().eq_ignore_ascii_case("application/json"))
}

async fn read(body: Incoming) -> Result<Bytes, Refusal> {
    let whole = Limited::new(body, MAX_BODY).collect();
    match tokio::time::timeout(BODY_TIMEOUT, whole).await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(Refusal::TooLarge),
        Ok(Err(_)) => Err(Refusal::Incomplete),
        Err(_) => Err(Refusal::TimedOut),
    }
}

/// A client that is still sending does not read the answer, so a body that is slightly too large is
/// received and discarded.
async fn discard(mut body: Incoming) {
    let mut left = 4 * MAX_BODY;
    let receiving = async {
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, Bytes::len);
            let Some(less) = left.checked_sub(length) else {
                return;
            };
            left = less;
        }
    };
    let _ = tokio::time::timeout(BODY_TIMEOUT, receiving).await;
}

/// Parses and frees the body: hundreds of pods may wait for a registry at once.
fn parse<K: DeserializeOwned>(
    body: Bytes,
    expected: &Expected,
) -> Result<(super::review::AdmissionRequest<K>, K), InvalidReview> {
    serde_json::from_slice::<Review<K>>(&body)?.open(expected)
}
