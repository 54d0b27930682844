//! Patches of pods: guarded patches of the controller, and unguarded patches of the webhook.

use serde_json::{Value, json};

use crate::placement::{
    GATE, Taint,
    affinity::Affinity,
    affinity_change::{AffinityChange, Require},
    annotation,
    change::PodChange,
    decision::Decision,
    demand::ImageChange,
    record,
};

use super::{
    super::objects::{Pod, PodSpec, annotations},
    JsonPatch,
};

const TOLERATIONS: &str = "/spec/tolerations";
const GATES: &str = "/spec/schedulingGates";
const AFFINITY: &str = "/spec/affinity";
const NODE_AFFINITY: &str = "/spec/affinity/nodeAffinity";
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";

/// Applies the change of a decision, records the decision, and removes archaware's scheduling gate
/// unless the pod stays behind it. Only adds tolerations, because the API server does not allow
/// them to be removed from a pod.
pub fn apply(pod: &Pod, change: PodChange, decision: &Decision, stays_gated: bool) -> JsonPatch {
    let mut patch = JsonPatch::for_images_of(pod);
    let added = record_of_additions(pod, &change);
    patch.change(&pod.spec, change);
    let decision = decision.annotation();
    let values = [
        (annotation::DECISION, Some(&*decision)),
        (annotation::ADDED, added.as_deref()),
    ];
    patch.annotate(&pod.metadata, &values);
    if !stays_gated {
        patch.release(pod);
    }
    patch
}

/// Adds the toleration for the taint of the pod's node.
pub fn tolerate(pod: &Pod, taint: &Taint) -> JsonPatch {
    let (mut patch, change) = toleration(pod, taint);
    let added = record_of_additions(pod, &change);
    patch.change(&pod.spec, change);
    patch.annotate(&pod.metadata, &[(annotation::ADDED, added.as_deref())]);
    patch
}

/// Adds the toleration for the taint of the pod's node, without a record. For a pod whose
/// annotations are full (`TotalAnnotationSizeLimitB` of k8s.io/apimachinery): the record only helps
/// pods that are created from this pod's YAML.
pub fn tolerate_unrecorded(pod: &Pod, taint: &Taint) -> JsonPatch {
    let (mut patch, change) = toleration(pod, taint);
    patch.change(&pod.spec, change);
    patch
}

fn toleration(pod: &Pod, taint: &Taint) -> (JsonPatch, PodChange) {
    let change = PodChange {
        tolerations: vec![taint.toleration()],
        ..PodChange::default()
    };
    (JsonPatch::for_images_of(pod), change)
}

/// Removes archaware's scheduling gate only.
pub fn remove_gate(pod: &Pod) -> JsonPatch {
    let mut patch = JsonPatch::for_images_of(pod);
    patch.release(pod);
    patch
}

/// The record of archaware's additions to the pod, including `change`. With it, archaware ignores
/// these additions in a pod that someone creates from this pod's YAML.
fn record_of_additions(pod: &Pod, change: &PodChange) -> Option<String> {
    let recorded = record::read(annotations(&pod.metadata));
    record::of_change(&recorded.and(change))
}

/// The changes that the webhook makes to a pod.
#[derive(Clone, Debug, Default)]
pub struct AdmissionPatch<'a> {
    /// Where the additions of an earlier call are.
    pub undo: record::FoundAdditions,
    /// The change to apply.
    pub change: PodChange,
    /// The decision, if there is one.
    pub decision: Option<&'a Decision>,
    /// Whether the pod has archaware's scheduling gate afterwards.
    pub gate: bool,
}

/// The webhook's patch of `pod`: removes the additions of an earlier call, then adds `change`.
/// `without_owned` is the spec without these additions; the indexes of `change` refer to it.
pub fn admit(pod: &Pod, without_owned: &PodSpec, admission: AdmissionPatch<'_>) -> JsonPatch {
    let AdmissionPatch {
        undo,
        change,
        decision,
        gate,
    } = admission;
    let mut patch = JsonPatch::without_guard();
    patch.undo(&undo);
    // Skips images that `change` sets anyway.
    let is_replaced = |undone: &&ImageChange| {
        let mut new = change.images.iter();
        !new.any(|new| new.container == undone.container)
    };
    for undone in undo.images.iter().filter(is_replaced) {
        patch.set_image(&pod.spec, &undone.container, &undone.to, &undone.from);
    }
    let record = record::of_change(&change);
    patch.change(without_owned, change);
    let decision = decision.map(Decision::annotation);
    let annotations = [
        (annotation::DECISION, decision.as_deref()),
        (annotation::ADDED, record.as_deref()),
    ];
    patch.annotate(&pod.metadata, &annotations);
    match (gate, pod.spec.gate()) {
        (true, None) => {
            let exists = pod.spec.scheduling_gates.is_some();
            patch.append_unguarded(GATES, exists, vec![json!({ "name": GATE })]);
        }
        (false, Some(_)) => patch.release(pod),
        _ => {}
    }
    patch
}

impl JsonPatch {
    /// An empty patch that applies only to this pod, and only while its images are unchanged: the
    /// decision depends on them, and the API server allows them to be replaced.
    fn for_images_of(pod: &Pod) -> Self {
        let mut patch = Self::for_object(&pod.metadata);
        let spec = &pod.spec;
        for (list, containers) in [
            ("containers", &spec.containers),
            ("initContainers", &spec.init_containers),
            ("ephemeralContainers", &spec.ephemeral_containers),
        ] {
            for (index, container) in containers.iter().enumerate() {
                patch.test(&format!("/spec/{list}/{index}/image"), &container.image);
            }
        }
        patch
    }

    fn change(&mut self, spec: &PodSpec, change: PodChange) {
        if !change.tolerations.is_empty() {
            self.append(TOLERATIONS, spec.tolerations.as_ref(), change.tolerations);
        }
        self.affinity(spec.affinity.as_ref(), &change.affinity);
        if let Some(class) = &change.runtime_class
            && spec.runtime_class_name.is_none()
        {
            self.add("/spec/runtimeClassName", json!(class));
        }
        for image in &change.images {
            self.set_image(spec, &image.container, &image.from, &image.to);
        }
    }

    /// Replaces the image of a container, if it is still `from`.
    fn set_image(&mut self, spec: &PodSpec, container: &str, from: &str, to: &str) {
        let mut containers = spec.selectable();
        let found = containers.find(|(_, candidate)| candidate.name == container);
        if let Some((path, _)) = found.filter(|_| from != to) {
            self.test(&format!("{path}/name"), container);
            self.test(&format!("{path}/image"), from);
            self.add(&format!("{path}/image"), json!(to));
        }
    }

    fn release(&mut self, pod: &Pod) {
        if let Some(index) = pod.spec.gate() {
            self.test(&format!("{GATES}/{index}/name"), GATE);
            self.remove(&format!("{GATES}/{index}"));
        }
    }

    /// Appends to the affinity. Missing parts are created, guarded by a test that they are still
    /// missing.
    fn affinity(&mut self, affinity: Option<&Affinity>, change: &AffinityChange) {
        let required = change
            .require
            .as_ref()
            .filter(|require| require.terms.is_empty());
        let required =
            required.map(|require| json!({ "nodeSelectorTerms": require.alternatives() }));
        let preferred: Vec<Value> = change.preferred_terms().map(|term| json!(term)).collect();
        let Some(node) = affinity.and_then(|affinity| affinity.node_affinity.as_ref()) else {
            let mut node = serde_json::Map::new();
            node.extend(required.map(|required| (REQUIRED.to_owned(), required)));
            if !preferred.is_empty() {
                node.insert(PREFERRED.to_owned(), json!(preferred));
            }
            if node.is_empty() {
                return;
            }
            match affinity {
                None => self.create(AFFINITY, json!({ "nodeAffinity": node })),
                Some(_) => self.create(NODE_AFFINITY, Value::Object(node)),
            }
            return;
        };
        if let Some(required) = required {
            self.create(&format!("{NODE_AFFINITY}/{REQUIRED}"), required);
        }
        if let Some(require) = &change.require {
            self.extend_terms(require);
        }
        if !preferred.is_empty() {
            let path = format!("{NODE_AFFINITY}/{PREFERRED}");
            if node.preferred.is_none() {
                self.test(&path, Value::Null);
            }
            self.append_unguarded(&path, node.preferred.is_some(), preferred);
        }
    }

    /// Adds the required expressions to the author's terms. If there are several alternatives, each
    /// of these terms is repeated for each alternative. Starts with the last term, so that the
    /// copies do not shift the terms that are still to be changed.
    fn extend_terms(&mut self, require: &Require) {
        let alternatives = require.alternatives();
        for index in require.terms.iter().rev() {
            for _ in alternatives.iter().skip(1) {
                self.copy(&term_path(*index), &term_path(index + 1));
            }
            for (offset, alternative) in alternatives.iter().enumerate() {
                let path = format!("{}/matchExpressions/-", term_path(index + offset));
                for expression in &alternative.match_expressions {
                    self.add(&path, json!(expression));
                }
            }
        }
    }

    fn create(&mut self, path: &str, value: Value) {
        self.test(path, Value::Null);
        self.add(path, value);
    }

    fn undo(&mut self, undo: &record::FoundAdditions) {
        for index in &undo.tolerations {
            self.remove(&format!("{TOLERATIONS}/{index}"));
        }
        for (term, expression) in &undo.affinity.expressions {
            self.remove(&format!(
                "{}/matchExpressions/{expression}",
                term_path(*term)
            ));
        }
        for term in &undo.affinity.terms {
            self.remove(&term_path(*term));
        }
        if undo.affinity.required {
            self.remove(&format!("{NODE_AFFINITY}/{REQUIRED}"));
        }
        for index in &undo.affinity.preferred {
            self.remove(&format!("{NODE_AFFINITY}/{PREFERRED}/{index}"));
        }
    }
}

fn term_path(index: usize) -> String {
    format!("{NODE_AFFINITY}/{REQUIRED}/nodeSelectorTerms/{index}")
}

#[cfg(test)]
mod tests;
