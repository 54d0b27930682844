//! A DaemonSet's template. The record on the DaemonSet says which of its tolerations are archaware's, and for
//! which images.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    cluster::objects::{DaemonSet, PodSpec, annotations},
    placement::{
        Decision, Mode, annotation,
        daemon_set::{Record, View},
        mode::Rule,
        preference::Preferences,
    },
    platform::Os,
};

use super::{Evaluation, Evaluator, Stage, Subject, Verdict};

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

    /// What is evaluated.
    pub fn subject(&self) -> Subject<'_> {
        Subject {
            spec: &self.authored,
            annotations: annotations(&self.set.spec.template.metadata),
            namespace: self.set.metadata.namespace.as_deref().unwrap_or_default(),
            stage: Stage::Template,
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

impl Evaluator {
    /// Evaluates a template. What the failure policy decided for these images stands until they change, and they
    /// are not looked at: each change rolls the DaemonSet.
    pub async fn evaluate_template(
        &self,
        template: &Template<'_>,
        of_namespace: &BTreeMap<String, String>,
    ) -> Evaluation {
        let subject = template.subject();
        let record = &template.record;
        let (rule, _) = self.rule(subject, of_namespace);
        if record.stepped_aside
            && record.is_for(&template.images)
            && rule == Rule::Mode(Mode::Inspect)
        {
            return Evaluation {
                verdict: Verdict::Decided(Decision::StepAside),
                by_policy: true,
                preferences: Preferences::new(),
                invalid: Vec::new(),
                images: Vec::new(),
                unusable: BTreeSet::new(),
            };
        }
        self.evaluate(subject, of_namespace).await
    }
}
