//! Compatibility documents in artifacts.

use std::{convert::Infallible, sync::Arc};

use quick_cache::{Weighter, sync::Cache};
use sha2::{Digest, Sha256};

use crate::image::{
    ArtifactError, ImageError,
    artifact::{ArtifactContent, ArtifactKind, ArtifactLayer},
};

use super::compatibility::{
    CompatibilityDocument, FeatureRules, InvalidDocument, LabelRules, MAX_SIZE, Models,
    of_media_type,
};

/// Media types of layers with rules. Only the first such layer of an artifact is read.
const RULES: [&str; 3] = {
    let [yaml, json] = FeatureRules::MEDIA_TYPES;
    [LabelRules::MEDIA_TYPE, yaml, json]
};

/// Artifacts with compatibility documents. NFD attaches its artifacts to images.
pub static COMPATIBILITY: ArtifactKind = ArtifactKind {
    name: "compatibility document",
    layers: &[&RULES, &[Models::MEDIA_TYPE]],
    attached_type: "application/vnd.nfd.image-compatibility.v1alpha1",
    attached_layers: &[&FeatureRules::MEDIA_TYPES],
    max_size: MAX_SIZE as u64,
};

/// Estimated number of cached documents; sets the initial size of the cache.
const ESTIMATED_DOCUMENTS: usize = 512;
/// Maximum bytes of memory for cached documents. There is room for thousands of the usual size.
const MAX_MEMORY: u64 = 32 * 1024 * 1024;
/// Bytes of memory that an error or a document counts for. The elements of a document are added.
const MIN_MEMORY: usize = 1024;

type Parsed = Result<Arc<CompatibilityDocument>, ImageError>;

/// Parsed documents, by the digests of their layers.
pub(super) struct Documents(Arc<Cache<[u8; 32], Parsed, Memory>>);

#[derive(Clone)]
struct Memory;

impl Weighter<[u8; 32], Parsed> for Memory {
    fn weight(&self, _: &[u8; 32], parsed: &Parsed) -> u64 {
        let memory = parsed.as_ref().map(|document| document.memory);
        (MIN_MEMORY + memory.unwrap_or_default()) as u64
    }
}

impl Default for Documents {
    fn default() -> Self {
        let cache = Cache::with_weighter(ESTIMATED_DOCUMENTS, MAX_MEMORY, Memory);
        Self(Arc::new(cache))
    }
}

impl Documents {
    /// The document of an artifact.
    pub(super) async fn parse(&self, content: Arc<ArtifactContent>) -> Parsed {
        let key = key(&content);
        if let Some(known) = self.0.get(&key) {
            return known;
        }
        let documents = self.0.clone();
        // The largest documents take some tenths of a second, most of it for patterns.
        let parsing = tokio::task::spawn_blocking(move || {
            // The pods of a rollout need the document at the same time: only one of them parses it.
            let known = documents
                .get_or_insert_with(&key, || Ok::<_, Infallible>(parse(&content).map(Arc::new)));
            match known {
                Ok(parsed) => parsed,
                Err(never) => match never {},
            }
        });
        let stopped = |_| ImageError::unanswered(COMPATIBILITY.name, "archaware is stopping", None);
        parsing.await.map_err(stopped)?
    }
}

/// The cache key: a hash of everything on which the document depends. The digest of a layer stands
/// for its content.
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
/// When a layer is not a document of its media type, or too large.
pub fn parse(content: &ArtifactContent) -> Result<CompatibilityDocument, ImageError> {
    if !content.platforms.is_empty() {
        let mut documents = Vec::new();
        for (platform, attached) in &content.platforms {
            let document = attached.as_deref().map(of_layers).transpose()?;
            documents.push((platform, document));
        }
        let documents = documents
            .iter()
            .map(|(platform, document)| (*platform, document.as_ref()));
        let document = CompatibilityDocument::of_platforms(documents);
        return document.map_err(|error| unusable(format!("artifact {}", content.digest), error));
    }
    let mut document = of_layers(content)?;
    document.subject.clone_from(&content.subject);
    Ok(document)
}

fn of_layers(content: &ArtifactContent) -> Result<CompatibilityDocument, ImageError> {
    let mut document = CompatibilityDocument::without_rules();
    for layer in &content.layers {
        if let Some(format) = of_media_type(&layer.media_type) {
            let result = format.read(&layer.bytes, &mut document);
            result.map_err(|error| unusable(name_of(layer), error))?;
        }
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

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use crate::platform::Platform;

    use super::*;

    fn artifact(media_type: &str, weight: u8) -> ArtifactContent {
        let text = format!("{{\"compatibilities\": [{{\"weight\": {weight}, \"rules\": []}}]}}");
        let layer = ArtifactLayer {
            media_type: media_type.to_owned(),
            digest: format!("sha256:{weight}"),
            bytes: Bytes::from(text),
        };
        ArtifactContent {
            layers: vec![layer],
            ..ArtifactContent::default()
        }
    }

    /// Otherwise a layer would be read, and ignored because no format has its media type.
    #[test]
    fn every_layer_that_is_read_has_a_format() {
        let groups = COMPATIBILITY
            .layers
            .iter()
            .chain(COMPATIBILITY.attached_layers);
        for media_type in groups.copied().flatten() {
            assert!(of_media_type(media_type).is_some(), "{media_type}");
        }
    }

    #[tokio::test]
    async fn each_artifact_has_its_own_document() {
        let documents = Documents::default();
        let platform = |name: &str| Platform::new("linux", name, "").unwrap();
        let attached = Some(Arc::new(artifact(FeatureRules::MEDIA_TYPES[0], 3)));
        let index = |platforms: Vec<(Platform, Option<Arc<ArtifactContent>>)>| ArtifactContent {
            platforms,
            ..ArtifactContent::default()
        };
        let with_subject = ArtifactContent {
            subject: Some("sha256:1".to_owned()),
            ..artifact(FeatureRules::MEDIA_TYPES[0], 1)
        };
        let artifacts = [
            artifact(FeatureRules::MEDIA_TYPES[0], 1),
            artifact(LabelRules::MEDIA_TYPE, 1),
            artifact(FeatureRules::MEDIA_TYPES[0], 2),
            with_subject,
            index(vec![(platform("amd64"), attached.clone())]),
            index(vec![(platform("arm64"), attached.clone())]),
            index(vec![
                (platform("amd64"), None),
                (platform("arm64"), attached),
            ]),
        ];
        for content in &artifacts {
            let expected = parse(content).unwrap();
            // The second time from the cache.
            for _ in 0..2 {
                let found = documents.parse(Arc::new(content.clone())).await.unwrap();
                assert_eq!(format!("{found:?}"), format!("{expected:?}"));
            }
        }
        assert_eq!(documents.0.len(), artifacts.len());
        let broken = Arc::new(ArtifactContent {
            layers: vec![ArtifactLayer {
                bytes: Bytes::from_static(b"["),
                ..artifact(LabelRules::MEDIA_TYPE, 9).layers.remove(0)
            }],
            ..ArtifactContent::default()
        });
        for _ in 0..2 {
            assert!(documents.parse(broken.clone()).await.is_err());
        }
    }
}
