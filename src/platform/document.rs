//! Image indexes, manifests and configs, OCI's and Docker's, with or without `mediaType`.
//!
//! Every field is optional here: what registries hold in practice is wider than the specification,
//! and one odd entry must not hide the others.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Note, Platform, PlatformSet};

/// Size limit of one document in bytes: containerd refuses larger manifests too.
pub const MAX_DOCUMENT: u64 = 4 * 1024 * 1024;

/// Different platforms, and entries that do not name theirs, of one index. Repetitions are free: an
/// index of thousands of entries is read, a hostile one does not fill the memory.
const MAX_ENTRIES: usize = 256;

/// Media types of the OCI image specification and of Docker's distribution.
pub mod media_type {
    /// OCI image index.
    pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";
    /// OCI image manifest.
    pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
    /// OCI image config.
    pub const OCI_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
    /// Docker manifest list.
    pub const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
    /// Docker manifest, schema 2.
    pub const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
    /// Docker image config.
    pub const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
    /// The four that hold platforms: what to ask a registry for.
    pub const MANIFESTS: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

    pub(super) fn is_index(media_type: &str) -> bool {
        matches!(media_type, OCI_INDEX | DOCKER_LIST)
    }

    pub(super) fn is_manifest(media_type: &str) -> bool {
        matches!(media_type, OCI_MANIFEST | DOCKER_MANIFEST)
    }

    /// Early Docker clients pushed configs as plain octets, and some writers leave the type out:
    /// those are judged by their content.
    pub(super) fn may_be_config(media_type: &str) -> bool {
        matches!(
            media_type,
            OCI_CONFIG | DOCKER_CONFIG | "application/octet-stream" | ""
        )
    }
}

/// Why bytes are not a document that says anything about platforms.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DocumentError {
    /// Over [`MAX_DOCUMENT`].
    #[error("{0} bytes are more than the limit of 4 MiB")]
    TooLarge(u64),
    /// Not the JSON of an index, manifest or config.
    #[error("not an image manifest: {0}")]
    Malformed(String),
    /// Holds `manifests` and `config`, or contradicts its own media type (CVE-2021-41190).
    #[error("ambiguous: {0}")]
    Ambiguous(&'static str),
    /// More different platforms, or more entries without one, than any image has.
    #[error("more than {MAX_ENTRIES} entries that count")]
    TooManyEntries,
    /// Docker's schema 1, dead since 2017; containerd 2 refuses it too.
    #[error("a Docker schema 1 manifest, which holds no platform")]
    Schema1,
}

/// A descriptor: what a document says of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// As written; empty when absent.
    pub media_type: String,
    /// As written, not yet validated.
    pub digest: String,
    /// In bytes; `None` when absent. A size that is there binds.
    pub size: Option<u64>,
}

/// An image index or Docker manifest list, without its attestations and unknown platforms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    /// The platforms that entries name.
    pub platforms: BTreeSet<Platform>,
    /// Entries that name none, or only half of one: their own manifests have to be read. Each digest once.
    pub unnamed: Vec<Descriptor>,
}

/// An image manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Its image config; `None` when this is an artifact and no image.
    pub config: Option<Descriptor>,
}

/// An index or a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// OCI image index or Docker manifest list.
    Index(Index),
    /// OCI image manifest or Docker schema 2.
    Manifest(Manifest),
}

/// An image config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config(pub PlatformSet);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawDocument {
    schema_version: Option<serde_json::Number>,
    media_type: Option<String>,
    manifests: Option<RawIndex>,
    config: Option<RawDescriptor>,
    fs_layers: Option<serde::de::IgnoredAny>,
    artifact_type: Option<String>,
}

/// The entries of an index, judged one by one while they are read. One that is not even a descriptor is
/// passed over, like one of a platform that nobody knows.
#[derive(Default)]
struct RawIndex {
    index: Index,
    too_many: bool,
}

impl<'de> Deserialize<'de> for RawIndex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> serde::de::Visitor<'de> for Entries {
            type Value = RawIndex;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a list of descriptors")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut entries: A,
            ) -> Result<RawIndex, A::Error> {
                let mut raw = RawIndex::default();
                // Borrowed from the document: an entry of any shape costs no memory.
                while let Some(entry) = entries.next_element::<&RawValue>()? {
                    if let Ok(descriptor) = serde_json::from_str(entry.get()) {
                        raw.add(descriptor);
                    }
                }
                Ok(raw)
            }
        }
        deserializer.deserialize_seq(Entries)
    }
}

impl RawIndex {
    /// Passes over what stands for no image: attestations, unknown platforms, entries without a digest.
    fn add(&mut self, raw: RawDescriptor) {
        let is_attestation = |annotations: &RawAnnotations| {
            annotations.reference_type.as_deref() == Some("attestation-manifest")
        };
        let platform = raw.platform.as_ref();
        if raw.annotations.as_ref().is_some_and(is_attestation)
            || platform.is_some_and(RawPlatform::is_unknown)
        {
            return;
        }
        let (index, of_manifest) = (&mut self.index, |kind: &str| {
            kind.is_empty() || media_type::is_index(kind) || media_type::is_manifest(kind)
        });
        if let Some(platform) = platform.filter(|platform| platform.is_complete()) {
            index.platforms.extend(platform.platform());
        } else if let Ok(entry) = Descriptor::from_raw(raw)
            && of_manifest(&entry.media_type)
            && !index
                .unnamed
                .iter()
                .any(|other| other.digest == entry.digest)
            && !self.too_many
        {
            index.unnamed.push(entry);
        }
        self.too_many |= index.platforms.len() > MAX_ENTRIES || index.unnamed.len() > MAX_ENTRIES;
        if self.too_many {
            self.index = Index::default();
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct RawDescriptor {
    media_type: Option<String>,
    digest: Option<String>,
    size: Option<i64>,
    platform: Option<RawPlatform>,
    annotations: Option<RawAnnotations>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct RawPlatform {
    os: Option<String>,
    architecture: Option<String>,
    variant: Option<String>,
}

#[derive(Deserialize)]
struct RawAnnotations {
    /// BuildKit marks attestations with it. Its sibling `vnd.docker.reference.digest` alone marks
    /// nothing.
    #[serde(rename = "vnd.docker.reference.type", default)]
    reference_type: Option<String>,
}

impl Document {
    /// Reads an index or manifest. `content_type` is what the carrier says about it (a registry's
    /// `Content-Type` or the parent's descriptor), if anything.
    pub fn parse(bytes: &[u8], content_type: Option<&str>) -> Result<Self, DocumentError> {
        check(bytes)?;
        let raw: RawDocument = serde_json::from_slice(bytes).map_err(malformed)?;
        let carried = content_type.map_or("", |text| text.split(';').next().unwrap_or("").trim());
        let own = raw.media_type.as_deref().unwrap_or("");
        for said in [own, carried] {
            if raw.manifests.is_some() && media_type::is_manifest(said) {
                return Err(DocumentError::Ambiguous(
                    "an index that calls itself a manifest",
                ));
            }
            if raw.config.is_some() && media_type::is_index(said) {
                return Err(DocumentError::Ambiguous(
                    "a manifest that calls itself an index",
                ));
            }
        }
        match (raw.manifests, raw.config) {
            (Some(_), Some(_)) => Err(DocumentError::Ambiguous("both manifests and config")),
            (Some(raw), None) if raw.too_many => Err(DocumentError::TooManyEntries),
            (Some(raw), None) => Ok(Self::Index(raw.index)),
            (None, Some(config)) => {
                let config = Descriptor::from_raw(config)?;
                let is_image = media_type::may_be_config(&config.media_type);
                Ok(Self::Manifest(Manifest {
                    config: is_image.then_some(config),
                }))
            }
            (None, None) if raw.fs_layers.is_some() => Err(DocumentError::Schema1),
            (None, None) if raw.schema_version.is_some_and(|v| v.as_u64() == Some(1)) => {
                Err(DocumentError::Schema1)
            }
            // The artifact manifest of OCI 1.1's release candidates has no config at all.
            (None, None) if raw.artifact_type.is_some() => {
                Ok(Self::Manifest(Manifest { config: None }))
            }
            (None, None) => Err(DocumentError::Malformed(
                "neither manifests nor config".to_owned(),
            )),
        }
    }
}

impl Config {
    /// Reads an image config.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        check(bytes)?;
        let raw: RawPlatform = serde_json::from_slice(bytes).map_err(malformed)?;
        Ok(Self(PlatformSet::new(
            raw.platform().into_iter().collect(),
            Note::NoArchitecture,
        )))
    }
}

impl RawPlatform {
    fn platform(&self) -> Option<Platform> {
        let text = |field: &Option<String>| field.clone().unwrap_or_default();
        Platform::new(
            &text(&self.os),
            &text(&self.architecture),
            &text(&self.variant),
        )
    }

    /// Both halves are there, known or not.
    fn is_complete(&self) -> bool {
        let given = |field: &Option<String>| field.as_deref().is_some_and(|text| !text.is_empty());
        given(&self.os) && given(&self.architecture)
    }

    fn is_unknown(&self) -> bool {
        let unknown = |field: &Option<String>| field.as_deref() == Some("unknown");
        unknown(&self.os) || unknown(&self.architecture)
    }
}

impl Descriptor {
    fn from_raw(raw: RawDescriptor) -> Result<Self, DocumentError> {
        let malformed = |what: &str| DocumentError::Malformed(what.to_owned());
        let size = raw.size.map(u64::try_from).transpose();
        Ok(Self {
            media_type: raw.media_type.unwrap_or_default(),
            digest: raw
                .digest
                .ok_or_else(|| malformed("a descriptor without a digest"))?,
            size: size.map_err(|_| malformed("a descriptor with a negative size"))?,
        })
    }
}

/// Small enough, and an object: serde would read a list as one, too.
fn check(bytes: &[u8]) -> Result<(), DocumentError> {
    let size = bytes.len() as u64;
    if size > MAX_DOCUMENT {
        return Err(DocumentError::TooLarge(size));
    }
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(DocumentError::Malformed("not a JSON object".to_owned()));
    }
    Ok(())
}

/// The library's own words quote the document, which may be megabytes.
fn malformed(error: serde_json::Error) -> DocumentError {
    let what = if error.is_data() {
        "JSON of another shape"
    } else {
        "not JSON"
    };
    let (line, column) = (error.line(), error.column());
    DocumentError::Malformed(format!("{what} at line {line}, column {column}"))
}

#[cfg(test)]
mod tests;
