//! Variables of Node Feature Discovery's rules (`vars`). Later rules read them as the feature
//! `rule.matched`. The rules of an entry are `ANDed`, so the result of a rule matters only if all
//! earlier rules of the entry hold. Then their variables are set, so conditions on these variables
//! are constant.

use std::collections::{BTreeMap, BTreeSet};

use super::{Expression, FeatureMatch, facts::Feature, rule::satisfies};

/// The feature that holds the variables.
const FEATURE: &str = "rule.matched";

/// The known variables when the next rule is read.
#[derive(Debug, Default)]
pub(super) struct Variables {
    /// Variables of earlier rules in this entry.
    known: BTreeMap<String, String>,
    /// Names of the variables of earlier entries. Whether these variables are set depends on the
    /// node, because the rules that set them hold only for some nodes.
    names_in_other_entries: BTreeSet<String>,
    /// Whether an earlier rule has a template, which may set any variable.
    has_template: bool,
    /// Whether there is an earlier rule. Before the first rule NFD has no feature `rule.matched`.
    has_rule: bool,
}

impl Variables {
    pub(super) fn begin_entry(&mut self) {
        self.names_in_other_entries
            .extend(std::mem::take(&mut self.known).into_keys());
    }

    /// Adds the variables that a rule sets.
    pub(super) fn add(&mut self, set: BTreeMap<String, String>, template: &str) {
        self.has_template |= !template.is_empty();
        self.has_rule = true;
        self.known.extend(set);
    }

    /// Evaluates a condition on variables: `None` if it always holds, otherwise `Never`, also if
    /// the result depends on the node. Returns other conditions unchanged.
    pub(super) fn simplify(&self, condition: FeatureMatch) -> Option<FeatureMatch> {
        let FeatureMatch::Feature {
            feature,
            elements,
            name,
        } = &condition
        else {
            return Some(condition);
        };
        if feature != FEATURE {
            return Some(condition);
        }
        let variables = Feature::Found {
            flags: None,
            attributes: Some(&self.known),
            instances: &[],
        };
        let is_known = self.are_known(elements.as_deref().unwrap_or_default(), name.is_some());
        let holds = is_known && satisfies(variables, elements.as_deref(), name.as_ref());
        (!holds).then_some(FeatureMatch::Never)
    }

    fn are_known(&self, elements: &[(String, Expression)], reads_names: bool) -> bool {
        let is_known = |(key, _): &(String, Expression)| {
            self.known.contains_key(key) || !self.names_in_other_entries.contains(key)
        };
        let names_are_known = !reads_names || self.names_in_other_entries.is_empty();
        self.has_rule && !self.has_template && names_are_known && elements.iter().all(is_known)
    }
}
