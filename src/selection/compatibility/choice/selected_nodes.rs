//! Turns a choice into node affinity: the selected image has to fit the node on which the pod
//! lands.

use crate::{
    placement::{
        affinity::{HOSTNAME, WeightedTerm, on_architecture},
        image_locality::MAX_HOSTS,
        node_set::{MAX_TERMS, NodeSet},
        requirement::{Operator, Requirement},
    },
    platform::Architectures,
};

use super::{
    super::{FeatureMatch, Rule, facts::feature_label},
    Choice, Compatibility, Fit, NodeGroup, RuleKeys,
};

/// Maximum number of requirements in all alternatives.
const MAX_REQUIREMENTS: usize = 128;
/// Maximum number of entries whose rules become node affinity, and of expressions in such an entry.
/// The affinity for an entry with more expressions would be too large for a pod.
const MAX_ENTRIES: usize = 2 * MAX_TERMS;
const MAX_EXPRESSIONS: usize = 4 * MAX_REQUIREMENTS;
/// Maximum number of comparisons that check the affinity of one entry.
const MAX_COMPARISONS: usize = 256 * 1024;
/// Bounds of the API for the weight of a preferred term.
const MAX_WEIGHT: i64 = 100;

/// Requirements on nodes, so that selected images fit them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelectedNodes {
    /// The possible nodes.
    pub required: NodeSet,
    /// The preferred nodes.
    pub preferred: Vec<WeightedTerm>,
}

impl SelectedNodes {
    /// Limits the nodes to these architectures: the image has to run there, whatever the pod's
    /// annotations say. `None` is no limit.
    #[must_use]
    pub fn on(mut self, architectures: Option<&Architectures>) -> Self {
        if let Some(set) = architectures {
            let of_architectures = NodeSet::all_of([on_architecture(set.names())]);
            self.required = of_architectures.and(&self.required);
        }
        self
    }

    /// The requirements for the images of two containers of a pod.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.required = self.required.and(&other.required);
        self.preferred.extend(other.preferred);
        self
    }

    /// The requirements for the images of two containers of a pod. If there are too many
    /// combinations, only combinations that select one of these groups are kept.
    #[must_use]
    pub fn and_on(self, other: Self, groups: &[NodeGroup<'_>]) -> Self {
        if self.required.terms().len() * other.required.terms().len() <= MAX_TERMS {
            return self.and(other).sorted_by(groups);
        }
        let pairs = self.required.combinations(&other.required);
        let selecting = pairs.filter(|term| selects_some(term, groups));
        let required = NodeSet::any_of(selecting.take(MAX_TERMS));
        if required.is_none() {
            return self.and(other).sorted_by(groups);
        }
        let preferred = [self.preferred, other.preferred].concat();
        Self {
            required,
            preferred,
        }
    }

    /// Moves the alternatives that select one of these groups to the front, because only the first
    /// alternatives are written if there are too many.
    #[must_use]
    pub fn sorted_by(mut self, groups: &[NodeGroup<'_>]) -> Self {
        let required = self.required;
        self.required = required.sorted_by_key(|term| !selects_some(term, groups));
        self
    }

    /// Whether some nodes of a group are selected.
    pub fn select_group(&self, group: &NodeGroup<'_>) -> bool {
        let mut terms = self.required.terms().iter();
        terms.any(|term| selects(term, group))
    }

    /// Whether the requirements are too large for a pod: each term of the pod may be repeated for
    /// each alternative.
    fn is_large(&self) -> bool {
        let preferred = self.preferred.iter().map(|term| &term.expressions);
        let all_terms = || self.required.terms().iter().chain(preferred.clone());
        let has_many_values = |term: &Vec<Requirement>| {
            term.iter()
                .any(|requirement| requirement.values.len() > MAX_HOSTS)
        };
        all_terms().map(Vec::len).sum::<usize>() > MAX_REQUIREMENTS
            || all_terms().any(has_many_values)
    }
}

/// An entry, and the nodes that it fits.
type Expressed<'a> = (&'a Compatibility, NodeSet);

impl<'a> Choice<'a> {
    /// The requirements on nodes. They express the rules, so that they also select nodes that join
    /// later. Label values of current nodes replace regular expressions and versions. If labels
    /// cannot express the rules of NFD, the requirements name the nodes. `None` if both are
    /// impossible, or if the requirements are too large for a pod.
    pub fn nodes(&self) -> Option<SelectedNodes> {
        let best = (self.best.entry, self.alternatives(&self.best)?);
        // Further entries with the same image may be left out: they only widen the affinity.
        let further_fits = self.further.iter().take(MAX_ENTRIES);
        let further_fits = further_fits.filter_map(|fit| self.expressed(fit));
        let fits: Vec<_> = std::iter::once(best).chain(further_fits).collect();
        let lowest = self.fits().map(|fit| fit.entry.weight).min();
        let mut nodes = SelectedNodes::default();
        if lowest.is_some_and(|lowest| lowest < self.highest()) {
            let terms = preferred_terms(&fits, self.highest());
            nodes.preferred = terms.map(|(_, term)| term).collect();
        }
        let sets = fits.into_iter().map(|(_, set)| set);
        // The best alternatives come first.
        nodes.required = sets
            .reduce(NodeSet::or)
            .unwrap_or_default()
            .truncated(MAX_TERMS);
        Some(nodes).filter(|nodes| !nodes.is_large())
    }

    /// The weights as preferences, for an image that is not selected. Entries without a weight are
    /// left out, and so are entries whose rules neither labels nor names of nodes can express.
    pub fn preferred(&self) -> Vec<(&'a Compatibility, WeightedTerm)> {
        let fits = self.fits().take(MAX_ENTRIES);
        let fits: Vec<_> = fits.filter_map(|fit| self.expressed(fit)).collect();
        let terms: Vec<_> = preferred_terms(&fits, self.highest()).collect();
        let nodes = SelectedNodes {
            required: NodeSet::every(),
            preferred: terms.iter().map(|(_, term)| term.clone()).collect(),
        };
        if nodes.is_large() {
            return Vec::new();
        }
        terms
    }

    fn fits(&self) -> impl Iterator<Item = &Fit<'a>> {
        std::iter::once(&self.best).chain(&self.further)
    }

    fn highest(&self) -> i64 {
        let weights = self.fits().map(|fit| fit.entry.weight);
        weights.max().unwrap_or(0)
    }

    fn expressed(&self, fit: &Fit<'a>) -> Option<Expressed<'a>> {
        Some((fit.entry, self.alternatives(fit)?))
    }

    /// The nodes that an entry fits; `None` if neither labels nor names can describe these nodes.
    fn alternatives(&self, fit: &Fit<'_>) -> Option<NodeSet> {
        // Some node satisfies the rules, so "no node" cannot be right here.
        let by_labels = fit.by_labels().filter(|set| !set.is_none());
        match self.keys {
            RuleKeys::Labels => by_labels,
            // NFD makes no labels for most features, so labels may select other nodes than rules.
            RuleKeys::Features => by_labels
                .filter(|term| self.selects_what_fits(fit, term))
                .or_else(|| fit.by_hosts()),
        }
    }

    fn selects_what_fits(&self, fit: &Fit<'_>, set: &NodeSet) -> bool {
        let requirements = set.terms().iter().flatten();
        let size: usize = requirements
            .map(|requirement| 1 + requirement.values.len())
            .sum();
        if size.saturating_mul(self.considered.len()) > MAX_COMPARISONS {
            return false;
        }
        let mut groups = self.considered.iter().zip(&fit.satisfying);
        groups.all(|(group, is_satisfying)| {
            let mut terms = set.terms().iter();
            terms.any(|term| selects(term, group)) == *is_satisfying
        })
    }
}

fn selects_some(term: &[Requirement], groups: &[NodeGroup<'_>]) -> bool {
    let mut groups = groups.iter();
    groups.any(|group| selects(term, group))
}

/// Whether requirements select nodes of a group. Called for each requirement and group, so it
/// copies nothing.
fn selects(requirements: &[Requirement], group: &NodeGroup<'_>) -> bool {
    let labels = group.facts.labels;
    // Nodes of a group differ in their names.
    let is_by_host =
        |requirement: &&Requirement| requirement.key == HOSTNAME && !labels.contains_key(HOSTNAME);
    let mut by_label = requirements
        .iter()
        .filter(|requirement| !is_by_host(requirement));
    let selects_host = |host: &String| {
        let mut by_host = requirements.iter().filter(is_by_host);
        by_host.all(|requirement| {
            requirement.operator == Operator::In && requirement.values.contains(host)
        })
    };
    by_label.all(|requirement| requirement.selects(labels))
        && (!requirements
            .iter()
            .any(|requirement| is_by_host(&requirement))
            || group.hosts.iter().any(selects_host))
}

/// A term for each alternative of each entry with a weight. Alternatives that hold for all nodes
/// are no preference.
fn preferred_terms<'a>(
    fits: &[Expressed<'a>],
    highest: i64,
) -> impl Iterator<Item = (&'a Compatibility, WeightedTerm)> {
    let terms = fits.iter().flat_map(move |(entry, alternatives)| {
        let weight = weight(entry, highest);
        let alternatives = alternatives.terms().iter().filter(|term| !term.is_empty());
        alternatives.filter_map(move |expressions| {
            let term = WeightedTerm {
                weight: weight?,
                expressions: expressions.clone(),
            };
            Some((*entry, term))
        })
    });
    terms.take(MAX_TERMS)
}

/// The weight of a preferred term: the weight of the entry, scaled down if the highest weight
/// exceeds the API's maximum of 100; `None` if it is not positive.
fn weight(entry: &Compatibility, highest: i64) -> Option<u8> {
    let weight = if highest <= MAX_WEIGHT {
        entry.weight
    } else {
        // In i128, because the product of two weights may exceed i64.
        let scaled = i128::from(entry.weight) * i128::from(MAX_WEIGHT) / i128::from(highest);
        i64::try_from(scaled).unwrap_or_default()
    };
    u8::try_from(weight).ok().filter(|weight| *weight > 0)
}

impl Fit<'_> {
    /// The rules as requirements on labels, if labels can express them.
    fn by_labels(&self) -> Option<NodeSet> {
        let rules = self.entry.rules.iter();
        let conditions =
            rules.flat_map(|rule| rule.features.iter().chain(rule.any.iter().flatten()));
        if conditions.map(FeatureMatch::size).sum::<usize>() > MAX_EXPRESSIONS {
            return None;
        }
        let mut nodes = NodeSet::every();
        for rule in &self.entry.rules {
            nodes = product(&nodes, &self.of_rule(rule)?)?;
        }
        Some(nodes)
    }

    fn of_rule(&self, rule: &Rule) -> Option<NodeSet> {
        let nodes = self.of_conditions(&rule.features)?;
        if rule.any.is_empty() {
            return Some(nodes);
        }
        let lists = rule.any.iter();
        let sets: Option<Vec<_>> = lists.map(|list| self.of_conditions(list)).collect();
        let union = sets?.into_iter().reduce(NodeSet::or);
        product(&nodes, &union.unwrap_or_else(NodeSet::none))
    }

    /// The conditions as requirements on labels; the empty set if no node can satisfy all of them.
    fn of_conditions(&self, conditions: &[FeatureMatch]) -> Option<NodeSet> {
        let mut requirements: Vec<Requirement> = Vec::new();
        for condition in conditions {
            let (expressions, feature) = match condition {
                FeatureMatch::Labels(expressions) => (expressions.as_slice(), None),
                FeatureMatch::Feature {
                    feature,
                    elements,
                    name: None,
                } => (elements.as_deref().unwrap_or_default(), Some(feature)),
                // Node affinity has no operator for the name of some element.
                FeatureMatch::Feature { .. } => return None,
                FeatureMatch::Never => return Some(NodeSet::none()),
            };
            for (element, expression) in expressions {
                let key = feature.map_or_else(
                    || element.clone(),
                    |feature| feature_label(feature, element),
                );
                let groups = self.groups.iter();
                let values = || {
                    let values = groups.filter_map(|group| group.facts.labels.get(&key));
                    values.map(String::as_str).collect()
                };
                let Some(new) = expression.requirements(&key, values) else {
                    return Some(NodeSet::none());
                };
                let new = new
                    .into_iter()
                    .filter(|requirement| !requirements.contains(requirement));
                let new: Vec<_> = new.collect();
                requirements.extend(new);
            }
        }
        Some(NodeSet::all_of(requirements))
    }

    /// The nodes by their names; `None` if there are too many, or a name is not known.
    fn by_hosts(&self) -> Option<NodeSet> {
        let are_known = self.groups.iter().all(|group| !group.hosts.is_empty());
        let hosts = self.groups.iter().flat_map(|group| group.hosts).cloned();
        let hosts: Vec<String> = hosts.collect();
        let named_hosts =
            || NodeSet::all_of([Requirement::new(HOSTNAME, Operator::In, hosts.clone())]);
        (are_known && hosts.len() <= MAX_HOSTS).then(named_hosts)
    }
}

/// The intersection of two sets; `None` if it would have too many terms.
fn product(set: &NodeSet, other: &NodeSet) -> Option<NodeSet> {
    (set.terms().len() * other.terms().len() <= MAX_TERMS).then(|| set.and(other))
}

#[cfg(test)]
mod tests;
