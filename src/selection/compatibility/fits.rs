//! Which entries of a document fit which nodes: computed once for a container, in bounded time.

use super::{Compatibility, CompatibilityDocument, NodeGroup};

/// Maximum work for a container, in comparisons of a value: some tenths of a second. A document
/// with a hundred expressions needs this for ten thousand groups of nodes.
const MAX_WORK: usize = 4_000_000;
/// Maximum number of pairs of an entry and a group.
const MAX_PAIRS: usize = 256 * 1024;
/// Less work than this takes so little time that other tasks can wait for it.
const SMALL_WORK: usize = 20_000;

/// Which entries fit which groups.
#[derive(Clone, Debug, Default)]
pub struct Fits(Vec<EntryFits>);

#[derive(Clone, Debug)]
struct EntryFits {
    /// For each group, by its index: whether its nodes satisfy all rules.
    groups: Vec<bool>,
    /// Whether the nodes of all evaluated groups satisfy all rules.
    all: bool,
    /// For each rule: the number of nodes that do not satisfy it.
    failing: Vec<usize>,
}

/// The document has too many rules for so many different nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its rules need too much work, because this cluster has too many different nodes for so many rules"
)]
pub struct TooMuchWork;

/// The work of computing [`Fits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitsWork(usize);

impl FitsWork {
    /// The work of a document for groups.
    ///
    /// # Errors
    ///
    /// When it is more than archaware does for one container.
    pub fn new(
        document: &CompatibilityDocument,
        groups: &[NodeGroup<'_>],
    ) -> Result<Self, TooMuchWork> {
        if document.entries.len().saturating_mul(groups.len()) > MAX_PAIRS {
            return Err(TooMuchWork);
        }
        let mut work: usize = 0;
        for group in groups {
            work = work.saturating_add(document.work.for_node(group.facts));
            if work > MAX_WORK {
                return Err(TooMuchWork);
            }
        }
        Ok(Self(work))
    }

    /// Whether the work is so small that it may run on an async worker.
    pub fn is_small(self) -> bool {
        self.0 <= SMALL_WORK
    }
}

impl Fits {
    /// Evaluates all rules for all groups. The caller bounds the work with [`FitsWork`].
    pub fn new<'a>(
        document: &CompatibilityDocument,
        groups: impl Iterator<Item = NodeGroup<'a>> + Clone,
    ) -> Self {
        let count = groups.clone().map(|group| group.index + 1).max();
        let of_entry = |entry: &Compatibility| {
            let mut fits = EntryFits {
                groups: vec![false; count.unwrap_or_default()],
                all: true,
                failing: vec![0; entry.rules.len()],
            };
            for group in groups.clone() {
                let mut is_fitting = true;
                for (rule, failing) in entry.rules.iter().zip(&mut fits.failing) {
                    if !rule.holds(group.facts) {
                        *failing += group.count;
                        is_fitting = false;
                    }
                }
                fits.all &= is_fitting;
                if let Some(fits) = fits.groups.get_mut(group.index) {
                    *fits = is_fitting;
                }
            }
            fits
        };
        Self(document.entries.iter().map(of_entry).collect())
    }

    /// Whether the nodes of a group satisfy the rules of an entry.
    pub fn fits(&self, entry: &Compatibility, group: &NodeGroup<'_>) -> bool {
        let of_entry = self.0.get(entry.index);
        of_entry.is_some_and(|fits| fits.groups.get(group.index) == Some(&true))
    }

    /// Whether the nodes of all evaluated groups satisfy the rules of an entry.
    pub fn fit_all(&self, entry: &Compatibility) -> bool {
        self.0.get(entry.index).is_some_and(|fits| fits.all)
    }

    /// For each rule of an entry: the number of nodes that do not satisfy it.
    pub(super) fn failing(&self, entry: &Compatibility) -> &[usize] {
        let of_entry = self.0.get(entry.index);
        of_entry.map_or(&[], |fits| &fits.failing)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::selection::compatibility::{NodeFacts, NodeFeatures, RuleKeys};

    fn document(matches: &[String]) -> CompatibilityDocument {
        let text = format!(
            "compatibilities: [{{rules: [{{matchAny: [{}]}}]}}]",
            matches.join(",")
        );
        CompatibilityDocument::parse(RuleKeys::Features, text.as_bytes()).unwrap()
    }

    fn nodes(count: usize, flags: usize) -> Vec<NodeFeatures> {
        let of_node = |node: usize| {
            let flags = (0..flags).map(|flag| (format!("m{node}-{flag}"), json!({})));
            let flags: serde_json::Map<_, _> = flags.collect();
            let features = json!({"flags": {"kernel.loadedmodule": {"elements": flags}}});
            serde_json::from_value(features).unwrap()
        };
        (0..count).map(of_node).collect()
    }

    fn groups<'a>(
        nodes: &'a [NodeFeatures],
        labels: &'a BTreeMap<String, String>,
    ) -> Vec<NodeGroup<'a>> {
        let nodes = nodes.iter().enumerate();
        let group = |(index, features)| NodeGroup {
            index,
            facts: NodeFacts {
                labels,
                features: Some(features),
            },
            architecture: "amd64",
            variant: None,
            hosts: &[],
            count: 1,
        };
        nodes.map(group).collect()
    }

    /// Conditions on names read every name of every node.
    #[test]
    fn the_work_is_bounded_before_it_begins() {
        let condition = |number: usize| {
            format!(
                "{{matchFeatures: [{{feature: kernel.loadedmodule, matchName: {{op: In, value: x{number}}}}}]}}"
            )
        };
        let large = document(&(0..1000).map(condition).collect::<Vec<_>>());
        let (labels, nodes) = (BTreeMap::new(), nodes(200, 100));
        let groups = groups(&nodes, &labels);
        let started = std::time::Instant::now();
        assert_eq!(FitsWork::new(&large, &groups), Err(TooMuchWork));
        assert!(
            started.elapsed().as_millis() < 200,
            "{:?}",
            started.elapsed()
        );
        let usual = document(&(0..10).map(condition).collect::<Vec<_>>());
        let work = FitsWork::new(&usual, &groups).unwrap();
        // Two comparisons of each name: the value, and the operator.
        assert!((400_000..500_000).contains(&work.0), "{work:?}");
        assert!(!work.is_small() && FitsWork::new(&usual, &groups[..1]).unwrap().is_small());
    }

    #[test]
    fn each_group_has_its_result() {
        let names = "{matchFeatures: [{feature: kernel.loadedmodule, matchName: {op: In, value: [m0-1, m2-0]}}]}";
        let document = document(&[names.to_owned()]);
        let (labels, nodes) = (BTreeMap::new(), nodes(4, 2));
        let groups = groups(&nodes, &labels);
        let entry = &document.entries[0];
        // Only some of the groups are evaluated; each keeps its index.
        let fits = Fits::new(&document, groups[1..].iter().copied());
        let fitting: Vec<_> = groups.iter().map(|group| fits.fits(entry, group)).collect();
        assert_eq!(fitting, [false, false, true, false]);
        assert_eq!(
            (fits.failing(entry), fits.fit_all(entry)),
            (&[2][..], false)
        );
        assert!(Fits::new(&document, groups[2..3].iter().copied()).fit_all(entry));
    }
}
