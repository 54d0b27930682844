//! The startup sequence: nodes are tainted only after every existing pod and DaemonSet has been
//! attempted once. An earlier taint would make all of them wait.

use std::time::Duration;

use tokio::{sync::watch, time::Instant};

use crate::cluster::objects::{DaemonSet, Pod};

use super::{PendingSyncs, initial::InitialOfKind};

/// What the startup sequence waits for.
pub(super) struct Startup {
    pub(super) pods: InitialOfKind<Pod>,
    pub(super) daemon_sets: InitialOfKind<DaemonSet>,
    /// Whether each initial list is complete.
    pub(super) lists: Vec<(&'static str, watch::Receiver<bool>)>,
    /// The longest time that pods and DaemonSets may delay tainting.
    pub(super) timeout: Duration,
}

impl Startup {
    /// Runs the sequence, then enables tainting while this process leads.
    pub(super) async fn run(
        self,
        mut leadership: watch::Receiver<bool>,
        pending: watch::Sender<PendingSyncs>,
        may_taint: watch::Sender<bool>,
    ) {
        let syncs = self.lists.into_iter().map(|(name, mut list)| {
            let pending = &pending;
            async move {
                drop(list.wait_for(|ready| *ready).await.ok()?);
                pending.send_modify(|pending| pending.retain(|other| *other != name));
                Some(())
            }
        });
        let synced = futures::future::join_all(syncs).await;
        if synced.contains(&None) {
            return;
        }
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        let started = Instant::now();
        let both = futures::future::join(self.pods.wait(), self.daemon_sets.wait());
        let in_time = tokio::time::timeout(self.timeout, both).await.is_ok();
        let pods = self.pods.objects.finish();
        let daemon_sets = self.daemon_sets.objects.finish();
        if in_time {
            let seconds = started.elapsed().as_secs_f64();
            tracing::info!(
                seconds,
                "archaware has tried to decide about every pod and DaemonSet that existed at its start; nodes may get taints now"
            );
        } else {
            tracing::warn!(
                pods,
                daemon_sets,
                "startup.timeout ended before archaware had tried to decide about every existing pod and DaemonSet; nodes may get taints now"
            );
        }
        loop {
            may_taint.send_replace(*leadership.borrow_and_update());
            if leadership.changed().await.is_err() {
                return;
            }
        }
    }
}
