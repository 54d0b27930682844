//! Which containers of a pod ask for image selection, and by which documents.

use std::collections::BTreeMap;

use crate::placement::annotation::SELECT_IMAGE;

/// Maximum number of containers of a pod whose images are selected. Each needs a read of its
/// document.
const MAX_SELECTIONS: usize = 16;

/// Label and annotations of ocifit-k8s: pods that were written for it work unchanged.
mod ocifit {
    pub(super) const ENABLED: &str = "oci.image.compatibilities.selection/enabled";
    pub(super) const REFERENCE: &str = "oci.image.compatibilities.selection/image-ref";
    pub(super) const TARGET: &str = "oci.image.compatibilities.selection/target-image";
    pub(super) const MODEL: &str = "oci.image.compatibilities.selection/model";
    pub(super) const DEFAULT_TARGET: &str = "placeholder:latest";
}

/// A container whose image is selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSelection {
    /// The name of the container.
    pub container: String,
    /// The reference of the compatibility document.
    pub document: String,
    /// The model that chooses, if the document has several.
    pub model: Option<String>,
}

/// A request for image selection that cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSelection {
    /// An annotation is for a container that the pod does not have.
    #[error("annotation {SELECT_IMAGE}{0}: the pod has no container {0:?}")]
    NoContainer(String),
    /// The pod has the label of ocifit-k8s, but not the annotation that names the document.
    #[error("label {} needs the annotation {}", ocifit::ENABLED, ocifit::REFERENCE)]
    NoReference,
    /// No container has the image that the annotation wants to replace.
    #[error("no container has the image {0:?}, which is to be replaced")]
    NoTarget(String),
    /// More containers than any real pod has.
    #[error("the pod asks for the selection of more than {MAX_SELECTIONS} images")]
    TooMany,
}

/// Whether a pod perhaps asks for image selection: a cheap test before [`requested`].
pub fn is_requested(
    annotations: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> bool {
    let mut keys = annotations.keys();
    labels.contains_key(ocifit::ENABLED) || keys.any(|key| key.starts_with(SELECT_IMAGE))
}

/// The containers of a pod that ask for image selection. `containers`: their names and images.
///
/// # Errors
///
/// When an annotation names a container or image that the pod does not have.
pub fn requested(
    annotations: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
    containers: &[(&str, &str)],
) -> Result<Vec<ImageSelection>, InvalidSelection> {
    let mut selections = Vec::new();
    let model = annotations.get(ocifit::MODEL);
    let range = annotations.range(SELECT_IMAGE.to_owned()..);
    let documents = range.map_while(|(key, value)| Some((key.strip_prefix(SELECT_IMAGE)?, value)));
    for (container, document) in documents {
        if !containers.iter().any(|(name, _)| *name == container) {
            return Err(InvalidSelection::NoContainer(container.to_owned()));
        }
        selections.push(ImageSelection {
            container: container.to_owned(),
            document: document.trim().to_owned(),
            model: model.cloned(),
        });
    }
    if labels
        .get(ocifit::ENABLED)
        .is_some_and(|value| value == "true")
    {
        let document = annotations.get(ocifit::REFERENCE);
        let document = document.ok_or(InvalidSelection::NoReference)?.trim();
        let target = annotations.get(ocifit::TARGET).map(String::as_str);
        let target = target.unwrap_or(ocifit::DEFAULT_TARGET);
        let targets = containers.iter().filter(|(_, image)| *image == target);
        let targets: Vec<&str> = targets.map(|(name, _)| *name).collect();
        if targets.is_empty() {
            return Err(InvalidSelection::NoTarget(target.to_owned()));
        }
        for name in targets {
            // The annotation that names the container overrides the annotations of ocifit-k8s.
            if !selections
                .iter()
                .any(|selection: &ImageSelection| selection.container == name)
            {
                selections.push(ImageSelection {
                    container: name.to_owned(),
                    document: document.to_owned(),
                    model: model.cloned(),
                });
            }
        }
    }
    if selections.len() > MAX_SELECTIONS {
        return Err(InvalidSelection::TooMany);
    }
    Ok(selections)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        let pairs = pairs.iter();
        pairs
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn who_asks_for_it() {
        let containers = [
            ("app", "placeholder:latest"),
            ("side", "proxy:1"),
            ("other", "old:2"),
        ];
        let (enabled, reference) = ((ocifit::ENABLED, "true"), (ocifit::REFERENCE, "reg/doc:1"));
        for (annotations, labels, expected) in [
            (vec![], vec![], Ok(vec![])),
            (
                vec![("archaware.dev/select-image.app", " reg/doc:1 ")],
                vec![],
                Ok(vec![("app", "reg/doc:1")]),
            ),
            (
                vec![
                    ("archaware.dev/select-image.side", "b"),
                    ("archaware.dev/select-image.app", "a"),
                ],
                vec![],
                Ok(vec![("app", "a"), ("side", "b")]),
            ),
            (
                vec![("archaware.dev/select-image.gone", "a")],
                vec![],
                Err(InvalidSelection::NoContainer("gone".to_owned())),
            ),
            (vec![reference], vec![], Ok(vec![])),
            (
                vec![reference],
                vec![(ocifit::ENABLED, "false")],
                Ok(vec![]),
            ),
            (
                vec![reference],
                vec![enabled],
                Ok(vec![("app", "reg/doc:1")]),
            ),
            (
                vec![reference, ("archaware.dev/select-image.app", "own")],
                vec![enabled],
                Ok(vec![("app", "own")]),
            ),
            (vec![], vec![enabled], Err(InvalidSelection::NoReference)),
            (
                vec![reference, (ocifit::TARGET, "old:2")],
                vec![enabled],
                Ok(vec![("other", "reg/doc:1")]),
            ),
            (
                vec![reference, (ocifit::TARGET, "new:2")],
                vec![enabled],
                Err(InvalidSelection::NoTarget("new:2".to_owned())),
            ),
        ] {
            let found = requested(&map(&annotations), &map(&labels), &containers);
            let found = found.map(|selections| {
                selections
                    .into_iter()
                    .map(|selection| (selection.container, selection.document))
                    .collect::<Vec<_>>()
            });
            let expected = expected.map(|pairs: Vec<(&str, &str)>| {
                pairs
                    .into_iter()
                    .map(|(a, b)| (a.to_owned(), b.to_owned()))
                    .collect::<Vec<_>>()
            });
            assert_eq!(found, expected, "{annotations:?} {labels:?}");
        }
    }
}
