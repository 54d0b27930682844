//! What becomes of a DaemonSet's template. The record on the DaemonSet says which of its tolerations are
//! archaware's, and for which images.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    cluster::{
        objects::{DaemonSet, PodSpec},
        patch::annotations,
    },
    placement::{
        annotation,
        daemon_set::{self, Change, Record},
        pod::Decision,
    },
};

use super::{Inspection, Inspector, Stage, Subject, Verdict};

/// The images of a template, which a stepped-aside decision is bound to.
pub fn images(spec: &PodSpec) -> BTreeSet<String> {
    spec.images().into_keys().map(str::to_owned).collect()
}

/// What archaware owns in a DaemonSet's template.
pub fn record(set: &DaemonSet) -> Record {
    Record::parse(
        annotations(&set.metadata)
            .get(annotation::TOLERATIONS)
            .map(String::as_str),
    )
}

/// The spec as its author wrote it: owned tolerations are no word of theirs, and must not end the
/// inspection.
pub fn authored(spec: &PodSpec, record: &Record) -> PodSpec {
    let mut spec = spec.clone();
    if let Some(tolerations) = &mut spec.tolerations {
        tolerations.retain(|toleration| !record.tolerations.contains(toleration));
    }
    spec
}

/// What would be done about a DaemonSet now; the inspection itself where it decides nothing.
pub async fn plan(
    set: &DaemonSet,
    inspector: &Inspector,
    of_namespace: &BTreeMap<String, String>,
) -> Result<(Option<Change>, Decision), Inspection> {
    let template = &set.spec.template;
    let (record, images) = (record(set), images(&template.spec));
    let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
    let spec = authored(&template.spec, &record);
    let subject = Subject {
        spec: &spec,
        annotations: annotations(&template.metadata),
        namespace,
        stage: Stage::Template,
    };
    let aside =
        record.stepped_aside && record.is_for(&images) && inspector.inspects(subject, of_namespace);
    let decision = if aside {
        Decision::StepAside
    } else {
        let inspection = inspector.inspect(subject, of_namespace).await;
        match inspection.verdict {
            Verdict::Decided(decision) => decision,
            _ => return Err(inspection),
        }
    };
    let existing = template.spec.tolerations.as_deref().unwrap_or_default();
    let change = daemon_set::decide(
        &inspector.policy,
        &decision,
        (&spec.os(), existing),
        &record,
        &images,
        aside,
    );
    Ok((change, decision))
}
