//! The sources of demands that archaware asks.

use crate::{
    cluster::cluster_nodes::ClusterNodes,
    config::SelectionConfig,
    evaluate::source::{
        ArchitectureSource, AuthorSource, DemandSource, EmulationSource, ImageLocalitySource,
        RuleSource, RuntimeClassSource, Sources,
    },
    selection::{AttachedDocumentSource, ImageSelectionSource, ImageSelector, PredictorError},
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
        Box::new(RuleSource) as Box<dyn DemandSource>,
        Box::new(ImageSelectionSource(selector.clone())),
        Box::new(ArchitectureSource),
        Box::new(EmulationSource),
        Box::new(RuntimeClassSource),
        Box::new(AuthorSource),
        Box::new(AttachedDocumentSource(selector)),
        Box::new(ImageLocalitySource),
    ]))
}
