//! Gives the templates of DaemonSets the tolerations that their images allow.

use std::{sync::Arc, time::Instant};

use kube::{Api, Client, ResourceExt};
use kube_runtime::{controller::Action, reflector::Store};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        events::{EventReason, Events},
        objects::DaemonSet,
        patch::{self, annotations},
        writer::Writer,
    },
    config::{self, Config},
    inspect::{
        Stage, Subject,
        daemon_set::{authored, images, record},
    },
    metrics::Metrics,
    placement::{
        daemon_set::{self, Change},
        pod::Decision,
    },
};

use super::{
    attempt::Attempt,
    judge::{Judge, Prior},
    startup::Seen,
};

/// The reconciler of DaemonSets.
pub(super) struct DaemonSets {
    client: Client,
    /// Otherwise it only reports.
    manage: bool,
    /// The webhook sees every change of a template, and that is enough.
    is_idle: bool,
    judge: Judge,
    writer: Writer,
    events: Events,
    metrics: Metrics,
    store: Store<DaemonSet>,
    seen: Seen,
}

/// The DaemonSet controller writes the status all the time.
pub(super) fn same(old: &DaemonSet, new: &DaemonSet) -> bool {
    old.metadata.uid == new.metadata.uid
        && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        && old.metadata.annotations == new.metadata.annotations
        && old.spec == new.spec
}

impl DaemonSets {
    pub(super) fn new(
        client: Client,
        config: &Config,
        judge: Judge,
        (writer, events, metrics): (Writer, Events, Metrics),
        store: Store<DaemonSet>,
    ) -> Arc<Self> {
        let seen = Seen::default();
        Arc::new(Self {
            client,
            manage: config.daemon_sets == config::DaemonSets::Manage,
            is_idle: config.leaves_daemon_sets(),
            judge,
            writer,
            events,
            metrics,
            store,
            seen,
        })
    }

    /// Which DaemonSets have had their first attempt.
    pub(super) fn seen(&self) -> Seen {
        self.seen.clone()
    }

    pub(super) async fn reconcile(
        self: Arc<Self>,
        set: Arc<DaemonSet>,
        stop: CancellationToken,
    ) -> Action {
        let started = Instant::now();
        let attempt = self.place(&set, &stop).await;
        self.metrics.attempt_took(started.elapsed());
        if attempt.complete {
            self.seen.mark(&*set);
        }
        attempt.action
    }

    async fn place(&self, set: &DaemonSet, stop: &CancellationToken) -> Attempt {
        if set.metadata.deletion_timestamp.is_some() || self.is_idle {
            return Attempt::complete(Action::await_change());
        }
        self.judge.sweep(&self.store);
        let template = &set.spec.template;
        let (record, images) = (record(set), images(&template.spec));
        // What was decided for these images stands until they change: no second rollout.
        let prior = match (record.is_for(&images), record.stepped_aside) {
            (false, _) => Prior::Nothing,
            (true, false) => Prior::Decided,
            (true, true) => Prior::SteppedAside,
        };
        let spec = authored(&template.spec, &record);
        let own = annotations(&template.metadata);
        let subject = Subject {
            spec: &spec,
            annotations: own,
            namespace: set.metadata.namespace.as_deref().unwrap_or_default(),
            stage: Stage::Template,
        };
        let judgement = self.judge.judge(set, subject, prior, stop).await;
        let later = judgement
            .retry
            .map_or_else(Action::await_change, Action::requeue);
        let Some(decision) = judgement.decision else {
            return Attempt::complete(later);
        };
        let aside = judgement.by_policy && decision == Decision::StepAside;
        let existing = template.spec.tolerations.as_deref().unwrap_or_default();
        let policy = self.judge.policy();
        let has = (&spec.os(), existing);
        let change = daemon_set::decide(policy, &decision, has, &record, &images, aside);
        let Some(change) = change else {
            return Attempt::complete(later);
        };
        if !self.manage {
            self.report(set, &decision);
            return Attempt::complete(later);
        }
        // Somebody else writes the same list. Taking turns with them would roll the DaemonSet for ever.
        if record.was_reverted(existing)
            && let Some(wait) = self.judge.hold_back(set, &spec)
        {
            let note = "somebody removes the tolerations that archaware adds to its template; give them \
                        to it at its source, or annotate the template with archaware.dev/mode: ignore";
            self.events
                .publish(set, EventReason::TolerationsReverted, note.to_owned());
            return Attempt::complete(Action::requeue(wait));
        }
        let attempt = self
            .change(set, change, &decision, judgement.by_policy)
            .await;
        attempt.unwrap_or_else(|| Attempt::complete(later))
    }

    fn report(&self, set: &DaemonSet, decision: &Decision) {
        let reason = EventReason::TolerationsMissing;
        if self.judge.tell_once(set, &set.spec.template.spec, reason) {
            let note = format!(
                "its images allow {}, its template tolerates something else; \
                 daemonSets: report leaves that to you",
                decision.annotation()
            );
            self.events.publish(set, reason, note);
        }
    }

    /// `None` once the change is made.
    async fn change(
        &self,
        set: &DaemonSet,
        change: Change,
        decision: &Decision,
        by_policy: bool,
    ) -> Option<Attempt> {
        let rolls = !(change.add.is_empty() && change.remove.is_empty());
        let namespace = set.metadata.namespace.as_deref().unwrap_or_default();
        let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), namespace);
        let patch = patch::daemon_set(set, change);
        let written = self.writer.patch(&api, &set.name_any(), patch).await;
        let attempt = Attempt::unless_applied(set, &written, &self.events);
        if attempt.is_none() && rolls {
            let (name, tolerated) = (
                format!("{namespace}/{}", set.name_any()),
                decision.annotation(),
            );
            tracing::info!(
                daemonset = name,
                decision = tolerated,
                by_policy,
                "template changed"
            );
            let note = format!("its template now tolerates {tolerated}; this rolls the DaemonSet");
            self.events
                .publish(set, EventReason::TolerationsChanged, note);
            if by_policy {
                self.judge.told_policy(set, decision);
            }
        }
        attempt
    }
}
