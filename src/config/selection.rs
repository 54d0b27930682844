//! `selection`: the selection of images by compatibility documents.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::{is_dns_subdomain, is_qualified_name};

use super::{duration, mistakes::Mistakes};

/// Maximum timeout of the predictor: the creation of a pod may not wait longer.
const MAX_PREDICTION: Duration = Duration::from_secs(10);

/// The selection of images. Pods ask for it by annotations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SelectionConfig {
    /// If no image of a document fits a node, the container keeps its image, or the pod is denied.
    pub on_no_match: OnNoMatch,
    /// Documents attached to images of pods that do not ask for a selection: prefer turns their
    /// weights into preferred node affinity.
    pub attached: AttachedDocuments,
    /// The server that chooses nodes by a model, for documents that name a model.
    pub predictor: PredictorConfig,
}

/// A server that chooses among nodes by a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PredictorConfig {
    /// Its URL; empty: there is none.
    pub url: String,
    /// How long an answer may take, less than `admission.budget`; then the rules of the document
    /// decide.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Path of a PEM file with certificate authorities, besides the system's.
    pub ca_bundle: PathBuf,
    /// Node labels that archaware sends to the server, besides those in image-selection.md: keys,
    /// or prefixes like `nvidia.com/`.
    pub labels: Vec<LabelPattern>,
}

impl SelectionConfig {
    pub(super) fn check(&self, mistakes: &mut Mistakes) {
        let predictor = &self.predictor;
        let is_url = |url: &str| {
            let parsed = url.parse::<http::Uri>();
            parsed.is_ok_and(|uri| {
                matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()
            })
        };
        mistakes.unless(
            predictor.url.is_empty() || is_url(&predictor.url),
            &["selection.predictor.url"],
            "selection.predictor.url has to be an http or https URL",
        );
        mistakes.unless(
            predictor.timeout <= MAX_PREDICTION,
            &["selection.predictor.timeout"],
            "selection.predictor.timeout is longer than 10s, the most that a pod may wait",
        );
    }
}

/// The key of a label, or, with `/` at its end, the prefix of keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String")]
#[schemars(with = "String")]
pub struct LabelPattern(String);

impl TryFrom<String> for LabelPattern {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_prefix = text.strip_suffix('/').is_some_and(is_dns_subdomain);
        if is_prefix || is_qualified_name(&text) {
            Ok(Self(text))
        } else {
            Err(format!(
                "{text:?} is neither the key of a label nor a prefix like example.com/"
            ))
        }
    }
}

impl From<LabelPattern> for String {
    fn from(pattern: LabelPattern) -> Self {
        pattern.0
    }
}

impl Default for PredictorConfig {
    fn default() -> Self {
        Self {
            url: String::new(),
            timeout: Duration::from_millis(500),
            ca_bundle: PathBuf::new(),
            labels: Vec::new(),
        }
    }
}

/// How to treat pods whose documents name no image that fits a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnNoMatch {
    /// Admit them with a warning; the container keeps its image.
    #[default]
    Keep,
    /// Reject them.
    Deny,
}

/// Whether documents that are attached to images count for pods that do not ask for a selection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum AttachedDocuments {
    /// They are not looked for.
    #[default]
    Ignore,
    /// Their weights become preferred node affinity.
    Prefer,
}
