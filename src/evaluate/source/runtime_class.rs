//! The runtime class whose handler runs the images.

use futures::future::BoxFuture;

use crate::{
    evaluate::{Evaluator, Stage, images::limit},
    placement::runtime_class,
};

use super::{DemandSource, Evaluating};

/// The runtime class of the pod, or the runtime class that it gets because no CPU runs all of its
/// images.
pub struct RuntimeClassSource;

impl DemandSource for RuntimeClassSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        pod.read.as_ref()?;
        let assigned = assigned(evaluator, pod);
        if let Some(class) = &assigned {
            pod.spec_mut().runtime_class_name = Some(class.clone());
            let spec = pod.subject().spec.clone();
            limit(&evaluator.policy, &spec, &mut pod.evaluation.images);
            evaluator.decide_by_images(pod);
        }
        let spec = pod.subject().spec;
        let class = spec.runtime_class_name.as_deref()?;
        let (os, images) = (spec.os(), pod.evaluation.images.iter());
        let sets = images.map(|image| &image.platforms);
        let policy = &evaluator.policy;
        let native = policy.native_architectures(sets, spec.runtime(&os));
        let mut demand = runtime_class::demand(class, native.as_ref());
        demand.class = assigned;
        if demand != runtime_class::demand(class, None) {
            pod.evaluation.demands.push(demand);
        }
        None
    }
}

/// The class that a pod gets on its creation. For an existing pod or a template it is only
/// reported.
fn assigned(evaluator: &Evaluator, pod: &mut Evaluating<'_>) -> Option<String> {
    let subject = pod.subject();
    let has_class = subject.spec.runtime_class_name.is_some();
    if has_class || !evaluator.config.assign_runtime_class || !pod.has_no_architecture() {
        return None;
    }
    let images = pod.evaluation.images.iter();
    let sets = images.map(|image| &image.platforms);
    let class = evaluator.policy.class_for(sets, &subject.spec.os());
    let class = class.map(str::to_owned);
    if subject.stage != Stage::Creation {
        pod.evaluation.lacking_class = class;
        return None;
    }
    class
}
