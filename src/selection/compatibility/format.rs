//! The formats of compatibility documents, and the media types of their layers.

use super::{CompatibilityDocument, InvalidDocument, Model, RuleKeys};

/// A format of compatibility documents: the media types of its layers, and how a layer is read. To
/// add a format, implement this trait, and add the format to `FORMATS` and its media types to
/// `COMPATIBILITY`.
pub trait DocumentFormat: Sync {
    /// The media types of its layers.
    fn media_types(&self) -> &'static [&'static str];

    /// Adds the content of a layer to a document.
    ///
    /// # Errors
    ///
    /// When the layer is not of this format, or too large.
    fn read(
        &self,
        layer: &[u8],
        document: &mut CompatibilityDocument,
    ) -> Result<(), InvalidDocument>;
}

const FORMATS: [&dyn DocumentFormat; 3] = [&LabelRules, &FeatureRules, &Models];

/// The format of layers with this media type.
pub fn of_media_type(media_type: &str) -> Option<&'static dyn DocumentFormat> {
    let mut formats = FORMATS.into_iter();
    formats.find(|format| format.media_types().contains(&media_type))
}

/// ocifit-k8s' documents: rules on node labels.
#[derive(Clone, Copy, Debug)]
pub struct LabelRules;

impl LabelRules {
    /// The media type of its layers.
    pub const MEDIA_TYPE: &str = "application/vnd.oci.image.compatibilities.v1+json";
}

impl DocumentFormat for LabelRules {
    fn media_types(&self) -> &'static [&'static str] {
        &[Self::MEDIA_TYPE]
    }

    fn read(
        &self,
        layer: &[u8],
        document: &mut CompatibilityDocument,
    ) -> Result<(), InvalidDocument> {
        document.add_rules(CompatibilityDocument::parse(RuleKeys::Labels, layer)?);
        Ok(())
    }
}

/// Documents of Node Feature Discovery: rules on features, in YAML or JSON.
#[derive(Clone, Copy, Debug)]
pub struct FeatureRules;

impl FeatureRules {
    /// The media types of its layers.
    pub const MEDIA_TYPES: [&str; 2] = [
        "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml",
        "application/vnd.nfd.image-compatibility.spec.v1alpha1+json",
    ];
}

impl DocumentFormat for FeatureRules {
    fn media_types(&self) -> &'static [&'static str] {
        &Self::MEDIA_TYPES
    }

    fn read(
        &self,
        layer: &[u8],
        document: &mut CompatibilityDocument,
    ) -> Result<(), InvalidDocument> {
        document.add_rules(CompatibilityDocument::parse(RuleKeys::Features, layer)?);
        Ok(())
    }
}

/// ocifit-k8s' documents with models.
#[derive(Clone, Copy, Debug)]
pub struct Models;

impl Models {
    /// The media type of its layers.
    pub const MEDIA_TYPE: &str = "application/vnd.oci.image.model-compatibilities.v1+json";
}

impl DocumentFormat for Models {
    fn media_types(&self) -> &'static [&'static str] {
        &[Self::MEDIA_TYPE]
    }

    fn read(
        &self,
        layer: &[u8],
        document: &mut CompatibilityDocument,
    ) -> Result<(), InvalidDocument> {
        let (models, memory) = Model::parse(layer)?;
        document.models = models;
        document.memory += memory;
        Ok(())
    }
}
