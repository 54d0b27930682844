//! Under which addresses a registry is reached: mirrors first, the registry itself last.

mod file;
mod read;

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use http::HeaderMap;
use quick_cache::sync::Cache;
use reqwest::Url;

use crate::image::{
    error::ImageError,
    flight::Flights,
    reference::{Reference, host_and_port},
};

use super::Settings;

/// Registries are named by whoever creates pods: the least used are read again.
const MAX_REGISTRIES: usize = 1024;
/// Files are looked at again after this time. containerd reads them at each pull.
const READ_AGAIN: Duration = Duration::from_secs(5);
/// Reading a few files from a disk that hangs must not hold up a pod.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// One address of a registry.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(super) endpoint: Endpoint,
    /// Content may be fetched there.
    pub(super) pulls: bool,
    /// Its word counts for what a tag points at.
    pub(super) resolves: bool,
    pub(super) role: Role,
    /// Sent with each request to this address, and nowhere else. May be secret.
    pub(super) headers: HeaderMap,
    pub(super) transport: Arc<Transport>,
}

/// What a host is to the registry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    /// The registry itself: who asks shows credentials here.
    Origin,
    /// Somebody else's machine that holds some of the same.
    Mirror,
    /// The same mirror as the one before it, in the clear: for when nobody speaks TLS there.
    Fallback,
}

/// Where an API is.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Endpoint {
    /// `https://host:port/v2`, without a slash at the end.
    base: String,
    /// `host[:port]`
    host: String,
    /// The registry's own name, for hosts that serve several (`?ns=`).
    namespace: Option<String>,
}

/// How connections are secured: content, not names of files, so a changed file is another value.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Transport {
    /// DER, beside the system's.
    pub(super) authorities: Vec<Vec<u8>>,
    /// PEM of certificate and key.
    pub(super) identity: Option<Vec<u8>>,
    pub(super) skip_verify: bool,
    pub(super) dial_timeout: Option<Duration>,
}

/// The addresses of every registry, read from files when needed and again when they may have changed.
pub(super) struct Hosts {
    roots: Vec<PathBuf>,
    ca_bundle: Option<PathBuf>,
    plain_http: Vec<String>,
    known: Cache<String, Known>,
    flights: Flights<String, Option<Known>>,
}

#[derive(Clone)]
struct Known {
    hosts: Arc<[Host]>,
    read: Instant,
    /// What is wrong with its files, said once.
    problem: Option<String>,
}

impl Hosts {
    pub(super) fn new(settings: &Settings) -> Self {
        for root in settings
            .hosts_directories
            .iter()
            .filter(|root| !root.is_dir())
        {
            let folder = root.display();
            tracing::warn!(%folder, "registries.hostsDirectories names a folder that is not there (yet)");
        }
        Self {
            roots: settings.hosts_directories.clone(),
            ca_bundle: settings.ca_bundle.clone(),
            plain_http: settings.plain_http.clone(),
            known: Cache::new(MAX_REGISTRIES),
            flights: Flights::new(),
        }
    }

    /// The addresses of a reference's registry, in the order in which they are asked.
    pub(super) async fn of(&self, reference: &Reference) -> Result<Arc<[Host]>, ImageError> {
        let name = reference.registry();
        let before = self.known.get(name);
        if let Some(known) = &before
            && known.read.elapsed() < READ_AGAIN
        {
            return Ok(known.hosts.clone());
        }
        let own = self.own(reference);
        if self.roots.is_empty() && self.ca_bundle.is_none() {
            let known = Known::new([own].into(), None);
            self.known.insert(name.to_owned(), known.clone());
            return Ok(known.hosts);
        }
        let (roots, bundle, registry) =
            (self.roots.clone(), self.ca_bundle.clone(), name.to_owned());
        let read = move || {
            async move {
                let files = move || read::read(&roots, bundle.as_deref(), &registry, own);
                let read = tokio::task::spawn_blocking(files);
                tokio::time::timeout(READ_TIMEOUT, read).await.ok()?.ok()
            }
            .boxed()
        };
        let known = match (self.flights.run(name.to_owned(), read).await, before) {
            (Some(known), before) => {
                let told = before.and_then(|before| before.problem);
                if let Some(problem) = known
                    .problem
                    .as_ref()
                    .filter(|new| told.as_ref() != Some(*new))
                {
                    let registry = name;
                    tracing::warn!(
                        registry,
                        problem,
                        "its host configuration is not used as it stands"
                    );
                }
                known
            }
            // What was read before is better than nothing, and a disk that hangs is not asked at once again.
            (None, Some(before)) => Known {
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

    /// The registry under its own name: https, unless it is on loopback (port 443 apart) or the
    /// operator says that it speaks plain http.
    fn own(&self, reference: &Reference) -> Host {
        let host = reference.api_host().to_ascii_lowercase();
        let loopback = is_loopback(&host);
        let named = |name: &String| name.eq_ignore_ascii_case(&host);
        let plain = (loopback && host_and_port(&host).1 != Some("443"))
            || self.plain_http.iter().any(named);
        let scheme = if plain { "http" } else { "https" };
        let base = format!("{scheme}://{host}/v2");
        // As a URL, so that the default port is left out here as it is in the addresses of files.
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
            // containerd does not verify its own machine either, unless told how.
            transport: Arc::new(Transport {
                skip_verify: loopback && !plain,
                ..Transport::default()
            }),
        }
    }
}

impl Known {
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

    /// `host[:port]`
    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// The address of a repository's manifest or blob.
    pub(super) fn url(&self, repository: &str, path: &str) -> String {
        let url = format!("{}/{repository}/{path}", self.base);
        match &self.namespace {
            Some(namespace) => format!("{url}?ns={namespace}"),
            None => url,
        }
    }

    /// Whether an address is served by the same server.
    pub(super) fn is_at(&self, url: &Url) -> bool {
        Url::parse(&self.base).is_ok_and(|own| own.origin() == url.origin())
    }

    /// The same address with TLS; `None` when it has that already.
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

/// Of `host[:port]`.
pub(super) fn is_loopback(registry: &str) -> bool {
    let host = host_and_port(registry).0.trim_matches(['[', ']']);
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests;
