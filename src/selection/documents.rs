//! Compatibility documents in artifacts.

use std::sync::Arc;

use quick_cache::{Weighter, sync::Cache};
use sha2::{Digest, Sha256};

use crate::image::{
    ArtifactError, ImageError,
    artifact::{ArtifactContent, ArtifactKind, ArtifactLayer},
};

use super::compatibility::{
    CompatibilityDocument, DocumentFormat, InvalidDocument, MAX_EXPRESSIONS, MAX_SIZE, Model,
};

/// Layers with rules on labels, as ocifit-k8s has them.
const LABELS: &str = "application/vnd.oci.image.compatibilities.v1+json";
/// Layers with rules on the features of Node Feature Discovery.
const FEATURES: [&str; 2] = [
    "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml",
    "application/vnd.nfd.image-compatibility.spec.v1alpha1+json",
];
/// Layers that leave the choice to models.
const MODELS: &str = "application/vnd.oci.image.model-compatibilities.v1+json";

/// Artifacts with compatibility documents. NFD's are attached to images.
pub static COMPATIBILITY: ArtifactKind = ArtifactKind {
    name: "compatibility document",
    layers: &[&[LABELS, FEATURES[0], FEATURES[1]], &[MODELS]],
    attached_type: "application/vnd.nfd.image-compatibility.v1alpha1",
    attached_layers: &[&FEATURES],
    max_size: MAX_SIZE,
};

/// Number of parsed documents, for the size of their cache.
const ESTIMATED_DOCUMENTS: usize = 512;
/// Maximum number of expressions and values in all of them: as many as 64 documents of the largest size have, which are a few megabytes
/// each with compiled patterns. Documents of a usual size are thousands.
const MAX_COST: u64 = 64 * MAX_EXPRESSIONS as u64;
/// What a document costs beside its expressions.
const MIN_COST: usize = 16;

type Parsed = Result<Arc<CompatibilityDocument>, ImageError>;

/// Parsed documents, by the digests of their layers.
pub(super) struct Documents(Cache<[u8; 32], Parsed, Cost>);

#[derive(Clone)]
struct Cost;

impl Weighter<[u8; 32], Parsed> for Cost {
    fn weight(&self, _: &[u8; 32], parsed: &Parsed) -> u64 {
        let cost = parsed.as_ref().map(|own| own.cost + own.entries.len());
        (MIN_COST + cost.unwrap_or_default()) as u64
    }
}

impl Default for Documents {
    fn default() -> Self {
        Self(Cache::with_weighter(ESTIMATED_DOCUMENTS, MAX_COST, Cost))
    }
}

impl Documents {
    /// The document of an artifact.
    pub(super) fn parse(&self, content: &ArtifactContent) -> Parsed {
        let key = key(content);
        if let Some(known) = self.0.get(&key) {
            return known;
        }
        let parsed = parse(content).map(Arc::new);
        self.0.insert(key, parsed.clone());
        parsed
    }
}

/// Everything that a document depends on: the bytes of layers are those of their digests.
fn key(content: &ArtifactContent) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut add = |part: &str| {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    };
    add(content.subject.as_deref().unwrap_or_default());
    add_layers(&content.layers, &mut add);
    for (platform, attached) in &content.platforms {
        add(&platform.to_string());
        add_layers(
            attached.as_ref().map_or(&[], |attached| &attached.layers),
            &mut add,
        );
    }
    hash.finalize().into()
}

fn add_layers(layers: &[ArtifactLayer], add: &mut impl FnMut(&str)) {
    add(&layers.len().to_string());
    for layer in layers {
        add(&layer.media_type);
        add(&layer.digest);
    }
}

/// The document of an artifact of the kind [`COMPATIBILITY`].
///
/// # Errors
///
/// When a layer is no document of its type, or too large.
pub fn parse(content: &ArtifactContent) -> Result<CompatibilityDocument, ImageError> {
    if !content.platforms.is_empty() {
        let mut documents = Vec::new();
        for (platform, attached) in &content.platforms {
            let own = attached.as_deref().map(of_layers).transpose()?;
            documents.push((platform, own));
        }
        let documents = documents
            .iter()
            .map(|(platform, own)| (*platform, own.as_ref()));
        let whole = CompatibilityDocument::of_platforms(documents);
        return whole.map_err(|error| {
            unusable(
                "the documents of the platforms of an image".to_owned(),
                error,
            )
        });
    }
    let mut document = of_layers(content)?;
    document.subject.clone_from(&content.subject);
    Ok(document)
}

fn of_layers(content: &ArtifactContent) -> Result<CompatibilityDocument, ImageError> {
    let mut document = CompatibilityDocument::without_rules();
    let (models, rules): (Vec<_>, Vec<_>) = content
        .layers
        .iter()
        .partition(|layer| layer.media_type == MODELS);
    if let Some(layer) = rules.first() {
        let format = if layer.media_type == LABELS {
            DocumentFormat::Labels
        } else {
            DocumentFormat::Features
        };
        document = CompatibilityDocument::parse(format, &layer.bytes)
            .map_err(|error| unusable(name_of(layer), error))?;
    }
    if let Some(layer) = models.first() {
        let models = Model::parse(&layer.bytes).map_err(|error| unusable(name_of(layer), error))?;
        document = document.with_models(models);
    }
    Ok(document)
}

fn name_of(layer: &ArtifactLayer) -> String {
    format!("{} {}", COMPATIBILITY.name, layer.digest)
}

fn unusable(what: String, error: InvalidDocument) -> ImageError {
    let why = error.to_string();
    let source = match error {
        InvalidDocument::Malformed(_) => ArtifactError::Malformed(why),
        InvalidDocument::TooLarge(_) | InvalidDocument::TooManyEntries => {
            ArtifactError::TooLarge(why)
        }
    };
    ImageError::Artifact { what, source }
}
