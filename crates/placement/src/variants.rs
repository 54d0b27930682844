//! CPU variants of nodes: which variant the labels of a node state or prove, and which node
//! affinity selects nodes whose variant suffices for an image.

mod proof;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use archaware_platform::{Architecture, Architectures, Variants, known_variant};

use super::{
    affinity::{WeightedTerm, on_architecture},
    node_view::NodeView,
    requirement::{Operator, Requirement},
};

/// How to treat nodes of unknown variant when an image needs more than the presumed variant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum UnknownVariants {
    /// Pods may run on them, and prefer nodes that are known to suffice.
    #[default]
    Prefer,
    /// Pods run only on nodes that are known to suffice.
    Require,
    /// The variants of images are not considered at all.
    Ignore,
}

/// How variants are considered.
#[derive(Clone, Debug)]
pub struct VariantPolicy {
    /// How to treat nodes of unknown variant.
    pub unknown: UnknownVariants,
    /// The node label whose value is the variant. It counts more than the labels of Node Feature
    /// Discovery.
    pub label: String,
    /// Whether nodes of a known variant have it in their taint.
    pub taints: bool,
}

impl Default for VariantPolicy {
    fn default() -> Self {
        Self {
            unknown: UnknownVariants::default(),
            label: crate::annotation::VARIANT.to_owned(),
            taints: false,
        }
    }
}

/// A node's variant, as far as its labels prove it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeVariant {
    /// Stated by the label [`VariantPolicy::label`].
    Exactly(&'static str),
    /// Proven by labels for CPU features or the CPU model; the variant may be higher.
    AtLeast(&'static str),
}

impl NodeVariant {
    /// The variant.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exactly(name) | Self::AtLeast(name) => name,
        }
    }
}

/// Whether a set contains nodes of this architecture and variant; `None` if that depends on an
/// unknown variant.
pub fn suffices(set: &Architectures, node: &str, variant: Option<NodeVariant>) -> Option<bool> {
    let Some((name, variants)) = set.iter().find(|(name, _)| name.as_str() == node) else {
        return Some(false);
    };
    match variant {
        _ if variants.is_any() => Some(true),
        Some(variant) if variants.contains(name, variant.name()) => Some(true),
        Some(NodeVariant::Exactly(_)) => Some(false),
        Some(NodeVariant::AtLeast(_)) => None,
        None => variants.contains_presumed(name).then_some(true),
    }
}

/// Weight of nodes that are known to suffice, the highest that the API allows: an image that does
/// not run is worse than any other disadvantage of a node.
const WEIGHT: u8 = 100;

impl VariantPolicy {
    /// The variant that the labels of a node state or prove.
    fn variant_by_labels(
        &self,
        architecture: &Architecture,
        labels: &BTreeMap<String, String>,
    ) -> Option<NodeVariant> {
        let label_value = labels.get(&self.label);
        // A value that is not a variant counts as a missing label. Karpenter writes such values for
        // keys that its pools do not define.
        if let Some(name) = label_value.and_then(|value| known_variant(architecture, value)) {
            return Some(NodeVariant::Exactly(name));
        }
        proof::proven(architecture, labels).map(NodeVariant::AtLeast)
    }

    /// The variant of a node, as far as it is known.
    pub fn of_node(&self, node: &NodeView<'_>) -> Option<NodeVariant> {
        let architecture = node.architecture.parse().ok()?;
        self.variant_by_labels(&architecture, node.labels)
    }

    /// The value of a node's taint. A variant that is proven, but not stated by the variant label,
    /// is used only with `require`. Otherwise pods may run on nodes of unknown variant, and the
    /// real variant may be higher than the proven variant.
    pub(super) fn taint_value(
        &self,
        architecture: &Architecture,
        labels: &BTreeMap<String, String>,
    ) -> String {
        if !self.taints {
            return value(architecture, None);
        }
        let counts = |variant: &NodeVariant| {
            matches!(variant, NodeVariant::Exactly(_)) || self.unknown == UnknownVariants::Require
        };
        let variant = self.variant_by_labels(architecture, labels).filter(counts);
        let tainted = variant.and_then(|variant| tainted_variant(architecture, variant.name()));
        value(architecture, tainted)
    }

    /// The set with only those variants that are considered. With `prefer`, and without variants in
    /// taints, an architecture is not limited if its presumed variant suffices: most images have an
    /// entry `arm/v7`, the presumed variant of arm, and hardly any cluster has lower nodes.
    pub(super) fn considered(&self, set: Architectures) -> Architectures {
        let considers_presumed = self.taints || self.unknown == UnknownVariants::Require;
        match self.unknown {
            UnknownVariants::Ignore => set.without_variants(),
            _ if considers_presumed => set,
            _ => Architectures::from_variants(set.iter().map(|(name, variants)| {
                let is_open = variants.contains_presumed(name);
                (name.clone(), if is_open { Variants::ANY } else { variants })
            })),
        }
    }

    /// Taint values of nodes whose variant is sufficient or, without `Require`, unknown.
    pub(super) fn tolerated_values(
        &self,
        architecture: &Architecture,
        variants: Variants,
    ) -> Vec<String> {
        if !self.taints {
            return vec![value(architecture, None)];
        }
        let sufficient = variants.names(architecture);
        let mut tainted: Vec<_> = sufficient
            .map(|variant| tainted_variant(architecture, variant))
            .collect();
        if variants.is_any() || self.unknown != UnknownVariants::Require {
            tainted.push(None);
        }
        // The presumed variant is left out of the taint, so it gives the same value as no variant.
        tainted.sort_unstable();
        tainted.dedup();
        tainted
            .into_iter()
            .map(|variant| value(architecture, variant))
            .collect()
    }

    /// Alternative lists of requirements for nodes; empty if no variant is required. `is_single`:
    /// only one list can be added. If one list cannot select all sufficient nodes, nodes of unknown
    /// variant stay possible.
    pub(super) fn required(&self, set: &Architectures, is_single: bool) -> Vec<Vec<Requirement>> {
        if set.iter().all(|(_, variants)| variants.is_any()) {
            return Vec::new();
        }
        let known = self.known_to_suffice(set);
        if self.unknown == UnknownVariants::Require && (known.len() == 1 || !is_single) {
            return known;
        }
        vec![self.not_known_to_lack(set)]
    }

    /// The nodes to prefer.
    pub(super) fn preferred(&self, set: &Architectures) -> Vec<WeightedTerm> {
        let all_presumed = set
            .iter()
            .all(|(name, variants)| variants.contains_presumed(name));
        if all_presumed || self.unknown != UnknownVariants::Prefer {
            return Vec::new();
        }
        let known = self.known_to_suffice(set).into_iter();
        known
            .map(|expressions| WeightedTerm {
                weight: WEIGHT,
                expressions,
            })
            .collect()
    }

    /// Requirements for nodes of these architectures, except nodes whose variant label states an
    /// insufficient variant.
    fn not_known_to_lack(&self, set: &Architectures) -> Vec<Requirement> {
        // `v8` is a variant of arm and of arm64.
        let suffices_for_another = |value: &str| {
            let is_known = |name| known_variant(name, value).is_some();
            set.iter()
                .any(|(name, variants)| is_known(name) && variants.contains(name, value))
        };
        let lacking = set
            .iter()
            .filter(|(_, variants)| !variants.is_any())
            .flat_map(|(name, variants)| variants.insufficient(name))
            .filter(|value| !suffices_for_another(value));
        let lacking: Vec<String> = lacking.map(str::to_owned).collect();
        let mut requirements = vec![on_architecture(set.names())];
        if !lacking.is_empty() {
            requirements.push(Requirement::new(&self.label, Operator::NotIn, lacking));
        }
        requirements
    }

    /// Alternative lists of requirements for nodes whose variant suffices. Labels state or prove
    /// the variant, or it is presumed because the node has no such labels.
    fn known_to_suffice(&self, set: &Architectures) -> Vec<Vec<Requirement>> {
        let (presumed, not_presumed): (Vec<_>, Vec<_>) = set
            .iter()
            .partition(|(name, variants)| variants.contains_presumed(name));
        let mut alternatives = Vec::new();
        if !presumed.is_empty() {
            let presumed = presumed
                .into_iter()
                .map(|(name, variants)| (name.clone(), variants));
            alternatives.push(self.not_known_to_lack(&Architectures::from_variants(presumed)));
        }
        for (name, variants) in not_presumed {
            let of_architecture = on_architecture([name]);
            let by_label = |operator, names: Vec<&str>| {
                let names = names.into_iter().map(str::to_owned).collect();
                Requirement::new(&self.label, operator, names)
            };
            let sufficient = variants.names(name).collect();
            alternatives.push(vec![
                of_architecture.clone(),
                by_label(Operator::In, sufficient),
            ]);
            // Also matches nodes without the label.
            let no_label = by_label(Operator::NotIn, Variants::ANY.names(name).collect());
            for proof in proof::requirements(name, variants) {
                let unlabelled = [of_architecture.clone(), no_label.clone()];
                alternatives.push(unlabelled.into_iter().chain(proof).collect());
            }
        }
        alternatives
    }
}

/// The variant in the taint of a node: the major version, unless it is the presumed version.
fn tainted_variant(architecture: &Architecture, variant: &'static str) -> Option<&'static str> {
    let major = variant.split_once('.').map_or(variant, |(major, _)| major);
    (!Variants::is_presumed(architecture, major)).then_some(major)
}

/// The value of a taint. A label value cannot contain a slash.
fn value(architecture: &Architecture, variant: Option<&str>) -> String {
    variant.map_or_else(
        || architecture.to_string(),
        |variant| format!("{architecture}-{variant}"),
    )
}

/// The architecture in the value of a taint, if archaware can have written the value. No
/// architecture of Go has a hyphen.
pub(super) fn architecture_of(value: &str) -> Option<Architecture> {
    let Some((architecture, variant)) = value.split_once('-') else {
        return value.parse().ok();
    };
    let architecture: Architecture = architecture.parse().ok()?;
    known_variant(&architecture, variant).map(|_| architecture)
}

#[cfg(test)]
mod tests;
