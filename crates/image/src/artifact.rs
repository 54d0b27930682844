//! OCI artifacts and their layers. This crate reads the layers; the feature that requests an
//! artifact interprets them.

use std::sync::Arc;

use bytes::Bytes;

use archaware_platform::Platform;

/// A kind of artifact, which has its own reference or is attached to an image.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct ArtifactKind {
    /// Its name in errors, for example `compatibility document`.
    pub name: &'static str,
    /// Groups of media types. Of the layers whose types are in one group, only the first is read.
    pub layers: &'static [&'static [&'static str]],
    /// `artifactType` of artifacts that are attached to images.
    pub attached_type: &'static str,
    /// Like `layers`, for artifacts that are attached to images.
    pub attached_layers: &'static [&'static [&'static str]],
    /// Maximum bytes of a layer.
    pub max_size: u64,
}

/// The content of an artifact, or of the artifacts that are attached to the images of an index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArtifactContent {
    /// The digest of the artifact, or of the index whose images have attached artifacts. Empty for
    /// an attached artifact.
    pub digest: String,
    /// The digest in the `subject` of the artifact, if it is read by its own reference.
    pub subject: Option<String>,
    /// The layers that were read.
    pub layers: Vec<ArtifactLayer>,
    /// The platforms of an index, each with the artifact that is attached to its image.
    pub platforms: Vec<(Platform, Option<Arc<ArtifactContent>>)>,
}

/// A layer of an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArtifactLayer {
    /// Its media type.
    pub media_type: String,
    /// The layer's digest, which `bytes` was verified against.
    pub digest: String,
    /// The content of the layer.
    pub bytes: Bytes,
}

impl ArtifactContent {
    /// All layers, with those of attached artifacts.
    pub fn all_layers(&self) -> impl Iterator<Item = &ArtifactLayer> {
        let attached = self
            .platforms
            .iter()
            .filter_map(|(_, content)| content.as_deref());
        self.layers
            .iter()
            .chain(attached.flat_map(|content| &content.layers))
    }

    /// Bytes of all layers.
    pub(super) fn size(&self) -> u64 {
        self.all_layers()
            .map(|layer| layer.bytes.len() as u64)
            .sum()
    }
}
