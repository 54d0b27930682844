//! What an earlier call of the webhook has added to a pod. The API server calls again after other
//! webhooks have changed the pod (`reinvocationPolicy: IfNeeded`): with a sidecar, it may run in fewer
//! places than it did without, so what was added comes off before it is decided anew.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    affinity::{self, Affinity},
    annotation,
    pod::Change,
};

/// Where in a pod stands what was added; each index is what it is when those before it have been removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Undo {
    /// Tolerations.
    pub tolerations: Vec<usize>,
    /// Node affinity.
    pub affinity: affinity::Undo,
}

/// What the pod's annotation says; what is not readable has added nothing.
pub fn recorded(annotations: &BTreeMap<String, String>) -> Change {
    let text = annotations.get(annotation::ADDED);
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// Takes what was added out of a pod, as far as it is still there. Each toleration comes off once: the
/// author may have written the same.
pub fn undo(
    added: &Change,
    tolerations: Option<&mut Vec<Value>>,
    affinity: Option<&mut Affinity>,
) -> Undo {
    let mut undo = Undo::default();
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

impl Undo {
    /// Whether all of it was found.
    pub fn is_whole(&self, added: &Change) -> bool {
        let required = added.affinity.require.as_ref();
        let required = required.is_none_or(|require| {
            let made = self.affinity.required || self.affinity.term.is_some();
            let found = self.affinity.expressions.len();
            (require.terms.is_empty() && made) || (found > 0 && found == require.terms.len())
        });
        required
            && self.tolerations.len() == added.tolerations.len()
            && self.affinity.preferred.len() == added.affinity.prefer.len()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_toleration_comes_off_once() {
        let (ours, other) = (json!({"key": "a"}), json!({"key": "b"}));
        let added = Change {
            tolerations: vec![ours.clone()],
            ..Change::default()
        };
        let mut tolerations = vec![ours.clone(), other.clone(), ours.clone(), other.clone()];
        let found = undo(&added, Some(&mut tolerations), None);
        assert_eq!(found.tolerations, [2]);
        assert!(found.is_whole(&added));
        assert_eq!(tolerations, [ours, other.clone(), other.clone()]);
        let mut foreign = vec![other];
        let found = undo(&added, Some(&mut foreign), None);
        assert!(found.tolerations.is_empty() && !found.is_whole(&added));
    }

    #[test]
    fn nonsense_has_added_nothing() {
        let annotated =
            |text: &str| recorded(&[(annotation::ADDED.to_owned(), text.to_owned())].into());
        assert!(annotated("nonsense").is_empty());
        assert!(annotated("{}").is_empty());
        assert_eq!(annotated(r#"{"tolerations":[1]}"#).tolerations, [json!(1)]);
    }
}
