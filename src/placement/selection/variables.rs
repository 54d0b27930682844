//! Variables of Node Feature Discovery's rules (`vars`). Later rules read them as the feature `rule.matched`. The rules of an entry are
//! `ANDed`, so that where a rule counts, those before it hold and their variables are known: conditions on them are constant.

use std::collections::BTreeMap;

use super::{FeatureMatch, facts::Feature};

/// The feature by which variables are read.
const FEATURE: &str = "rule.matched";

/// What is known of the variables when the next rule is read.
#[derive(Debug, Default)]
pub(super) struct Variables {
    /// Those of the rules before, in this entry.
    known: BTreeMap<String, String>,
    /// Whether some depend on the node: those of other entries, whose rules may hold or not, and those of templates.
    are_open: bool,
    /// Whether there is a rule before. NFD has the feature only then.
    has_rule: bool,
}

impl Variables {
    pub(super) fn begin_entry(&mut self) {
        self.are_open |= !self.known.is_empty();
        self.known.clear();
    }

    /// Adds those that a rule sets.
    pub(super) fn add(&mut self, set: BTreeMap<String, String>, template: &str) {
        self.are_open |= !template.is_empty();
        self.has_rule = true;
        self.known.extend(set);
    }

    /// A condition as it is if it is not on variables; `None`: it always holds.
    pub(super) fn replace(&self, condition: FeatureMatch) -> Option<FeatureMatch> {
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
        let is_known = self.has_rule && !self.are_open;
        let holds = is_known && variables.satisfies(elements.as_deref(), name.as_ref());
        (!holds).then_some(FeatureMatch::Never)
    }
}
