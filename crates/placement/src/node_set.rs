//! Sets of nodes that are described by requirements on labels.

use std::{collections::BTreeMap, fmt};

use super::requirement::Requirement;

/// Maximum number of terms of a set. A pod gets one node selector term for each term of the set. If
/// its author wrote terms, each of them is repeated for each term of the set.
pub const MAX_TERMS: usize = 16;

/// The nodes that satisfy at least one term of the set. A node satisfies a term if it satisfies all
/// requirements of the term, so every node satisfies an empty term. A set without terms selects no
/// node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSet {
    terms: Vec<Vec<Requirement>>,
}

/// Why two sets share no node: two requirements on the same label, of which at most one can hold.
/// One is in the first term of one set, the other in the first term of the other set.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Disjoint {
    one: String,
    other: String,
}

impl fmt::Display for Disjoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, and {}", self.one, self.other)
    }
}

impl Default for NodeSet {
    fn default() -> Self {
        Self::every()
    }
}

impl NodeSet {
    /// All nodes.
    pub fn every() -> Self {
        Self {
            terms: vec![Vec::new()],
        }
    }

    /// No node.
    pub fn none() -> Self {
        Self { terms: Vec::new() }
    }

    /// The nodes that satisfy at least one of these terms.
    pub fn any_of(terms: impl IntoIterator<Item = Vec<Requirement>>) -> Self {
        let terms: Vec<_> = terms.into_iter().collect();
        if terms.iter().any(Vec::is_empty) {
            return Self::every();
        }
        Self { terms }
    }

    /// The nodes that satisfy all of these requirements.
    pub fn all_of(requirements: impl IntoIterator<Item = Requirement>) -> Self {
        Self::any_of([requirements.into_iter().collect()])
    }

    /// Whether it selects every node.
    pub fn is_every(&self) -> bool {
        self.terms.iter().any(Vec::is_empty)
    }

    /// Whether it selects no node.
    pub fn is_none(&self) -> bool {
        self.terms.is_empty()
    }

    /// Its terms, at least one of which has to hold. Each is a list of requirements, all of which
    /// have to hold.
    pub fn terms(&self) -> &[Vec<Requirement>] {
        &self.terms
    }

    /// Whether it selects a node with these labels.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        let mut terms = self.terms.iter();
        terms.any(|term| term.iter().all(|requirement| requirement.selects(labels)))
    }

    /// The nodes of one set or the other.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        let is_new = |term: &Vec<Requirement>| !self.terms.contains(term);
        let new: Vec<_> = other.terms.into_iter().filter(is_new).collect();
        self.terms.extend(new);
        Self::any_of(self.terms)
    }

    /// The nodes that are in both sets. Keeps only the first [`MAX_TERMS`] combinations of terms,
    /// so the result may lack nodes.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self::any_of(self.combinations(other).take(MAX_TERMS))
    }

    /// Each term of this set with each term of the other.
    pub fn combinations(&self, other: &Self) -> impl Iterator<Item = Vec<Requirement>> {
        let pairs = self
            .terms
            .iter()
            .flat_map(|first| other.terms.iter().map(move |second| (first, second)));
        pairs.map(|(first, second)| {
            let new = second
                .iter()
                .filter(|requirement| !first.contains(requirement));
            first.iter().chain(new).cloned().collect()
        })
    }

    /// Keeps only the first `count` terms. The set gets smaller, because a node has to satisfy only
    /// one term.
    #[must_use]
    pub fn truncated(mut self, count: usize) -> Self {
        self.terms.truncate(count);
        self
    }

    /// Sorts the terms by a key. [`Self::truncated`] and [`Self::and`] keep the first terms.
    #[must_use]
    pub fn sorted_by_key<K: Ord>(mut self, key: impl FnMut(&Vec<Requirement>) -> K) -> Self {
        self.terms.sort_by_key(key);
        self
    }

    /// Why no node can be in both sets. `None` if a node may be in both, or if one of the sets
    /// selects no node anyway.
    pub fn disjoint(&self, other: &Self) -> Option<Disjoint> {
        let pairs = self
            .terms
            .iter()
            .flat_map(|first| other.terms.iter().map(move |second| (first, second)));
        let mut example = None;
        for (first, second) in pairs {
            let mut requirements = first
                .iter()
                .flat_map(|one| second.iter().map(move |other| (one, other)));
            let conflict = requirements.find(|(one, other)| one.excludes(other))?;
            example.get_or_insert(conflict);
        }
        example.map(|(one, other)| Disjoint {
            one: one.to_string(),
            other: other.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::requirement::Operator, *};

    fn requirement() -> impl Strategy<Value = Requirement> {
        let operator = prop::sample::select(vec![
            Operator::In,
            Operator::NotIn,
            Operator::Exists,
            Operator::DoesNotExist,
        ]);
        let values = prop::collection::vec(prop::sample::select(vec!["1", "2", "3"]), 1..3);
        (prop::sample::select(vec!["a", "b"]), operator, values).prop_map(
            |(key, operator, values)| {
                let has_values = matches!(operator, Operator::In | Operator::NotIn);
                let values = values.into_iter().filter(|_| has_values);
                Requirement::new(key, operator, values.map(str::to_owned).collect())
            },
        )
    }

    fn set() -> impl Strategy<Value = NodeSet> {
        let term = prop::collection::vec(requirement(), 0..3);
        prop::collection::vec(term, 0..4).prop_map(NodeSet::any_of)
    }

    /// Every combination of the labels above.
    fn nodes() -> Vec<BTreeMap<String, String>> {
        let values = [None, Some("1"), Some("2"), Some("3"), Some("4")];
        let pairs = values
            .iter()
            .flat_map(|a| values.iter().map(move |b| (a, b)));
        pairs
            .map(|(a, b)| {
                let labels = [("a", a), ("b", b)].into_iter();
                let labels = labels.filter_map(|(key, value)| {
                    value.map(|value| (key.to_owned(), value.to_owned()))
                });
                labels.collect()
            })
            .collect()
    }

    proptest! {
        #[test]
        fn operations_are_those_of_sets(one in set(), other in set()) {
            let (both, either) = (one.and(&other), one.clone().or(other.clone()));
            for labels in nodes() {
                let selected = (one.selects(&labels), other.selects(&labels));
                prop_assert_eq!(both.selects(&labels), selected.0 && selected.1);
                prop_assert_eq!(either.selects(&labels), selected.0 || selected.1);
            }
        }

        #[test]
        fn sets_that_are_called_disjoint_share_no_node(one in set(), other in set()) {
            let shares = nodes().iter().any(|labels| one.selects(labels) && other.selects(labels));
            let reason = one.disjoint(&other);
            prop_assert!(!(shares && reason.is_some()), "{:?}", reason);
            prop_assert_eq!(reason.is_some(), other.disjoint(&one).is_some());
        }
    }

    #[test]
    fn every_node_and_no_node_are_different() {
        let on = |value: &str| {
            NodeSet::all_of([Requirement::new(
                "zone",
                Operator::In,
                vec![value.to_owned()],
            )])
        };
        let none = NodeSet::none();
        assert!(NodeSet::every().is_every() && !NodeSet::every().is_none());
        assert!(none.is_none() && !none.is_every());
        assert_eq!(NodeSet::every().and(&on("a")), on("a"));
        assert_eq!(none.and(&on("a")), none);
        assert_eq!(none.clone().or(on("a")), on("a"));
        assert!(NodeSet::every().or(on("a")).is_every());
        assert_eq!(
            on("a").disjoint(&on("b")).unwrap().to_string(),
            "zone in (a), and zone in (b)"
        );
        assert_eq!(on("a").or(on("b")).disjoint(&on("b")), None);
    }

    #[test]
    fn a_product_has_a_limited_number_of_terms() {
        let five_terms = |key: &str| {
            NodeSet::any_of((0..5).map(|value: u8| {
                vec![Requirement::new(key, Operator::In, vec![value.to_string()])]
            }))
        };
        assert_eq!(
            five_terms("a").and(&five_terms("b")).terms().len(),
            MAX_TERMS
        );
    }
}
