//! `selection`: the selection of images by compatibility documents.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The selection of images. Pods ask for it by annotations.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SelectionConfig {
    /// What happens to pods whose documents name no image that fits a node.
    pub on_no_match: OnNoMatch,
}

/// What happens to pods whose documents name no image that fits a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnNoMatch {
    /// Admit them with a warning; the container keeps its image.
    #[default]
    Keep,
    /// Reject them.
    Deny,
}
