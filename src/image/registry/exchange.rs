//! One request and its answer: connections, redirects, a slot with the host, limits of time and size, and
//! what the outcome says about the host.

use std::{
    fmt::Write as _,
    future::Future,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header::RETRY_AFTER};

use crate::image::error::ImageError;

use super::gate::{DEFAULT_RETRY_AFTER, Host, LONGEST_RETRY_AFTER};

/// As containerd and Go's client do.
const MAX_REDIRECTS: usize = 10;
const USER_AGENT: &str = concat!("archaware/", env!("CARGO_PKG_VERSION"));
/// Why there is no answer when the time is over.
pub(super) const NO_ANSWER: &str = "no answer in time";

/// The TLS client could not be set up.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot set up TLS for registries; are CA certificates installed?")]
pub struct TlsError(#[source] Arc<reqwest::Error>);

/// The connections: one set for this machine's own registries, one for the world.
#[derive(Default)]
pub(super) struct Clients {
    timeout: Duration,
    per_host: usize,
    world: OnceLock<Result<reqwest::Client, TlsError>>,
    loopback: OnceLock<Result<reqwest::Client, TlsError>>,
}

impl Clients {
    pub(super) fn new(timeout: Duration, per_host: usize) -> Self {
        Self {
            timeout,
            per_host,
            ..Self::default()
        }
    }

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
