//! Under which addresses a registry is reached: mirrors first, the registry itself last.

mod file;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use http::HeaderMap;
use quick_cache::sync::Cache;
use reqwest::Url;

use crate::image::{
    error::ImageError,
    reference::{Reference, host_and_port},
};

use super::Settings;
use file::Entry;

/// Registries are named by whoever creates pods: the least used are read again.
const MAX_REGISTRIES: usize = 1024;
/// Files are looked at again after this time. containerd reads them at each pull.
const READ_AGAIN: Duration = Duration::from_secs(5);
/// Larger files hold no configuration and no certificate.
const MAX_FILE: u64 = 1024 * 1024;
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
    /// The registry itself: who asks shows credentials here.
    pub(super) origin: bool,
    /// Sent with each request to this address, and nowhere else. May be secret.
    pub(super) headers: HeaderMap,
    pub(super) transport: Arc<Transport>,
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
    /// PEM, beside the system's.
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
        Self {
            roots: settings.hosts_directories.clone(),
            ca_bundle: settings.ca_bundle.clone(),
            plain_http: settings.plain_http.clone(),
            known: Cache::new(MAX_REGISTRIES),
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
        let known = if self.roots.is_empty() && self.ca_bundle.is_none() {
            Known::new([own].into(), None)
        } else {
            let (roots, bundle) = (self.roots.clone(), self.ca_bundle.clone());
            let (name, plain) = (name.to_owned(), own);
            let read =
                tokio::task::spawn_blocking(move || read(&roots, bundle.as_deref(), &name, plain));
            match tokio::time::timeout(READ_TIMEOUT, read).await {
                Ok(Ok(known)) => known,
                // What was read before is better than nothing.
                _ if before.is_some() => return before.map(|known| known.hosts).ok_or_else(hung),
                _ => return Err(hung()),
            }
        };
        let told = before.and_then(|before| before.problem);
        if let Some(problem) = known
            .problem
            .as_ref()
            .filter(|new| told.as_ref() != Some(*new))
        {
            tracing::warn!(
                registry = name,
                problem,
                "the registry's host configuration is not used as it stands"
            );
        }
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
        Host {
            endpoint: Endpoint {
                base: format!("{scheme}://{host}/v2"),
                host,
                namespace: None,
            },
            pulls: true,
            resolves: true,
            origin: true,
            headers: HeaderMap::new(),
            // containerd does not verify its own machine either, unless told how.
            transport: Arc::new(Transport {
                skip_verify: loopback && !plain,
                ..Transport::default()
            }),
        }
    }
}

fn hung() -> ImageError {
    ImageError::unavailable(
        "registries.hostsDirectories",
        "its files cannot be read in time",
    )
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

/// Reads what the trees say of a registry. What cannot be used is left out and said.
fn read(roots: &[PathBuf], bundle: Option<&Path>, registry: &str, own: Host) -> Known {
    let mut problems = Vec::new();
    let bundle = bundle.and_then(|path| keep(read_file(path), &mut problems));
    let folder = roots.iter().find_map(|root| folder(root, registry));
    let mut entries = folder.as_deref().map_or_else(Vec::new, |folder| {
        let file = folder.join("hosts.toml");
        let parsed = file.exists().then(|| {
            let bytes = read_file(&file)?;
            file::parse(folder, &String::from_utf8_lossy(&bytes))
                .map_err(|error| format!("{}: {error}", file.display()))
        });
        let parsed = parsed.and_then(|parsed| keep(parsed, &mut problems));
        parsed.unwrap_or_else(|| vec![certificates(folder)])
    });
    if entries.is_empty() {
        entries.push(Entry {
            pulls: true,
            resolves: true,
            ..Entry::default()
        });
    }
    let last = entries.len() - 1;
    let mut hosts = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let transport = transport(&entry, bundle.as_deref(), &own, &mut problems);
        // `server` is the operator's word for where the registry itself is.
        hosts.extend(addresses(
            &entry,
            registry,
            &own,
            index == last,
            &Arc::new(transport),
        ));
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    Known::new(hosts.into(), problem)
}

/// The folder of a registry in one tree; the first that exists.
fn folder(root: &Path, registry: &str) -> Option<PathBuf> {
    let with_port = match host_and_port(registry) {
        (host, Some(port)) => format!("{host}_{port}_"),
        (host, None) => host.to_owned(),
    };
    [with_port.as_str(), registry, "_default"]
        .into_iter()
        .map(|name| root.join(name))
        .find(|folder| folder.is_dir())
}

/// Docker's older way: `*.crt` are authorities, `*.cert` with `*.key` are client certificates.
fn certificates(folder: &Path) -> Entry {
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|file| file.path())
        .collect();
    names.sort();
    let with = |extension: &str| {
        let extension = extension.to_owned();
        names
            .iter()
            .filter(move |path| {
                path.extension()
                    .is_some_and(|own| own == extension.as_str())
            })
            .cloned()
    };
    Entry {
        pulls: true,
        resolves: true,
        ca: with("crt").collect(),
        clients: with("cert")
            .map(|path| (path.clone(), Some(path.with_extension("key"))))
            .collect(),
        ..Entry::default()
    }
}

fn transport(
    entry: &Entry,
    bundle: Option<&[u8]>,
    own: &Host,
    problems: &mut Vec<String>,
) -> Transport {
    let mut pem = |path: &PathBuf| keep(read_file(path), problems);
    let mut authorities: Vec<Vec<u8>> = entry.ca.iter().filter_map(&mut pem).collect();
    // One identity: a server that asks for a certificate is shown the first.
    let identity = entry.clients.iter().find_map(|(certificate, key)| {
        let mut both = pem(certificate)?;
        if let Some(key) = key {
            both.push(b'\n');
            both.extend(pem(key)?);
        }
        Some(both)
    });
    authorities.extend(bundle.map(<[u8]>::to_vec));
    let unsaid = entry.url.is_none() && authorities.is_empty() && own.transport.skip_verify;
    Transport {
        skip_verify: entry.skip_verify.unwrap_or(unsaid),
        authorities,
        identity,
        dial_timeout: entry.dial_timeout,
    }
}

/// An entry's address; two for one that may speak either: settings for TLS on an http address mean
/// https first (not on port 80).
fn addresses(
    entry: &Entry,
    registry: &str,
    own: &Host,
    last: bool,
    transport: &Arc<Transport>,
) -> Vec<Host> {
    let host = |endpoint| Host {
        endpoint,
        pulls: entry.pulls,
        resolves: entry.resolves,
        origin: false,
        headers: entry.headers.clone(),
        transport: transport.clone(),
    };
    let Some(url) = &entry.url else {
        return vec![Host {
            origin: true,
            ..host(own.endpoint.clone())
        }];
    };
    let endpoint = Endpoint::new(url);
    let origin = last || endpoint.host == own.endpoint.host;
    let namespace = (endpoint.host != own.endpoint.host).then(|| registry.to_owned());
    let endpoint = Endpoint {
        namespace,
        ..endpoint
    };
    let own_tls = !entry.ca.is_empty() || !entry.clients.is_empty() || entry.skip_verify.is_some();
    let both = url.scheme() == "http" && own_tls && url.port_or_known_default() != Some(80);
    let secure = both.then(|| Endpoint {
        base: endpoint.base.replacen("http://", "https://", 1),
        ..endpoint.clone()
    });
    let endpoints = secure.into_iter().chain([endpoint]);
    endpoints
        .map(|endpoint| Host {
            origin,
            ..host(endpoint)
        })
        .collect()
}

fn keep<T>(read: Result<T, String>, problems: &mut Vec<String>) -> Option<T> {
    read.map_err(|problem| problems.push(problem)).ok()
}

fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    let failed = |why: &dyn fmt::Display| format!("cannot read {}: {why}", path.display());
    let size = std::fs::metadata(path)
        .map_err(|error| failed(&error))?
        .len();
    if size > MAX_FILE {
        return Err(failed(&"it is larger than 1 MiB"));
    }
    std::fs::read(path).map_err(|error| failed(&error))
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

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport")
            .field("skip_verify", &self.skip_verify)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
