//! archaware's additions to the node affinity of a pod. Autoscalers follow affinity, and it also
//! applies to nodes without a taint.
//!
//! Required terms are `ORed`, so the architectures must be added to each of them. A term that
//! allows only architectures that can run the pod is not changed. A term that allows more is
//! narrowed, because an autoscaler would also make nodes of the other architectures.

mod undo;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use archaware_platform::{Architecture, Architectures};

use super::{
    MAX_LIST,
    affinity::{Affinity, LABELS, NodeSelectorTerm, PreferredTerm, WeightedTerm, on_architecture},
    author_nodes::{AuthorNodes, is_within},
    node_set::{MAX_TERMS, NodeSet},
    requirement::Requirement,
    unlabelled::UnlabelledNodes,
    variants::VariantPolicy,
};

pub use undo::{AffinityUndo, undo};

/// Maximum number of terms of a pod that are repeated for several alternatives. Real pods have a
/// few.
const MAX_REPEATED: usize = 16;

/// Maximum number of expressions that are added to the terms of a pod.
const MAX_EXPRESSIONS: usize = 16 * MAX_LIST;

/// What archaware adds to a pod's node affinity. Recorded on the pod, so that it can be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AffinityChange {
    /// Required architectures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub require: Option<Require>,
    /// Preferred architectures.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefer: Vec<Preference>,
    /// Other preferred nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prefer_terms: Vec<WeightedTerm>,
}

/// Required architectures and the terms that get them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Require {
    /// The architectures. An empty set selects no node; it is used if an image has no architecture
    /// for the OS of the pod. Ignored if there are `alternatives`.
    #[serde(deserialize_with = "recorded::set")]
    pub architectures: BTreeSet<Architecture>,
    /// More sets that are required as well. No architecture is in all sets, so autoscalers see that
    /// no node can run the pod.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "recorded::sets"
    )]
    pub further: Vec<BTreeSet<Architecture>>,
    /// Alternatives for nodes, each a list of requirements. Empty if only the architectures are
    /// required.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Vec<Requirement>>,
    /// Indexes of the terms that get the expressions. Empty if the pod has no terms and gets new
    /// terms.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub terms: Vec<usize>,
}

/// A preferred architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preference {
    /// The architecture.
    #[serde(deserialize_with = "recorded::one")]
    pub architecture: Architecture,
    /// From 1 to 100.
    pub weight: u8,
}

/// Reads the architectures of a record. Accepts unknown names, which the configuration refuses,
/// because an image may contain them.
mod recorded {
    use serde::{Deserializer, de::Error};

    use super::{Architecture, BTreeSet, Deserialize};

    pub(super) fn one<'de, D: Deserializer<'de>>(from: D) -> Result<Architecture, D::Error> {
        parse(&String::deserialize(from)?)
    }

    pub(super) fn set<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<BTreeSet<Architecture>, D::Error> {
        let names = Vec::<String>::deserialize(from)?;
        names.iter().map(|name| parse(name)).collect()
    }

    pub(super) fn sets<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<BTreeSet<Architecture>>, D::Error> {
        let sets = Vec::<Vec<String>>::deserialize(from)?;
        let parsed = |set: Vec<String>| set.iter().map(|name| parse(name)).collect();
        sets.into_iter().map(parsed).collect()
    }

    fn parse<E: Error>(name: &str) -> Result<Architecture, E> {
        name.parse()
            .map_err(|_| E::custom(format!("{name:?} is no architecture")))
    }
}

impl AffinityChange {
    /// Whether nothing is added.
    pub fn is_empty(&self) -> bool {
        self.require.is_none() && self.prefer.is_empty() && self.prefer_terms.is_empty()
    }

    /// The preferred terms to write.
    pub fn preferred_terms(&self) -> impl Iterator<Item = PreferredTerm> {
        let architectures = self.prefer.iter().map(Preference::term);
        architectures.chain(self.prefer_terms.iter().map(WeightedTerm::term))
    }
}

impl Require {
    /// Terms to add. If the pod already has terms, each affected term is combined with every one of
    /// these.
    pub fn alternatives(&self) -> Vec<NodeSelectorTerm> {
        let nodes = self.nodes();
        let terms = nodes.terms().iter().cloned();
        terms.map(NodeSelectorTerm::with_expressions).collect()
    }

    /// The required nodes.
    fn nodes(&self) -> NodeSet {
        match self.alternatives.as_slice() {
            [] => {
                let sets = std::iter::once(&self.architectures).chain(&self.further);
                NodeSet::all_of(sets.map(on_architecture))
            }
            alternatives => NodeSet::any_of(alternatives.to_vec()),
        }
    }

    /// Whether archaware can have written this record. Long lists would make `undo` slow, and
    /// archaware lists each term once.
    fn is_possible(&self) -> bool {
        let alternatives = self.alternatives.iter().map(Vec::len);
        let largest = alternatives.chain([1 + self.further.len()]).max();
        let largest = largest.unwrap_or_default();
        let lists = [self.alternatives.len(), self.terms.len(), largest];
        lists.into_iter().all(|length| length <= MAX_LIST)
            && self.terms.len() * largest <= MAX_EXPRESSIONS
            && self.terms.is_sorted_by(|a, b| a < b)
    }
}

impl Preference {
    /// The term to write.
    fn term(&self) -> PreferredTerm {
        PreferredTerm {
            weight: self.weight.into(),
            preference: NodeSelectorTerm::with_expressions(vec![on_architecture([
                &self.architecture
            ])]),
        }
    }
}

/// The requirements of a pod's images and of the configuration on the pod's nodes.
#[derive(Clone, Debug)]
pub struct AffinityDemand<'a> {
    /// Sets of architectures; the architecture of the node has to be in each set. No sets: nothing
    /// is required.
    pub required: &'a [Architectures],
    /// The architectures and variants that suffice: nodes that are known to have them are
    /// preferred.
    pub suitable: Option<&'a Architectures>,
    /// How variants are considered.
    pub variants: &'a VariantPolicy,
    /// The nodes without the label for their architecture.
    pub unlabelled: &'a UnlabelledNodes,
    /// The nodes that demands require.
    pub nodes: &'a NodeSet,
    /// The nodes that demands prefer.
    pub prefer: Vec<WeightedTerm>,
    /// Whether required terms can be added and repeated. Those of an existing pod can only get more
    /// expressions (`ValidatePodUpdate` of the API server: the affinity of a gated pod may be
    /// narrowed).
    pub terms_are_open: bool,
}

/// The additions to a pod.
pub fn decide(
    wanted: &AffinityDemand<'_>,
    preferred: Vec<Preference>,
    author: AuthorNodes<'_>,
) -> AffinityChange {
    let suitable = wanted.suitable.map(|set| author.selected(set));
    let mut terms = suitable.map_or_else(Vec::new, |set| wanted.variants.preferred(&set));
    terms.extend(wanted.prefer.iter().cloned());
    if author.names_nodes() {
        terms.clear();
    }
    AffinityChange {
        require: required_change(wanted, author),
        prefer: preferred
            .into_iter()
            .filter(|_| author.is_open_to_preferences())
            .collect(),
        prefer_terms: preferred_terms(&terms, author),
    }
}

/// The preferred terms that the pod lacks. Omits terms that name only the architecture if the node
/// selector names an architecture, or if the author prefers one.
fn preferred_terms(terms: &[WeightedTerm], author: AuthorNodes<'_>) -> Vec<WeightedTerm> {
    let author_terms = author.affinity.map(Affinity::preferred_terms);
    let author_terms = author_terms.unwrap_or_default();
    let says_more = |term: &WeightedTerm| {
        let mut expressions = term.expressions.iter();
        author.is_open_to_preferences()
            || expressions.any(|requirement| !LABELS.contains(&requirement.key.as_str()))
    };
    let new = terms
        .iter()
        .filter(|term| !author_terms.contains(&term.term()) && says_more(term));
    new.cloned().collect()
}

/// Whether node affinity would have to be added so that only these architectures are selected.
pub fn requires_more(
    architectures: &Architectures,
    variants: &VariantPolicy,
    author: AuthorNodes<'_>,
) -> bool {
    let wanted = AffinityDemand {
        required: std::slice::from_ref(architectures),
        suitable: None,
        variants,
        unlabelled: &UnlabelledNodes::default(),
        nodes: &NodeSet::every(),
        prefer: Vec::new(),
        terms_are_open: true,
    };
    required_change(&wanted, author).is_some()
}

fn required_change(wanted: &AffinityDemand<'_>, author: AuthorNodes<'_>) -> Option<Require> {
    let terms = author.affinity.and_then(Affinity::required_terms);
    let is_single = !wanted.terms_are_open && terms.is_some();
    let architectures = RequiredArchitectures::compute(wanted, author, is_single);
    // Each term is repeated for each alternative, so a pod with many terms gets only one
    // alternative.
    let is_single = is_single || terms.is_some_and(|terms| terms.len() > MAX_REPEATED);
    if wanted.nodes.is_every() {
        return architectures?.require(terms);
    }
    let (mut require, by_architecture) = match architectures {
        Some(required) => {
            let set = required.require.nodes();
            (required.require, set)
        }
        None => (Require::default(), NodeSet::every()),
    };
    // Only the first `MAX_TERMS` alternatives are kept. The terms of the best images come first,
    // each with all architectures.
    let nodes = wanted.unlabelled.admitted_to(wanted.nodes.clone());
    let alternatives = nodes.terms().iter().flat_map(|term| {
        let nodes = NodeSet::all_of(term.iter().cloned());
        by_architecture.combinations(&nodes).collect::<Vec<_>>()
    });
    require.alternatives = alternatives.take(MAX_TERMS).collect();
    if require.alternatives.is_empty() {
        // An empty list would ask for the architectures only.
        require.alternatives = vec![vec![on_architecture([])]];
    }
    if let Some(terms) = terms {
        require.terms = open_terms(terms, &require.alternatives());
        if require.terms.is_empty() {
            return None;
        }
    }
    if is_single {
        // The first alternatives are the best.
        require.alternatives.truncate(1);
    }
    Some(require)
}

/// The requirements for the architectures of the images, before they are compared with the pod's
/// terms.
struct RequiredArchitectures {
    require: Require,
    /// A term or node selector that selects only these architectures is not changed.
    suffices: Architectures,
    /// Alternatives that archaware could have written when the pod was created. A term that
    /// contains one of them is not changed.
    unlimited: Vec<NodeSelectorTerm>,
}

impl RequiredArchitectures {
    /// `None` if nothing is required, or if the author's node selector already selects only
    /// sufficient architectures.
    fn compute(
        wanted: &AffinityDemand<'_>,
        author: AuthorNodes<'_>,
        is_single: bool,
    ) -> Option<Self> {
        let (first, further) = wanted.required.split_first()?;
        let shared = further.iter().fold(first.clone(), |a, b| a.and(b));
        let names = |set: &Architectures| set.names().cloned().collect();
        let selected = author.selected(&shared);
        let mut require = Require {
            architectures: names(first),
            further: further.iter().map(names).collect(),
            alternatives: wanted.variants.required(&selected, is_single),
            terms: Vec::new(),
        };
        let suffices = if require.alternatives.is_empty() {
            shared
        } else {
            selected.clone().of_any_variant()
        };
        let unlimited = if require.alternatives.len() == 1 {
            let alternatives = wanted.variants.required(&selected, false).into_iter();
            alternatives
                .map(NodeSelectorTerm::with_expressions)
                .collect()
        } else {
            Vec::new()
        };
        let admitted = wanted.unlabelled.admitted_to(require.nodes());
        if admitted != require.nodes() {
            require.alternatives = admitted.terms().to_vec();
        }
        (!author.selects_within(&suffices)).then_some(Self {
            require,
            suffices,
            unlimited,
        })
    }

    /// Adds the indexes of the terms that need the requirement; `None` if the pod has terms and
    /// none of them needs it.
    fn require(mut self, terms: Option<&[NodeSelectorTerm]>) -> Option<Require> {
        if let Some(terms) = terms {
            let mut alternatives = self.require.alternatives();
            alternatives.append(&mut self.unlimited);
            let is_within = |index: &usize| {
                let term = terms.get(*index);
                term.is_some_and(|term| is_within(term, &self.suffices))
            };
            let mut open = open_terms(terms, &alternatives);
            open.retain(|index| !is_within(index));
            if open.is_empty() {
                return None;
            }
            self.require.terms = open;
        }
        Some(self.require)
    }
}

/// Indexes of the terms that do not yet include the requirements of any of these alternatives.
fn open_terms(terms: &[NodeSelectorTerm], alternatives: &[NodeSelectorTerm]) -> Vec<usize> {
    // A term without expressions either matches no node (`nodeaffinity.isEmptyNodeSelectorTerm` of
    // k8s.io/component-helpers) or names a single node, as in a DaemonSet's pods. Neither is
    // changed.
    let needs_more = |term: &NodeSelectorTerm| {
        let expressions = &term.match_expressions;
        let has_one = alternatives.iter().any(|alternative| {
            let mut requirements = alternative.match_expressions.iter();
            requirements.all(|requirement| expressions.contains(requirement))
        });
        !expressions.is_empty() && !has_one
    };
    let open = terms
        .iter()
        .enumerate()
        .filter(|(_, term)| needs_more(term));
    open.map(|(index, _)| index).collect()
}

#[cfg(test)]
mod tests;
