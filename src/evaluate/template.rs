//! A DaemonSet's template. The record on the DaemonSet says which of its tolerations are archaware's, and for
//! which images.

use std::collections::BTreeSet;

use crate::{
    cluster::objects::{DaemonSet, PodSpec, annotations},
    placement::{
        annotation,
        daemon_set::{Record, View},
    },
    platform::Os,
};

use super::{Stage, Subject};

/// The template of a DaemonSet as its author wrote it, and what archaware has added.
#[derive(Clone, Debug)]
pub struct Template<'a> {
    /// The DaemonSet.
    pub set: &'a DaemonSet,
    /// The spec without the tolerations of archaware's: they say nothing of what its author wants.
    pub authored: PodSpec,
    /// What archaware owns in it.
    pub record: Record,
    /// Its images, which a decision of the failure policy is bound to.
    pub images: BTreeSet<String>,
    os: Os,
}

/// What archaware owns in a DaemonSet's template.
pub fn record(set: &DaemonSet) -> Record {
    let text = annotations(&set.metadata).get(annotation::TOLERATIONS);
    Record::parse(text.map(String::as_str))
}

impl<'a> Template<'a> {
    /// Reads the record of a DaemonSet.
    pub fn of(set: &'a DaemonSet) -> Self {
        let record = record(set);
        let mut authored = set.spec.template.spec.clone();
        if let Some(tolerations) = &mut authored.tolerations {
            tolerations.retain(|toleration| !record.tolerations.contains(toleration));
        }
        Self {
            images: authored.images().into_keys().map(str::to_owned).collect(),
            os: authored.os(),
            set,
            authored,
            record,
        }
    }

    /// What is evaluated. What the failure policy decided for these images stands until they change, and they are
    /// not looked at: each change rolls the DaemonSet.
    pub fn subject(&self) -> Subject<'_> {
        let record = &self.record;
        Subject {
            spec: &self.authored,
            annotations: annotations(&self.set.spec.template.metadata),
            namespace: self.set.metadata.namespace.as_deref().unwrap_or_default(),
            stage: Stage::Template,
            tolerated_all_by_policy: record.stepped_aside && record.is_for(&self.images),
        }
    }

    /// Its tolerations, archaware's included.
    pub fn tolerations(&self) -> &[serde_json::Value] {
        let spec = &self.set.spec.template.spec;
        spec.tolerations.as_deref().unwrap_or_default()
    }

    /// What the decision on its tolerations depends on.
    pub fn view(&self) -> View<'_> {
        View {
            os: &self.os,
            tolerations: self.tolerations(),
            images: &self.images,
            record: &self.record,
        }
    }
}
