//! The addresses of a registry: mirrors first, the registry itself last.

mod bundle;
mod file;
mod read;
mod rewrites;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use http::HeaderMap;
use quick_cache::sync::Cache;
use reqwest::Url;

use crate::{
    error::ImageError,
    reference::{Reference, host_and_port},
};
use archaware_base::single_flight::SingleFlight;

use super::{RegistryClient, address::is_loopback, dns::AddressCheck};

use bundle::{Bundle, Bundles};
use rewrites::Rewrites;

/// Users choose the registries, so the settings of the least used registries are dropped and read
/// again.
const MAX_REGISTRIES: usize = 1024;
/// How long settings are used before the files are read again. containerd reads them at each pull.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);
/// A disk that hangs must not delay pods longer than this.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// One address of a registry.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(super) endpoint: Endpoint,
    /// Whether content may be fetched from it.
    pub(super) pulls: bool,
    /// Whether this host may resolve tags to digests (capability `resolve`).
    pub(super) resolves: bool,
    pub(super) role: Role,
    /// Sent with each request to this address only. May contain secrets.
    pub(super) headers: HeaderMap,
    /// The names of repositories on this host.
    pub(super) rewrites: Rewrites,
    pub(super) transport: Arc<Transport>,
    pub(super) check: AddressCheck,
}

/// The relation of a host to the registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// The registry itself, which gets credentials.
    Origin,
    /// A mirror.
    Mirror,
    /// The previous host over plain HTTP, asked only if that host speaks no TLS. Gets no credential
    /// and no header of `hosts.toml`.
    Fallback,
}

/// Base address of a registry API.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Endpoint {
    /// `https://host:port/v2` without a trailing slash.
    base: String,
    /// `host[:port]`
    host: String,
    /// The registry's name, for mirrors that serve several (`?ns=`).
    namespace: Option<String>,
}

/// TLS settings. Holds the content of files instead of their names, so that a changed file changes
/// the value.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Transport {
    /// Certificates in addition to the system's.
    pub(super) authorities: Vec<Arc<Bundle>>,
    /// PEM of client certificate and key.
    pub(super) identity: Option<Vec<u8>>,
    pub(super) skip_verify: bool,
    pub(super) dial_timeout: Option<Duration>,
}

impl Transport {
    /// These settings without the client certificate, which must not be sent to other hosts
    /// (redirects and token endpoints).
    pub(super) fn without_identity(self: &Arc<Self>) -> Arc<Self> {
        match &self.identity {
            None => self.clone(),
            Some(_) => Arc::new(Self {
                identity: None,
                ..(**self).clone()
            }),
        }
    }
}

/// The addresses of all registries. Files are read when needed, and again when they may have
/// changed.
pub(super) struct Hosts {
    roots: Vec<PathBuf>,
    ca_bundle: Option<PathBuf>,
    plain_http: Vec<String>,
    bundles: Arc<Bundles>,
    known: Cache<String, CachedHosts>,
    flights: SingleFlight<String, Option<CachedHosts>>,
}

#[derive(Clone)]
struct CachedHosts {
    hosts: Arc<[Host]>,
    read: Instant,
    /// The last problem with the files, to log it once.
    problem: Option<String>,
}

impl Hosts {
    pub(super) fn new(settings: &RegistryClient) -> Self {
        for root in settings
            .hosts_directories
            .iter()
            .filter(|root| !root.is_dir())
        {
            let folder = root.display();
            tracing::warn!(%folder, "registries.hostsDirectories names a folder that does not exist (yet)");
        }
        Self {
            roots: settings.hosts_directories.clone(),
            ca_bundle: settings.ca_bundle.clone(),
            plain_http: settings.plain_http.clone(),
            bundles: Arc::new(Bundles::new()),
            known: Cache::new(MAX_REGISTRIES),
            flights: SingleFlight::default(),
        }
    }

    /// The addresses of a reference's registry in the order of their use.
    pub(super) async fn for_reference(
        &self,
        reference: &Reference,
    ) -> Result<Arc<[Host]>, ImageError> {
        let name = reference.registry();
        let before = self.known.get(name);
        if let Some(known) = &before
            && known.read.elapsed() < REREAD_INTERVAL
        {
            return Ok(known.hosts.clone());
        }
        let origin_host = self.origin_host(reference);
        if self.roots.is_empty() && self.ca_bundle.is_none() {
            let known = CachedHosts::new([origin_host].into(), None);
            self.known.insert(name.to_owned(), known.clone());
            return Ok(known.hosts);
        }
        let (roots, bundle, registry) =
            (self.roots.clone(), self.ca_bundle.clone(), name.to_owned());
        let bundles = self.bundles.clone();
        let read = move || {
            async move {
                let files =
                    move || read::read(&roots, bundle.as_deref(), &bundles, &registry, origin_host);
                let read = tokio::task::spawn_blocking(files);
                tokio::time::timeout(READ_TIMEOUT, read).await.ok()?.ok()
            }
            .boxed()
        };
        let known = match (self.flights.run(name.to_owned(), read).await, before) {
            (Some(known), before) => {
                let reported = before.and_then(|before| before.problem);
                if let Some(problem) = known
                    .problem
                    .as_ref()
                    .filter(|new| reported.as_ref() != Some(*new))
                {
                    let registry = name;
                    tracing::warn!(
                        registry,
                        problem,
                        "host configuration is invalid; the invalid parts are ignored"
                    );
                }
                known
            }
            // Uses the earlier settings again. The new `read` time delays the next access to a
            // disk that hangs.
            (None, Some(before)) => CachedHosts {
                read: Instant::now(),
                ..before
            },
            (None, None) => {
                let what = "registries.hostsDirectories";
                let why = "its files cannot be read in time";
                return Err(ImageError::unavailable(what, why));
            }
        };
        self.known.insert(name.to_owned(), known.clone());
        Ok(known.hosts)
    }

    /// The registry under its own name: HTTPS, except for hosts in `plainHttp` and for loopback
    /// with a port other than 443.
    fn origin_host(&self, reference: &Reference) -> Host {
        let host = reference.api_host().to_ascii_lowercase();
        let loopback = is_loopback(&host);
        let named = |name: &String| name.eq_ignore_ascii_case(&host);
        // containerd's `ConfigureHosts`: localhost without a port, or with 443, is HTTPS.
        let has_other_port = host_and_port(&host).1.is_some_and(|port| port != "443");
        let plain = (loopback && has_other_port) || self.plain_http.iter().any(named);
        let scheme = if plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2");
        // Parsed as a URL to drop the default port, as in the addresses from files.
        let endpoint = Url::parse(&base).map_or_else(
            |_| Endpoint {
                base,
                host,
                namespace: None,
            },
            |url| Endpoint::new(&url),
        );
        Host {
            endpoint,
            pulls: true,
            resolves: true,
            role: Role::Origin,
            headers: HeaderMap::new(),
            rewrites: Rewrites::default(),
            // containerd does not verify certificates of loopback addresses either, unless TLS is
            // configured.
            transport: Arc::new(Transport {
                skip_verify: loopback && !plain,
                ..Transport::default()
            }),
            check: AddressCheck::RefuseLocal,
        }
    }
}

impl CachedHosts {
    fn new(hosts: Arc<[Host]>, problem: Option<String>) -> Self {
        Self {
            hosts,
            read: Instant::now(),
            problem,
        }
    }
}

impl Endpoint {
    pub(super) fn new(url: &Url) -> Self {
        let host = url.host_str().unwrap_or_default();
        Self {
            base: url.as_str().trim_end_matches('/').to_owned(),
            host: url
                .port()
                .map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")),
            namespace: None,
        }
    }

    /// The registry API (`/v2`) on the server of a URL.
    pub(super) fn new_base(url: &Url) -> Self {
        let mut base = url.clone();
        base.set_path("/v2");
        base.set_query(None);
        base.set_fragment(None);
        Self::new(&base)
    }

    /// `host[:port]`
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// The URL of a manifest or blob in a repository.
    pub(super) fn url(&self, repository: &str, path: &str) -> String {
        let url = format!("{}/{repository}/{path}", self.base);
        match &self.namespace {
            Some(namespace) => format!("{url}?ns={namespace}"),
            None => url,
        }
    }

    /// Whether a URL is served by the same server.
    pub(super) fn is_at(&self, url: &Url) -> bool {
        Url::parse(&self.base).is_ok_and(|base| base.origin() == url.origin())
    }

    /// This address with TLS; `None` if it has TLS already.
    fn secured(&self) -> Option<Self> {
        let rest = self.base.strip_prefix("http://")?;
        let base = format!("https://{rest}");
        Some(Self {
            base,
            ..self.clone()
        })
    }

    pub(super) fn is_plain(&self) -> bool {
        self.base.starts_with("http://")
    }
}

#[cfg(test)]
mod tests;
