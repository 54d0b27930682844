//! Before a node is tainted, its pods get a toleration for the taint, so that nothing changes for
//! them. Without the toleration, `NoExecute` would evict the pods; with `NoSchedule` the
//! descheduler would evict them, and an autoscaler would find no other node for them. Bound pods
//! are not watched: archaware lists them before a node gets its taint, soon afterwards, and then
//! every hour.

mod batch;
mod checks;
mod worker;

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

use crate::{
    cluster::{objects::Node, watch::Removed},
    metrics::Metrics,
    placement::Taint,
};

use checks::NodeChecks;

pub(super) use worker::Worker;

/// Requests checks of the pods of nodes, and knows their results. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct BoundPods(Arc<Shared>);

#[derive(Default)]
struct Shared {
    checks: Mutex<NodeChecks>,
    /// Notified on each request.
    changed: Notify,
}

impl BoundPods {
    /// Takes the permission to give the node this taint. Without a permission, returns false; the
    /// node is reconciled again when it gets one.
    pub(super) fn take_permission(&self, node: &Node, taint: &Taint) -> bool {
        let permitted = {
            let mut checks = self.0.checks.lock();
            checks.take_permission(uid(node), name(node), taint, Instant::now())
        };
        if !permitted {
            self.0.changed.notify_one();
        }
        permitted
    }

    /// Requests checks of the pods of a node that has this taint and keeps it.
    pub(super) fn recheck(&self, node: &Node, taint: &Taint) {
        let mut checks = self.0.checks.lock();
        checks.recheck(uid(node), name(node), taint, Instant::now());
        drop(checks);
        self.0.changed.notify_one();
    }

    /// Forgets a node that has no taint and gets none.
    pub(super) fn forget(&self, node: &Node) {
        self.0.checks.lock().forget(uid(node));
    }

    /// Forgets deleted nodes.
    pub(super) fn removed(&self, removed: &Removed<'_, Node>) {
        self.0.checks.lock().removed(removed);
    }

    /// Registers the gauge of nodes whose taint waits.
    pub(super) fn register_gauge(&self, metrics: &Metrics) {
        let requests = self.clone();
        let name = "nodes_waiting_for_bound_pods";
        let help = "Nodes that get their taint when the pods that run there tolerate it";
        metrics.register_gauges([(name, help)], move || {
            let waiting = requests.0.checks.lock().waiting();
            [vec![([], i64::try_from(waiting).unwrap_or(i64::MAX))]]
        });
    }
}

fn uid(node: &Node) -> &str {
    node.metadata.uid.as_deref().unwrap_or_default()
}

fn name(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}
