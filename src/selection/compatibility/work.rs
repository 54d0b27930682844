//! Computes the work of evaluating a document before the evaluation begins.

use std::collections::BTreeMap;

use super::{Expression, FeatureMatch, NodeFacts, Rule};

/// The work for one node, in comparisons of a value.
#[derive(Clone, Debug, Default)]
pub(super) struct Work {
    /// The work of rules, and of conditions on labels: the same for all nodes.
    fixed: usize,
    by_feature: BTreeMap<String, FeatureWork>,
}

/// The work of the conditions on a feature of Node Feature Discovery.
#[derive(Clone, Copy, Debug, Default)]
struct FeatureWork {
    /// The work for all flags and attributes together. The same is added for each instance.
    elements: usize,
    /// The work for each name of an element.
    names: usize,
}

impl Work {
    pub(super) fn of_rules<'a>(rules: impl Iterator<Item = &'a Rule>) -> Self {
        let mut work = Self::default();
        for rule in rules {
            work.fixed += 1 + rule.any.len();
            for condition in rule.features.iter().chain(rule.any.iter().flatten()) {
                work.add(condition);
            }
        }
        work
    }

    fn add(&mut self, condition: &FeatureMatch) {
        let of_list = |list: &[(String, Expression)]| -> usize {
            1 + list
                .iter()
                .map(|(_, expression)| expression.cost())
                .sum::<usize>()
        };
        match condition {
            FeatureMatch::Labels(list) => self.fixed += of_list(list),
            FeatureMatch::Never => self.fixed += 1,
            FeatureMatch::Feature {
                feature,
                elements,
                name,
            } => {
                let of_feature = self.by_feature.entry(feature.clone()).or_default();
                of_feature.elements += of_list(elements.as_deref().unwrap_or_default());
                of_feature.names += name.as_ref().map_or(0, Expression::cost);
            }
        }
    }

    pub(super) fn for_node(&self, node: NodeFacts<'_>) -> usize {
        let of_features = self.by_feature.iter().map(|(name, work)| {
            let Some(feature) = node.feature(name) else {
                return work.elements;
            };
            let elements = (1 + feature.instances().len()).saturating_mul(work.elements);
            elements.saturating_add(feature.count_names().saturating_mul(work.names))
        });
        of_features.fold(self.fixed, usize::saturating_add)
    }
}
