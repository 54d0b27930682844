//! Removes what an earlier call of the webhook added to a pod. The API server calls the webhook again after other
//! webhooks changed the pod (`reinvocationPolicy: IfNeeded`). With an injected sidecar the pod may run on fewer
//! architectures, so earlier additions are removed before the new decision.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    affinity::{self, Affinity},
    annotation,
    change::{ImageChange, PodChange},
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

/// The images that were replaced, as they are now: another webhook may have changed them after archaware. `containers`: names and
/// images.
pub fn undo_images<'a>(
    added: &PodChange,
    containers: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Vec<ImageChange> {
    let now = |own: &ImageChange| {
        let mut all = containers.clone();
        let (_, image) = all.find(|(name, _)| *name == own.container)?;
        (image != own.from || own.from == own.to).then(|| ImageChange {
            to: image.to_owned(),
            ..own.clone()
        })
    };
    added.images.iter().filter_map(now).collect()
}

impl ReinvocationUndo {
    /// Whether all additions were found.
    pub fn is_complete(&self, added: &PodChange) -> bool {
        self.tolerations.len() == added.tolerations.len()
            && self.affinity.is_complete(&added.affinity)
            && self.images == added.images
    }
}

impl PodChange {
    /// An image that is selected again stays as another webhook has changed it, e.g. to the name of a mirror.
    #[must_use]
    pub fn with_images_kept(mut self, recorded: &Self, undone: &[ImageChange]) -> Self {
        for image in &mut self.images {
            let is_same = |own: &&ImageChange| own.container == image.container;
            let before = recorded.images.iter().find(is_same);
            if before.is_some_and(|before| before.to == image.to)
                && let Some(now) = undone.iter().find(is_same)
            {
                image.to.clone_from(&now.to);
            }
        }
        self
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

    /// An image may name an architecture that the configuration refuses.
    #[test]
    fn every_name_is_read_again() {
        let unusual = ["amd64", "loongarch64"].map(|name| name.parse().unwrap());
        let require = affinity::Require {
            architectures: unusual.clone().into(),
            further: vec![unusual.clone().into()],
            ..Default::default()
        };
        let [_, architecture] = unusual;
        let affinity = affinity::AffinityChange {
            require: Some(require),
            prefer: vec![affinity::Preference {
                architecture,
                weight: 1,
            }],
            ..Default::default()
        };
        let change = PodChange {
            affinity,
            ..PodChange::default()
        };
        let text = record(&change).unwrap();
        let read = recorded_change(&[(annotation::ADDED.to_owned(), text)].into());
        assert_eq!(read.affinity, change.affinity);
    }

    #[test]
    fn an_image_may_have_been_changed_again() {
        let image = |container: &str, from: &str, to: &str| ImageChange {
            container: container.to_owned(),
            from: from.to_owned(),
            to: to.to_owned(),
        };
        let change = |images: &[ImageChange]| PodChange {
            images: images.to_vec(),
            ..PodChange::default()
        };
        let recorded = change(&[
            image("same", "a", "b"),
            image("mirrored", "a", "b"),
            image("reverted", "a", "b"),
            image("gone", "a", "b"),
            image("best", "a", "a"),
        ]);
        let now = [
            ("same", "b"),
            ("mirrored", "mirror/b"),
            ("reverted", "a"),
            ("best", "a"),
        ];
        let undone = undo_images(&recorded, now.into_iter());
        let expected = [
            image("same", "a", "b"),
            image("mirrored", "a", "mirror/b"),
            image("best", "a", "a"),
        ];
        assert_eq!(undone, expected);
        // The same choice leaves the mirror's name; another one does not.
        let chosen = |to: &str| change(&[image("mirrored", "a", to)]);
        for (to, kept) in [("b", "mirror/b"), ("c", "c")] {
            let kept_as = chosen(to).with_images_kept(&recorded, &undone);
            assert_eq!(kept_as, chosen(kept));
        }
    }
}
