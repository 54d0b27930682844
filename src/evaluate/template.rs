//! A DaemonSet's template and the annotation that records which of its tolerations archaware owns, and for which
//! images.

use std::collections::BTreeSet;

use crate::{
    cluster::objects::{DaemonSet, PodSpec, annotations},
    placement::{
        Decision, annotation,
        daemon_set::{OwnedTolerations, TemplateView},
    },
    platform::Os,
};

use super::{Stage, Subject};

/// A DaemonSet's template, split into its author's part and archaware's.
#[derive(Clone, Debug)]
pub struct Template<'a> {
    /// The DaemonSet.
    pub set: &'a DaemonSet,
    /// The spec without archaware's tolerations, as its author wrote it.
    pub without_owned: PodSpec,
    /// The tolerations that archaware owns.
    pub owned: OwnedTolerations,
    /// Images of the template. A decision of the failure policy stands until they change.
    pub images: BTreeSet<String>,
    /// The decision of the failure policy that stands.
    decided_by_policy: Option<Decision>,
    os: Os,
}

/// The tolerations that archaware owns in a DaemonSet's template.
pub fn owned_tolerations(set: &DaemonSet) -> OwnedTolerations {
    let text = annotations(&set.metadata).get(annotation::TOLERATIONS);
    OwnedTolerations::parse(text.map(String::as_str))
}

impl<'a> Template<'a> {
    /// Splits the template of a DaemonSet.
    pub fn new(set: &'a DaemonSet) -> Self {
        let owned = owned_tolerations(set);
        let mut without_owned = set.spec.template.spec.clone();
        if let Some(tolerations) = &mut without_owned.tolerations {
            tolerations.retain(|toleration| !owned.tolerations.contains(toleration));
        }
        let images = without_owned.images().into_keys().map(str::to_owned);
        let images: BTreeSet<String> = images.collect();
        let standing = owned.decision_of_policy().filter(|_| owned.is_for(&images));
        Self {
            images,
            decided_by_policy: standing,
            os: without_owned.os(),
            set,
            without_owned,
            owned,
        }
    }

    /// What is evaluated. A decision of the failure policy for these images stands until they change, because each
    /// change of the template causes a rollout.
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            spec: &self.without_owned,
            annotations: annotations(&self.set.spec.template.metadata),
            namespace: self.set.metadata.namespace.as_deref().unwrap_or_default(),
            stage: Stage::Template,
            decided_by_policy: self.decided_by_policy.as_ref(),
        }
    }

    /// All tolerations of the template.
    pub fn tolerations(&self) -> &[serde_json::Value] {
        let spec = &self.set.spec.template.spec;
        spec.tolerations.as_deref().unwrap_or_default()
    }

    /// The parts that the decision on its tolerations depends on.
    pub fn placement_view(&self) -> TemplateView<'_> {
        TemplateView {
            os: &self.os,
            tolerations: self.tolerations(),
            images: &self.images,
            record: &self.owned,
        }
    }
}
