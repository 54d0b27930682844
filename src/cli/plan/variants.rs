//! How many nodes suffice for pods that need more than the lowest variant of an architecture.

use std::collections::HashMap;

use crate::{
    cluster::objects::Node,
    placement::{NodeVariant, PlacementPolicy, suffices},
    platform::Architectures,
};

/// The number of nodes of each architecture and variant.
pub(super) struct Variants<'a>(HashMap<(&'a str, Option<NodeVariant>), usize>);

impl<'a> Variants<'a> {
    pub(super) fn count(nodes: &'a [Node], policy: &PlacementPolicy) -> Self {
        let mut counts = HashMap::new();
        for node in nodes {
            let (view, variants) = (node.view(), &policy.variants);
            let key = (view.architecture, variants.of_node(&view));
            *counts.entry(key).or_default() += 1;
        }
        Self(counts)
    }

    /// The numbers of sufficient, unknown and insufficient nodes as text; `None` if every variant
    /// suffices.
    pub(super) fn describe(&self, set: &Architectures) -> Option<String> {
        if set.iter().all(|(_, variants)| variants.is_any()) {
            return None;
        }
        let (mut sufficient, mut unknown, mut insufficient) = (0, 0, 0);
        for ((architecture, variant), count) in &self.0 {
            match suffices(set, architecture, *variant) {
                Some(true) => sufficient += count,
                None => unknown += count,
                Some(false) => insufficient += count,
            }
        }
        Some(format!(
            "; nodes that suffice: {sufficient}, of unknown variant: {unknown}, insufficient: {insufficient}"
        ))
    }
}
