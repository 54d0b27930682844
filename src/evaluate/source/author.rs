//! The nodes that the author of a pod selects.

use futures::future::BoxFuture;

use crate::{
    evaluate::{AuthorPod, Conflict, Evaluator, Notice, Verdict},
    placement::{
        Decision,
        affinity::on_architecture,
        change::AffinityAccess,
        demand::{Demands, Source},
        node_set::NodeSet,
    },
    platform::Architectures,
};

use super::{DemandSource, Evaluating};

/// Compares the selection of the author, and the nodes of rules, with the architectures of the
/// images, and makes no demand.
/// If no selected node runs the images, the pod has a conflict, also before all images are known:
/// an autoscaler would make nodes that the author selects, and their taint would keep the pod away.
/// If no taint keeps the pod away, the author's selection stands, and a notice reports it.
pub struct AuthorSource;

impl DemandSource for AuthorSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        let subject = pod.subject();
        let (Verdict::Decided(Decision::Architectures(set))
        | Verdict::Unresolved {
            known: Some(set), ..
        }) = &pod.evaluation.verdict
        else {
            return None;
        };
        // A rule adds affinity, which an existing pod without a gate cannot get any more.
        let rule = ruled_out(&pod.evaluation.demands, set);
        if let Some(conflict) = rule.filter(|_| subject.affinity_access() != AffinityAccess::Closed)
        {
            pod.evaluation.conflict = Some(conflict);
            pod.evaluation.verdict = Verdict::Decided(Decision::NoCommonArchitecture);
            return None;
        }
        if !subject.spec.author_nodes().excludes_all(set) {
            return None;
        }
        // archaware's own affinity is left out: the images may have changed since it was added.
        let author_pod = AuthorPod::new(subject.spec, subject.annotations);
        let author = author_pod.spec.author_nodes();
        let tolerations = author_pod.spec.tolerations.as_deref().unwrap_or_default();
        let conflict = if evaluator.policy.is_excluded(set, author, tolerations) {
            Conflict::Excluded(set.clone())
        } else if author.excludes_all(set) {
            let overruled = pod.evaluation.explain_overruled(set);
            pod.evaluation
                .raised
                .push(Notice::AuthorOverrules(overruled));
            return None;
        } else {
            Conflict::Outdated(set.clone())
        };
        pod.evaluation.conflict = Some(conflict);
        pod.evaluation.verdict = Verdict::Decided(Decision::NoCommonArchitecture);
        None
    }
}

/// The conflict with a rule that requires nodes of other architectures only.
fn ruled_out(demands: &Demands, set: &Architectures) -> Option<Conflict> {
    let nodes = NodeSet::all_of([on_architecture(set.names())]);
    demands.of_rules().find_map(|demand| {
        let Source::Rule(rule) = &demand.source else {
            return None;
        };
        let why = demand.require.disjoint(&nodes)?;
        Some(Conflict::Ruled {
            rule: rule.clone(),
            why,
            sets: [set.clone(), Architectures::default()],
        })
    })
}
