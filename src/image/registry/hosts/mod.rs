//! Under which addresses a registry is reached: mirrors first, the registry itself last.

mod file;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use http::HeaderMap;
use quick_cache::sync::Cache;
use reqwest::Url;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::image::{
    error::ImageError,
    flight::Flights,
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
                let files = move || read(&roots, bundle.as_deref(), &registry, own);
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
            (None, None) => return Err(hung()),
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
    let bundle = bundle.and_then(|path| {
        let found = read_file(path).and_then(|pem| usable(&pem, path));
        keep(found, &mut problems)
    });
    let folder = roots.iter().find_map(|root| folder(root, registry));
    let mut entries = folder.as_deref().map_or_else(Vec::new, |folder| {
        let file = folder.join("hosts.toml");
        let bytes = file.exists().then(|| keep(read_file(&file), &mut problems));
        // An empty file is none.
        let parsed = bytes
            .flatten()
            .filter(|bytes| !bytes.is_empty())
            .and_then(|bytes| {
                let parsed = String::from_utf8(bytes)
                    .map_err(|_| "it is not UTF-8".to_owned())
                    .and_then(|text| {
                        file::parse(folder, &text, &mut problems).map_err(|error| error.to_string())
                    });
                let named = |problem| format!("{}: {problem}", file.display());
                keep(parsed.map_err(named), &mut problems)
            });
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
    // In a registry's own folder `server` is the operator's word for where that registry is. In `_default` it
    // stands for every registry there is: a machine that is none of them.
    let own_folder = folder
        .as_deref()
        .is_none_or(|folder| !folder.ends_with(DEFAULT));
    let mut hosts = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let transport = Arc::new(transport(&entry, bundle.as_deref(), &own, &mut problems));
        let origin = index == last && own_folder;
        hosts.extend(addresses(&entry, registry, &own, origin, &transport));
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    Known::new(hosts.into(), problem)
}

/// The folder for registries that have none of their own.
const DEFAULT: &str = "_default";

/// The folder of a registry in one tree; the first that exists.
fn folder(root: &Path, registry: &str) -> Option<PathBuf> {
    let with_port = match host_and_port(registry) {
        (host, Some(port)) => format!("{host}_{port}_"),
        (host, None) => host.to_owned(),
    };
    [with_port.as_str(), registry, DEFAULT]
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
            .map(|path| {
                // Without a key beside it, one file holds both.
                let key = Some(path.with_extension("key"));
                (path, key.filter(|key| key.exists()))
            })
            .collect(),
        ..Entry::default()
    }
}

fn transport(
    entry: &Entry,
    bundle: Option<&[Vec<u8>]>,
    own: &Host,
    problems: &mut Vec<String>,
) -> Transport {
    let mut authorities = Vec::new();
    for path in &entry.ca {
        let found = read_file(path).and_then(|pem| usable(&pem, path));
        authorities.extend(keep(found, problems).into_iter().flatten());
    }
    authorities.extend(bundle.iter().flat_map(|bundle| bundle.iter().cloned()));
    let mut pem = |path: &PathBuf| keep(read_file(path), problems);
    // One identity: a server that asks for a certificate is shown the first.
    let identity = entry.clients.iter().find_map(|(certificate, key)| {
        let mut both = pem(certificate)?;
        if let Some(key) = key {
            both.push(b'\n');
            both.extend(pem(key)?);
        }
        Some(both)
    });
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
    origin: bool,
    transport: &Arc<Transport>,
) -> Vec<Host> {
    let host = |endpoint, role| Host {
        endpoint,
        pulls: entry.pulls,
        resolves: entry.resolves,
        role,
        headers: entry.headers.clone(),
        transport: transport.clone(),
    };
    let Some(url) = &entry.url else {
        return vec![host(own.endpoint.clone(), Role::Origin)];
    };
    let endpoint = Endpoint::new(url);
    let same = endpoint.host == own.endpoint.host;
    let role = if origin || same {
        Role::Origin
    } else {
        Role::Mirror
    };
    let endpoint = Endpoint {
        namespace: (!same).then(|| registry.to_owned()),
        ..endpoint
    };
    let own_tls = !entry.ca.is_empty() || !entry.clients.is_empty() || entry.skip_verify.is_some();
    let both = url.scheme() == "http" && own_tls && url.port_or_known_default() != Some(80);
    if !both {
        return vec![host(endpoint, role)];
    }
    let secure = Endpoint {
        base: endpoint.base.replacen("http://", "https://", 1),
        ..endpoint.clone()
    };
    // Credentials stay with the secure one: a certificate that does not verify must not bring them out.
    vec![host(secure, role), host(endpoint, Role::Fallback)]
}

/// The certificates of a PEM file that TLS can use, as DER. Go passes over the others, too.
fn usable(pem: &[u8], path: &Path) -> Result<Vec<Vec<u8>>, String> {
    let parsable =
        |der: &CertificateDer<'_>| RootCertStore::empty().add(der.clone().into_owned()).is_ok();
    let found = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok);
    let found: Vec<_> = found.filter(parsable).map(|der| der.to_vec()).collect();
    if found.is_empty() {
        return Err(format!("{} holds no certificate", path.display()));
    }
    Ok(found)
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

    /// Whether an address is served by the same server.
    pub(super) fn is_at(&self, url: &Url) -> bool {
        Url::parse(&self.base).is_ok_and(|own| own.origin() == url.origin())
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
