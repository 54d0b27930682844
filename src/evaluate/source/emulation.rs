//! Nodes that run the images by emulation.

use futures::future::BoxFuture;

use crate::{
    evaluate::{Evaluator, Subject},
    placement::{change::AffinityAccess, emulation::Emulation},
};

use super::{DemandSource, Evaluating};

/// Nodes that emulate, if the pod can be limited to them.
pub struct EmulationSource;

impl DemandSource for EmulationSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        if pod.read.is_some()
            && let Some(emulation) = emulation(evaluator, pod)
        {
            // Native nodes come first, so preferences for other architectures are dropped.
            let preferences = &mut pod.evaluation.preferences;
            preferences.retain(|name, _| emulation.native.contains(name.as_str()));
            pod.evaluation.demands.push(emulation.demand());
            pod.emulation = Some(emulation);
            evaluator.decide_by_images(pod);
        }
        None
    }
}

fn emulation(evaluator: &Evaluator, pod: &Evaluating<'_>) -> Option<Emulation> {
    let subject = pod.subject();
    let os = subject.spec.os();
    let sets = pod.evaluation.images.iter();
    let sets = sets.map(|image| &image.platforms);
    let emulation = evaluator
        .policy
        .emulation(sets, subject.spec.runtime(&os))?;
    let author = subject.spec.author_nodes();
    let helps = !author.excludes_all(&emulation.architectures());
    (helps && (can_be_limited(subject) || emulation.covers(author))).then_some(emulation)
}

/// Whether archaware can limit the pod to nodes that emulate. Terms with `matchFields` get no
/// further requirements. Existing terms of a pod behind a gate get no alternatives, because
/// Kubernetes allows them only to be narrowed.
fn can_be_limited(subject: Subject<'_>) -> bool {
    let author = subject.spec.author_nodes();
    match subject.affinity_access() {
        AffinityAccess::Open => !author.names_fields(),
        AffinityAccess::Narrowing => !author.has_terms(),
        AffinityAccess::Closed => false,
    }
}
