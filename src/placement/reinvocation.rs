//! Removes what an earlier call of the webhook added to a pod. The API server calls the webhook again after other
//! webhooks changed the pod (`reinvocationPolicy: IfNeeded`). With an injected sidecar the pod may run on fewer
//! architectures, so earlier additions are removed before the new decision.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    affinity::{self, Affinity},
    annotation,
    pod::PodChange,
    selection::ImageChange,
};

/// Where the additions are in a pod. Each index applies after the removals before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReinvocationUndo {
    /// Indexes of tolerations.
    pub tolerations: Vec<usize>,
    /// Places in the node affinity.
    pub affinity: affinity::AffinityUndo,
    /// Images that are as they were replaced.
    pub images: Vec<ImageChange>,
}

/// Version of the record. One of a later version records nothing: its fields may mean something else.
const VERSION: u32 = 3;
/// The version before, which knows no selected images.
const WITHOUT_IMAGES: u32 = 2;
/// The first version, which knows no alternatives and no preferred nodes either.
const ARCHITECTURES_ONLY: u32 = 1;

/// The lowest version that can undo a change.
fn version(change: &PodChange) -> u32 {
    if !change.images.is_empty() {
        VERSION
    } else if change.affinity.is_beyond_architectures() {
        WITHOUT_IMAGES
    } else {
        ARCHITECTURES_ONLY
    }
}

/// The value of `archaware.dev/added`.
#[derive(Serialize, Deserialize)]
struct Added<C> {
    /// Absent in the first records.
    #[serde(default)]
    version: u32,
    #[serde(flatten)]
    change: C,
}

/// The additions recorded in the pod's annotation; an unreadable annotation records none.
pub fn recorded_change(annotations: &BTreeMap<String, String>) -> PodChange {
    let text = annotations.get(annotation::ADDED);
    let added = text.and_then(|text| serde_json::from_str::<Added<PodChange>>(text).ok());
    let added = added.filter(|added| added.version <= VERSION);
    added.map(|added| added.change).unwrap_or_default()
}

/// The annotation that records additions; `None` if there are none.
pub fn record(change: &PodChange) -> Option<String> {
    let added = Added {
        version: version(change),
        change,
    };
    let text = serde_json::to_string(&added).ok();
    text.filter(|_| !change.is_empty())
}

/// Removes the additions that are still in the pod. Each toleration is removed once, because the author may have
/// written the same one.
pub fn undo(
    added: &PodChange,
    tolerations: Option<&mut Vec<Value>>,
    affinity: Option<&mut Affinity>,
) -> ReinvocationUndo {
    let mut undo = ReinvocationUndo::default();
    if let Some(tolerations) = tolerations {
        let mut indexes: Vec<usize> = Vec::new();
        for own in &added.tolerations {
            let mut found = tolerations.iter().enumerate().rev();
            let index = found.find(|(index, one)| *one == own && !indexes.contains(index));
            indexes.extend(index.map(|(index, _)| index));
        }
        indexes.sort_unstable_by(|a, b| b.cmp(a));
        for &index in &indexes {
            tolerations.remove(index);
        }
        undo.tolerations = indexes;
    }
    if let Some(affinity) = affinity {
        undo.affinity = affinity::undo(affinity, &added.affinity);
    }
    undo
}

/// The replaced images that are still in the pod. `containers`: names and images.
pub fn undo_images<'a>(
    added: &PodChange,
    containers: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Vec<ImageChange> {
    let is_there = |own: &&ImageChange| {
        let mut all = containers.clone();
        all.any(|(name, image)| name == own.container && image == own.to)
    };
    added.images.iter().filter(is_there).cloned().collect()
}

impl ReinvocationUndo {
    /// Whether all additions were found.
    pub fn is_complete(&self, added: &PodChange) -> bool {
        self.tolerations.len() == added.tolerations.len()
            && self.affinity.is_complete(&added.affinity)
            && self.images.len() == added.images.len()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_toleration_comes_off_once() {
        let (ours, other) = (json!({"key": "a"}), json!({"key": "b"}));
        let added = PodChange {
            tolerations: vec![ours.clone()],
            ..PodChange::default()
        };
        let mut tolerations = vec![ours.clone(), other.clone(), ours.clone(), other.clone()];
        let found = undo(&added, Some(&mut tolerations), None);
        assert_eq!(found.tolerations, [2]);
        assert!(found.is_complete(&added));
        assert_eq!(tolerations, [ours, other.clone(), other.clone()]);
        let mut foreign = vec![other];
        let found = undo(&added, Some(&mut foreign), None);
        assert!(found.tolerations.is_empty() && !found.is_complete(&added));
    }

    #[test]
    fn nonsense_has_added_nothing() {
        let annotated =
            |text: &str| recorded_change(&[(annotation::ADDED.to_owned(), text.to_owned())].into());
        assert!(annotated("nonsense").is_empty());
        assert!(annotated("{}").is_empty());
        assert_eq!(annotated(r#"{"tolerations":[1]}"#).tolerations, [json!(1)]);
        let text = record(&annotated(r#"{"tolerations":[1]}"#)).unwrap();
        assert_eq!(text, r#"{"version":1,"tolerations":[1]}"#);
        assert_eq!(annotated(&text).tolerations, [json!(1)]);
        assert!(annotated(&text.replace(":1,", ":4,")).is_empty());
        assert_eq!(record(&PodChange::default()), None);
    }
}
