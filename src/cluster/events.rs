//! Events on the objects that archaware decides about. Writing them never holds up a decision: they go
//! through a bounded queue, and what does not fit is dropped and counted.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};

use quick_cache::sync::Cache;
use serde::de::IgnoredAny;
use tokio::sync::mpsc;

use crate::metrics::Metrics;

use super::{
    NAME,
    api::{ApiClient, Kind},
};

/// Words that are remembered as told: eight bytes each.
const REMEMBERED: usize = 8192;
/// Of one process: a cluster whose registry is down has a few events for each of its pods.
const QUEUE: usize = 1024;
/// The API server's limit for a note, in bytes.
const MAX_NOTE: usize = 1024;

/// Why an event was written: a closed set, which users can filter for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventReason {
    /// On a node: a foreign taint of the same key and effect has another value.
    TaintConflict,
    /// On a node: it reports no usable architecture.
    UnknownArchitecture,
    /// The images share no architecture.
    NoCommonArchitecture,
    /// An annotation means nothing.
    InvalidAnnotation,
    /// An image could not be resolved.
    ImageNotResolved,
    /// A pull secret was passed over.
    PullSecretUnusable,
    /// The failure policy made the pod tolerate every architecture.
    SteppedAside,
    /// The failure policy made the pod tolerate the configured architectures.
    ToleratedByPolicy,
    /// On a DaemonSet: its template was changed, which rolls it.
    TolerationsChanged,
    /// On a DaemonSet: somebody keeps taking archaware's tolerations out of its template.
    TolerationsReverted,
    /// On a DaemonSet: its template should be changed, and `daemonSets: report` forbids that.
    TolerationsMissing,
    /// The API server refuses the change.
    ChangeRefused,
}

impl EventReason {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TaintConflict => "TaintConflict",
            Self::UnknownArchitecture => "UnknownArchitecture",
            Self::NoCommonArchitecture => "NoCommonArchitecture",
            Self::InvalidAnnotation => "InvalidAnnotation",
            Self::ImageNotResolved => "ImageNotResolved",
            Self::PullSecretUnusable => "PullSecretUnusable",
            Self::SteppedAside => "SteppedAside",
            Self::ToleratedByPolicy => "ToleratedByPolicy",
            Self::TolerationsChanged => "TolerationsChanged",
            Self::TolerationsReverted => "TolerationsReverted",
            Self::TolerationsMissing => "TolerationsMissing",
            Self::ChangeRefused => "ChangeRefused",
        }
    }

    fn severity(self) -> &'static str {
        match self {
            Self::TolerationsChanged => "Normal",
            _ => "Warning",
        }
    }
}

struct Queued {
    reason: EventReason,
    note: String,
    regarding: ObjectReference,
}

/// Where events are handed in. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Queued>,
    /// What was told lately: saying it again would only fill the API server.
    told: Arc<Cache<u64, ()>>,
    metrics: Metrics,
}

/// Where they are written. Ends when every [`Events`] is gone.
pub struct EventWriter {
    queue: mpsc::Receiver<Queued>,
    api: ApiClient,
}

/// The two ends.
pub fn channel(api: ApiClient, metrics: Metrics) -> (Events, EventWriter) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let told = Arc::new(Cache::new(REMEMBERED));
    (
        Events {
            queue: sender,
            told,
            metrics,
        },
        EventWriter {
            queue: receiver,
            api,
        },
    )
}

impl Events {
    /// Hands in an event on an object. The same words on the same object are written once.
    pub fn publish<K: Kind>(&self, on: &K, reason: EventReason, mut note: String) {
        let regarding = on.object_ref(&());
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        let mut hasher = DefaultHasher::new();
        (&regarding.uid, &regarding.name, reason, &note).hash(&mut hasher);
        let words = hasher.finish();
        if self.told.get(&words).is_some() {
            return;
        }
        // Dropping is safe: an event tells people, nothing depends on it.
        match self.queue.try_send(Queued {
            reason,
            note,
            regarding,
        }) {
            Ok(()) => self.told.insert(words, ()),
            Err(_) => self.metrics.event_dropped(),
        }
    }
}

impl EventWriter {
    /// Writes events until nobody can hand in any more. kube's `Recorder` is of no use here: it counts a
    /// second event of a reason up on the first one, and keeps the first one's words.
    pub async fn run(mut self) {
        while let Some(queued) = self.queue.recv().await {
            let reason = queued.reason.as_str();
            // Events on what has no namespace are kept in `default`.
            let namespace = queued.regarding.namespace.clone();
            let namespace = namespace.unwrap_or_else(|| "default".to_owned());
            let event = event(queued, namespace.clone());
            let written = self
                .api
                .create::<Event, IgnoredAny>(Some(&namespace), &event);
            if let Err(error) = written.await {
                tracing::debug!(%error, reason, "event not written");
            }
        }
    }
}

fn event(queued: Queued, namespace: String) -> Event {
    let Queued {
        reason,
        note,
        regarding,
    } = queued;
    let now = jiff::Timestamp::now();
    let name = regarding.name.as_deref().unwrap_or(NAME);
    Event {
        // As client-go names them: the object and the time.
        metadata: ObjectMeta {
            name: Some(format!("{name}.{:x}", now.as_nanosecond())),
            namespace: Some(namespace),
            ..ObjectMeta::default()
        },
        action: Some("Place".to_owned()),
        reason: Some(reason.as_str().to_owned()),
        type_: Some(reason.severity().to_owned()),
        note: Some(note),
        regarding: Some(regarding),
        event_time: Some(MicroTime(now)),
        reporting_controller: Some(NAME.to_owned()),
        reporting_instance: Some(NAME.to_owned()),
        ..Event::default()
    }
}
