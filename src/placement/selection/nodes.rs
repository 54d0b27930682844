//! What a choice means for the nodes of its pod, as node affinity: the image has to fit the node on which the pod lands.

use std::collections::BTreeSet;

use crate::placement::affinity::{NodeSelectorTerm, Requirement, WeightedTerm};

use super::{
    Choice, Compatibility, DocumentFormat, FeatureMatch, Rule, choice::Fit, facts::feature_label,
};

/// Maximum number of alternatives: a pod gets a term for each, and each of its own terms is repeated for each.
const MAX_ALTERNATIVES: usize = 16;
/// The label by which nodes are named if no other labels select them.
const HOSTNAME: &str = "kubernetes.io/hostname";
/// Bounds of the API for the weight of a preferred term.
const MAX_WEIGHT: i64 = 100;

/// What nodes have to be so that selected images fit them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelectedNodes {
    /// One of these, each a list of requirements. Empty: nothing.
    pub required: Vec<Vec<Requirement>>,
    /// Nodes to prefer.
    pub preferred: Vec<WeightedTerm>,
}

impl SelectedNodes {
    /// What the nodes have to be for the images of two containers.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.required = product(&self.required, &other.required);
        self.preferred.extend(other.preferred);
        self
    }

    /// Whether there is nothing to add.
    pub fn is_empty(&self) -> bool {
        self.required.is_empty() && self.preferred.is_empty()
    }
}

/// Each of these with each of those; an empty list asks for nothing. If they become too many, only the best of each.
pub(in crate::placement) fn product(
    one: &[Vec<Requirement>],
    other: &[Vec<Requirement>],
) -> Vec<Vec<Requirement>> {
    if one.is_empty() || other.is_empty() {
        return [one, other].concat();
    }
    let is_small = one.len() * other.len() <= MAX_ALTERNATIVES;
    let kept = if is_small { usize::MAX } else { 1 };
    let mut all = Vec::new();
    for first in one.iter().take(kept) {
        for second in other.iter().take(kept) {
            let new = second.iter().filter(|one| !first.contains(one));
            all.push(first.iter().chain(new).cloned().collect());
        }
    }
    all
}

impl Choice<'_> {
    /// What nodes have to be: the rules themselves, so that it holds for nodes that come later, too. Only a regular expression is
    /// replaced by the values that the groups have. Rules that labels do not express name the nodes; `None` if these are too many.
    pub fn nodes(&self) -> Option<SelectedNodes> {
        let fits = || std::iter::once(&self.best).chain(&self.further);
        let mut nodes = SelectedNodes::default();
        let mut is_open = false;
        let highest = fits().map(|fit| fit.entry.weight).max().unwrap_or(0);
        let lowest = fits().map(|fit| fit.entry.weight).min().unwrap_or(0);
        for fit in fits() {
            let alternatives = self.alternatives(fit)?;
            is_open |= alternatives.iter().any(Vec::is_empty);
            let weight = weight(fit.entry, highest).filter(|_| lowest < highest);
            let preferred = alternatives.iter().filter(|all| !all.is_empty());
            let preferred = preferred.zip(std::iter::repeat(weight));
            nodes
                .preferred
                .extend(preferred.filter_map(|(expressions, weight)| {
                    Some(WeightedTerm {
                        weight: weight?,
                        expressions: expressions.clone(),
                    })
                }));
            let new = alternatives
                .into_iter()
                .filter(|one| !nodes.required.contains(one));
            let new: Vec<_> = new.collect();
            nodes.required.extend(new);
        }
        // The first are the best.
        nodes.required.truncate(MAX_ALTERNATIVES);
        nodes.preferred.truncate(MAX_ALTERNATIVES);
        if is_open {
            nodes.required.clear();
        }
        Some(nodes)
    }

    /// The requirements of one entry.
    fn alternatives(&self, fit: &Fit<'_>) -> Option<Vec<Vec<Requirement>>> {
        let by_labels = fit.by_labels();
        match self.format {
            DocumentFormat::Labels => by_labels,
            // NFD makes no labels for most of what it knows.
            DocumentFormat::Features => by_labels
                .filter(|all| self.selects_what_fits(fit.entry, all))
                .or_else(|| fit.by_hosts()),
        }
    }

    fn selects_what_fits(&self, entry: &Compatibility, alternatives: &[Vec<Requirement>]) -> bool {
        self.considered.iter().all(|group| {
            let selects = |all: &Vec<Requirement>| {
                let term = NodeSelectorTerm {
                    match_expressions: all.clone(),
                    ..NodeSelectorTerm::default()
                };
                all.is_empty() || term.selects(group.facts.labels, "")
            };
            alternatives.iter().any(selects) == entry.fits(group.facts)
        })
    }
}

/// The weight of a preferred term: as written where the API allows that, otherwise in proportion.
fn weight(entry: &Compatibility, highest: i64) -> Option<u8> {
    let weight = if highest <= MAX_WEIGHT {
        entry.weight
    } else {
        // Of i128, because weights are any integers.
        let scaled = i128::from(entry.weight) * i128::from(MAX_WEIGHT) / i128::from(highest);
        i64::try_from(scaled).unwrap_or_default()
    };
    u8::try_from(weight).ok().filter(|weight| *weight > 0)
}

impl Fit<'_> {
    /// The rules as requirements on labels, if labels can express them.
    fn by_labels(&self) -> Option<Vec<Vec<Requirement>>> {
        let mut all = vec![Vec::new()];
        for rule in &self.entry.rules {
            all = product_of_rules(&all, &self.of_rule(rule)?)?;
        }
        Some(all)
    }

    fn of_rule(&self, rule: &Rule) -> Option<Vec<Vec<Requirement>>> {
        let mut all = vec![self.of_conditions(&rule.features)?];
        if !rule.any.is_empty() {
            let any = rule.any.iter();
            let any: Option<Vec<_>> = any.map(|list| self.of_conditions(list)).collect();
            all = product_of_rules(&all, &any?)?;
        }
        Some(all)
    }

    fn of_conditions(&self, conditions: &[FeatureMatch]) -> Option<Vec<Requirement>> {
        let mut all: Vec<Requirement> = Vec::new();
        for condition in conditions {
            let (expressions, feature) = match condition {
                FeatureMatch::Labels(expressions) => (expressions.as_slice(), None),
                FeatureMatch::Feature {
                    feature,
                    elements,
                    name: None,
                } => (elements.as_deref().unwrap_or_default(), Some(feature)),
                // Labels have no expression for the name of some element.
                FeatureMatch::Feature { .. } => return None,
            };
            for (element, expression) in expressions {
                let key = feature.map_or_else(
                    || element.clone(),
                    |feature| feature_label(feature, element),
                );
                let values: BTreeSet<&str> = self
                    .groups
                    .iter()
                    .filter_map(|group| group.facts.labels.get(&key))
                    .map(String::as_str)
                    .collect();
                let new = expression.requirements(&key, &values).into_iter();
                let new: Vec<_> = new.filter(|one| !all.contains(one)).collect();
                all.extend(new);
            }
        }
        Some(all)
    }

    /// The names of the nodes.
    fn by_hosts(&self) -> Option<Vec<Vec<Requirement>>> {
        let are_known = self.groups.iter().all(|group| !group.hosts.is_empty());
        let hosts = self.groups.iter().flat_map(|group| group.hosts).cloned();
        let hosts: Vec<String> = hosts.collect();
        (are_known && hosts.len() <= super::MAX_HOSTS)
            .then(|| vec![vec![Requirement::new(HOSTNAME, "In", hosts)]])
    }
}

/// Each of these with each of those, unless they become too many.
fn product_of_rules(
    one: &[Vec<Requirement>],
    other: &[Vec<Requirement>],
) -> Option<Vec<Vec<Requirement>>> {
    let is_small = one.len() * other.len() <= MAX_ALTERNATIVES;
    is_small.then(|| product(one, other))
}

#[cfg(test)]
mod tests;
