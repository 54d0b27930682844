//! Reads the settings of one registry: `hosts.toml` and the files beside it, in the registry's
//! folder.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::reference::host_and_port;
use archaware_base::{error::chain, files};

use http::HeaderMap;

use super::{
    AddressCheck, Bundle, Bundles, CachedHosts, Endpoint, Host, Role, Transport,
    file::{self, HostEntry},
};

/// Reads the settings of a registry. Unusable settings are skipped and reported.
pub(super) fn read(
    roots: &[PathBuf],
    bundle: Option<&Path>,
    bundles: &Bundles,
    registry: &str,
    origin_host: Host,
) -> CachedHosts {
    let mut problems = Vec::new();
    let bundle = bundle.and_then(|path| {
        let found = bundles.load(path);
        ok_or_report(
            found.map_err(|why| format!("registries.caBundle: {why}")),
            &mut problems,
        )
    });
    let folder = roots.iter().find_map(|root| folder(root, registry));
    let mut entries = folder.as_deref().map_or_else(Vec::new, |folder| {
        let file = folder.join("hosts.toml");
        let bytes = file
            .exists()
            .then(|| ok_or_report(read_file(&file), &mut problems));
        // An empty file means no hosts.toml.
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
                ok_or_report(parsed.map_err(named), &mut problems)
            });
        parsed.unwrap_or_else(|| vec![certificates(folder)])
    });
    if entries.is_empty() {
        entries.push(HostEntry {
            pulls: true,
            resolves: true,
            ..HostEntry::default()
        });
    }
    let last = entries.len() - 1;
    // In a registry's own folder, `server` is the address of that registry. In `_default` it
    // applies to every registry and is therefore a mirror.
    let own_folder = folder
        .as_deref()
        .is_none_or(|folder| !folder.ends_with(DEFAULT));
    let mut hosts = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let transport = transport(
            &entry,
            bundle.as_ref(),
            bundles,
            &origin_host,
            &mut problems,
        );
        let transport = Arc::new(transport);
        let origin = index == last && own_folder;
        hosts.extend(addresses(
            &entry,
            registry,
            &origin_host,
            origin,
            &transport,
        ));
    }
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    CachedHosts::new(hosts.into(), problem)
}

/// The folder for registries without a folder of their own.
const DEFAULT: &str = "_default";

/// The first existing folder of a registry in one directory.
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

/// Docker's older layout: `*.crt` are authorities, `*.cert` with `*.key` are client certificates.
fn certificates(folder: &Path) -> HostEntry {
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
                    .is_some_and(|found| found == extension.as_str())
            })
            .cloned()
    };
    HostEntry {
        pulls: true,
        resolves: true,
        ca: with("crt").collect(),
        clients: with("cert")
            .map(|path| {
                // A certificate file without a key file beside it also holds the key.
                let key = Some(path.with_extension("key"));
                (path, key.filter(|key| key.exists()))
            })
            .collect(),
        ..HostEntry::default()
    }
}

fn transport(
    entry: &HostEntry,
    bundle: Option<&Arc<Bundle>>,
    bundles: &Bundles,
    origin_host: &Host,
    problems: &mut Vec<String>,
) -> Transport {
    let mut authorities = Vec::new();
    for path in &entry.ca {
        authorities.extend(ok_or_report(bundles.load(path), problems));
    }
    authorities.extend(bundle.cloned());
    let mut pem = |path: &PathBuf| ok_or_report(read_file(path), problems);
    // A client can present one identity, so the first one is used.
    let identity = entry.clients.iter().find_map(|(certificate, key)| {
        let mut both = pem(certificate)?;
        if let Some(key) = key {
            both.push(b'\n');
            both.extend(pem(key)?);
        }
        Some(both)
    });
    let default_skip_verify =
        entry.url.is_none() && authorities.is_empty() && origin_host.transport.skip_verify;
    Transport {
        skip_verify: entry.skip_verify.unwrap_or(default_skip_verify),
        authorities,
        identity,
        dial_timeout: entry.dial_timeout,
    }
}

/// The addresses of an entry. If an http address has TLS settings, https is tried first, unless
/// `entry.url` has port 80.
fn addresses(
    entry: &HostEntry,
    registry: &str,
    origin_host: &Host,
    origin: bool,
    transport: &Arc<Transport>,
) -> Vec<Host> {
    let host = |endpoint, role| Host {
        endpoint,
        pulls: entry.pulls,
        resolves: entry.resolves,
        role,
        // The fallback uses plain HTTP, so it gets no headers, because headers may hold secrets.
        headers: match role {
            Role::Origin | Role::Mirror => entry.headers.clone(),
            Role::Fallback => HeaderMap::new(),
        },
        rewrites: entry.rewrites.clone(),
        transport: transport.clone(),
        check: match &entry.url {
            Some(_) => AddressCheck::AllowAll,
            None => origin_host.check,
        },
    };
    let own_tls = !entry.ca.is_empty() || !entry.clients.is_empty() || entry.skip_verify.is_some();
    let Some(url) = &entry.url else {
        let endpoint = origin_host.endpoint.clone();
        return match endpoint.secured() {
            // The address is plain HTTP, but TLS settings are configured for it.
            Some(secure) if own_tls => {
                vec![host(secure, Role::Origin), host(endpoint, Role::Fallback)]
            }
            _ => vec![host(endpoint, Role::Origin)],
        };
    };
    let endpoint = Endpoint::new(url);
    let same = endpoint.host == origin_host.endpoint.host;
    let role = if origin || same {
        Role::Origin
    } else {
        Role::Mirror
    };
    let endpoint = Endpoint {
        namespace: (!same).then(|| registry.to_owned()),
        ..endpoint
    };
    let both = own_tls && url.port_or_known_default() != Some(80);
    match endpoint.secured() {
        // Only the https address gets credentials, so that the fallback to plain HTTP cannot leak
        // them.
        Some(secure) if both => vec![host(secure, role), host(endpoint, Role::Fallback)],
        _ => vec![host(endpoint, role)],
    }
}

fn ok_or_report<T>(read: Result<T, String>, problems: &mut Vec<String>) -> Option<T> {
    read.map_err(|problem| problems.push(problem)).ok()
}

pub(super) fn read_file(path: &Path) -> Result<Vec<u8>, String> {
    files::read("", path).map_err(|error| chain(&error))
}
