//! The architectures of the images, or the architectures that the author or the mode states.

use futures::{FutureExt, future::BoxFuture};

use crate::{
    evaluate::{Conflict, Evaluator, Stage, Verdict},
    placement::{Decision, Mode, annotation, change::AffinityAccess, mode::Handling},
};

use super::{DemandSource, Evaluating, ReadImages};

/// Decides which architectures can run a pod. The following sources see the decision. This source
/// makes no demand: `PlacementPolicy::change` derives tolerations and affinity from the decision.
pub struct ArchitectureSource;

impl DemandSource for ArchitectureSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        let inspects = pod.handling == Handling::Mode(Mode::Inspect);
        if inspects && let Some(standing) = pod.subject().decided_by_policy.cloned() {
            pod.evaluation.by_policy = true;
            pod.decide(Verdict::Decided(standing));
            return None;
        }
        let verdict = match &pod.handling {
            _ if nothing_to_add(evaluator, pod) => Verdict::Skip,
            Handling::Mode(Mode::Ignore) => Verdict::Skip,
            Handling::Mode(Mode::Any) => Verdict::Decided(Decision::TolerateAll),
            Handling::Architectures(set) => {
                let policy = &evaluator.policy;
                let decision = policy.limit(set.clone());
                if decision == Decision::NoCommonArchitecture {
                    let schedulable = policy.schedulable.iter().cloned().collect();
                    pod.evaluation.conflict =
                        Some(Conflict::Disjoint(vec![set.clone(), schedulable]));
                }
                Verdict::Decided(decision)
            }
            Handling::Mode(Mode::Inspect) => return Some(by_images(evaluator, pod).boxed()),
        };
        pod.decide(verdict);
        None
    }
}

async fn by_images(evaluator: &Evaluator, pod: &mut Evaluating<'_>) {
    let subject = pod.subject();
    let is_template = subject.stage == Stage::Template;
    let (spec, namespace) = (subject.spec, subject.namespace);
    let credentials = evaluator.pull_secrets.for_pod(namespace, spec, is_template);
    let resolving = evaluator.resolve_images(spec, namespace, &credentials, pod.deadline);
    let (images, failed) = resolving.await;
    let verdict = evaluator.verdict(&images, &failed, None);
    pod.evaluation.images = images;
    pod.read = Some(ReadImages {
        credentials,
        failed,
    });
    pod.decide(verdict);
}

/// Whether the pod needs no decision, so that archaware does not ask its registry: it tolerates
/// every architecture, no rule or document affects it, and it can get neither affinity nor
/// additional tolerations (or it has them: its recorded decision is `any`).
fn nothing_to_add(evaluator: &Evaluator, pod: &Evaluating<'_>) -> bool {
    let (policy, evaluation) = (&evaluator.policy, &pod.evaluation);
    let asks = evaluation.left_out_rules().next().is_some()
        || evaluation.demands.rules().next().is_some()
        || evaluation.demands.images().next().is_some()
        || !pod.unread.is_empty();
    if asks {
        return false;
    }
    let subject = pod.subject();
    let tolerations = subject.spec.tolerations.as_deref().unwrap_or_default();
    let mut tolerations = tolerations.iter();
    let tolerates_all = tolerations.any(|toleration| policy.taint.is_tolerated_by(toleration));
    let affinity = policy.requires_affinity || !evaluation.preferences.is_empty();
    let has_additions = !policy.tolerations.is_empty()
        || (affinity && subject.affinity_access() != AffinityAccess::Closed);
    let decided = subject.annotations.get(annotation::DECISION);
    tolerates_all && (!has_additions || decided.is_some_and(|decision| decision == "any"))
}
