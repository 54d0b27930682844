//! Sends HTTP requests: redirects, host limits, timeouts and size limits.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use http::{
    HeaderMap, Method, StatusCode,
    header::{AUTHORIZATION, CONTENT_TYPE, LOCATION, RETRY_AFTER},
};
use reqwest::Url;
use tokio::time::{Instant as Deadline, timeout_at};

use crate::{
    error::ImageError,
    trace::{self, Call, Peer},
};

use super::{
    address::{bare, is_link_local, literal, names_local},
    body::Bodies,
    clients::Clients,
    dns::AddressCheck,
    exchange_error::ExchangeError,
    host_limiter::{DEFAULT_RETRY_AFTER, HostLimiter, HostLimiters, MAX_RETRY_AFTER, Principal},
    hosts::{Endpoint, Transport},
};

/// The limit of containerd and of Go's HTTP client.
const MAX_REDIRECTS: usize = 10;

/// Sends requests within the limits of each host and of the process. Cheap to clone.
#[derive(Clone)]
pub(super) struct Http(Arc<HttpInner>);

struct HttpInner {
    timeout: Duration,
    clients: Clients,
    limiters: HostLimiters,
    bodies: Bodies,
}

/// A request. Redirects are followed here, because credentials must only be sent to the original
/// address.
#[derive(Clone)]
pub(super) struct HttpRequest {
    pub(super) peer: Peer,
    pub(super) method: Method,
    pub(super) url: Url,
    /// Sent to every address in a chain of redirects.
    pub(super) headers: HeaderMap,
    /// Sent to the original address only: `Authorization` and the headers of `hosts.toml`.
    pub(super) origin_headers: HeaderMap,
    /// A form with a secret, never sent to another host.
    pub(super) form: Option<String>,
    pub(super) transport: Arc<Transport>,
    pub(super) check: AddressCheck,
    /// Whether the caller verifies the body by a digest that it knows already. Such a request may
    /// follow a redirect to plain HTTP, as containerd does: object stores of some registries speak
    /// no TLS.
    pub(super) has_known_digest: bool,
    /// Counts from 1.
    pub(super) attempt: u32,
}

/// The response of a host.
pub(super) struct HttpResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// Empty unless the request succeeded: bodies of errors are neither needed nor trusted.
    pub(super) body: Bytes,
    /// Where the response came from, after redirects.
    pub(super) url: Url,
}

/// Limits of one exchange.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Timeout of the whole exchange with its redirects, without the wait for permission to send. A
    /// timeout per read would not end a body that trickles.
    pub(super) time: Duration,
    /// Maximum bytes of the decompressed body.
    pub(super) body: u64,
}

/// One request in a chain of redirects.
#[derive(Clone, Copy)]
struct Hop {
    principal: Principal,
    /// Whether no earlier request in the chain used part of [`Limits::time`].
    has_full_time: bool,
}

impl HttpRequest {
    /// The request to the host of a redirect. Secrets stay behind: headers of the original host,
    /// and the client certificate.
    pub(super) fn redirected_to_host(self, url: Url) -> Self {
        Self {
            url,
            origin_headers: HeaderMap::new(),
            transport: Transport::without_identity(&self.transport),
            check: AddressCheck::RefuseLocal,
            ..self
        }
    }

    fn redirected(self, url: Url) -> Result<Self, &'static str> {
        if url.host() != self.url.host() && names_local(&url) && !names_local(&self.url) {
            return Err("it redirects to an address of this machine");
        }
        if self.url.scheme() == "https" && url.scheme() != "https" && !self.has_known_digest {
            return Err("it redirects from https to http");
        }
        if url.origin() == self.url.origin() {
            return Ok(Self { url, ..self });
        }
        if self.form.is_some() {
            return Err("it redirects a credential to another host");
        }
        Ok(self.redirected_to_host(url))
    }

    /// Whether the host may get the request twice (RFC 9110, 9.2.2).
    fn may_be_repeated(&self) -> bool {
        self.method.is_idempotent() && self.form.is_none()
    }

    fn credential_kind(&self) -> &'static str {
        if self.form.is_some() {
            return "identity token";
        }
        let header = self.origin_headers.get(AUTHORIZATION);
        match header.map(http::HeaderValue::as_bytes) {
            Some(value) if value.starts_with(b"Basic ") => "password",
            Some(value) if value.starts_with(b"Bearer ") => "bearer token",
            Some(_) => "header of hosts.toml",
            None => trace::NO_CREDENTIAL,
        }
    }
}

impl Http {
    /// `allowed` are the hosts whose names may resolve to local addresses.
    pub(super) fn new(timeout: Duration, per_host: usize, allowed: Vec<String>) -> Self {
        Self(Arc::new(HttpInner {
            timeout,
            clients: Clients::new(per_host, allowed),
            limiters: HostLimiters::new(per_host),
            bodies: Bodies::new(),
        }))
    }

    /// Timeout of one request.
    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    pub(super) fn limiters(&self) -> &HostLimiters {
        &self.0.limiters
    }

    /// Sends a request and follows redirects. Each request waits for its host's limiter and reports
    /// the outcome to that limiter.
    pub(super) async fn exchange(
        &self,
        principal: Principal,
        what: &str,
        mut request: HttpRequest,
        mut limits: Limits,
    ) -> Result<HttpResponse, ImageError> {
        let home = request.url.origin();
        let mut hop = Hop {
            principal,
            has_full_time: true,
        };
        for _ in 0..=MAX_REDIRECTS {
            let (response, took) = self.hop(hop, what, &request, limits).await?;
            let Some(next) = redirect_target(&response) else {
                return Ok(response);
            };
            let redirected = request.redirected(next);
            request = redirected.map_err(|why| ImageError::unavailable(what, why))?;
            limits.time = limits.time.saturating_sub(took);
            hop = Hop {
                principal: principal.filter(|_| request.url.origin() == home),
                has_full_time: false,
            };
        }
        Err(ImageError::unavailable(what, "too many redirects"))
    }

    /// Sends a request to one host. Also returns how long that took.
    async fn hop(
        &self,
        hop: Hop,
        what: &str,
        request: &HttpRequest,
        limits: Limits,
    ) -> Result<(HttpResponse, Duration), ImageError> {
        let principal = hop.principal;
        let host = Endpoint::new(&request.url).host().to_owned();
        if let Some(address) = literal(&request.url).filter(|address| is_link_local(*address))
            && request.check == AddressCheck::RefuseLocal
            && !self.0.clients.allows_local(bare(&host))
        {
            let why = format!(
                "{address} is a link-local address or that of a metadata service; if it is a registry, add it to registries.allowLocalAddresses"
            );
            return Err(ImageError::Denied {
                what: what.to_owned(),
                why,
            });
        }
        let limiter = self.0.limiters.host(&host);
        let _slot = limiter.enter(principal).await?;
        let started = Instant::now();
        let answer = self.send(what, request, limits, &limiter).await;
        let took = started.elapsed();
        let call = Call {
            peer: request.peer,
            method: request.method.as_str(),
            host: &host,
            path: request.url.path(),
            attempt: request.attempt,
            credential: request.credential_kind(),
        };
        match answer {
            Ok(answer) => {
                call.ended(started, answer.status.as_u16());
                record(&limiter, principal, &answer)?;
                Ok((answer, took))
            }
            Err(error) => {
                let timed_out = match &error {
                    ExchangeError::TimedOut => true,
                    ExchangeError::Transport(error) => error.is_timeout(),
                    _ => false,
                };
                // If earlier requests in the chain used part of the time, the timeout is not
                // counted against this host.
                if timed_out && hop.has_full_time {
                    limiter.timed_out();
                }
                let error = error.into_image_error(what);
                call.ended(started, error.reason().as_str());
                Err(error)
            }
        }
    }

    /// The head of the answer. `reuses`: whether the request may use an idle connection.
    async fn response(
        &self,
        request: &HttpRequest,
        deadline: Deadline,
        reuses: bool,
    ) -> Result<reqwest::Response, ExchangeError> {
        let clients = &self.0.clients;
        let client = clients.client(&request.transport, &request.url, request.check, reuses);
        let client = client.map_err(ExchangeError::Other)?;
        let mut sending = client
            .request(request.method.clone(), request.url.clone())
            .headers(request.headers.clone())
            .headers(request.origin_headers.clone());
        if let Some(form) = &request.form {
            sending = sending
                .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                .body(form.clone());
        }
        let response = timeout_at(deadline, sending.send()).await;
        Ok(response.map_err(|_| ExchangeError::TimedOut)??)
    }

    async fn send(
        &self,
        what: &str,
        request: &HttpRequest,
        limits: Limits,
        limiter: &HostLimiter,
    ) -> Result<HttpResponse, ExchangeError> {
        let deadline = Deadline::now() + limits.time;
        let mut response = self.response(request, deadline, true).await;
        if let Err(ExchangeError::Transport(error)) = &response
            && request.may_be_repeated()
            && !error.is_connect()
            && !error.is_timeout()
        {
            // Registries and load balancers close idle connections without notice. The request then
            // fails before any answer, although the host is well (`shouldRetryRequest` of Go's
            // net/http, which containerd uses, repeats it too). Other idle connections may be dead
            // as well, so the second attempt opens a new one.
            response = self.response(request, deadline, false).await;
        }
        let response = response?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = if status.is_success() && request.method != Method::HEAD {
            let share = limiter.body_share();
            let reading = (self.0.bodies).read(what, response, limits.body, share, deadline);
            reading.await?
        } else {
            Bytes::new()
        };
        Ok(HttpResponse {
            status,
            headers,
            body,
            url: request.url.clone(),
        })
    }
}

/// Reports the answer of a host to its limiter. Returns the error if the host asks for fewer
/// requests.
fn record(
    limiter: &HostLimiter,
    principal: Principal,
    answer: &HttpResponse,
) -> Result<(), ImageError> {
    let headers = &answer.headers;
    limiter.answered(headers);
    let limited = answer.status == StatusCode::TOO_MANY_REQUESTS;
    let overloaded =
        answer.status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key(RETRY_AFTER);
    if limited || overloaded {
        let retry_after = retry_after(headers, SystemTime::now());
        return Err(limiter.pause(principal, retry_after, limited));
    }
    Ok(())
}

/// The target of a redirect. The caller follows every redirect with the same method.
fn redirect_target(response: &HttpResponse) -> Option<Url> {
    if !matches!(response.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = response.headers.get(LOCATION)?.to_str().ok()?;
    response.url.join(location).ok()
}

/// Seconds or an HTTP date (RFC 9110, 10.2.3).
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
    let pause = seconds.or_else(date).unwrap_or(DEFAULT_RETRY_AFTER);
    pause.clamp(Duration::from_secs(1), MAX_RETRY_AFTER)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// A registry chooses `Retry-After`. No value stops requests for longer than
        /// [`MAX_RETRY_AFTER`].
        #[test]
        fn any_pause_is_bounded(value in "[ -~]{0,40}|-?[0-9]{0,30}") {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]);
            let pause = retry_after(&headers, SystemTime::UNIX_EPOCH);
            prop_assert!((Duration::from_secs(1)..=MAX_RETRY_AFTER).contains(&pause));
        }
    }

    #[test]
    fn only_blobs_follow_redirects_to_plain_http() {
        let request = |has_known_digest| HttpRequest {
            peer: Peer::Registry,
            method: Method::GET,
            url: Url::parse("https://reg.io/v2/a/blobs/x").unwrap(),
            headers: HeaderMap::new(),
            origin_headers: HeaderMap::from_iter([(AUTHORIZATION, "secret".parse().unwrap())]),
            form: None,
            transport: Arc::default(),
            check: AddressCheck::AllowAll,
            has_known_digest,
            attempt: 1,
        };
        for target in ["http://store.io/x", "http://reg.io/v2/a/blobs/x"] {
            let target = Url::parse(target).unwrap();
            let why = request(false).redirected(target.clone()).err();
            assert_eq!(why, Some("it redirects from https to http"));
            let redirected = request(true).redirected(target.clone()).unwrap();
            assert_eq!(redirected.url, target);
            assert!(
                redirected.origin_headers.is_empty(),
                "the credential stays behind"
            );
            assert_eq!(redirected.check, AddressCheck::RefuseLocal);
        }
    }

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
        assert_eq!(read("31536000"), MAX_RETRY_AFTER);
        assert_eq!(
            read("Sun, 09 Sep 2001 01:47:40 GMT"),
            Duration::from_mins(1)
        );
        assert_eq!(read("Sun, 09 Sep 2001 01:40:00 GMT"), DEFAULT_RETRY_AFTER);
        assert_eq!(read("soon"), DEFAULT_RETRY_AFTER);
        assert_eq!(retry_after(&HeaderMap::new(), now), DEFAULT_RETRY_AFTER);
    }
}
