//! The labels and features that the rules of documents read. Nodes with equal values for these keys
//! form one group, for which rules are evaluated once.

use std::collections::{BTreeMap, BTreeSet};

use super::{FeatureMatch, facts::feature_label};

/// Keys of node labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelKeys {
    /// Whole keys.
    pub keys: BTreeSet<String>,
    /// Prefixes of keys.
    pub prefixes: BTreeSet<String>,
}

impl LabelKeys {
    /// Whether a key is among these keys.
    pub fn contains(&self, key: &str) -> bool {
        self.keys.contains(key) || self.prefixes.iter().any(|prefix| key.starts_with(prefix))
    }

    pub fn add(&mut self, other: &Self) {
        self.keys.extend(other.keys.iter().cloned());
        self.prefixes.extend(other.prefixes.iter().cloned());
    }

    /// The keys that conditions read.
    pub(super) fn from_conditions<'a>(conditions: impl Iterator<Item = &'a FeatureMatch>) -> Self {
        let mut keys = Self::default();
        for condition in conditions {
            match condition {
                FeatureMatch::Labels(expressions) => {
                    keys.keys
                        .extend(expressions.iter().map(|(key, _)| key.clone()));
                }
                FeatureMatch::Feature { feature, .. } => {
                    keys.prefixes.insert(feature_label(feature, ""));
                }
                FeatureMatch::Never => {}
            }
        }
        keys
    }
}

/// Features of Node Feature Discovery, and which of their elements are read.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FeatureKeys(BTreeMap<String, Elements>);

/// Elements of a feature.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Elements {
    Named(BTreeSet<String>),
    /// A rule reads the names of all elements.
    All,
}

impl FeatureKeys {
    /// Whether a rule names a feature. Conditions of lists of images have none.
    pub fn names_any(&self) -> bool {
        self.0.keys().any(|feature| !feature.is_empty())
    }

    /// Whether the rules read no features.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The names of the features.
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    pub fn add(&mut self, other: &Self) {
        for (feature, elements) in &other.0 {
            self.add_elements(feature, elements.clone());
        }
    }

    /// The features that conditions read.
    pub(super) fn from_conditions<'a>(conditions: impl Iterator<Item = &'a FeatureMatch>) -> Self {
        let mut keys = Self::default();
        for condition in conditions {
            if let FeatureMatch::Feature {
                feature,
                elements,
                name,
            } = condition
            {
                let elements = elements.iter().flatten().map(|(key, _)| key.clone());
                let elements = match name {
                    Some(_) => Elements::All,
                    None => Elements::Named(elements.collect()),
                };
                keys.add_elements(feature, elements);
            }
        }
        keys
    }

    fn add_elements(&mut self, feature: &str, elements: Elements) {
        let nothing = || Elements::Named(BTreeSet::new());
        let existing = self.0.entry(feature.to_owned()).or_insert_with(nothing);
        match (existing, elements) {
            (Elements::Named(names), Elements::Named(new)) => names.extend(new),
            (existing, Elements::All) => *existing = Elements::All,
            (Elements::All, Elements::Named(_)) => {}
        }
    }

    /// Whether an element of a feature is read; `None` if the feature is not read.
    pub fn elements<'a>(&'a self, feature: &str) -> Option<impl Fn(&str) -> bool + use<'a>> {
        let elements = self.0.get(feature)?;
        Some(move |name: &str| match elements {
            Elements::Named(names) => names.contains(name),
            Elements::All => true,
        })
    }
}
