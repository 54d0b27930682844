//! The pods that run: how many get a toleration for the taint of their node, and which run where their images cannot.

use std::collections::HashMap;

use futures::{StreamExt, stream};
use kube::ResourceExt;

use crate::{
    cluster::objects::Pod,
    config::BoundPods,
    evaluate::Evaluator,
    placement::{Effect, Taint},
    plan,
};

use super::{AnnotationsByNamespace, CONCURRENCY, PlanRow, nodes::PlannedNode, of_namespace};

/// What happens to the pods that run.
#[derive(Default)]
pub(super) struct Looked {
    /// Pods that get a toleration, by node.
    pub(super) tolerated: HashMap<String, usize>,
    /// Pods on the wrong architecture, and those that a taint evicts.
    pub(super) rows: Vec<PlanRow>,
}

/// What happens to one of them.
struct Fate {
    is_tolerated: bool,
    row: Option<PlanRow>,
}

pub(super) async fn look(
    pods: Vec<Pod>,
    nodes: &[PlannedNode<'_>],
    evaluator: &Evaluator,
    namespaces: &AnnotationsByNamespace,
) -> Looked {
    let nodes: HashMap<String, &PlannedNode<'_>> = nodes
        .iter()
        .map(|node| (node.node.name_any(), node))
        .collect();
    let fates = stream::iter(pods).map(|pod| {
        let name = pod.spec.node_name.clone().unwrap_or_default();
        let node = nodes.get(&name).copied();
        async move {
            let node = node?;
            let architecture = node.node.view().architecture;
            let fate = fate(
                &pod,
                architecture,
                node.taint.as_ref(),
                evaluator,
                namespaces,
            );
            Some((name, fate.await))
        }
    });
    let mut looked = Looked::default();
    let mut fates = fates.buffer_unordered(CONCURRENCY);
    while let Some(fate) = fates.next().await {
        let Some((node, fate)) = fate else {
            continue;
        };
        if fate.is_tolerated {
            *looked.tolerated.entry(node).or_default() += 1;
        }
        looked.rows.extend(fate.row);
    }
    looked
}

async fn fate(
    pod: &Pod,
    architecture: &str,
    taint: Option<&Taint>,
    evaluator: &Evaluator,
    namespaces: &AnnotationsByNamespace,
) -> Fate {
    let subject = plan::pod::subject(pod);
    let of_namespace = of_namespace(pod, namespaces);
    let evaluation = evaluator.evaluate(subject, of_namespace).await;
    let is_misplaced = plan::bound_pod::is_misplaced(&evaluation.verdict, architecture);
    let taint = taint.filter(|taint| plan::bound_pod::lacks_toleration(pod, taint));
    let evicting = taint.filter(|taint| taint.kind.effect == Effect::NoExecute);
    let is_left = evaluator.config.taint.bound_pods == BoundPods::Leave
        || evaluator.is_ignored(subject, of_namespace)
        || (is_misplaced && evicting.is_some());
    let images = || {
        format!(
            "it runs on {architecture}; its images: {}",
            evaluation.list_images()
        )
    };
    let row = match evicting.filter(|_| is_left) {
        Some(taint) if is_misplaced => Some(("evict", format!("by {taint}: {}", images()))),
        Some(taint) => Some(("evict", format!("does not tolerate {taint}"))),
        None => is_misplaced.then(|| ("misplaced", images())),
    };
    Fate {
        is_tolerated: taint.is_some() && !is_left,
        row: row.map(|(action, detail)| PlanRow::of("Pod", pod, action, detail)),
    }
}
