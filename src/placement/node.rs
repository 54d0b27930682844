//! What to do about the taint on a node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::platform::Architecture;

use super::{LabelSelector, Taint, TaintKind, annotation};

/// Which nodes get which taint.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Key and effect; `None` when no node is to be tainted.
    pub kind: Option<TaintKind>,
    /// Only these architectures; empty means all.
    pub architectures: BTreeSet<Architecture>,
    /// Only nodes with these labels.
    pub selector: LabelSelector,
}

/// A node, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    /// `status.nodeInfo.architecture`, as reported.
    pub architecture: &'a str,
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Its annotations.
    pub annotations: &'a BTreeMap<String, String>,
    /// `spec.taints`, as the API holds them.
    pub taints: &'a [Value],
}

/// What to change on a node. All of it goes into one patch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Index in `spec.taints` of an owned taint that has to go, and what stands there.
    pub remove: Option<(usize, Taint)>,
    /// Index of an owned taint with a wrong value, and what it should be.
    pub correct: Option<(usize, Taint)>,
    /// A taint to append.
    pub add: Option<Taint>,
    /// What `archaware.dev/taint` has to say from now on, if that changes.
    pub ownership: Option<Ownership>,
}

/// The annotation that records which taint is archaware's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// This one.
    Of(Taint),
    /// None: the annotation is dropped.
    Nothing,
}

/// What is to be told about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// Somebody else's taint of the same key and effect has another value.
    Conflict {
        /// What archaware would set.
        wanted: Taint,
        /// The value that is there.
        value: String,
    },
    /// The node reports no usable architecture.
    UnknownArchitecture,
}

/// The taint that archaware owns on a node with these annotations.
pub fn owned(annotations: &BTreeMap<String, String>) -> Option<Taint> {
    annotations.get(annotation::TAINT)?.parse().ok()
}

/// Whether the node's owner wants no taint of archaware's.
fn is_ignored(node: &Node<'_>) -> bool {
    [node.labels, node.annotations].iter().any(|map| {
        map.get(annotation::IGNORE)
            .is_some_and(|value| value == "true")
    })
}

/// The place of a taint of this key and effect, which the API keeps unique, and its value.
fn find(taints: &[Value], kind: &TaintKind) -> Option<(usize, String)> {
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

/// What to do about a node: nothing (most of the time), a change, a problem to report, or both.
pub fn decide(policy: &Policy, node: &Node<'_>) -> (Option<Change>, Option<Problem>) {
    let wanted = policy
        .kind
        .as_ref()
        .filter(|_| !is_ignored(node) && policy.selector.matches(node.labels));
    let Some(kind) = wanted else {
        return (release(node), None);
    };
    let Ok(architecture) = node.architecture.parse::<Architecture>() else {
        // A status that is empty for a moment is no reason to open the node to everything.
        return (None, Some(Problem::UnknownArchitecture));
    };
    if !policy.architectures.is_empty() && !policy.architectures.contains(&architecture) {
        return (release(node), None);
    }
    want(node, kind.taint(&architecture))
}

/// No taint is wanted: an owned one goes, by key and effect, and so does the annotation.
fn release(node: &Node<'_>) -> Option<Change> {
    node.annotations.get(annotation::TAINT)?;
    let remove = owned(node.annotations).and_then(|own| remove(node, own.kind));
    Some(Change {
        remove,
        ownership: Some(Ownership::Nothing),
        ..Change::default()
    })
}

fn remove(node: &Node<'_>, kind: TaintKind) -> Option<(usize, Taint)> {
    find(node.taints, &kind).map(|(index, value)| (index, Taint { kind, value }))
}

fn want(node: &Node<'_>, wanted: Taint) -> (Option<Change>, Option<Problem>) {
    let own = owned(node.annotations);
    let owns_wanted = own.as_ref().is_some_and(|own| own.kind == wanted.kind);
    // The configuration changed: what was owned under another key or effect moves.
    let leftover = own.as_ref().filter(|own| own.kind != wanted.kind);
    let leftover = leftover.and_then(|own| remove(node, own.kind.clone()));
    let annotated = node.annotations.contains_key(annotation::TAINT);
    let claim = || {
        let right = own.as_ref() == Some(&wanted);
        (!right).then(|| Ownership::Of(wanted.clone()))
    };
    let (change, problem) = match find(node.taints, &wanted.kind) {
        None => {
            let add = Some(wanted.clone());
            (
                Change {
                    remove: leftover,
                    add,
                    ownership: claim(),
                    correct: None,
                },
                None,
            )
        }
        Some((_, value)) if owns_wanted && value == wanted.value => (
            Change {
                ownership: claim(),
                ..Change::default()
            },
            None,
        ),
        Some((index, _)) if owns_wanted => {
            let correct = Some((index, wanted.clone()));
            (
                Change {
                    correct,
                    ownership: claim(),
                    ..Change::default()
                },
                None,
            )
        }
        // Somebody else's: it is left alone, and so is the claim to it.
        Some((_, value)) => {
            let ownership = annotated.then_some(Ownership::Nothing);
            let problem = (value != wanted.value).then_some(Problem::Conflict { wanted, value });
            (
                Change {
                    remove: leftover,
                    ownership,
                    ..Change::default()
                },
                problem,
            )
        }
    };
    ((change != Change::default()).then_some(change), problem)
}

/// What `clean` takes away: only a taint that is exactly the recorded one, and the record.
pub fn clean(node: &Node<'_>) -> Option<Change> {
    node.annotations.get(annotation::TAINT)?;
    let exact = owned(node.annotations).and_then(|own| {
        let found = find(node.taints, &own.kind).filter(|(_, value)| *value == own.value);
        found.map(|(index, _)| (index, own))
    });
    Some(Change {
        remove: exact,
        ownership: Some(Ownership::Nothing),
        ..Change::default()
    })
}

#[cfg(test)]
mod tests;
