//! Node affinity in the API's form: the parts that archaware reads.

mod select;

use serde::{Deserialize, Serialize};

use archaware_platform::Architecture;

use super::requirement::{Operator, Requirement};

/// The node label for the architecture, and its deprecated name.
pub const LABEL: &str = "kubernetes.io/arch";
pub(super) const OLD_LABEL: &str = "beta.kubernetes.io/arch";
/// The node label for the host name. It selects single nodes that no other label distinguishes.
pub const HOSTNAME: &str = "kubernetes.io/hostname";
/// [`LABEL`] and its deprecated name.
pub const LABELS: [&str; 2] = [LABEL, OLD_LABEL];

/// `spec.affinity`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Affinity {
    /// Node affinity.
    pub node_affinity: Option<NodeAffinity>,
}

/// `spec.affinity.nodeAffinity`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeAffinity {
    /// Required terms; a node must match one of them.
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    pub required: Option<NodeSelector>,
    /// Preferred terms.
    #[serde(rename = "preferredDuringSchedulingIgnoredDuringExecution")]
    pub preferred: Option<Vec<PreferredTerm>>,
}

/// The required node affinity; not the pod's `nodeSelector`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// Terms, `ORed`.
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// One term.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements on labels, `ANDed`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
    /// Requirements on fields: only `metadata.name` exists.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_fields: Vec<Requirement>,
}

impl NodeSelectorTerm {
    pub(super) fn with_expressions(match_expressions: Vec<Requirement>) -> Self {
        Self {
            match_expressions,
            match_fields: Vec::new(),
        }
    }
}

/// A preferred term.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct PreferredTerm {
    /// From 1 to 100.
    pub weight: i64,
    /// The term that is preferred.
    pub preference: NodeSelectorTerm,
}

/// Preferred nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightedTerm {
    /// From 1 to 100.
    pub weight: u8,
    /// Requirements on labels.
    pub expressions: Vec<Requirement>,
}

impl WeightedTerm {
    pub(super) fn term(&self) -> PreferredTerm {
        PreferredTerm {
            weight: self.weight.into(),
            preference: NodeSelectorTerm::with_expressions(self.expressions.clone()),
        }
    }
}

/// Requires one of these architectures. Without architectures it uses `DoesNotExist`, because the
/// API server rejects `In` without values. Only virtual nodes may lack the label, and the taint
/// keeps the pod away from these.
pub fn on_architecture<'a>(
    architectures: impl IntoIterator<Item = &'a Architecture>,
) -> Requirement {
    let values: Vec<_> = architectures.into_iter().map(ToString::to_string).collect();
    let operator = if values.is_empty() {
        Operator::DoesNotExist
    } else {
        Operator::In
    };
    Requirement::new(LABEL, operator, values)
}

impl Affinity {
    /// The number of terms and requirements, for the size limit of the webhook.
    pub fn size(&self) -> usize {
        let of_term =
            |term: &NodeSelectorTerm| 1 + term.match_expressions.len() + term.match_fields.len();
        let required = self
            .required_terms()
            .unwrap_or_default()
            .iter()
            .map(of_term);
        let preferred = self
            .preferred_terms()
            .iter()
            .map(|term| of_term(&term.preference));
        required.chain(preferred).sum()
    }

    pub(super) fn required_terms(&self) -> Option<&[NodeSelectorTerm]> {
        let required = self.node_affinity.as_ref()?.required.as_ref()?;
        Some(&required.node_selector_terms)
    }

    pub(super) fn preferred_terms(&self) -> &[PreferredTerm] {
        let preferred = self
            .node_affinity
            .as_ref()
            .and_then(|node| node.preferred.as_deref());
        preferred.unwrap_or_default()
    }
}
