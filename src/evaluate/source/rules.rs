//! Demands of the configuration's rules that select the pod.

use futures::future::BoxFuture;

use crate::{
    cluster::objects::{Namespace, labels},
    evaluate::{Evaluator, Notice, Stage, Subject},
    placement::{
        Mode,
        mode::Handling,
        rule::{self, AppliedRules, RuledPod},
    },
};

use super::{DemandSource, Evaluating};

/// The rules of the configuration that select the pod.
pub struct RuleSource;

impl DemandSource for RuleSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        let applied = applied_rules(evaluator, pod.subject(), &pod.handling, pod.namespace);
        if let Some(class) = applied.demands.class() {
            pod.spec_mut().runtime_class_name = Some(class.to_owned());
        }
        let left_out = applied.left_out.into_iter().map(Notice::RuleLeftOut);
        pod.evaluation.raised.extend(left_out);
        pod.evaluation.demands.extend(applied.demands);
        None
    }
}

/// The additions of the configuration's rules for a pod. A template gets no additions, because each
/// of its pods gets them.
pub(in crate::evaluate) fn applied_rules(
    evaluator: &Evaluator,
    subject: Subject<'_>,
    handling: &Handling,
    namespace: &Namespace,
) -> AppliedRules {
    let rules = evaluator.config.rules.as_slice();
    let is_left_alone = *handling == Handling::Mode(Mode::Ignore);
    if rules.is_empty() || is_left_alone || subject.stage == Stage::Template {
        return AppliedRules::default();
    }
    let pod = RuledPod {
        labels: subject.labels,
        namespace_labels: labels(&namespace.metadata),
        author: subject.spec.author_nodes(),
        runtime_class: subject.spec.runtime_class_name.as_deref(),
        is_new: subject.stage == Stage::Creation,
    };
    rule::apply(rules, pod)
}
