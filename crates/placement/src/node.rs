//! Decides the taint of a node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use archaware_platform::Architecture;

use super::{
    ConfiguredKeys, LabelSelector, Taint, TaintKind, VariantPolicy, annotation,
    configured_keys::names_architecture, node_view::NodeView, variants::architecture_of,
};

/// Which nodes get which taint.
#[derive(Clone, Debug)]
pub struct TaintPolicy {
    /// Key and effect; `None` when no node is tainted.
    pub kind: Option<TaintKind>,
    /// Only nodes of these architectures; empty means all.
    pub architectures: BTreeSet<Architecture>,
    /// Only nodes with these labels.
    pub selector: LabelSelector,
    /// Whether the variant is in the taint.
    pub variants: VariantPolicy,
}

impl Default for TaintPolicy {
    /// The policy of an empty configuration: every node.
    fn default() -> Self {
        Self {
            kind: Some(TaintKind::default()),
            architectures: BTreeSet::new(),
            selector: LabelSelector::default(),
            variants: VariantPolicy::default(),
        }
    }
}

impl TaintPolicy {
    /// The kind of the taint that a node gets. `None` if it gets none, unless for its architecture.
    fn kind_for(&self, node: &NodeView<'_>) -> Option<&TaintKind> {
        let selected = !is_ignored(node) && self.selector.matches(node.labels);
        self.kind.as_ref().filter(|_| selected)
    }

    fn taints_architecture(&self, architecture: &Architecture) -> bool {
        self.architectures.is_empty() || self.architectures.contains(architecture)
    }

    /// Whether a node of this architecture has or gets a taint.
    pub(super) fn taints(&self, node: &NodeView<'_>, architecture: &Architecture) -> bool {
        self.kind_for(node).is_some() && self.taints_architecture(architecture)
    }
}

/// Changes to a node, applied in one patch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeChange {
    /// Index in `spec.taints` of an owned taint to remove, with its expected content.
    pub remove: Option<(usize, Taint)>,
    /// Index of an owned taint with a wrong value, and the right taint.
    pub correct: Option<(usize, Taint)>,
    /// A taint to append.
    pub add: Option<Taint>,
    /// The new content of `archaware.dev/taint`, if it changes.
    pub ownership: Option<Ownership>,
}

impl NodeChange {
    /// The taint that the node gets.
    pub fn new_taint(&self) -> Option<&Taint> {
        let corrected = self.correct.as_ref().map(|(_, taint)| taint);
        self.add.as_ref().or(corrected)
    }
}

/// The annotation that records which taint archaware owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// Records this taint.
    Of(Taint),
    /// Removes the annotation.
    Nothing,
}

/// A problem to report about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TaintProblem {
    /// A taint that archaware does not own has the same key and effect, but another value.
    Conflict {
        /// The taint that archaware would set.
        wanted: Taint,
        /// The existing value.
        value: String,
    },
    /// The node reports no valid architecture.
    UnknownArchitecture,
    /// The node has the recorded taint, but the key of this taint is not in [`ConfiguredKeys`].
    UnknownKey(Taint),
}

/// The taint that archaware owns according to the node's annotations. This is no proof: a kubelet
/// can write the annotations.
pub fn recorded(annotations: &BTreeMap<String, String>) -> Option<Taint> {
    annotations.get(annotation::TAINT)?.parse().ok()
}

/// The recorded taint, if archaware could have set it on this node: its key is or was configured,
/// and its value names an architecture.
fn owned(node: &NodeView<'_>, keys: &ConfiguredKeys) -> Option<Taint> {
    recorded(node.annotations).filter(|taint| keys.can_own_taint(taint, node.architecture))
}

/// Index and content of the taint with this key and effect, if it can be archaware's.
fn removable(
    node: &NodeView<'_>,
    kind: TaintKind,
    keys: &ConfiguredKeys,
) -> Option<(usize, Taint)> {
    let (index, value) = find_taint(node.taints, &kind)?;
    let taint = Taint { kind, value };
    let ours = keys.can_own_taint(&taint, node.architecture);
    ours.then_some((index, taint))
}

/// Whether the label or annotation excludes the node.
fn is_ignored(node: &NodeView<'_>) -> bool {
    [node.labels, node.annotations].iter().any(|map| {
        map.get(annotation::IGNORE)
            .is_some_and(|value| value == "true")
    })
}

/// Index and value of the taint with this key and effect. The API server allows only one.
fn find_taint(taints: &[Value], kind: &TaintKind) -> Option<(usize, String)> {
    let text = |taint: &Value, field: &str| {
        taint
            .get(field)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    taints
        .iter()
        .position(|taint| {
            text(taint, "key") == kind.key && text(taint, "effect") == kind.effect.as_str()
        })
        .and_then(|index| Some((index, text(taints.get(index)?, "value"))))
}

/// The taint of this kind, if no record claims it.
pub fn foreign_taint(node: &NodeView<'_>, kind: &TaintKind) -> Option<Taint> {
    let (_, value) = find_taint(node.taints, kind)?;
    let found = Taint {
        kind: kind.clone(),
        value,
    };
    (recorded(node.annotations).as_ref() != Some(&found)).then_some(found)
}

/// The taint that archaware owns, if the node has it.
pub fn standing(node: &NodeView<'_>, keys: &ConfiguredKeys) -> Option<Taint> {
    let taint = owned(node, keys)?;
    let (_, value) = find_taint(node.taints, &taint.kind)?;
    (value == taint.value).then_some(taint)
}

/// The change of a node and the problem to report. Both are usually `None`.
pub fn decide(
    policy: &TaintPolicy,
    node: &NodeView<'_>,
    keys: &ConfiguredKeys,
) -> (Option<NodeChange>, Option<TaintProblem>) {
    if let Some(taint) = of_unknown_key(node, keys) {
        // The record stays: without it archaware could no longer recognise the taint as possibly
        // its own.
        return (None, Some(TaintProblem::UnknownKey(taint)));
    }
    let Some(kind) = policy.kind_for(node) else {
        return (untaint(node, keys), None);
    };
    let Ok(architecture) = node.architecture.parse::<Architecture>() else {
        // A node whose status is briefly empty keeps its taint: removing it would admit every pod.
        return (None, Some(TaintProblem::UnknownArchitecture));
    };
    if !policy.taints_architecture(&architecture) {
        return (untaint(node, keys), None);
    }
    let value = policy.variants.taint_value(&architecture, node.labels);
    decide_taint(node, kind.taint(value), keys)
}

/// The change when no taint is wanted: removes the annotation and the owned taint, which is found
/// by key and effect.
fn untaint(node: &NodeView<'_>, keys: &ConfiguredKeys) -> Option<NodeChange> {
    node.annotations.get(annotation::TAINT)?;
    let own = owned(node, keys);
    let remove = own.and_then(|taint| removable(node, taint.kind, keys));
    Some(NodeChange {
        remove,
        ownership: Some(Ownership::Nothing),
        ..NodeChange::default()
    })
}

fn decide_taint(
    node: &NodeView<'_>,
    wanted: Taint,
    keys: &ConfiguredKeys,
) -> (Option<NodeChange>, Option<TaintProblem>) {
    let owned_taint = owned(node, keys);
    // A taint whose value is no architecture has another owner, whatever the record says.
    let owns_wanted = owned_taint
        .as_ref()
        .is_some_and(|taint| taint.kind == wanted.kind)
        && (find_taint(node.taints, &wanted.kind).is_none()
            || removable(node, wanted.kind.clone(), keys).is_some());
    // After a change of the configured key or effect, the taint with the old key and effect is
    // removed.
    let leftover = owned_taint
        .as_ref()
        .filter(|taint| taint.kind != wanted.kind);
    let leftover = leftover.and_then(|taint| removable(node, taint.kind.clone(), keys));
    let annotated = node.annotations.contains_key(annotation::TAINT);
    let claim = || {
        let right = recorded(node.annotations).as_ref() == Some(&wanted);
        (!right).then(|| Ownership::Of(wanted.clone()))
    };
    let (change, problem) = match find_taint(node.taints, &wanted.kind) {
        None => {
            let add = Some(wanted.clone());
            (
                NodeChange {
                    remove: leftover,
                    add,
                    ownership: claim(),
                    correct: None,
                },
                None,
            )
        }
        Some((_, value)) if owns_wanted && value == wanted.value => (
            NodeChange {
                ownership: claim(),
                ..NodeChange::default()
            },
            None,
        ),
        Some((index, _)) if owns_wanted => {
            let correct = Some((index, wanted.clone()));
            (
                NodeChange {
                    correct,
                    ownership: claim(),
                    ..NodeChange::default()
                },
                None,
            )
        }
        // Another owner's taint is not changed, and archaware's claim to it is removed.
        Some((_, value)) => {
            let ownership = annotated.then_some(Ownership::Nothing);
            // A node pool that declares the taint cannot know the variant, so a value without
            // variant is no conflict.
            let is_plain = architecture_of(&wanted.value)
                .is_some_and(|architecture| architecture.as_str() == value);
            let agrees = value == wanted.value || is_plain;
            let problem = (!agrees).then_some(TaintProblem::Conflict { wanted, value });
            (
                NodeChange {
                    remove: leftover,
                    ownership,
                    ..NodeChange::default()
                },
                problem,
            )
        }
    };
    ((change != NodeChange::default()).then_some(change), problem)
}

/// The recorded taint, if the node has it and its value names an architecture, but its key is
/// unknown. An earlier configuration may have had this key.
pub fn of_unknown_key(node: &NodeView<'_>, keys: &ConfiguredKeys) -> Option<Taint> {
    let recorded = recorded(node.annotations)?;
    if keys.taints.contains(&recorded.kind.key) {
        return None;
    }
    let (_, value) = find_taint(node.taints, &recorded.kind)?;
    let possible = value == recorded.value && names_architecture(&recorded, node.architecture);
    possible.then_some(recorded)
}

/// The change that `archaware clean` makes: removes the annotation, and the taint if it equals the
/// recorded taint exactly.
pub fn clean(node: &NodeView<'_>, keys: &ConfiguredKeys) -> Option<NodeChange> {
    node.annotations.get(annotation::TAINT)?;
    let exact = owned(node, keys).and_then(|own| {
        let found = find_taint(node.taints, &own.kind).filter(|(_, value)| *value == own.value);
        found.map(|(index, _)| (index, own))
    });
    Some(NodeChange {
        remove: exact,
        ownership: Some(Ownership::Nothing),
        ..NodeChange::default()
    })
}

#[cfg(test)]
mod tests;
