//! Taints nodes with their architecture.

use std::{collections::BTreeMap, sync::Arc};

use kube::{Api, Client, ResourceExt};
use kube_runtime::{controller::Action, reflector::Store};

use crate::{
    cluster::{
        events::{EventReason, Events},
        objects::Node,
        patch,
        writer::Writer,
    },
    config::Config,
    metrics::Metrics,
    placement::node::{self, Policy, Problem},
};

use super::attempt::Attempt;

/// The reconciler of nodes.
pub(super) struct Nodes {
    client: Client,
    policy: Policy,
    writer: Writer,
    events: Events,
}

/// A heartbeat changes none of this.
pub(super) fn same(old: &Node, new: &Node) -> bool {
    old.metadata.uid == new.metadata.uid
        && old.metadata.labels == new.metadata.labels
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
        && old.status == new.status
}

impl Nodes {
    pub(super) fn new(
        client: Client,
        config: &Config,
        writer: Writer,
        events: Events,
    ) -> Arc<Self> {
        Arc::new(Self {
            client,
            policy: Policy::from(config),
            writer,
            events,
        })
    }

    pub(super) async fn reconcile(self: Arc<Self>, node: Arc<Node>) -> Action {
        if node.metadata.deletion_timestamp.is_some() {
            return Action::await_change();
        }
        let (change, problem) = node::decide(&self.policy, &node.view());
        if let Some(problem) = problem {
            self.report(&node, &problem);
        }
        let Some(change) = change else {
            return Action::await_change();
        };
        let name = node.name_any();
        let removed = change.remove.is_some();
        let taint = change
            .add
            .as_ref()
            .or(change.correct.as_ref().map(|(_, taint)| taint));
        let taint = taint.map(ToString::to_string);
        let api: Api<Node> = Api::all(self.client.clone());
        let written = self
            .writer
            .patch(&api, &name, patch::node(&node, change))
            .await;
        if let Some(attempt) = Attempt::unless_applied(&*node, &written, &self.events) {
            return attempt.action;
        }
        if let Some(taint) = taint {
            tracing::info!(node = name, taint, removed, "node tainted");
        } else {
            tracing::info!(node = name, removed, "node released");
        }
        Action::await_change()
    }

    fn report(&self, node: &Node, problem: &Problem) {
        let (reason, note) = describe(problem);
        tracing::warn!(node = node.name_any(), "{note}");
        self.events.publish(node, reason, note);
    }
}

/// What people are told about a node's problem.
pub(crate) fn describe(problem: &Problem) -> (EventReason, String) {
    match problem {
        Problem::Conflict { wanted, value } => (
            EventReason::TaintConflict,
            format!(
                "its taint {}={value}:{} is not archaware's and not {wanted}; it is left alone",
                wanted.kind.key,
                wanted.kind.effect.as_str()
            ),
        ),
        Problem::UnknownArchitecture => (
            EventReason::UnknownArchitecture,
            "status.nodeInfo.architecture names no architecture; the node is not tainted"
                .to_owned(),
        ),
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
                let parsed = view.architecture.parse::<crate::platform::Architecture>();
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
