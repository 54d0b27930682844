//! Documents that leave the choice to a model, in the format of ocifit-k8s. A server applies the
//! model and answers with the best node.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::{InvalidDocument, LabelKeys, limits};

/// Maximum number of models of a document, and of images of a model.
const MAX_MODELS: usize = 64;
/// Node labels about hardware and location, which every request to the server contains.
const FEATURES: &str = "feature.node.kubernetes.io/";
const HARDWARE: [&str; 4] = [
    "kubernetes.io/arch",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
];

/// A model that chooses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    /// The name that pods use for the model.
    pub tag: String,
    /// The metric that the model predicts.
    pub metric: String,
    /// `maximize`, `minimize` or `random`.
    pub direction: String,
    /// The image for each architecture.
    pub images: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct RawDocument {
    compatibilities: Vec<RawCompatibility>,
}

#[derive(Deserialize)]
struct RawCompatibility {
    #[serde(default)]
    tag: String,
    #[serde(default)]
    rules: Vec<RawRule>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawRule {
    match_model: Option<RawMatch>,
}

#[derive(Deserialize)]
struct RawMatch {
    model: RawModel,
}

#[derive(Deserialize)]
struct RawModel {
    #[serde(default)]
    name: String,
    #[serde(default)]
    direction: String,
    #[serde(default)]
    platforms: BTreeMap<String, String>,
}

impl Model {
    /// Parses the models of a document. Also returns the bytes that they take in memory.
    ///
    /// # Errors
    ///
    /// When the bytes are not a document of this format, or too large.
    pub(super) fn parse(bytes: &[u8]) -> Result<(Vec<Self>, usize), InvalidDocument> {
        let (raw, memory) = limits::parse::<RawDocument>(bytes)?;
        let models = raw.compatibilities.into_iter().flat_map(|raw| {
            let tag = raw.tag;
            let models = raw.rules.into_iter().filter_map(|rule| rule.match_model);
            models.map(move |raw| Self {
                tag: tag.clone(),
                metric: raw.model.name,
                direction: raw.model.direction,
                images: raw.model.platforms,
            })
        });
        let models: Vec<_> = models.take(MAX_MODELS + 1).collect();
        let is_large = |model: &Self| model.images.len() > MAX_MODELS;
        if models.len() > MAX_MODELS || models.iter().any(is_large) {
            return Err(InvalidDocument::TooManyEntries);
        }
        Ok((models, memory))
    }

    /// The labels that every request to the server contains.
    pub fn labels() -> LabelKeys {
        LabelKeys {
            keys: HARDWARE.map(str::to_owned).into(),
            prefixes: BTreeSet::from([FEATURES.to_owned()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;
    use testsupport::mutated;

    use super::*;

    #[test]
    fn models_are_read() {
        let text = r#"{"version": "v1alpha1", "compatibilities": [
            {"tag": "cost", "rules": [{"matchModel": {"model": {
                "type": "sklearn", "platforms": {"amd64": "a", "arm64": "b"}, "direction": "minimize", "name": "price", "filename": "m.pkl"}}}]},
            {"tag": "rules", "rules": [{"matchFeatures": []}]}]}"#;
        let expected = Model {
            tag: "cost".to_owned(),
            metric: "price".to_owned(),
            direction: "minimize".to_owned(),
            images: [("amd64", "a"), ("arm64", "b")]
                .map(|(architecture, image)| (architecture.to_owned(), image.to_owned()))
                .into(),
        };
        let (found, memory) = Model::parse(text.as_bytes()).unwrap();
        assert_eq!(found, [expected]);
        assert!(memory > text.len() / 2, "{memory}");
        let malformed = Model::parse(b"{}");
        assert!(matches!(malformed, Err(InvalidDocument::Malformed(_))));
        let one = r#"{"rules": [{"matchModel": {"model": {}}}]}"#;
        let many = format!("{{\"compatibilities\": [{}]}}", vec![one; 100].join(","));
        assert_eq!(
            Model::parse(many.as_bytes()),
            Err(InvalidDocument::TooManyEntries)
        );
        let large = vec![b' '; 300 * 1024];
        assert_eq!(
            Model::parse(&large),
            Err(InvalidDocument::TooLarge(300 * 1024))
        );
    }

    proptest! {
        #[test]
        fn any_document_has_few_models_or_an_error(document in mutated(json!({
            "version": "v1alpha1", "compatibilities": [
                {"tag": "cost", "rules": [{"matchModel": {"model": {
                    "type": "sklearn", "platforms": {"amd64": "a", "arm64": "b"},
                    "direction": "minimize", "name": "price", "filename": "m.pkl"}}}]},
                {"tag": "rules", "rules": [{"matchFeatures": []}]}],
        }))) {
            if let Ok((models, memory)) = Model::parse(document.to_string().as_bytes()) {
                prop_assert!(models.len() <= MAX_MODELS);
                let texts = |model: &Model| model.metric.len() + model.direction.len();
                prop_assert!(memory >= models.iter().map(texts).sum());
            }
        }
    }
}
