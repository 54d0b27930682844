//! Whether the API server asks the webhook about new pods, as far as this process can tell.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kube::Resource;
use parking_lot::Mutex;

use crate::{
    cluster::{
        api::ServerClock,
        namespaces::Namespaces,
        objects::{Pod, annotations},
    },
    metrics::Metrics,
    placement::{annotation, record},
};

/// Maximum number of remembered namespaces; beyond it, the namespace with the oldest pod is
/// forgotten.
const MAX_NAMESPACES: usize = 10_000;

/// Knows whether the API server calls the webhook for a pod. Cheap to clone.
#[derive(Clone)]
pub(super) struct WebhookUse {
    pub(super) metrics: Metrics,
    pub(super) namespaces: Namespaces,
    /// archaware's own namespace.
    pub(super) own_namespace: String,
    pub(super) admitted: AdmittedPods,
    /// The clock of the API server.
    pub(super) clock: ServerClock,
}

impl WebhookUse {
    /// Whether a pod of the same namespace came through the webhook after this pod was created.
    /// Pods of other namespaces prove nothing: their authors could have forged the webhook's
    /// record, to have this pod evicted.
    pub(super) fn is_proven_since(&self, pod: &Pod) -> bool {
        let newest = self.admitted.newest(namespace_of(pod));
        created(pod).is_some_and(|created| newest.is_some_and(|newest| created < newest))
    }

    /// Whether it seems that the API server called the webhook after this pod was created: a client
    /// asked this replica, or a pod of any namespace looks as if it came through another replica.
    /// Tenants can forge both, because an API server need not identify itself to a webhook.
    pub(super) fn seems_asked_since(&self, pod: &Pod) -> bool {
        let last_asked = self.metrics.admissions.last_asked();
        let newest = self.admitted.newest_of_all();
        last_asked.is_some_and(|ago| Duration::from_secs(ago + 1) < self.clock.age(pod))
            || created(pod).is_some_and(|created| newest.is_some_and(|newest| created < newest))
    }

    /// Whether the pod's namespace is excluded from the webhook, or is not known.
    pub(super) fn is_excluded(&self, pod: &Pod) -> bool {
        let name = namespace_of(pod);
        let Some(namespace) = self.namespaces.get(name) else {
            return true;
        };
        let labels = namespace.meta().labels.as_ref();
        let admission = labels.and_then(|labels| labels.get(annotation::ADMISSION));
        name == self.own_namespace || admission.is_some_and(|value| value == "disabled")
    }
}

pub(super) fn namespace_of(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or_default()
}

/// In seconds since 1970.
fn created(pod: &Pod) -> Option<i64> {
    let created = pod.metadata.creation_timestamp.as_ref();
    created.map(|created| created.0.as_second())
}

/// For each namespace, the creation time of the newest pod that came through the webhook of some
/// replica, in seconds since 1970. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct AdmittedPods(Arc<Mutex<HashMap<String, i64>>>);

impl AdmittedPods {
    /// Remembers this pod, if a controller owns it and its annotation records required affinity
    /// from the webhook.
    pub(super) fn record(&self, pod: &Pod) {
        let added = record::read(annotations(&pod.metadata));
        let Some(created) = created(pod) else {
            return;
        };
        if added.affinity.require.is_none() || pod.controller().is_none() {
            return;
        }
        let (mut newest, namespace) = (self.0.lock(), namespace_of(pod));
        if let Some(known) = newest.get_mut(namespace) {
            *known = created.max(*known);
            return;
        }
        if newest.len() >= MAX_NAMESPACES {
            let oldest = newest.iter().min_by_key(|(_, created)| **created);
            let oldest = oldest.map(|(namespace, _)| namespace.clone());
            newest.remove(&oldest.unwrap_or_default());
        }
        newest.insert(namespace.to_owned(), created);
    }

    fn newest(&self, namespace: &str) -> Option<i64> {
        self.0.lock().get(namespace).copied()
    }

    fn newest_of_all(&self) -> Option<i64> {
        self.0.lock().values().max().copied()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A pod of a controller; `record` is the annotation of archaware's additions.
    fn pod(namespace: &str, created: &str, record: Option<&str>) -> Pod {
        let annotations = record.map(|record| json!({ annotation::ADDED: record }));
        serde_json::from_value(json!({"metadata": {
            "name": "p", "namespace": namespace, "creationTimestamp": created,
            "annotations": annotations,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r",
                "controller": true}],
        }}))
        .unwrap()
    }

    #[tokio::test]
    async fn a_forged_record_proves_nothing_about_other_namespaces() {
        let webhook = WebhookUse {
            metrics: Metrics::default(),
            namespaces: Namespaces::default(),
            own_namespace: "archaware".to_owned(),
            admitted: AdmittedPods::default(),
            clock: ServerClock::default(),
        };
        let late = pod("tenant", "2026-01-01T00:00:00Z", None);
        assert!(!webhook.seems_asked_since(&late) && !webhook.is_proven_since(&late));
        let record = r#"{"version":1,"affinity":{"require":{"architectures":["amd64"]}}}"#;
        let forged = pod("hostile", "2026-01-01T00:00:01Z", Some(record));
        webhook.admitted.record(&forged);
        assert!(webhook.seems_asked_since(&late) && !webhook.is_proven_since(&late));
        webhook
            .admitted
            .record(&pod("tenant", "2026-01-01T00:00:01Z", None));
        assert!(!webhook.is_proven_since(&late), "without a record");
        webhook
            .admitted
            .record(&pod("tenant", "2026-01-01T00:00:00Z", Some(record)));
        assert!(!webhook.is_proven_since(&late), "not newer");
        webhook
            .admitted
            .record(&pod("tenant", "2026-01-01T00:00:01Z", Some(record)));
        assert!(webhook.is_proven_since(&late));
    }
}
