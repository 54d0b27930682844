//! Parses containerd's `hosts.toml`: the addresses of a registry
//! (`core/remotes/docker/config/hosts.go` of containerd).

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use http::{HeaderMap, HeaderName, HeaderValue};
use regex::Regex;
use reqwest::Url;
use toml::{Table, Value};

use super::rewrites::Rewrites;

/// The keys that are read, of a host and of the file itself.
const KEYS: [&str; 8] = [
    "capabilities",
    "override_path",
    "ca",
    "client",
    "skip_verify",
    "header",
    "dial_timeout",
    "rewrite",
];
const FILE_KEYS: [&str; 2] = ["server", "host"];

/// One address. Paths are absolute; the files are not read yet.
#[derive(Clone, PartialEq, Eq, Default)]
pub(super) struct HostEntry {
    /// `None` means the registry itself under its own name.
    pub(super) url: Option<Url>,
    pub(super) pulls: bool,
    pub(super) resolves: bool,
    pub(super) ca: Vec<PathBuf>,
    /// Pairs of certificate and key files. Without a key file, the certificate file holds both.
    pub(super) clients: Vec<(PathBuf, Option<PathBuf>)>,
    pub(super) skip_verify: Option<bool>,
    pub(super) headers: HeaderMap,
    pub(super) dial_timeout: Option<Duration>,
    pub(super) rewrites: Rewrites,
}

/// Why the file cannot be used. Header values may be secrets, so no value is quoted, except an
/// unknown capability.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum HostsFileError {
    #[error("not TOML at line {0}")]
    Toml(usize),
    #[error("a host's address is malformed or contains a password")]
    Address,
    #[error("{0}")]
    Invalid(String),
}

/// Parses the file of `folder`: mirrors in order, the registry itself last. A mirror with a
/// malformed address is skipped with a warning.
pub(super) fn parse(
    folder: &Path,
    text: &str,
    problems: &mut Vec<String>,
) -> Result<Vec<HostEntry>, HostsFileError> {
    let table: Table = toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        HostsFileError::Toml(before.map_or(1, |before| before.matches('\n').count() + 1))
    })?;
    let mut entries = Vec::new();
    report_unknown_keys(folder, &table, &FILE_KEYS, problems);
    match table.get("host") {
        None => {}
        Some(Value::Table(hosts)) => {
            for (address, fields) in hosts {
                let fields = fields.as_table().ok_or_else(|| wrong_type(address))?;
                report_unknown_keys(folder, fields, &[], problems);
                match entry(folder, Some(address), fields) {
                    Ok(entry) => entries.push(entry),
                    Err(HostsFileError::Address) => {
                        problems.push(format!("{}: {}", folder.display(), HostsFileError::Address));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Some(_) => return Err(wrong_type("host")),
    }
    let server = text_of(&table, "server")?.filter(|server| !server.is_empty());
    let mut last = entry(folder, server, &table)?;
    if server.is_none() {
        // The registry itself always has both capabilities.
        (last.pulls, last.resolves) = (true, true);
    }
    entries.push(last);
    Ok(entries)
}

fn entry(
    folder: &Path,
    address: Option<&str>,
    fields: &Table,
) -> Result<HostEntry, HostsFileError> {
    let (mut pulls, mut resolves) = (true, true);
    if let Some(capabilities) = fields.get("capabilities") {
        let list = capabilities
            .as_array()
            .ok_or_else(|| wrong_type("capabilities"))?;
        let named = strings("capabilities", capabilities)?;
        // An empty list allows everything.
        (pulls, resolves) = (list.is_empty(), list.is_empty());
        for capability in named {
            match capability.to_ascii_lowercase().as_str() {
                "pull" => pulls = true,
                "resolve" => resolves = true,
                "push" | "referrers" => {}
                other => {
                    return Err(HostsFileError::Invalid(format!(
                        "unknown capability {other:.40?}"
                    )));
                }
            }
        }
    }
    let override_path = flag(fields, "override_path")?.unwrap_or(false);
    let path = |text: &str| folder.join(text);
    let ca = fields.get("ca").map(|ca| strings("ca", ca)).transpose()?;
    Ok(HostEntry {
        url: address
            .map(|text| address_of(text, override_path))
            .transpose()?,
        pulls,
        resolves,
        ca: ca.unwrap_or_default().into_iter().map(path).collect(),
        clients: fields
            .get("client")
            .map(|client| parse_client_certificates(folder, client))
            .transpose()?
            .unwrap_or_default(),
        skip_verify: flag(fields, "skip_verify")?,
        headers: fields
            .get("header")
            .map(headers)
            .transpose()?
            .unwrap_or_default(),
        dial_timeout: text_of(fields, "dial_timeout")?
            .map(|text| {
                // containerd treats an empty text as no timeout.
                let text = if text.is_empty() { "0" } else { text };
                archaware_base::duration::parse(text).ok_or_else(|| wrong_type("dial_timeout"))
            })
            .transpose()?
            .filter(|time| !time.is_zero()),
        rewrites: fields
            .get("rewrite")
            .map(rewrites)
            .transpose()?
            .unwrap_or_default(),
    })
}

/// Adds `https` if there is no scheme, and `/v2` unless `override_path` is set.
fn address_of(text: &str, override_path: bool) -> Result<Url, HostsFileError> {
    let full = if text.starts_with("http://") || text.starts_with("https://") {
        text.to_owned()
    } else {
        format!("https://{text}")
    };
    let mut url = Url::parse(&full).map_err(|_| HostsFileError::Address)?;
    // A password in the URL would end up in logs and errors.
    if !url.has_host() || !url.username().is_empty() || url.password().is_some() {
        return Err(HostsFileError::Address);
    }
    url.set_query(None);
    url.set_fragment(None);
    // Cleans the path like Go's `path.Clean`: `Url` has resolved `.` and `..`, and this removes
    // duplicate and trailing slashes.
    let parts = url.path().split('/').filter(|part| !part.is_empty());
    let mut path: String = parts.flat_map(|part| ["/", part]).collect();
    if !override_path && !path.ends_with("/v2") {
        path.push_str("/v2");
    }
    url.set_path(&path);
    Ok(url)
}

/// Parses `client`: the path of a file with certificate and key, a list of such paths, or a list of
/// pairs of paths.
fn parse_client_certificates(
    folder: &Path,
    value: &Value,
) -> Result<Vec<(PathBuf, Option<PathBuf>)>, HostsFileError> {
    let path = |text: &str| folder.join(text);
    match value {
        Value::String(file) => Ok(vec![(path(file), None)]),
        Value::Array(items) => items
            .iter()
            .map(|item| match item {
                Value::String(file) => Ok((path(file), None)),
                Value::Array(_) => match strings("client", item)?.as_slice() {
                    [both] | [both, ""] => Ok((path(both), None)),
                    [certificate, key] => Ok((path(certificate), Some(path(key)))),
                    _ => Err(wrong_type("client")),
                },
                _ => Err(wrong_type("client")),
            })
            .collect(),
        _ => Err(wrong_type("client")),
    }
}

fn headers(value: &Value) -> Result<HeaderMap, HostsFileError> {
    let mut headers = HeaderMap::new();
    for (name, values) in value.as_table().ok_or_else(|| wrong_type("header"))? {
        let name: HeaderName = name.parse().map_err(|_| wrong_type("header"))?;
        for text in strings("header", values)? {
            let mut value: HeaderValue = text.parse().map_err(|_| wrong_type("header"))?;
            value.set_sensitive(true);
            headers.append(name.clone(), value);
        }
    }
    Ok(headers)
}

fn rewrites(value: &Value) -> Result<Rewrites, HostsFileError> {
    let pairs = value.as_table().ok_or_else(|| wrong_type("rewrite"))?;
    let parsed = pairs.iter().map(|(pattern, replacement)| {
        let replacement = replacement.as_str().ok_or_else(|| wrong_type("rewrite"))?;
        let pattern = Regex::new(pattern).map_err(|_| wrong_type("rewrite"))?;
        Ok((pattern, replacement.to_owned()))
    });
    parsed.collect()
}

/// Reports keys that archaware does not know, because they may change which images the node pulls.
fn report_unknown_keys(folder: &Path, fields: &Table, more: &[&str], problems: &mut Vec<String>) {
    let is_unknown = |key: &&String| !KEYS.contains(&key.as_str()) && !more.contains(&key.as_str());
    // A few show what kind of file it is.
    for key in fields.keys().filter(is_unknown).take(3) {
        let folder = folder.display();
        problems.push(format!("{folder}: the key {key:.40?} is not supported"));
    }
}

/// Parses a string or a list of strings.
fn strings<'a>(key: &str, value: &'a Value) -> Result<Vec<&'a str>, HostsFileError> {
    match value {
        Value::String(text) => Ok(vec![text]),
        Value::Array(items) => {
            let items = items.iter().map(Value::as_str);
            items.collect::<Option<_>>().ok_or_else(|| wrong_type(key))
        }
        _ => Err(wrong_type(key)),
    }
}

fn text_of<'a>(fields: &'a Table, key: &str) -> Result<Option<&'a str>, HostsFileError> {
    let text = |value: &'a Value| value.as_str().ok_or_else(|| wrong_type(key));
    fields.get(key).map(text).transpose()
}

fn flag(fields: &Table, key: &str) -> Result<Option<bool>, HostsFileError> {
    let flag = |value: &Value| value.as_bool().ok_or_else(|| wrong_type(key));
    fields.get(key).map(flag).transpose()
}

fn wrong_type(key: &str) -> HostsFileError {
    HostsFileError::Invalid(format!("{key} has the wrong type or an impossible value"))
}
