//! Image references in the grammar of `github.com/distribution/reference` (v0.6), which the kubelet
//! and containerd use. What Go rejects is rejected here.

use std::fmt;

use super::digest::{Digest, DigestError};

const DOCKER_HUB: &str = "docker.io";
/// Limit of the path without the registry, in bytes (`RepositoryNameTotalLengthMax`).
const MAX_PATH: usize = 255;
const MAX_TAG: usize = 128;
/// Limit of a host with its port, in bytes. A name in the DNS has at most 253 (RFC 1035, 2.3.4). Go
/// has no limit here, but a longer name cannot be resolved.
const MAX_HOST: usize = 255;

/// A normalised image reference: `registry/repository`, with a tag or a digest.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Reference {
    registry: String,
    repository: String,
    version: Version,
}

/// A tag or a digest. A tag beside a digest is dropped, because the digest decides.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Version {
    /// A tag; `latest` if none was given.
    Tag(String),
    /// A digest.
    Digest(Digest),
}

/// Why text is not an image reference.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReferenceError {
    /// The text does not match the grammar.
    #[error("{text:?} is not an image reference: {problem}")]
    Invalid {
        /// The reference as given.
        text: String,
        /// The part that is wrong.
        problem: &'static str,
    },
    /// The digest has an unknown algorithm.
    #[error(transparent)]
    Algorithm(DigestError),
}

impl Reference {
    /// Parses and normalises: `nginx` becomes `docker.io/library/nginx:latest`.
    ///
    /// # Errors
    ///
    /// When the text does not match the grammar or its digest has an unknown algorithm.
    pub fn parse(text: &str) -> Result<Self, ReferenceError> {
        let invalid = |problem| ReferenceError::Invalid {
            text: text.to_owned(),
            problem,
        };
        if text.is_empty() {
            return Err(invalid("it is empty"));
        }
        let lower_hex = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        if text.len() == 64 && text.chars().all(lower_hex) {
            return Err(invalid("64 hexadecimal digits are an image ID, not a name"));
        }
        let (registry, remainder) = split_registry(text);
        let (name_and_tag, digest) = match remainder.split_once('@') {
            Some((name, digest)) => (name.to_owned(), Some(digest)),
            None => (remainder, None),
        };
        let (repository, tag) = match name_and_tag.split_once(':') {
            Some((repository, tag)) => (repository.to_owned(), Some(tag)),
            None => (name_and_tag, None),
        };
        if repository.chars().any(|c| c.is_ascii_uppercase()) {
            return Err(invalid("the repository must be lower-case"));
        }
        if registry.len() > MAX_HOST {
            return Err(invalid("the registry's host is longer than 255 characters"));
        }
        // For Go, a first component that is not a domain name (for example, because of an
        // underscore) is a part of the path, but containerd uses it as host. So both forms count.
        if !is_registry(&registry) && !is_path_component(&registry) {
            return Err(invalid("the registry's host or port is malformed"));
        }
        if !repository.split('/').all(is_path_component) {
            return Err(invalid("the repository is malformed"));
        }
        if repository.len() > MAX_PATH {
            return Err(invalid("the repository is longer than 255 characters"));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(invalid("the tag is malformed"));
        }
        let version = match digest.map(str::parse) {
            Some(Ok(digest)) => Version::Digest(digest),
            Some(Err(error @ DigestError::Algorithm)) => {
                return Err(ReferenceError::Algorithm(error));
            }
            Some(Err(DigestError::Malformed)) => return Err(invalid("the digest is malformed")),
            None => Version::Tag(tag.unwrap_or("latest").to_owned()),
        };
        Ok(Self {
            registry,
            repository,
            version,
        })
    }

    /// Host and optional port as written in names: Docker Hub is `docker.io`.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// The path within the registry.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Tag or digest.
    pub fn version(&self) -> &Version {
        &self.version
    }

    /// `registry/repository`, which credentials are matched against.
    pub fn name(&self) -> String {
        format!("{}/{}", self.registry, self.repository)
    }

    /// Host and port of the registry's API. For Docker Hub it differs from the registry's name.
    pub fn api_host(&self) -> &str {
        if self.registry == DOCKER_HUB {
            "registry-1.docker.io"
        } else {
            &self.registry
        }
    }

    /// The registry without port, as in containerd's `distribution.source` labels.
    pub fn host_name(&self) -> &str {
        host_and_port(&self.registry).0.trim_matches(['[', ']'])
    }
}

/// `docker.io/library/nginx:latest`, `reg/app@sha256:…`: also the name of containerd's image
/// record.
impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.version {
            Version::Tag(tag) => write!(f, "{}/{}:{tag}", self.registry, self.repository),
            Version::Digest(digest) => write!(f, "{}/{}@{digest}", self.registry, self.repository),
        }
    }
}

/// Splits at the last colon outside the brackets of an IPv6 literal.
pub(super) fn host_and_port(registry: &str) -> (&str, Option<&str>) {
    match registry.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (registry, None),
    }
}

/// `splitDockerDomain`: the first part is a registry if it cannot be a Docker Hub user.
fn split_registry(text: &str) -> (String, String) {
    let Some((first, rest)) = text.split_once('/') else {
        return (DOCKER_HUB.to_owned(), format!("library/{text}"));
    };
    let has_upper = || first.chars().any(char::is_uppercase);
    let (registry, rest) = if first == "index.docker.io" {
        (DOCKER_HUB, rest)
    } else if first == "localhost" || first.contains(['.', ':']) || has_upper() {
        (first, rest)
    } else {
        (DOCKER_HUB, text)
    };
    let official = registry == DOCKER_HUB && !rest.contains('/');
    let rest = if official {
        format!("library/{rest}")
    } else {
        rest.to_owned()
    };
    (registry.to_owned(), rest)
}

fn is_registry(text: &str) -> bool {
    let (host, port) = host_and_port(text);
    let port_ok = port.is_none_or(|p| !p.is_empty() && p.chars().all(|c| c.is_ascii_digit()));
    let host_ok = match host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        Some(v6) => !v6.is_empty() && v6.chars().all(|c| c.is_ascii_hexdigit() || c == ':'),
        None => host.split('.').all(is_host_component),
    };
    port_ok && host_ok
}

fn is_host_component(part: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    edge(part.chars().next())
        && edge(part.chars().next_back())
        && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

/// Lower-case alphanumeric words joined by `.`, `_`, `__` or any number of `-`.
fn is_path_component(part: &str) -> bool {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let mut rest = part;
    loop {
        let after = rest.trim_start_matches(word);
        if after.len() == rest.len() {
            return false;
        }
        if after.is_empty() {
            return true;
        }
        rest = match after
            .strip_prefix("__")
            .or_else(|| after.strip_prefix(['.', '_']))
        {
            Some(next) => next,
            None => after.trim_start_matches('-'),
        };
        if rest.len() == after.len() {
            return false;
        }
    }
}

fn is_tag(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.len() <= MAX_TAG
        && text.starts_with(word)
        && text.chars().all(|c| word(c) || matches!(c, '.' | '-'))
}

#[cfg(test)]
mod tests;
