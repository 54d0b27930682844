//! HTTP clients by TLS settings, and which of their connections are kept.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use quick_cache::sync::Cache;
use reqwest::Url;

use crate::error::ImageError;
use archaware_base::proxy;

use super::{
    address::is_loopback,
    dns::{AddressCheck, Dns},
    hosts::Transport,
};

const USER_AGENT: &str = concat!("archaware/", env!("CARGO_PKG_VERSION"));
/// Maximum number of clients, one for each [`ClientSettings`]. Most clusters need two.
const MAX_CLIENTS: usize = 64;
/// How long an idle connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum number of hosts whose idle connections are kept, because users choose the hosts and a
/// connection needs some 40 KiB. `Clients::per_host` limits the connections of each host.
const MAX_KEPT_HOSTS: usize = 32;
/// Flow control windows of HTTP/2. Smaller than the defaults of 2 and 5 MiB, because a peer can
/// fill them while archaware reads nothing.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// Maximum bytes of a response's headers over HTTP/2.
const MAX_HEADERS: u32 = 64 << 10;

/// The TLS client could not be created.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "cannot set up TLS: are CA certificates installed, and is the client's certificate X.509 v3 with its key?"
)]
pub struct TlsError(#[source] Arc<reqwest::Error>);

/// HTTP clients by their settings.
pub(super) struct Clients {
    per_host: usize,
    dns: Dns,
    kept_hosts: KeptHosts,
    /// Created on first use, because reading the system's CA bundle costs time and memory.
    by_settings: Cache<ClientSettings, reqwest::Client>,
}

/// What clients differ in.
#[derive(Clone, PartialEq, Eq, Hash)]
struct ClientSettings {
    transport: Arc<Transport>,
    kind: ConnectionKind,
    check: AddressCheck,
    keeps_idle: bool,
}

/// Loopback connections bypass proxies, as in Go. Plain HTTP connections do not need the CA bundle.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ConnectionKind {
    Remote,
    Loopback,
    PlainLoopback,
}

/// The hosts whose idle connections are kept, with their last use.
#[derive(Default)]
struct KeptHosts(Mutex<HashMap<String, Instant>>);

impl KeptHosts {
    /// Whether idle connections to a host are kept. A host that was not used for [`IDLE_TIMEOUT`]
    /// gives its place to another host.
    fn keep(&self, host: &str) -> bool {
        let now = Instant::now();
        let mut hosts = self.0.lock();
        if let Some(used) = hosts.get_mut(host) {
            *used = now;
            return true;
        }
        if hosts.len() >= MAX_KEPT_HOSTS {
            hosts.retain(|_, used| now.duration_since(*used) < IDLE_TIMEOUT);
        }
        let has_place = hosts.len() < MAX_KEPT_HOSTS;
        if has_place {
            hosts.insert(host.to_owned(), now);
        }
        has_place
    }
}

impl Clients {
    /// `allowed` are the hosts whose names may resolve to local addresses.
    pub(super) fn new(per_host: usize, mut allowed: Vec<String>) -> Self {
        // A proxy may have a local address. With a proxy, archaware resolves only the proxy's name.
        allowed.extend(proxy::hosts());
        Self {
            per_host,
            dns: Dns::new(allowed),
            kept_hosts: KeptHosts::default(),
            by_settings: Cache::new(MAX_CLIENTS),
        }
    }

    /// Whether the operator allows that a host has a local address.
    pub(super) fn allows_local(&self, host: &str) -> bool {
        self.dns.allows_local(host)
    }

    /// The client for requests to a URL. `reuses`: whether it may use an idle connection of an
    /// earlier request.
    pub(super) fn client(
        &self,
        transport: &Arc<Transport>,
        url: &Url,
        check: AddressCheck,
        reuses: bool,
    ) -> Result<reqwest::Client, ImageError> {
        let host = url.host_str().unwrap_or_default();
        let kind = match (is_loopback(host), url.scheme()) {
            (false, _) => ConnectionKind::Remote,
            (true, "https") => ConnectionKind::Loopback,
            (true, _) => ConnectionKind::PlainLoopback,
        };
        let port = url.port_or_known_default().unwrap_or_default();
        let settings = ClientSettings {
            transport: transport.clone(),
            kind,
            check,
            keeps_idle: reuses && self.kept_hosts.keep(&format!("{host}:{port}")),
        };
        // A failure is not cached, because its cause may be fixed later.
        let made = self
            .by_settings
            .get_or_insert_with(&settings, || self.build(&settings));
        made.map_err(|error| {
            let source = Arc::new(TlsError(Arc::new(error)));
            ImageError::unanswered(host, "no request was sent", Some(source))
        })
    }

    fn build(&self, settings: &ClientSettings) -> Result<reqwest::Client, reqwest::Error> {
        let ClientSettings {
            transport,
            kind,
            check,
            keeps_idle,
        } = settings;
        let mut authorities = Vec::new();
        for der in transport
            .authorities
            .iter()
            .flat_map(|bundle| bundle.iter())
        {
            authorities.push(reqwest::Certificate::from_der(der)?);
        }
        let mut builder = reqwest::Client::builder()
            .user_agent(USER_AGENT)
            .referer(false)
            .dns_resolver(self.dns.for_client(*check))
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(if *keeps_idle { self.per_host } else { 0 })
            .http2_initial_stream_window_size(STREAM_WINDOW)
            .http2_initial_connection_window_size(CONNECTION_WINDOW)
            .http2_max_header_list_size(MAX_HEADERS)
            .redirect(reqwest::redirect::Policy::none())
            .tls_danger_accept_invalid_certs(transport.skip_verify);
        if let Some(time) = transport.dial_timeout {
            builder = builder.connect_timeout(time);
        }
        if let Some(pem) = &transport.identity {
            builder = builder.identity(reqwest::Identity::from_pem(pem)?);
        }
        // The client's own reading of the environment differs from that of Go programs.
        builder = builder.no_proxy();
        if *kind == ConnectionKind::Remote {
            let proxy = |url: &Url| proxy::for_server(&url.as_str().parse().ok()?);
            let proxy = move |url: &Url| proxy(url).map(|proxy| proxy.to_string());
            builder = builder.proxy(reqwest::Proxy::custom(proxy));
        }
        builder = match kind {
            ConnectionKind::PlainLoopback => builder.tls_certs_only(authorities),
            _ if authorities.is_empty() => builder,
            _ => builder.tls_certs_merge(authorities),
        };
        builder.build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_connections_of_few_hosts_are_kept() {
        let kept = KeptHosts::default();
        for number in 0..MAX_KEPT_HOSTS {
            assert!(kept.keep(&number.to_string()));
        }
        assert!(!kept.keep("one more"));
        assert!(kept.keep("0"), "it has its place");
        let long_ago = Instant::now().checked_sub(IDLE_TIMEOUT).unwrap();
        kept.0.lock().insert("1".to_owned(), long_ago);
        assert!(kept.keep("one more"));
        assert!(!kept.keep("1"));
    }
}
