//! Records of what archaware added to a pod or to the template of a DaemonSet: their format, their
//! size, and how the additions to a pod are removed.
//!
//! archaware removes its earlier additions before it decides about a pod, for two reasons:
//! - The API server calls the webhook again after other webhooks changed the pod
//!   (`reinvocationPolicy: IfNeeded`). With an injected sidecar the pod may run on fewer
//!   architectures.
//! - People copy the YAML of pods, including the additions.

use std::collections::BTreeMap;

use archaware_base::bounded::Budget;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    MAX_LIST, affinity::Affinity, affinity_change, annotation, change::PodChange,
    demand::ImageChange, removal::remove_each,
};

/// Version of the format. A record of another version is ignored, because its fields may have
/// another meaning.
const VERSION: u32 = 1;
/// Maximum bytes of a record. The record of a template with 256 containers and the longest image
/// names is shorter. A longer record is not written, and not parsed either, because everybody who
/// may write a pod may write its annotations.
pub const MAX_SIZE: usize = 128 * 1024;
/// Maximum number of list elements and object entries in a record. Many small objects would need
/// more memory than their text.
const MAX_ELEMENTS: usize = 16 * 1024;

#[derive(Serialize, Deserialize)]
struct Record<T> {
    version: u32,
    #[serde(flatten)]
    content: T,
}

/// What an annotation records; `None` if it cannot be read.
pub(super) fn parse<T: DeserializeOwned>(text: Option<&str>) -> Option<T> {
    let text = text.filter(|text| text.len() <= MAX_SIZE)?;
    let budget = Budget::new(MAX_ELEMENTS, MAX_SIZE);
    let mut input = serde_json::Deserializer::from_str(text);
    let record: Record<T> = budget.parse(&mut input).ok()?;
    let is_whole = input.end().is_ok() && !budget.is_exceeded();
    (is_whole && record.version == VERSION).then_some(record.content)
}

/// The annotation value that records `content`; `None` if it would be too long.
pub(super) fn format<T: Serialize>(content: &T) -> Option<String> {
    let record = Record {
        version: VERSION,
        content,
    };
    let text = serde_json::to_string(&record).ok();
    text.filter(|text| text.len() <= MAX_SIZE)
}

/// The additions to a pod that its annotation records; empty if the annotation cannot be read.
pub fn read(annotations: &BTreeMap<String, String>) -> PodChange {
    let text = annotations.get(annotation::ADDED).map(String::as_str);
    let change = parse(text).filter(is_possible);
    change.unwrap_or_default()
}

/// Whether each of its lists has at most [`MAX_LIST`] elements, like the lists of the pods that
/// archaware handles.
fn is_possible(change: &PodChange) -> bool {
    let lists = [
        change.tolerations.len(),
        change.images.len(),
        change.affinity.prefer.len(),
        change.affinity.prefer_terms.len(),
    ];
    lists.into_iter().all(|length| length <= MAX_LIST)
}

/// The value of [`annotation::ADDED`] for these additions; `None` if there are none, or if the
/// record would be too long.
pub fn of_change(change: &PodChange) -> Option<String> {
    (!change.is_empty()).then(|| format(change)).flatten()
}

/// Shortens a change that is too long for its record: first removes its preferred terms, then
/// alternatives. A pod can run with each single alternative.
#[must_use]
pub fn fitting(mut change: PodChange) -> PodChange {
    let is_too_long = |change: &PodChange| !change.is_empty() && of_change(change).is_none();
    let required = change.affinity.require.as_ref();
    let has_alternatives = required.is_some_and(|required| !required.alternatives.is_empty());
    // Only these lists can be too long for a record.
    let may_be_long = has_alternatives || !change.affinity.prefer_terms.is_empty();
    if !may_be_long || !is_too_long(&change) {
        return change;
    }
    change.affinity.prefer_terms.clear();
    while is_too_long(&change)
        && let Some(required) = &mut change.affinity.require
        && required.alternatives.len() > 1
    {
        let half = required.alternatives.len() / 2;
        required.alternatives.truncate(half);
    }
    change
}

/// Where the additions are in a pod. Each index is valid once the removals that are listed
/// before it have been made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundAdditions {
    /// Indexes of tolerations.
    pub tolerations: Vec<usize>,
    /// Places in the node affinity.
    pub affinity: affinity_change::AffinityUndo,
    /// The replaced images, with their current names.
    pub images: Vec<ImageChange>,
}

/// Removes the additions that are still in the pod. Each toleration is removed once, because the
/// author may have written the same one.
pub fn undo(
    added: &PodChange,
    tolerations: Option<&mut Vec<Value>>,
    affinity: Option<&mut Affinity>,
) -> FoundAdditions {
    let mut undo = FoundAdditions::default();
    if let Some(tolerations) = tolerations {
        undo.tolerations = remove_each(tolerations, added.tolerations.iter().cloned());
    }
    if let Some(affinity) = affinity {
        undo.affinity = affinity_change::undo(affinity, &added.affinity);
    }
    undo
}

/// The replaced images with their current names: another webhook may have changed the host and the
/// repository after archaware, e.g. to those of a mirror. Anybody may write a record, so it counts
/// only for containers for which the pod requests a selection, and only if the current image is the
/// recorded choice by its tag or digest. `containers`: names and images.
pub fn undo_images<'a>(
    added: &PodChange,
    annotations: &BTreeMap<String, String>,
    containers: impl Iterator<Item = (&'a str, &'a str)> + Clone,
) -> Vec<ImageChange> {
    let by_image = annotations
        .keys()
        .any(|key| key.starts_with(annotation::OCIFIT_PREFIX));
    let requests_selection = |container: &str| {
        by_image || annotations.contains_key(&format!("{}{container}", annotation::SELECT_IMAGE))
    };
    let now = |change: &ImageChange| {
        let mut current_containers = containers.clone();
        let (_, image) = current_containers.find(|(name, _)| *name == change.container)?;
        let is_replaced = image != change.from || change.from == change.to;
        (is_replaced && is_chosen(image, &change.to) && requests_selection(&change.container)).then(
            || ImageChange {
                to: image.to_owned(),
                ..change.clone()
            },
        )
    };
    added.images.iter().filter_map(now).collect()
}

/// Whether an image is the chosen image, perhaps from a mirror or with a digest in addition.
fn is_chosen(image: &str, chosen: &str) -> bool {
    let rest = version(image).strip_prefix(version(chosen));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('@'))
}

/// The tag with its colon, the digest with its at sign, or both; empty without both.
fn version(image: &str) -> &str {
    let name = image.rsplit('/').next().unwrap_or(image);
    name.find([':', '@'])
        .and_then(|at| name.get(at..))
        .unwrap_or_default()
}

impl FoundAdditions {
    /// Whether all additions were found.
    pub fn is_complete(&self, added: &PodChange) -> bool {
        self.tolerations.len() == added.tolerations.len()
            && self.affinity.is_complete(&added.affinity)
            && self.images == added.images
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use crate::{
        affinity,
        requirement::{Operator, Requirement},
    };

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
            |text: &str| read(&[(annotation::ADDED.to_owned(), text.to_owned())].into());
        assert!(annotated("nonsense").is_empty());
        assert!(annotated("{}").is_empty());
        assert!(annotated(r#"{"tolerations":[1]}"#).is_empty());
        let change = PodChange {
            tolerations: vec![json!(1)],
            ..PodChange::default()
        };
        let text = of_change(&change).unwrap();
        assert_eq!(text, r#"{"version":1,"tolerations":[1]}"#);
        assert_eq!(annotated(&text), change);
        assert!(annotated(&text.replace(":1,", ":4,")).is_empty());
        assert_eq!(of_change(&PodChange::default()), None);
    }

    #[test]
    fn a_change_fits_its_record() {
        let hosts = |n: usize| -> Vec<String> {
            (0..64)
                .map(|host| format!("{n:03}-{host:03}-{}", "x".repeat(240)))
                .collect()
        };
        let term = |n| vec![Requirement::new("host", Operator::In, hosts(n))];
        let prefer = |n| affinity::WeightedTerm {
            weight: 1,
            expressions: term(n),
        };
        let change = |alternatives: usize, preferred: usize| PodChange {
            affinity: affinity_change::AffinityChange {
                require: Some(affinity_change::Require {
                    alternatives: (0..alternatives).map(term).collect(),
                    ..Default::default()
                }),
                prefer_terms: (0..preferred).map(prefer).collect(),
                ..Default::default()
            },
            ..PodChange::default()
        };
        for (before, after) in [
            (change(2, 2), change(2, 2)),
            (change(4, 16), change(4, 0)),
            (change(16, 16), change(8, 0)),
        ] {
            let found = fitting(before);
            assert!(found == after);
            assert!(of_change(&found).is_some());
        }
        assert!(of_change(&change(16, 0)).is_none());
    }

    /// A toleration or a requirement from a small set, so that some are equal.
    fn requirement() -> impl Strategy<Value = Value> {
        let operator = prop::sample::select(vec!["In", "Exists", "NotIn"]);
        let values = prop::collection::vec("[xy]", 0..2);
        ("[ab]", operator, values).prop_map(
            |(key, operator, values)| json!({"key": key, "operator": operator, "values": values}),
        )
    }

    fn term() -> impl Strategy<Value = Value> {
        prop::collection::vec(requirement(), 0..4).prop_map(|all| json!({"matchExpressions": all}))
    }

    fn requirements() -> impl Strategy<Value = Vec<Vec<Value>>> {
        prop::collection::vec(prop::collection::vec(requirement(), 0..3), 0..3)
    }

    proptest! {
        /// A forged record removes only the tolerations that it names, and no term's last
        /// requirement.
        #[test]
        fn any_record_removes_only_what_it_names(
            own in prop::collection::vec(requirement(), 0..6),
            named in prop::collection::vec(requirement(), 0..6),
            terms in prop::collection::vec(term(), 0..4),
            alternatives in requirements(),
            indexes in prop::collection::vec(0..6_usize, 0..4),
        ) {
            let record = json!({"version": 1, "tolerations": named, "affinity": {"require": {
                "architectures": ["amd64"], "alternatives": alternatives, "terms": indexes}}});
            let added = read(&[(annotation::ADDED.to_owned(), record.to_string())].into());
            let required = json!({"nodeSelectorTerms": terms});
            let node = json!({"requiredDuringSchedulingIgnoredDuringExecution": required});
            let affinity = json!({"nodeAffinity": node});
            let mut affinity: Affinity = serde_json::from_value(affinity).unwrap();
            let before = affinity.clone();
            let mut tolerations = own.clone();
            let found = undo(&added, Some(&mut tolerations), Some(&mut affinity));
            let mut left = own.clone();
            for index in &found.tolerations {
                let removed = left.remove(*index);
                prop_assert!(named.contains(&removed));
            }
            prop_assert_eq!(&left, &tolerations);
            prop_assert!(found.tolerations.len() <= named.len());
            let required_terms = |affinity: &Affinity| -> Vec<affinity::NodeSelectorTerm> {
                let node = affinity.node_affinity.as_ref();
                let required = node.and_then(|node| node.required.clone());
                required.map(|required| required.node_selector_terms).unwrap_or_default()
            };
            // No term loses its last requirement, because an empty term selects no node.
            let (before, after) = (required_terms(&before), required_terms(&affinity));
            prop_assert!(after.len() <= before.len());
            let is_empty = |term: &affinity::NodeSelectorTerm| term.match_expressions.is_empty();
            let count = |terms: &[affinity::NodeSelectorTerm]| terms.iter().filter(|term| is_empty(term)).count();
            prop_assert!(count(&after) <= count(&before), "{:?} -> {:?}", before, after);
        }
    }

    /// Everybody who may write a pod may write its annotations.
    #[test]
    fn a_forged_record_costs_little() {
        let expression = |n: usize| json!({"key": format!("k{n}"), "operator": "Exists"});
        let terms = |count: usize, each: usize| -> Affinity {
            let term =
                |_| json!({"matchExpressions": (0..each).map(expression).collect::<Vec<_>>()});
            let terms: Vec<_> = (0..count).map(term).collect();
            let required = json!({"nodeSelectorTerms": terms});
            let node = json!({"requiredDuringSchedulingIgnoredDuringExecution": required});
            serde_json::from_value(json!({"nodeAffinity": node})).unwrap()
        };
        let forged = |require: Value| json!({"version": 1, "affinity": {"require": require}});
        let alternative = |count| (0..count).map(expression).collect::<Vec<_>>();
        let require = |terms: &[usize], expressions: usize| {
            forged(json!({
                "architectures": ["amd64"],
                "alternatives": [alternative(expressions)],
                "terms": terms,
            }))
        };
        let all: Vec<usize> = (0..MAX_LIST).collect();
        let twice: Vec<usize> = all.iter().map(|index| index / 2).collect();
        let far: Vec<usize> = all.iter().map(|index| index + 5000).collect();
        let toleration = json!({"key": "a"});
        for (name, record, affinity) in [
            ("every term", require(&all, 16), terms(341, 2)),
            ("terms that do not exist", require(&far, 16), terms(341, 2)),
            ("terms twice", require(&twice, 16), terms(341, 2)),
            ("one term", require(&[0], 1024), terms(1, 1024)),
            ("too many", require(&all, 1024), terms(341, 2)),
            (
                "tolerations",
                json!({"version": 1, "tolerations": vec![&toleration; MAX_LIST]}),
                Affinity::default(),
            ),
            (
                "far too many tolerations",
                json!({"version": 1, "tolerations": vec![&toleration; 9000]}),
                Affinity::default(),
            ),
        ] {
            let mut tolerations = vec![toleration.clone(); MAX_LIST];
            let (text, mut affinity) = (record.to_string(), affinity);
            assert!(text.len() <= MAX_SIZE, "{name}");
            let started = std::time::Instant::now();
            let added = read(&[(annotation::ADDED.to_owned(), text)].into());
            let found = undo(&added, Some(&mut tolerations), Some(&mut affinity));
            let _ = found.is_complete(&added);
            // The limit is generous, for a debug build on a shared machine. A search for each index
            // took a minute.
            let elapsed = started.elapsed();
            assert!(
                elapsed < std::time::Duration::from_millis(500),
                "{name}: {elapsed:?}"
            );
        }
    }

    #[test]
    fn what_is_longer_than_a_record_is_neither_written_nor_read() {
        let padded = |bytes: usize| PodChange {
            runtime_class: Some("x".repeat(bytes)),
            ..PodChange::default()
        };
        let overhead = of_change(&padded(1)).unwrap().len() - 1;
        let longest = padded(MAX_SIZE - overhead);
        let text = of_change(&longest).unwrap();
        assert_eq!(text.len(), MAX_SIZE);
        let annotated = |text: String| read(&[(annotation::ADDED.to_owned(), text)].into());
        assert_eq!(annotated(text.clone()), longest);
        assert!(annotated(text.replace("xx", "xxx")).is_empty());
        assert_eq!(of_change(&padded(MAX_SIZE - overhead + 1)), None);
    }

    /// An image may name an architecture that the configuration refuses.
    #[test]
    fn every_name_is_read_again() {
        let unusual = ["amd64", "loongarch64"].map(|name| name.parse().unwrap());
        let require = affinity_change::Require {
            architectures: unusual.clone().into(),
            further: vec![unusual.clone().into()],
            ..Default::default()
        };
        let [_, architecture] = unusual;
        let affinity = affinity_change::AffinityChange {
            require: Some(require),
            prefer: vec![affinity_change::Preference {
                architecture,
                weight: 1,
            }],
            ..Default::default()
        };
        let change = PodChange {
            affinity,
            ..PodChange::default()
        };
        let text = of_change(&change).unwrap();
        let found = read(&[(annotation::ADDED.to_owned(), text)].into());
        assert_eq!(found.affinity, change.affinity);
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
        let b = "reg/b:1";
        let recorded = change(&[
            image("same", "a", b),
            image("mirrored", "a", b),
            image("reverted", "a", b),
            image("gone", "a", b),
            image("best", "a", "a"),
            image("pinned", "a", b),
            image("another", "a", b),
            image("newer", "a", b),
            image("not-asked", "a", b),
        ]);
        let pinned = "mirror/b:1@sha256:0";
        let now = [
            ("same", b),
            ("mirrored", "mirror/b:1"),
            ("reverted", "a"),
            ("best", "a"),
            ("pinned", pinned),
            // Not the choice that is recorded: the record is forged, or the author changed it.
            ("another", "reg/b:2"),
            ("newer", "reg/b:1.1"),
            ("not-asked", b),
        ];
        let requests_selection = |container: &str| {
            (
                format!("archaware.dev/select-image.{container}"),
                "doc".to_owned(),
            )
        };
        let asking = now[..7]
            .iter()
            .map(|(container, _)| requests_selection(container))
            .collect();
        let undone = undo_images(&recorded, &asking, now.into_iter());
        let expected = [
            image("same", "a", b),
            image("mirrored", "a", "mirror/b:1"),
            image("best", "a", "a"),
            image("pinned", "a", pinned),
        ];
        assert_eq!(undone, expected);
        // A request in the form of ocifit-k8s names images, so it applies to every container.
        let label = "oci.image.compatibilities.selection/image-ref".to_owned();
        let by_image = undo_images(
            &recorded,
            &[(label, "doc".to_owned())].into(),
            now.into_iter(),
        );
        assert_eq!(by_image.len(), expected.len() + 1);
        assert_eq!(
            undo_images(&recorded, &BTreeMap::new(), now.into_iter()),
            []
        );
        // An equal choice keeps the mirror's name; another choice does not.
        let chosen = |container: &str, from: &str, to: &str| change(&[image(container, from, to)]);
        for (container, from, to, kept) in [
            ("mirrored", "a", b, "mirror/b:1"),
            ("mirrored", "a", "c", "c"),
            ("reverted", "a", b, b),
        ] {
            let kept_as = chosen(container, from, to).with_images_kept(&recorded, &undone);
            assert_eq!(kept_as, chosen(container, from, kept), "{container}");
        }
    }
}
