//! Image indexes, manifests and configs of OCI and Docker, with or without `mediaType`.
//!
//! Every field is optional: registries hold documents that violate the specification, and one
//! malformed entry must not hide the other entries.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{NoPlatformReason, Platform, PlatformSet};

/// Maximum size of one document in bytes; containerd has the same limit for manifests.
pub const MAX_DOCUMENT: u64 = 4 * 1024 * 1024;

/// Maximum number of distinct platforms, and of entries without a platform, in one index. Repeated
/// entries do not count, so an index of thousands of entries can be read while a hostile index
/// cannot exhaust memory.
const MAX_ENTRIES: usize = 256;

/// Media types of the OCI image specification and of Docker distribution.
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
    /// The media types of manifests and indexes, for `Accept` headers.
    pub const MANIFESTS: [&str; 4] = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST];

    /// An index of images.
    pub fn is_index(media_type: &str) -> bool {
        matches!(media_type, OCI_INDEX | DOCKER_LIST)
    }

    pub(super) fn is_manifest(media_type: &str) -> bool {
        matches!(media_type, OCI_MANIFEST | DOCKER_MANIFEST)
    }

    /// An index or a manifest, or an entry whose type is left out.
    pub(super) fn may_be_manifest(media_type: &str) -> bool {
        media_type.is_empty() || is_index(media_type) || is_manifest(media_type)
    }

    /// The config of an image.
    pub fn is_config(media_type: &str) -> bool {
        matches!(media_type, OCI_CONFIG | DOCKER_CONFIG)
    }

    /// Early Docker clients pushed configs as `application/octet-stream`, and some tools omit the
    /// type. Those are recognised by their content.
    pub(super) fn may_be_config(media_type: &str) -> bool {
        is_config(media_type) || matches!(media_type, "application/octet-stream" | "")
    }
}

/// Why bytes are not an image document.
#[derive(Debug, Clone, thiserror::Error)]
pub enum DocumentError {
    /// Larger than [`MAX_DOCUMENT`].
    #[error("{0} bytes are more than the limit of 4 MiB")]
    TooLarge(u64),
    /// Not JSON, or not an index, manifest or config.
    #[error("not an image document: {0}")]
    Malformed(String),
    /// Contains both `manifests` and `config`, or contradicts its own media type (CVE-2021-41190).
    #[error("ambiguous: {0}")]
    Ambiguous(&'static str),
    /// More distinct platforms, or entries without platform, than any real image has.
    #[error(
        "its index has more than {MAX_ENTRIES} platforms, or more than {MAX_ENTRIES} entries without a platform"
    )]
    TooManyEntries,
    /// Docker schema 1, deprecated since 2017; containerd 2 rejects it too.
    #[error("a Docker schema 1 manifest, which names no platform")]
    Schema1,
}

/// A reference from one document to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// The media type as written; empty when absent.
    pub media_type: String,
    /// The digest as written, not validated.
    pub digest: String,
    /// Size in bytes; `None` when absent. The content must have exactly this size.
    pub size: Option<u64>,
}

/// An image index or Docker manifest list, without attestations and unknown platforms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Index {
    /// Platforms named by the entries.
    pub platforms: BTreeSet<Platform>,
    /// Entries without a complete platform: their own manifests must be read. Each digest once.
    pub without_platform: Vec<Descriptor>,
}

/// An image manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The image config; `None` when the manifest describes an artifact instead of an image.
    pub config: Option<Descriptor>,
}

/// The manifest of an artifact, or an index of images that artifacts may be attached to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Artifact {
    /// Its layers. An index has none.
    pub layers: Vec<Descriptor>,
    /// The images of an index whose entries name a platform: platform and digest. The digests are
    /// as written, not validated.
    pub images: Vec<(Platform, String)>,
    /// The manifest that this document is attached to.
    pub subject: Option<Descriptor>,
}

/// The artifacts attached to a manifest, from an index whose entries have an `artifactType`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Referrers(pub Vec<Referrer>);

/// An artifact that is attached to a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Referrer {
    /// The manifest of the artifact.
    pub manifest: Descriptor,
    /// The `artifactType`.
    pub artifact_type: String,
    /// The annotation `org.opencontainers.image.created` (RFC 3339); empty when absent.
    pub created: String,
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
pub struct ImageConfig(pub PlatformSet);

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

/// Index entries are classified while they are parsed. Entries that are not descriptors or have an
/// unknown platform are skipped.
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
                // Borrowed from the document, so an entry of any shape needs no memory.
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
    /// Adds an entry. Skips attestations, artifacts, unknown platforms, and entries without a
    /// complete platform that have no digest or are not a manifest or index.
    fn add(&mut self, raw: RawDescriptor) {
        let platform = raw.platform.as_ref();
        if raw.is_attestation()
            || raw.is_artifact()
            || platform.is_some_and(RawPlatform::is_unknown)
        {
            return;
        }
        if let Some(platform) = platform.filter(|platform| platform.is_complete()) {
            self.index.platforms.extend(platform.platform());
        } else if let Ok(entry) = Descriptor::from_raw(raw)
            && media_type::may_be_manifest(&entry.media_type)
            && !self.too_many
        {
            let is_known = |other: &Descriptor| other.digest == entry.digest;
            if !self.index.without_platform.iter().any(is_known) {
                self.index.without_platform.push(entry);
            }
        }
        self.too_many |= self.index.platforms.len() > MAX_ENTRIES
            || self.index.without_platform.len() > MAX_ENTRIES;
        if self.too_many {
            self.index = Index::default();
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct RawDescriptor {
    media_type: Option<String>,
    artifact_type: Option<String>,
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
    /// Set by BuildKit on attestations. `vnd.docker.reference.digest` alone does not mark one.
    #[serde(rename = "vnd.docker.reference.type", default)]
    reference_type: Option<String>,
    #[serde(rename = "org.opencontainers.image.created", default)]
    created: Option<String>,
}

impl Document {
    /// Parses an index or manifest. `content_type` is the registry's `Content-Type` or the media
    /// type in the parent's descriptor, if any.
    ///
    /// # Errors
    ///
    /// When the bytes are too large, not an image document, or ambiguous.
    pub fn parse(bytes: &[u8], content_type: Option<&str>) -> Result<Self, DocumentError> {
        check(bytes)?;
        let raw: RawDocument = serde_json::from_slice(bytes).map_err(malformed)?;
        let carried = content_type.map_or("", |text| text.split(';').next().unwrap_or("").trim());
        let own_type = raw.media_type.as_deref().unwrap_or("");
        for media_type_text in [own_type, carried] {
            if raw.manifests.is_some() && media_type::is_manifest(media_type_text) {
                return Err(DocumentError::Ambiguous(
                    "an index that calls itself a manifest",
                ));
            }
            if raw.config.is_some() && media_type::is_index(media_type_text) {
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
            // The artifact manifest of OCI 1.1's release candidates has no config.
            (None, None) if raw.artifact_type.is_some() => {
                Ok(Self::Manifest(Manifest { config: None }))
            }
            (None, None) => Err(DocumentError::Malformed(
                "neither manifests nor config".to_owned(),
            )),
        }
    }
}

impl ImageConfig {
    /// Parses an image config.
    ///
    /// # Errors
    ///
    /// When the bytes are too large or not a JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        check(bytes)?;
        let raw: RawPlatform = serde_json::from_slice(bytes).map_err(malformed)?;
        Ok(Self(PlatformSet::new(
            raw.platform().into_iter().collect(),
            NoPlatformReason::NoArchitecture,
        )))
    }
}

/// A list that is read up to [`MAX_ENTRIES`] entries. Malformed entries are skipped.
#[derive(Deserialize)]
struct RawList<'a>(#[serde(borrow)] Vec<&'a RawValue>);

impl RawList<'_> {
    fn parse<T: serde::de::DeserializeOwned>(&self) -> impl Iterator<Item = T> {
        let entries = self.0.iter().take(MAX_ENTRIES);
        entries.filter_map(|raw| serde_json::from_str(raw.get()).ok())
    }
}

impl Artifact {
    /// Parses a manifest.
    ///
    /// # Errors
    ///
    /// When the bytes are too large or not a JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(borrow)]
            layers: Option<RawList<'a>>,
            #[serde(borrow)]
            manifests: Option<RawList<'a>>,
            subject: Option<RawDescriptor>,
        }
        check(bytes)?;
        let raw: Raw<'_> = serde_json::from_slice(bytes).map_err(malformed)?;
        let layers = raw.layers.iter().flat_map(RawList::parse);
        let images = raw.manifests.iter().flat_map(RawList::parse);
        let images = images.filter(RawDescriptor::is_image_of_platform);
        Ok(Self {
            images: images
                .filter_map(|raw| Some((raw.platform?.platform()?, raw.digest?)))
                .collect(),
            layers: layers
                .filter_map(|raw| Descriptor::from_raw(raw).ok())
                .collect(),
            subject: raw.subject.and_then(|raw| Descriptor::from_raw(raw).ok()),
        })
    }
}

impl Referrers {
    /// Parses an index.
    ///
    /// # Errors
    ///
    /// When the bytes are too large or not a JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Self, DocumentError> {
        #[derive(Deserialize)]
        struct Raw<'a> {
            #[serde(borrow)]
            manifests: Option<RawList<'a>>,
        }
        check(bytes)?;
        let raw: Raw<'_> = serde_json::from_slice(bytes).map_err(malformed)?;
        let entries = raw.manifests.iter().flat_map(RawList::parse);
        let referrer = |mut raw: RawDescriptor| {
            let annotations = raw.annotations.take();
            Some(Referrer {
                artifact_type: raw.artifact_type.take().unwrap_or_default(),
                manifest: Descriptor::from_raw(raw).ok()?,
                created: annotations
                    .and_then(|annotations| annotations.created)
                    .unwrap_or_default(),
            })
        };
        Ok(Self(entries.filter_map(referrer).collect()))
    }
}

impl RawDescriptor {
    fn is_attestation(&self) -> bool {
        let kind = self.annotations.as_ref();
        kind.and_then(|annotations| annotations.reference_type.as_deref())
            == Some("attestation-manifest")
    }

    /// Whether the entry says that its manifest is no image, whatever platform it names (OCI image
    /// specification, `descriptor.md`, `artifactType`).
    fn is_artifact(&self) -> bool {
        let artifact_type = self.artifact_type.as_deref().unwrap_or_default();
        !artifact_type.is_empty() && !media_type::is_config(artifact_type)
    }

    fn is_image_of_platform(&self) -> bool {
        let platform = self.platform.as_ref();
        !self.is_attestation()
            && !self.is_artifact()
            && platform.is_some_and(|platform| platform.is_complete() && !platform.is_unknown())
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

    /// Whether both OS and architecture are given, known or not.
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

/// Checks size and shape: serde would also accept a JSON array as a struct.
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

/// `serde_json`'s messages quote the document, which may be megabytes, so only the position is
/// kept.
fn malformed(error: serde_json::Error) -> DocumentError {
    let what = if error.is_data() {
        "JSON of another structure"
    } else {
        "not JSON"
    };
    let (line, column) = (error.line(), error.column());
    DocumentError::Malformed(format!("{what} at line {line}, column {column}"))
}

#[cfg(test)]
mod tests;
