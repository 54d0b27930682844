//! The candidates of a container for image selection, for `explain`.

use schemars::JsonSchema;
use serde::Serialize;

/// The candidates for the image of a container, or the preferred nodes for its own image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "ExplainedSelection")]
pub struct ImageAlternatives {
    /// Name of the container.
    pub container: String,
    /// The reference of the compatibility document, or of the image with the attached document.
    pub document: String,
    /// Whether the document selects an image; otherwise its weights are preferences.
    pub selects_image: bool,
    /// The number of nodes that can take the pod, whatever its image is.
    pub nodes: usize,
    /// The entries of the document in their order, or the images of its model.
    pub candidates: Vec<ImageAlternative>,
}

/// An entry of a compatibility document, or an image of its model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "ExplainedCandidate")]
pub struct ImageAlternative {
    /// The image or group of the entry.
    pub tag: String,
    /// The weight of the entry; null for an image of a model, which has no weight.
    pub weight: Option<i64>,
    /// Whether the image is selected, or the nodes are preferred.
    pub chosen: bool,
    /// Whether the entry was chosen, and why not.
    pub outcome: String,
}
