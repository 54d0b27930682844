//! The sources of demands that archaware asks.

use crate::{
    cluster::nodes::ClusterNodes,
    config::SelectionConfig,
    evaluate::source::{
        Architectures, Author, DemandSource, EmulatingNodes, HoldingNodes, Rules, RuntimeClass,
        Sources,
    },
    selection::{AttachedDocuments, ImageSelector, ImagesByDocuments, PredictorError},
};

/// All sources in their order: each sees the pod with the demands of the sources before it. A new
/// feature is a source of its own, and a line here.
///
/// # Errors
///
/// When `selection.predictor` cannot be used.
pub fn sources(config: &SelectionConfig, nodes: &ClusterNodes) -> Result<Sources, PredictorError> {
    let selector = ImageSelector::new(config, nodes.clone())?;
    Ok(Sources::new([
        Box::new(Rules) as Box<dyn DemandSource>,
        Box::new(ImagesByDocuments(selector.clone())),
        Box::new(Architectures),
        Box::new(EmulatingNodes),
        Box::new(RuntimeClass),
        Box::new(Author),
        Box::new(AttachedDocuments(selector)),
        Box::new(HoldingNodes),
    ]))
}
