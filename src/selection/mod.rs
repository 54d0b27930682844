//! Image selection by compatibility documents, which name images and the node features that the
//! images need. [`ImageSelectionSource`] selects one of several images for a container.
//! [`AttachedDocumentSource`] prefers nodes for an image that is not replaced. `evaluate` calls
//! both through the trait `DemandSource`, and does not depend on this module.

mod alternatives;
mod attached;
mod by_model;
mod by_rules;
pub mod check;
mod choose;
pub mod compatibility;
mod documents;
mod features;
mod fitting;
mod groups;
mod images;
mod landing;
mod node_feature;
mod predictor;
mod problem;

use std::sync::Arc;

use crate::{
    cluster::cluster_nodes::ClusterNodes, config::SelectionConfig, evaluate::Evaluator,
    lines::SharedPlaces,
};

use documents::Documents;
use groups::GroupedNodes;
use predictor::Predictor;

pub use attached::AttachedDocumentSource;
pub use documents::{COMPATIBILITY, parse};
pub use images::ImageSelectionSource;
pub use predictor::PredictorError;

/// Maximum number of pods whose documents are in memory at once. A namespace gets a quarter of it.
const MAX_PODS: usize = 16;
/// Maximum number of documents that are evaluated at once on blocking threads; at most one for each
/// namespace.
const MAX_COMPUTATIONS: usize = 2;

/// Shared by [`ImageSelectionSource`] and [`AttachedDocumentSource`]. Cheap to clone.
#[derive(Clone)]
pub struct ImageSelector(Arc<Parts>);

struct Parts {
    nodes: GroupedNodes,
    documents: Documents,
    /// Limits for pods whose documents are in memory, and for concurrent computations.
    pods: SharedPlaces,
    computations: SharedPlaces,
    /// Client of the server that applies models; `None` if none is configured.
    predictor: Option<Predictor>,
}

impl ImageSelector {
    /// Creates a selector for these nodes.
    ///
    /// # Errors
    ///
    /// When `selection.predictor` cannot be used.
    pub fn new(config: &SelectionConfig, nodes: ClusterNodes) -> Result<Self, PredictorError> {
        Ok(Self(Arc::new(Parts {
            nodes: GroupedNodes::new(nodes),
            documents: Documents::default(),
            pods: SharedPlaces::new(MAX_PODS, MAX_PODS / 4),
            computations: SharedPlaces::new(MAX_COMPUTATIONS, 1),
            predictor: Predictor::new(&config.predictor)?,
        })))
    }
}

/// A selector during one evaluation.
struct Selecting<'a> {
    evaluator: &'a Evaluator,
    parts: &'a Parts,
}
