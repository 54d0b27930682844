//! Bound pods: how many get a toleration for the taint of their node, and which pods are on a node
//! whose architecture their images do not support.

use std::collections::HashMap;

use futures::{StreamExt, stream};
use kube::ResourceExt;

use crate::{
    cluster::objects::Pod,
    config::BoundPods,
    evaluate::{Evaluator, Verdict},
    placement::{Effect, Mode, NodeVariant, mode::Handling},
    plan::{
        self,
        bound_pod::{self, BoundPodPlan},
    },
    platform::with_variant,
};

use super::{
    CONCURRENCY, NamespacesByName, PlanRow, namespace_of, planned_node::PlannedNode, wait,
};

/// The planned changes of bound pods.
#[derive(Default)]
pub(super) struct PlannedPods {
    /// Pods that get a toleration, by node.
    pub(super) tolerated: HashMap<String, usize>,
    /// Pods on the wrong architecture, and those that a taint evicts.
    pub(super) rows: Vec<PlanRow>,
}

/// The planned change of one pod.
struct PlannedPod {
    is_tolerated: bool,
    row: Option<PlanRow>,
}

pub(super) async fn plan(
    pods: Vec<Pod>,
    nodes: &[PlannedNode<'_>],
    evaluator: &Evaluator,
    namespaces: &NamespacesByName,
) -> PlannedPods {
    let nodes: HashMap<String, &PlannedNode<'_>> = nodes
        .iter()
        .map(|node| (node.node.name_any(), node))
        .collect();
    let plans = stream::iter(pods).map(|pod| {
        let name = pod.spec.node_name.clone().unwrap_or_default();
        let node = nodes.get(&name).copied();
        async move {
            let planned = of_pod(&pod, node?, evaluator, namespaces).await;
            Some((name, planned))
        }
    });
    let mut planned = PlannedPods::default();
    let mut plans = plans.buffer_unordered(CONCURRENCY);
    while let Some(plan) = plans.next().await {
        let Some((node, pod)) = plan else {
            continue;
        };
        if pod.is_tolerated {
            *planned.tolerated.entry(node).or_default() += 1;
        }
        planned.rows.extend(pod.row);
    }
    planned
}

async fn of_pod(
    pod: &Pod,
    node: &PlannedNode<'_>,
    evaluator: &Evaluator,
    namespaces: &NamespacesByName,
) -> PlannedPod {
    let (subject, view) = (plan::pod::subject(pod), node.node.view());
    let policy = &evaluator.policy;
    let namespace = namespace_of(pod, namespaces);
    let mut evaluation = evaluator.evaluate(subject, namespace).await;
    let (handling, ..) = evaluator.handling(subject, namespace);
    if handling == Handling::Mode(Mode::Inspect) && matches!(evaluation.verdict, Verdict::Skip) {
        // The pod tolerates every architecture, so the evaluation did not resolve its images. But
        // nothing kept the pod away from a node where they do not run.
        evaluation.images = evaluator.resolve_all(subject).await.images;
    }
    let platform = policy.node_platform(&view);
    let is_misplaced = bound_pod::is_misplaced(&evaluation, policy, platform, handling.stated());
    let images = || {
        let why = match handling.stated() {
            Some(stated) => format!("its author states {}", stated.join(", ")),
            None => format!("its images: {}", evaluation.list_images()),
        };
        let node = with_variant(view.architecture, platform.variant.map(NodeVariant::name));
        format!("it runs on {node}; {why}")
    };
    let misplaced = || {
        let unknown = || {
            let (_, why) = wait(&evaluation)?;
            let node = view.architecture;
            let detail =
                format!("it is not known whether its images run on {node}, where it runs: {why}");
            Some(("unknown", detail))
        };
        is_misplaced
            .then(|| ("misplaced", images()))
            .or_else(unknown)
    };
    let planned = |is_tolerated, row: Option<(&'static str, String)>| PlannedPod {
        is_tolerated,
        row: row.map(|(action, detail)| PlanRow::new("Pod", pod, action, detail)),
    };
    let taint = node.taint.as_ref();
    let Some(taint) = taint.filter(|taint| bound_pod::lacks_toleration(pod, taint)) else {
        return planned(false, misplaced());
    };
    let evicts = taint.kind.effect == Effect::NoExecute;
    let leaves = evaluator.config.taint.bound_pods == BoundPods::Leave;
    let is_ignored = evaluator.is_ignored(subject, namespace);
    let is_repelled = evicts && bound_pod::is_repelled(&evaluation, policy, taint);
    let plan = bound_pod::plan(is_ignored || leaves, is_repelled);
    let row = match plan {
        BoundPodPlan::Repelled => Some(("evict", format!("by {taint}: {}", images()))),
        BoundPodPlan::Ignored if evicts => Some(("evict", format!("does not tolerate {taint}"))),
        BoundPodPlan::Tolerated | BoundPodPlan::Ignored => misplaced(),
    };
    planned(plan == BoundPodPlan::Tolerated, row)
}
