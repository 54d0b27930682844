//! A pod as its author wrote it.

use std::{borrow::Cow, collections::BTreeMap};

use crate::{
    cluster::objects::PodSpec,
    placement::{
        annotation,
        change::PodChange,
        record::{self, FoundAdditions},
    },
};

type Annotations = BTreeMap<String, String>;

/// A pod without archaware's additions, as far as they are recorded and still there.
#[derive(Clone, Debug)]
pub struct AuthorPod<'a> {
    pub spec: Cow<'a, PodSpec>,
    /// The pod's annotations, without those of a decision.
    pub annotations: Cow<'a, Annotations>,
    /// archaware's additions, by its own record.
    pub recorded: PodChange,
    /// The positions of the additions.
    pub found: FoundAdditions,
}

impl<'a> AuthorPod<'a> {
    /// Removes the additions from a pod.
    pub fn new(spec: &'a PodSpec, annotations: &'a Annotations) -> Self {
        let recorded = record::read(annotations);
        let (spec, found) = if recorded.is_empty() {
            (Cow::Borrowed(spec), FoundAdditions::default())
        } else {
            let (spec, found) = without_additions(spec.clone(), annotations, &recorded);
            (Cow::Owned(spec), found)
        };
        let decision_annotations = [annotation::DECISION, annotation::ADDED];
        let annotations = if decision_annotations
            .iter()
            .any(|name| annotations.contains_key(*name))
        {
            let mut annotations = annotations.clone();
            annotations.retain(|name, _| !decision_annotations.contains(&name.as_str()));
            Cow::Owned(annotations)
        } else {
            Cow::Borrowed(annotations)
        };
        Self {
            spec,
            annotations,
            recorded,
            found,
        }
    }
}

fn without_additions(
    mut spec: PodSpec,
    annotations: &Annotations,
    recorded: &PodChange,
) -> (PodSpec, FoundAdditions) {
    let (tolerations, affinity) = (spec.tolerations.as_mut(), spec.affinity.as_mut());
    let mut found = record::undo(recorded, tolerations, affinity);
    let containers = spec.selectable().filter_map(|(_, container)| {
        let image = container.image.as_deref()?;
        Some((container.name.as_str(), image))
    });
    let containers: Vec<_> = containers.collect();
    found.images = record::undo_images(recorded, annotations, containers.into_iter());
    let images = found.images.iter();
    spec.set_images(images.map(|change| (change.container.as_str(), Some(change.from.as_str()))));
    (spec, found)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(image: &str, tolerations: &Value) -> PodSpec {
        let spec =
            json!({"containers": [{"name": "c", "image": image}], "tolerations": tolerations});
        serde_json::from_value(spec).unwrap()
    }

    #[test]
    fn only_what_is_recorded_comes_off() {
        let (own, foreign) = (json!({"key": "own"}), json!({"key": "foreign"}));
        let added = json!({
            "version": 1,
            "tolerations": [own],
            "images": [{"container": "c", "from": "app:1", "to": "app:1-v3"}],
        });
        let other = ("example.com/owner".to_owned(), "team".to_owned());
        let record = (annotation::ADDED.to_owned(), added.to_string());
        let decision = (annotation::DECISION.to_owned(), "amd64".to_owned());
        let asks = (
            format!("{}c", annotation::SELECT_IMAGE),
            "app:rules".to_owned(),
        );
        let annotations = Annotations::from([record, decision, asks.clone(), other.clone()]);
        let placed = spec("app:1-v3", &json!([foreign, own]));
        let author = AuthorPod::new(&placed, &annotations);
        assert_eq!(*author.spec, spec("app:1", &json!([foreign])));
        assert_eq!(
            *author.annotations,
            Annotations::from([asks, other.clone()])
        );
        assert!(author.found.is_complete(&author.recorded));
        // Without a record everything is the author's.
        let annotations = Annotations::from([other]);
        let author = AuthorPod::new(&placed, &annotations);
        assert!(matches!(author.spec, Cow::Borrowed(_)));
        assert!(matches!(author.annotations, Cow::Borrowed(_)));
    }
}
