//! Taints nodes with their architecture.

use std::{collections::BTreeMap, time::Instant};

use kube_runtime::reflector::Store;

use crate::{
    cluster::objects::Node,
    metrics::Metrics,
    placement::node::{self, Policy},
    plan::{self, ObjectState, Plan},
    platform::Architecture,
};

use super::reconcile::Reconcile;

/// What differs for nodes.
pub(super) struct Nodes {
    pub(super) policy: Policy,
}

/// A heartbeat changes none of this.
pub(super) fn same(old: &Node, new: &Node) -> bool {
    old.metadata.uid == new.metadata.uid
        && old.metadata.labels == new.metadata.labels
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
        && old.status == new.status
}

impl Reconcile for Nodes {
    type Object = Node;
    /// A node says everything itself.
    type Evaluation = ();
    const NAME: &'static str = "nodes";

    async fn evaluate(&self, node: &Node) -> Option<()> {
        node.metadata.deletion_timestamp.is_none().then_some(())
    }

    fn plan(&self, node: &Node, (): (), _: Option<ObjectState>, _: Instant) -> Plan {
        plan::node::plan(node, &self.policy)
    }
}

/// Nodes by architecture and whether they carry archaware's taint, counted when scraped.
pub(super) fn register_gauge(metrics: &Metrics, store: Store<Node>) {
    metrics.register_gauges(
        [(
            "nodes",
            "Nodes by architecture, and whether they carry a taint of archaware's",
        )],
        move || {
            let mut counts: BTreeMap<(String, bool), i64> = BTreeMap::new();
            for node in store.state() {
                let view = node.view();
                // A closed set: what is no architecture is counted as one thing.
                let parsed = view.architecture.parse::<Architecture>();
                let name = parsed.map_or_else(|_| "unknown".to_owned(), |a| a.to_string());
                let tainted = node::owned(view.annotations).is_some();
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
