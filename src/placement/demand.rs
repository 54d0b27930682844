//! Demands: what one feature asks of the nodes of a pod. All features have this form, and [`PlacementPolicy::change`] is the one place that
//! turns demands into tolerations and node affinity.
//!
//! [`PlacementPolicy::change`]: super::PlacementPolicy::change

use std::{collections::BTreeMap, fmt};

use serde_json::Value;

use super::{affinity::WeightedTerm, change::ImageChange, node_set::NodeSet};

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
    /// Nodes that hold images which are not known.
    ImageLocality,
}

/// Says why nodes that a demand does not require are excluded.
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

/// What one feature asks of the nodes of a pod.
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
    /// The runtime class that the pod gets. Only on its creation.
    pub class: Option<String>,
    /// Images to replace. Those that stay because they are the best ones are among them.
    pub images: Vec<ImageChange>,
    /// A sentence for `explain`.
    pub note: Option<String>,
}

impl Demand {
    /// A demand that asks for nothing yet.
    pub fn of(source: Source) -> Self {
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

/// The demands on the nodes of one pod, in the order in which their sources were asked.
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

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The demand of a source.
    pub fn of(&self, source: &Source) -> Option<&Demand> {
        self.iter().find(|demand| demand.source == *source)
    }

    /// The names of the rules that apply.
    pub fn rules(&self) -> impl Iterator<Item = &str> {
        self.iter().filter_map(|demand| match &demand.source {
            Source::Rule(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// The nodes that all of them allow.
    pub fn required(&self) -> NodeSet {
        let sets = self.iter().map(|demand| &demand.require);
        let sets = sets.filter(|set| !set.is_every());
        sets.fold(NodeSet::every(), |all, one| all.and(one))
    }

    /// The nodes to prefer. `by_policy`: the failure policy decides, because not all images are known.
    pub fn preferred(&self, by_policy: bool) -> Vec<WeightedTerm> {
        let counts = |demand: &&Demand| by_policy || demand.source != Source::ImageLocality;
        let demands = self.iter().filter(counts);
        demands
            .flat_map(|demand| demand.prefer.iter().cloned())
            .collect()
    }

    /// The tolerations of all of them.
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
        let mut all = self.iter();
        let demand = all.find(|demand| !demand.require.selects(labels))?;
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
