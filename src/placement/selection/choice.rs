//! The choice among the entries of a compatibility document.

use std::collections::BTreeSet;

use crate::placement::affinity::Requirement;

use super::{Compatibility, CompatibilityDocument, DocumentFormat, FeatureMatch, NodeFacts};

/// Nodes that are alike for the rules of a document.
#[derive(Clone, Copy, Debug)]
pub struct NodeGroup<'a> {
    /// What is known of each of them.
    pub facts: NodeFacts<'a>,
    /// How many there are.
    pub count: usize,
}

/// An entry that fits, and where.
#[derive(Clone, Debug)]
pub struct Choice<'a> {
    /// The entry.
    pub entry: &'a Compatibility,
    /// The groups that satisfy its rules; at least one.
    pub groups: Vec<NodeGroup<'a>>,
}

/// Why an entry was not chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedOver {
    /// Its image or group.
    pub tag: String,
    /// Each of its rules (by name, or by its place from 1), with the number of nodes that do not satisfy it. Empty: its weight is
    /// negative.
    pub failed: Vec<(String, usize)>,
}

impl CompatibilityDocument {
    /// The entries, the best first: by weight, then in the order in which they are written. Those with a negative weight are never
    /// chosen.
    pub fn candidates(&self) -> Vec<&Compatibility> {
        let mut all: Vec<_> = self
            .entries
            .iter()
            .filter(|entry| entry.weight >= 0)
            .collect();
        all.sort_by_key(|entry| std::cmp::Reverse(entry.weight));
        all
    }

    /// The best entry that some nodes satisfy.
    ///
    /// # Errors
    ///
    /// Why each entry was passed over, in the order of the document.
    pub fn choose<'a>(&'a self, groups: &[NodeGroup<'a>]) -> Result<Choice<'a>, Vec<PassedOver>> {
        let fitting = |entry: &'a Compatibility| {
            let fit = groups.iter().filter(|group| entry.fits(group.facts));
            let groups: Vec<_> = fit.copied().collect();
            (!groups.is_empty()).then_some(Choice { entry, groups })
        };
        let chosen = self.candidates().into_iter().find_map(fitting);
        chosen.ok_or_else(|| {
            let entries = self.entries.iter();
            entries.map(|entry| entry.passed_over(groups)).collect()
        })
    }
}

impl Compatibility {
    /// Whether a node satisfies its rules.
    pub fn fits(&self, node: NodeFacts<'_>) -> bool {
        self.rules.iter().all(|rule| rule.holds(node))
    }

    fn passed_over(&self, groups: &[NodeGroup<'_>]) -> PassedOver {
        let rules = self.rules.iter().filter(|_| self.weight >= 0).enumerate();
        let failed = rules.map(|(index, rule)| {
            let failing = groups.iter().filter(|group| !rule.holds(group.facts));
            let name = Some(&rule.name).filter(|name| !name.is_empty());
            let name = name.map_or_else(|| format!("rule {}", index + 1), Clone::clone);
            (name, failing.map(|group| group.count).sum())
        });
        PassedOver {
            tag: self.tag.clone(),
            failed: failed.filter(|(_, count)| *count > 0).collect(),
        }
    }
}

impl Choice<'_> {
    /// What nodes have to be, as node affinity: the rules themselves, so that it holds for nodes that come later, too. Only a
    /// regular expression is replaced by the values that the groups have. `None` for rules on features that are no labels.
    pub fn requirements(&self, format: DocumentFormat) -> Option<Vec<Requirement>> {
        if format != DocumentFormat::Labels {
            return None;
        }
        let conditions = self.entry.rules.iter().flat_map(|rule| &rule.features);
        let mut all: Vec<Requirement> = Vec::new();
        for condition in conditions {
            let FeatureMatch::Labels(expressions) = condition else {
                return None;
            };
            for (key, expression) in expressions {
                let values: BTreeSet<&str> = self
                    .groups
                    .iter()
                    .filter_map(|group| group.facts.labels.get(key))
                    .map(String::as_str)
                    .collect();
                let requirement = expression.requirement(key, &values);
                all.extend(requirement.filter(|one| !all.contains(one)));
            }
        }
        Some(all)
    }
}

#[cfg(test)]
mod tests;
