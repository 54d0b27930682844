//! Sends one HTTP request: connections, redirects, host limits, timeouts and size limits.

use std::{
    fmt::Write as _,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::{Bytes, BytesMut};
use http::{
    HeaderMap, Method, StatusCode,
    header::{CONTENT_TYPE, LOCATION, RETRY_AFTER},
};
use quick_cache::sync::Cache;
use reqwest::Url;

use crate::image::error::ImageError;

use super::{
    challenge::is_local,
    host_limiter::{DEFAULT_RETRY_AFTER, HostLimiter, MAX_RETRY_AFTER, Principal},
    hosts::{Transport, is_loopback},
};

/// The limit of containerd and of Go's HTTP client.
const MAX_REDIRECTS: usize = 10;
const USER_AGENT: &str = concat!("archaware/", env!("CARGO_PKG_VERSION"));

/// The TLS client could not be created.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot set up TLS: are CA certificates installed, and is the client's certificate X.509 v3 with its key?"
)]
pub struct TlsError(#[source] Arc<reqwest::Error>);

/// Clients differ only in their TLS settings; most clusters need one.
const MAX_CLIENTS: usize = 32;

/// HTTP clients by TLS settings, with separate ones for loopback.
pub(super) struct Clients {
    timeout: Duration,
    per_host: usize,
    /// Created on first use, because reading the system's CA bundle costs time and memory.
    by_transport: Cache<(Arc<Transport>, ConnectionKind), reqwest::Client>,
}

/// Loopback connections bypass proxies, as in Go. Plain HTTP connections do not need the CA bundle.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ConnectionKind {
    Remote,
    Loopback,
    PlainLoopback,
}

/// A request. Redirects are followed here, because credentials must only be sent to the original address.
pub(super) struct HttpRequest {
    pub(super) method: Method,
    pub(super) url: Url,
    /// Sent to every address in a chain of redirects.
    pub(super) headers: HeaderMap,
    /// Sent to the original address only: `Authorization` and the headers of `hosts.toml`.
    pub(super) own_headers: HeaderMap,
    /// A form with a secret, never sent to another host.
    pub(super) form: Option<String>,
    pub(super) transport: Arc<Transport>,
}

impl Clients {
    pub(super) fn new(timeout: Duration, per_host: usize) -> Self {
        Self {
            timeout,
            per_host,
            by_transport: Cache::new(MAX_CLIENTS),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    async fn send(&self, call: HttpRequest) -> Result<reqwest::Response, ExchangeError> {
        let home = call.url.origin();
        let mut url = call.url;
        for _ in 0..=MAX_REDIRECTS {
            let client = self.client(&call.transport, &url)?;
            let mut request = client.request(call.method.clone(), url.clone());
            request = request.headers(call.headers.clone());
            if url.origin() == home {
                request = request.headers(call.own_headers.clone());
            }
            if let Some(form) = &call.form {
                request = request
                    .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
                    .body(form.clone());
            }
            let response = request.send().await?;
            let Some(next) = redirect_target(&url, &response) else {
                return Ok(response);
            };
            if next.host() != url.host() && is_local(&next) && !is_local(&url) {
                return Err(ExchangeError::Redirect(
                    "it redirects to an address of this machine",
                ));
            }
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(ExchangeError::Redirect("it redirects from https to http"));
            }
            if call.form.is_some() && next.origin() != home {
                return Err(ExchangeError::Redirect(
                    "it redirects a credential to another host",
                ));
            }
            url = next;
        }
        Err(ExchangeError::Redirect("too many redirects"))
    }

    fn client(
        &self,
        transport: &Arc<Transport>,
        url: &Url,
    ) -> Result<reqwest::Client, ExchangeError> {
        let loopback = is_loopback(url.host_str().unwrap_or_default());
        let kind = match (loopback, url.scheme()) {
            (false, _) => ConnectionKind::Remote,
            (true, "https") => ConnectionKind::Loopback,
            (true, _) => ConnectionKind::PlainLoopback,
        };
        let key = (transport.clone(), kind);
        // A failure is not cached, because its cause may be fixed later.
        let made = self
            .by_transport
            .get_or_insert_with(&key, || self.build_client(transport, kind));
        made.map_err(|error| {
            let host = url.host_str().unwrap_or_default();
            let source = Arc::new(TlsError(Arc::new(error)));
            ExchangeError::Other(ImageError::unanswered(host, "no TLS", Some(source)))
        })
    }

    fn build_client(
        &self,
        transport: &Transport,
        kind: ConnectionKind,
    ) -> Result<reqwest::Client, reqwest::Error> {
        let mut authorities = Vec::new();
        for der in &transport.authorities {
            authorities.push(reqwest::Certificate::from_der(der)?);
        }
        let mut builder = reqwest::Client::builder()
            .user_agent(USER_AGENT)
            .referer(false)
            .pool_idle_timeout(Duration::from_mins(1))
            .pool_max_idle_per_host(self.per_host)
            .redirect(reqwest::redirect::Policy::none())
            .tls_danger_accept_invalid_certs(transport.skip_verify);
        if let Some(time) = transport.dial_timeout {
            builder = builder.connect_timeout(time);
        }
        if let Some(pem) = &transport.identity {
            builder = builder.identity(reqwest::Identity::from_pem(pem)?);
        }
        if kind != ConnectionKind::Remote {
            builder = builder.no_proxy();
        }
        builder = match kind {
            ConnectionKind::PlainLoopback => builder.tls_certs_only(authorities),
            _ if authorities.is_empty() => builder,
            _ => builder.tls_certs_merge(authorities),
        };
        builder.build()
    }
}

/// The target of a redirect that keeps the method.
fn redirect_target(url: &Url, response: &reqwest::Response) -> Option<Url> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    url.join(response.headers().get(LOCATION)?.to_str().ok()?)
        .ok()
}

/// Why an exchange failed.
enum ExchangeError {
    Transport(reqwest::Error),
    Redirect(&'static str),
    Other(ImageError),
}

impl From<reqwest::Error> for ExchangeError {
    fn from(error: reqwest::Error) -> Self {
        Self::Transport(error)
    }
}

/// The response of a host.
pub(super) struct HttpResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// Empty unless the request succeeded: bodies of errors are neither needed nor trusted.
    pub(super) body: Bytes,
}

/// Limits of one exchange.
pub(super) struct Limits {
    /// Timeout of the whole exchange. A timeout per read would not end a body that trickles.
    pub(super) time: Duration,
    /// Maximum bytes of the decompressed body.
    pub(super) body: u64,
}

/// Sends a request through the host's limiter and reports the outcome to the limiter.
pub(super) async fn exchange(
    clients: &Clients,
    limiter: &HostLimiter,
    principal: Principal,
    what: &str,
    call: HttpRequest,
    limits: Limits,
) -> Result<HttpResponse, ImageError> {
    let _slot = limiter.enter(principal).await?;
    let exchange = async {
        let is_head = call.method == Method::HEAD;
        let response = clients.send(call).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = if status.is_success() && !is_head {
            read_body(what, response, limits.body).await?
        } else {
            Bytes::new()
        };
        Ok(HttpResponse {
            status,
            headers,
            body,
        })
    };
    let answer = match tokio::time::timeout(limits.time, exchange).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(ExchangeError::Transport(error))) => {
            if error.is_timeout() {
                limiter.timed_out();
            }
            return Err(transport_error(what, error));
        }
        Ok(Err(ExchangeError::Redirect(why))) => return Err(ImageError::unavailable(what, why)),
        Ok(Err(ExchangeError::Other(error))) => return Err(error),
        Err(_) => {
            limiter.timed_out();
            return Err(ImageError::unanswered(what, "no answer in time", None));
        }
    };
    let headers = &answer.headers;
    limiter.answered(headers);
    let limited = answer.status == StatusCode::TOO_MANY_REQUESTS;
    let overloaded =
        answer.status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key(RETRY_AFTER);
    if limited || overloaded {
        let retry_after = retry_after(headers, SystemTime::now());
        return Err(limiter.pause(principal, retry_after, limited));
    }
    Ok(answer)
}

/// Reads a decompressed body and stops at `limit`.
async fn read_body(
    what: &str,
    mut response: reqwest::Response,
    limit: u64,
) -> Result<Bytes, ExchangeError> {
    let too_large = |size| Err(ExchangeError::Other(ImageError::too_large(what, size)));
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

/// The URL is removed from the error: a redirect's URL may contain a signature.
fn transport_error(what: &str, error: reqwest::Error) -> ImageError {
    let mut why = String::from(if error.is_connect() {
        "no connection"
    } else if error.is_body() || error.is_decode() {
        "its answer was truncated"
    } else {
        "the request failed"
    });
    if error.is_timeout() {
        let _ = write!(why, " in time");
    }
    let source = Some(Arc::new(error.without_url()) as _);
    ImageError::unanswered(what, why, source)
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
    let asked = seconds.or_else(date).unwrap_or(DEFAULT_RETRY_AFTER);
    asked.clamp(Duration::from_secs(1), MAX_RETRY_AFTER)
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
