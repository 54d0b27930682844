//! Images that a container could have got, for `explain`.

use schemars::JsonSchema;
use serde::Serialize;

/// The images that could have been selected for a container, or the nodes that are preferred for
/// its own image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "ExplainedSelection")]
pub struct ImageAlternatives {
    /// The container.
    pub container: String,
    /// The reference of the compatibility document, or of the image with the attached document.
    pub document: String,
    /// Whether an image is selected by it; otherwise its weights are preferences.
    pub selects_image: bool,
    /// The number of nodes that can take the pod with this image.
    pub nodes: usize,
    /// The entries of the document in its order, or the images of its model.
    pub candidates: Vec<ImageAlternative>,
}

/// An entry of a compatibility document, or an image of its model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "ExplainedCandidate")]
pub struct ImageAlternative {
    /// Its image or group.
    pub tag: String,
    /// Its weight; null for an image of a model, which has none.
    pub weight: Option<i64>,
    /// Whether its image is selected, or its nodes are preferred.
    pub chosen: bool,
    /// Whether the entry was chosen, and why not.
    pub outcome: String,
}
