//! The demands of archaware's features on the nodes of a pod. All features state their demands in
//! this form. Only [`PlacementPolicy::change`] turns demands into tolerations and node affinity.
//!
//! [`PlacementPolicy::change`]: super::PlacementPolicy::change

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{affinity::WeightedTerm, node_set::NodeSet};

/// The feature that asks.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A rule of the configuration, with its name.
    Rule(String),
    /// The selection of images by compatibility documents.
    ImageSelection,
    /// The architectures of the images, or those that the author states, with their variants.
    Architectures,
    /// Nodes that run the images by emulation.
    Emulation,
    /// The handler of a runtime class runs the images.
    RuntimeClass,
    /// Compatibility documents that are attached to the images.
    AttachedDocuments,
    /// Nodes that hold images whose platforms are unknown.
    ImageLocality,
}

/// The text for users why a demand of this source excludes nodes.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(name) => write!(f, "rule {name} requires other nodes"),
            Self::ImageSelection => f.write_str("the selected image does not fit these nodes"),
            Self::Architectures => {
                f.write_str("the variant of these nodes is not known to suffice")
            }
            Self::Emulation => f.write_str("these nodes do not emulate its images"),
            Self::RuntimeClass => f.write_str("its runtime class requires other nodes"),
            Self::AttachedDocuments => {
                f.write_str("documents that are attached to its images require other nodes")
            }
            Self::ImageLocality => f.write_str("other nodes hold its images"),
        }
    }
}

/// The demands of one feature on the nodes of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// The feature.
    pub source: Source,
    /// The nodes that are possible.
    pub require: NodeSet,
    /// Nodes to prefer.
    pub prefer: Vec<WeightedTerm>,
    /// Tolerations, in the API's form.
    pub tolerate: Vec<Value>,
    /// The runtime class that the pod gets. It can be set only on creation of the pod.
    pub class: Option<String>,
    /// The selected images, including those that stay unchanged because they are the best choice.
    pub images: Vec<ImageChange>,
    /// A sentence for `explain`.
    pub note: Option<String>,
}

/// The image that was selected for a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageChange {
    /// The name of the container.
    pub container: String,
    /// The image that the author wrote.
    pub from: String,
    /// The image that was selected.
    pub to: String,
}

impl Demand {
    /// A demand without content.
    pub fn from_source(source: Source) -> Self {
        Self {
            source,
            require: NodeSet::every(),
            prefer: Vec::new(),
            tolerate: Vec::new(),
            class: None,
            images: Vec::new(),
            note: None,
        }
    }
}

/// The demands on the nodes of one pod, in the order in which they were added.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demands(Vec<Demand>);

impl Demands {
    /// Adds a demand.
    pub fn push(&mut self, demand: Demand) {
        self.0.push(demand);
    }

    /// All demands.
    pub fn iter(&self) -> std::slice::Iter<'_, Demand> {
        self.0.iter()
    }

    /// The demand of a source.
    pub fn find(&self, source: &Source) -> Option<&Demand> {
        self.iter().find(|demand| demand.source == *source)
    }

    /// The demands of rules.
    pub fn of_rules(&self) -> impl Iterator<Item = &Demand> {
        let is_rule = |demand: &&Demand| matches!(demand.source, Source::Rule(_));
        self.iter().filter(is_rule)
    }

    /// The names of the rules that apply.
    pub fn rules(&self) -> impl Iterator<Item = &str> {
        self.iter().filter_map(|demand| match &demand.source {
            Source::Rule(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// The nodes that all demands allow. [`NodeSet::and`] keeps only the first combinations of
    /// terms. Emulation therefore comes after rules and image selection: the first combinations
    /// then contain all terms of emulation.
    pub fn required(&self) -> NodeSet {
        let sets = self.iter().map(|demand| &demand.require);
        let sets = sets.filter(|set| !set.is_every());
        sets.fold(NodeSet::every(), |shared, set| shared.and(set))
    }

    /// The nodes to prefer. Nodes that hold the images are preferred only with `by_policy`: the
    /// failure policy decides, because not all images are known.
    pub fn preferred(&self, by_policy: bool) -> Vec<WeightedTerm> {
        let counts = |demand: &&Demand| by_policy || demand.source != Source::ImageLocality;
        let demands = self.iter().filter(counts);
        demands
            .flat_map(|demand| demand.prefer.iter().cloned())
            .collect()
    }

    /// The tolerations of all demands.
    pub fn tolerations(&self) -> impl Iterator<Item = &Value> {
        self.iter().flat_map(|demand| &demand.tolerate)
    }

    /// The runtime class that the pod gets.
    pub fn class(&self) -> Option<&str> {
        self.iter().find_map(|demand| demand.class.as_deref())
    }

    /// The images that are replaced.
    pub fn images(&self) -> impl Iterator<Item = &ImageChange> {
        self.iter().flat_map(|demand| &demand.images)
    }

    /// The source of the first demand that a node with these labels does not satisfy.
    pub fn excluding(&self, labels: &BTreeMap<String, String>) -> Option<&Source> {
        let mut demands = self.iter();
        let demand = demands.find(|demand| !demand.require.selects(labels))?;
        Some(&demand.source)
    }
}

impl Extend<Demand> for Demands {
    fn extend<T: IntoIterator<Item = Demand>>(&mut self, demands: T) {
        self.0.extend(demands);
    }
}

impl IntoIterator for Demands {
    type Item = Demand;
    type IntoIter = std::vec::IntoIter<Demand>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Demands {
    type Item = &'a Demand;
    type IntoIter = std::slice::Iter<'a, Demand>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<Demand> for Demands {
    fn from_iter<T: IntoIterator<Item = Demand>>(demands: T) -> Self {
        Self(demands.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::requirement::{Operator, Requirement};

    use super::*;

    fn on(label: &str, value: &str) -> NodeSet {
        let values = vec![value.to_owned()];
        NodeSet::all_of([Requirement::new(label, Operator::In, values)])
    }

    fn prefer(weight: u8) -> Vec<WeightedTerm> {
        let expressions = Vec::new();
        vec![WeightedTerm {
            weight,
            expressions,
        }]
    }

    #[test]
    fn all_demands_hold_and_the_first_that_excludes_a_node_is_named() {
        let rule = Demand {
            require: on("pool", "a"),
            tolerate: vec![json!({"key": "pool"})],
            class: Some("fast".to_owned()),
            prefer: prefer(1),
            ..Demand::from_source(Source::Rule("pool".to_owned()))
        };
        let emulation = Demand {
            require: on("qemu", "yes"),
            prefer: prefer(2),
            ..Demand::from_source(Source::Emulation)
        };
        let locality = Demand {
            prefer: prefer(3),
            ..Demand::from_source(Source::ImageLocality)
        };
        let demands: Demands = [rule, emulation, locality].into_iter().collect();
        let labels = |all: &[(&str, &str)]| -> BTreeMap<String, String> {
            all.iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        for (node, excluding) in [
            (&[][..], Some("rule pool requires other nodes")),
            (&[("qemu", "yes")], Some("rule pool requires other nodes")),
            (
                &[("pool", "a")],
                Some("these nodes do not emulate its images"),
            ),
            (&[("pool", "a"), ("qemu", "yes")], None),
        ] {
            let node = labels(node);
            let source = demands.excluding(&node).map(ToString::to_string);
            assert_eq!(source.as_deref(), excluding);
            assert_eq!(demands.required().selects(&node), excluding.is_none());
        }
        let weights = |by_policy| {
            let preferred = demands.preferred(by_policy).into_iter();
            preferred
                .map(|preference| preference.weight)
                .collect::<Vec<_>>()
        };
        // Nodes that hold an image are preferred only while the failure policy decides.
        assert_eq!((weights(false), weights(true)), (vec![1, 2], vec![1, 2, 3]));
        assert_eq!(demands.class(), Some("fast"));
        assert_eq!(demands.tolerations().count(), 1);
        assert_eq!(demands.rules().collect::<Vec<_>>(), ["pool"]);
        assert!(Demands::default().required().is_every());
    }
}
