//! One request and its answer: connections, redirects, a slot with the host, limits of time and size, and
//! what the outcome says about the host.

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
    gate::{Asker, DEFAULT_RETRY_AFTER, Gate, LONGEST_RETRY_AFTER},
    hosts::{Transport, is_loopback},
};

/// As containerd and Go's client do.
const MAX_REDIRECTS: usize = 10;
const USER_AGENT: &str = concat!("archaware/", env!("CARGO_PKG_VERSION"));

/// The TLS client could not be set up.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot set up TLS: are CA certificates installed, and is the client's certificate X.509 v3 with its key?"
)]
pub struct TlsError(#[source] Arc<reqwest::Error>);

/// Connections are kept by how they are secured: few sets, one in most clusters.
const MAX_CLIENTS: usize = 32;

/// The connections: one set for each way of securing them, and one of its own for loopback.
pub(super) struct Clients {
    timeout: Duration,
    per_host: usize,
    /// Made at first use: reading the system's CA bundle costs time and memory.
    made: Cache<(Arc<Transport>, Kind), reqwest::Client>,
}

/// No proxy is asked about loopback, as in Go; and where there is no TLS, the system's authorities would only
/// cost memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    World,
    Loopback,
    PlainLoopback,
}

/// A request. Redirects are followed by hand: what proves who asks goes to its own address alone.
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) url: Url,
    /// For whoever answers in the end.
    pub(super) headers: HeaderMap,
    /// For this address only: `Authorization` and what `hosts.toml` says.
    pub(super) own_headers: HeaderMap,
    /// A form with a secret: it is never sent anywhere else.
    pub(super) form: Option<String>,
    pub(super) transport: Arc<Transport>,
}

impl Clients {
    pub(super) fn new(timeout: Duration, per_host: usize) -> Self {
        Self {
            timeout,
            per_host,
            made: Cache::new(MAX_CLIENTS),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    async fn send(&self, call: Call) -> Result<reqwest::Response, Broken> {
        let home = call.url.origin();
        let mut url = call.url;
        for _ in 0..=MAX_REDIRECTS {
            let client = self.to(&call.transport, &url)?;
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
            let Some(next) = target(&url, &response) else {
                return Ok(response);
            };
            if next.host() != url.host() && is_local(&next) && !is_local(&url) {
                return Err(Broken::Redirect(
                    "it redirects to an address of this machine",
                ));
            }
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(Broken::Redirect("it redirects from https to http"));
            }
            if call.form.is_some() && next.origin() != home {
                return Err(Broken::Redirect(
                    "it redirects a credential to another host",
                ));
            }
            url = next;
        }
        Err(Broken::Redirect("too many redirects"))
    }

    fn to(&self, transport: &Arc<Transport>, url: &Url) -> Result<reqwest::Client, Broken> {
        let loopback = is_loopback(url.host_str().unwrap_or_default());
        let kind = match (loopback, url.scheme()) {
            (false, _) => Kind::World,
            (true, "https") => Kind::Loopback,
            (true, _) => Kind::PlainLoopback,
        };
        let key = (transport.clone(), kind);
        // A failure is not kept: its reason may be gone the next time.
        let made = self
            .made
            .get_or_insert_with(&key, || self.make(transport, kind));
        made.map_err(|error| {
            let host = url.host_str().unwrap_or_default();
            let source = Arc::new(TlsError(Arc::new(error)));
            Broken::Other(ImageError::unanswered(host, "no TLS", Some(source)))
        })
    }

    fn make(&self, transport: &Transport, kind: Kind) -> Result<reqwest::Client, reqwest::Error> {
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
        if kind != Kind::World {
            builder = builder.no_proxy();
        }
        builder = match kind {
            Kind::PlainLoopback => builder.tls_certs_only(authorities),
            _ if authorities.is_empty() => builder,
            _ => builder.tls_certs_merge(authorities),
        };
        builder.build()
    }
}

/// Where a redirect leads, if the answer is one that can be followed with the same method.
fn target(url: &Url, response: &reqwest::Response) -> Option<Url> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    url.join(response.headers().get(LOCATION)?.to_str().ok()?)
        .ok()
}

/// How an exchange failed.
enum Broken {
    Transport(reqwest::Error),
    Redirect(&'static str),
    Other(ImageError),
}

impl From<reqwest::Error> for Broken {
    fn from(error: reqwest::Error) -> Self {
        Self::Transport(error)
    }
}

/// What a host answered.
pub(super) struct HttpAnswer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// Empty unless the request succeeded: an error's body is for people, neither needed nor to be trusted.
    pub(super) body: Bytes,
}

/// Limits of one exchange.
pub(super) struct Limits {
    /// Of the whole exchange: a body that trickles never ends by itself.
    pub(super) time: Duration,
    /// Bytes of the body.
    pub(super) body: u64,
}

/// One exchange with a host: a slot for it, its limits, and what the outcome says about the host.
pub(super) async fn exchange(
    clients: &Clients,
    gate: &Gate,
    asker: Asker,
    what: &str,
    call: Call,
    limits: Limits,
) -> Result<HttpAnswer, ImageError> {
    let _slot = gate.enter(asker).await?;
    let exchange = async {
        let is_head = call.method == Method::HEAD;
        let response = clients.send(call).await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = if status.is_success() && !is_head {
            read_body(what, response, limits.body).await?
        } else {
            Bytes::new()
        };
        Ok(HttpAnswer {
            status,
            headers,
            body,
        })
    };
    let answer = match tokio::time::timeout(limits.time, exchange).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(Broken::Transport(error))) => {
            if error.is_timeout() {
                gate.timed_out();
            }
            return Err(transport(what, error));
        }
        Ok(Err(Broken::Redirect(why))) => return Err(ImageError::unavailable(what, why)),
        Ok(Err(Broken::Other(error))) => return Err(error),
        Err(_) => {
            gate.timed_out();
            return Err(ImageError::unanswered(what, "no answer in time", None));
        }
    };
    let headers = &answer.headers;
    gate.answered(headers);
    let limited = answer.status == StatusCode::TOO_MANY_REQUESTS;
    let overloaded =
        answer.status == StatusCode::SERVICE_UNAVAILABLE && headers.contains_key(RETRY_AFTER);
    if limited || overloaded {
        let retry_after = retry_after(headers, SystemTime::now());
        return Err(gate.close(asker, retry_after, limited));
    }
    Ok(answer)
}

/// Reads a whole body, unpacked, and stops at the limit instead of filling the memory.
async fn read_body(
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
    let mut why = String::from(if error.is_connect() {
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
    ImageError::unanswered(what, why, source)
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
