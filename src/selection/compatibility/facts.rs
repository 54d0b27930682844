//! Facts about a node: its labels, and the features that Node Feature Discovery (NFD) found.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use serde::{Deserialize, Deserializer};

/// The fact about one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact<'a> {
    /// The key is missing.
    Missing,
    /// The key exists, and has no value.
    Flag,
    Value(&'a str),
}

/// Facts about a node.
#[derive(Clone, Copy, Debug)]
pub struct NodeFacts<'a> {
    pub labels: &'a BTreeMap<String, String>,
    /// The merged features of the node's `NodeFeature` objects, if it has any.
    pub features: Option<&'a NodeFeatures>,
}

/// `spec.features` of a `NodeFeature` (`nfd.k8s-sigs.io/v1alpha1`), by feature name, e.g.
/// `cpu.cpuid`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub struct NodeFeatures {
    /// Features whose elements are names without values.
    flags: BTreeMap<String, Flags>,
    /// Features whose elements are names with values.
    attributes: BTreeMap<String, Attributes>,
    /// Features whose elements are objects with names and values.
    instances: BTreeMap<String, Instances>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
struct Flags {
    #[serde(deserialize_with = "names")]
    elements: BTreeSet<String>,
}

/// The API has a map with empty objects as values.
fn names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    #[allow(clippy::zero_sized_map_values, reason = "only the keys are kept")]
    let map = BTreeMap::<String, serde::de::IgnoredAny>::deserialize(deserializer)?;
    Ok(map.into_keys().collect())
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
struct Attributes {
    elements: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
struct Instances {
    elements: Vec<Instance>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(default)]
pub(super) struct Instance {
    attributes: BTreeMap<String, String>,
}

/// NFD's labels: `feature.node.kubernetes.io/cpu-cpuid.AVX2` for the element `AVX2` of `cpu.cpuid`.
const NFD_LABELS: &str = "feature.node.kubernetes.io/";

/// The label for an element of a feature.
pub(super) fn feature_label(feature: &str, element: &str) -> String {
    format!("{NFD_LABELS}{}.{element}", feature.replacen('.', "-", 1))
}

/// One feature of a node. A feature may have thousands of elements, so they are borrowed and not
/// copied.
pub(super) enum Feature<'a> {
    /// From a `NodeFeature` object.
    Found {
        flags: Option<&'a BTreeSet<String>>,
        attributes: Option<&'a BTreeMap<String, String>>,
        instances: &'a [Instance],
    },
    /// From labels with this prefix. Labels do not distinguish a flag, whose label has the value
    /// `true`, from an attribute with the value `true`.
    Labels {
        labels: &'a BTreeMap<String, String>,
        prefix: String,
    },
}

impl<'a> NodeFacts<'a> {
    pub(super) fn label(&self, key: &str) -> Fact<'a> {
        self.labels
            .get(key)
            .map_or(Fact::Missing, |value| Fact::Value(value))
    }

    /// A feature that NFD found on the node: from its `NodeFeature` objects, else from its labels.
    pub(super) fn feature(&self, name: &str) -> Option<Feature<'a>> {
        match self.features {
            // Labels may have a feature that the objects lack.
            Some(features) => features.get(name).or_else(|| self.by_labels(name)),
            None => self.by_labels(name),
        }
    }

    fn by_labels(&self, name: &str) -> Option<Feature<'a>> {
        let (labels, prefix) = (self.labels, feature_label(name, ""));
        let is_there = labels_of(labels, &prefix).next().is_some();
        is_there.then_some(Feature::Labels { labels, prefix })
    }
}

/// The names of the elements of a feature in labels.
fn labels_of<'a>(
    labels: &'a BTreeMap<String, String>,
    prefix: &'a str,
) -> impl Iterator<Item = &'a str> {
    let range = labels.range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
    range.map_while(move |(key, _)| key.strip_prefix(prefix))
}

impl NodeFeatures {
    #[must_use]
    pub fn only(&self, features: &BTreeSet<String>) -> Self {
        fn read_features<T: Clone>(
            all_features: &BTreeMap<String, T>,
            features: &BTreeSet<String>,
        ) -> BTreeMap<String, T> {
            let kept_features = all_features
                .iter()
                .filter(|(name, _)| features.contains(*name));
            kept_features
                .map(|(name, feature)| (name.clone(), feature.clone()))
                .collect()
        }
        Self {
            flags: read_features(&self.flags, features),
            attributes: read_features(&self.attributes, features),
            instances: read_features(&self.instances, features),
        }
    }

    /// Keeps the elements that rules read. `elements` returns, for a feature, whether rules read an
    /// element; `None` if no rule reads the feature.
    #[must_use]
    pub fn read_by<F: Fn(&str) -> bool>(&self, elements: impl Fn(&str) -> Option<F>) -> Self {
        fn reduce_features<T, F: Fn(&str) -> bool>(
            features: &BTreeMap<String, T>,
            elements: impl Fn(&str) -> Option<F>,
            reduce: impl Fn(&T, &dyn Fn(&str) -> bool) -> T,
        ) -> BTreeMap<String, T> {
            let reduced = features.iter().filter_map(|(name, feature)| {
                let is_read = elements(name)?;
                Some((name.clone(), reduce(feature, &is_read)))
            });
            reduced.collect()
        }
        let attributes_of = |attributes: &BTreeMap<String, String>,
                             is_read: &dyn Fn(&str) -> bool| {
            let read_attributes = attributes.iter().filter(|(key, _)| is_read(key));
            read_attributes
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect()
        };
        Self {
            flags: reduce_features(&self.flags, &elements, |flags, is_read| Flags {
                elements: flags
                    .elements
                    .iter()
                    .filter(|name| is_read(name))
                    .cloned()
                    .collect(),
            }),
            attributes: reduce_features(&self.attributes, &elements, |attributes, is_read| {
                Attributes {
                    elements: attributes_of(&attributes.elements, is_read),
                }
            }),
            instances: reduce_features(&self.instances, &elements, |instances, is_read| {
                let reduced = instances.elements.iter().map(|instance| Instance {
                    attributes: attributes_of(&instance.attributes, is_read),
                });
                // Equal instances count once, and their order does not matter.
                let distinct: BTreeSet<Instance> = reduced.collect();
                Instances {
                    elements: distinct.into_iter().collect(),
                }
            }),
        }
    }

    /// Adds the features of another object for the same node, as NFD does (`Features.MergeInto` of
    /// its API).
    pub fn merge(&mut self, other: &Self) {
        for (name, flags) in &other.flags {
            let existing = self.flags.entry(name.clone()).or_default();
            existing.elements.extend(flags.elements.iter().cloned());
        }
        for (name, attributes) in &other.attributes {
            let existing = self.attributes.entry(name.clone()).or_default();
            let elements = attributes.elements.iter();
            existing
                .elements
                .extend(elements.map(|(key, value)| (key.clone(), value.clone())));
        }
        for (name, instances) in &other.instances {
            let existing = self.instances.entry(name.clone()).or_default();
            existing.elements.extend(instances.elements.iter().cloned());
        }
    }

    fn get(&self, name: &str) -> Option<Feature<'_>> {
        let (flags, attributes) = (self.flags.get(name), self.attributes.get(name));
        let instances = self.instances.get(name);
        if flags.is_none() && attributes.is_none() && instances.is_none() {
            return None;
        }
        Some(Feature::Found {
            flags: flags.map(|flags| &flags.elements),
            attributes: attributes.map(|attributes| &attributes.elements),
            instances: instances.map_or(&[], |instances| &instances.elements),
        })
    }
}

impl Feature<'_> {
    /// Whether the feature has flags or attributes.
    pub(super) fn has_names(&self) -> bool {
        match self {
            Self::Found {
                flags, attributes, ..
            } => flags.is_some() || attributes.is_some(),
            Self::Labels { .. } => true,
        }
    }

    /// The flag of this name; `None` if the feature has no flags.
    pub(super) fn flag(&self, name: &str) -> Option<Fact<'_>> {
        let is_set = match self {
            Self::Found { flags, .. } => flags.as_ref()?.contains(name),
            Self::Labels { .. } => self.label(name) == Some("true"),
        };
        Some(if is_set { Fact::Flag } else { Fact::Missing })
    }

    /// The attribute of this name; `None` if the feature has no attributes.
    pub(super) fn attribute(&self, name: &str) -> Option<Fact<'_>> {
        let value = match self {
            Self::Found { attributes, .. } => attributes.as_ref()?.get(name).map(String::as_str),
            Self::Labels { .. } => self.label(name),
        };
        Some(value.map_or(Fact::Missing, Fact::Value))
    }

    pub(super) fn instances(&self) -> &[Instance] {
        match self {
            Self::Found { instances, .. } => instances,
            Self::Labels { .. } => &[],
        }
    }

    /// Whether the name of some element satisfies a condition.
    pub(super) fn has_name(&self, mut is_one: impl FnMut(&str) -> bool) -> bool {
        match self {
            Self::Found {
                flags,
                attributes,
                instances,
            } => {
                let flags = flags.iter().copied().flatten();
                let attributes = attributes.iter().flat_map(|of_node| of_node.keys());
                let of_instances = instances
                    .iter()
                    .flat_map(|instance| instance.attributes.keys());
                let mut names = flags.chain(attributes).chain(of_instances);
                names.any(|name| is_one(name))
            }
            Self::Labels { labels, prefix } => labels_of(labels, prefix).any(is_one),
        }
    }

    /// How many names of elements a condition on names reads.
    pub(super) fn count_names(&self) -> usize {
        let mut count = 0;
        self.has_name(|_| {
            count += 1;
            false
        });
        count
    }

    fn label(&self, element: &str) -> Option<&str> {
        let Self::Labels { labels, prefix } = self else {
            return None;
        };
        let value = labels.get(&format!("{prefix}{element}"));
        value.map(String::as_str)
    }
}

impl Instance {
    pub(super) fn attribute(&self, name: &str) -> Fact<'_> {
        let value = self.attributes.get(name);
        value.map_or(Fact::Missing, |value| Fact::Value(value))
    }
}
