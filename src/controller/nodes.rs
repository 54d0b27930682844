//! Reconciles nodes: each gets a taint with its architecture.

use std::{collections::BTreeMap, time::Instant};

use kube_runtime::reflector::Store;

use crate::{
    cluster::objects::Node,
    evaluate::KnownKeys,
    metrics::Metrics,
    placement::node::{self, TaintPolicy},
    plan::{self, Plan, Remembered},
    platform::Architecture,
};

use super::{bound_pods::BoundPods, reconcile::ReconcileSteps};

/// The reconciler of nodes.
pub(super) struct NodeSteps {
    pub(super) policy: TaintPolicy,
    pub(super) keys: KnownKeys,
    /// Gives tolerations to the pods of a node before the node is tainted; `None` if that is not
    /// configured.
    pub(super) bound_pods: Option<BoundPods>,
}

/// Compares the relevant fields; a heartbeat changes none of them. The images in `status` are
/// compared too, because otherwise the store would not get their changes.
pub(super) fn same(old: &Node, new: &Node) -> bool {
    old.metadata.uid == new.metadata.uid
        && old.metadata.labels == new.metadata.labels
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
        && old.status == new.status
}

impl ReconcileSteps for NodeSteps {
    type Object = Node;
    /// Nothing else has to be read for a node.
    type Evaluation = ();
    const NAME: &'static str = "nodes";

    async fn evaluate(&self, node: &Node) -> Option<()> {
        node.metadata.deletion_timestamp.is_none().then_some(())
    }

    fn plan(&self, node: &Node, (): (), remembered: Remembered, now: Instant) -> Plan {
        plan::node::plan(node, &self.policy, &self.keys.get(), &remembered, now)
    }

    fn may_apply(&self, node: &Node, plan: &Plan) -> bool {
        let Some(bound_pods) = &self.bound_pods else {
            return true;
        };
        if let Some(taint) = plan.new_taint() {
            return bound_pods.take_permission(node, taint);
        }
        match node::standing(&node.view(), &self.keys.get()) {
            Some(taint) if !plan.removes_taint() => bound_pods.recheck(node, &taint),
            _ => bound_pods.forget(node),
        }
        true
    }
}

/// Registers a gauge of nodes by architecture and by whether they have archaware's taint.
pub(super) fn register_gauge(metrics: &Metrics, store: Store<Node>) {
    metrics.register_gauges(
        [(
            "nodes",
            "Nodes by architecture and by whether they have archaware's taint",
        )],
        move || {
            let mut counts: BTreeMap<(String, bool), i64> = BTreeMap::new();
            for node in store.state() {
                let view = node.view();
                // Label values are bounded: all invalid architectures are counted as one.
                let parsed = view.architecture.parse::<Architecture>();
                let name = parsed.map_or_else(|_| "unknown".to_owned(), |a| a.to_string());
                let tainted = node::recorded(view.annotations).is_some();
                *counts.entry((name, tainted)).or_default() += 1;
            }
            let sample = |((architecture, tainted), count): ((String, bool), i64)| {
                let labels = [
                    ("architecture", architecture),
                    ("tainted", tainted.to_string()),
                ];
                (labels, count)
            };
            [counts.into_iter().map(sample).collect()]
        },
    );
}
