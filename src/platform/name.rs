//! A short name that costs nothing when it is one of the usual ones.

use std::{fmt, sync::Arc};

/// Names met in nearly every image: kept as static strings, so a cache of many images shares them.
const COMMON: &[&str] = &[
    "linux", "windows", "darwin", "freebsd", "amd64", "arm64", "arm", "386", "ppc64le", "s390x",
    "riscv64", "loong64", "mips64le", "mips64", "mipsle", "mips", "ppc64", "wasm", "wasip1", "v5",
    "v6", "v7", "v8", "v9", "v2", "v3", "v4",
];

/// A string compared by its text, whether it is static or shared.
#[derive(Clone)]
pub(super) enum Name {
    Common(&'static str),
    Other(Arc<str>),
}

impl Name {
    pub(super) fn new(text: &str) -> Self {
        COMMON
            .iter()
            .find(|common| **common == text)
            .map_or_else(|| Self::Other(text.into()), |common| Self::Common(common))
    }

    pub(super) fn as_str(&self) -> &str {
        match self {
            Self::Common(text) => text,
            Self::Other(text) => text,
        }
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl std::hash::Hash for Name {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}
