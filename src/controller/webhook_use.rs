//! Whether the API server asks the webhook about new pods, as far as this process can tell.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use kube::Resource;

use crate::{
    cluster::{
        api::ServerClock,
        namespaces::Namespaces,
        objects::{Pod, annotations},
    },
    metrics::Metrics,
    placement::{annotation, record},
};

/// Knows whether the API server calls the webhook for a pod. Cheap to clone.
#[derive(Clone)]
pub(super) struct WebhookUse {
    pub(super) metrics: Metrics,
    pub(super) namespaces: Namespaces,
    /// archaware's own namespace.
    pub(super) own_namespace: String,
    /// When the newest pod was created that came through the webhook, in seconds since 1970.
    pub(super) newest_admitted: Arc<AtomicI64>,
    /// Of the API server.
    pub(super) clock: ServerClock,
}

impl WebhookUse {
    /// Whether the API server called the webhook after this pod was created: this replica, or
    /// another replica, as the pods it changed prove.
    pub(super) fn is_asked_since(&self, pod: &Pod) -> bool {
        let asked = self.metrics.admissions.last_asked();
        let created = pod.metadata.creation_timestamp.as_ref();
        let newest = self.newest_admitted.load(Ordering::Relaxed);
        asked.is_some_and(|ago| Duration::from_secs(ago + 1) < self.clock.age(pod))
            || created.is_some_and(|created| created.0.as_second() < newest)
    }

    /// Whether the webhook is not asked about the pod's namespace, or may not be.
    pub(super) fn is_excluded(&self, pod: &Pod) -> bool {
        let name = pod.metadata.namespace.as_deref().unwrap_or_default();
        let Some(namespace) = self.namespaces.get(name) else {
            return true;
        };
        let labels = namespace.meta().labels.as_ref();
        let admission = labels.and_then(|labels| labels.get(annotation::ADMISSION));
        name == self.own_namespace || admission.is_some_and(|value| value == "disabled")
    }
}

/// Remembers that this pod came through the webhook of some replica, if it did.
pub(super) fn record_admission(newest: &AtomicI64, pod: &Pod) {
    let created = pod.metadata.creation_timestamp.as_ref();
    let added = record::read(annotations(&pod.metadata));
    if let Some(created) = created
        && added.affinity.require.is_some()
        && pod.controller().is_some()
    {
        newest.fetch_max(created.0.as_second(), Ordering::Relaxed);
    }
}
