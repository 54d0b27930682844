//! Events on the objects that archaware decides about. Writing them never holds up a decision: they go
//! through a bounded queue, and what does not fit is dropped and counted.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Client, Resource};
use kube_runtime::events::{Event, EventType, Recorder, Reporter};
use tokio::sync::mpsc;

use crate::metrics::Metrics;

use super::{CALL_TIMEOUT, NAME};

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
    /// The failure policy made the pod tolerate every architecture.
    SteppedAside,
    /// The failure policy made the pod tolerate the configured architectures.
    ToleratedByPolicy,
    /// On a DaemonSet: its template was changed, which rolls it.
    TolerationsChanged,
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
            Self::SteppedAside => "SteppedAside",
            Self::ToleratedByPolicy => "ToleratedByPolicy",
            Self::TolerationsChanged => "TolerationsChanged",
            Self::TolerationsMissing => "TolerationsMissing",
            Self::ChangeRefused => "ChangeRefused",
        }
    }

    fn severity(self) -> EventType {
        match self {
            Self::TolerationsChanged => EventType::Normal,
            _ => EventType::Warning,
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
    metrics: Metrics,
}

/// Where they are written. Ends when every [`Events`] is gone.
pub struct EventWriter {
    queue: mpsc::Receiver<Queued>,
    recorder: Recorder,
}

/// The two ends.
pub fn channel(client: Client, metrics: Metrics) -> (Events, EventWriter) {
    let (sender, receiver) = mpsc::channel(QUEUE);
    let recorder = Recorder::new(
        client,
        Reporter {
            controller: NAME.to_owned(),
            instance: None,
        },
    );
    (
        Events {
            queue: sender,
            metrics,
        },
        EventWriter {
            queue: receiver,
            recorder,
        },
    )
}

impl Events {
    /// Hands in an event on an object. Repetitions are counted up on one Event object.
    pub fn publish<K: Resource<DynamicType = ()>>(
        &self,
        on: &K,
        reason: EventReason,
        note: String,
    ) {
        let regarding = on.object_ref(&());
        let mut note = note;
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        // Dropping is safe: an event tells people, nothing depends on it.
        if self
            .queue
            .try_send(Queued {
                reason,
                note,
                regarding,
            })
            .is_err()
        {
            self.metrics.event_dropped();
        }
    }
}

impl EventWriter {
    /// Writes events until nobody can hand in any more.
    pub async fn run(mut self) {
        while let Some(queued) = self.queue.recv().await {
            let event = Event {
                type_: queued.reason.severity(),
                reason: queued.reason.as_str().to_owned(),
                note: Some(queued.note),
                action: "Place".to_owned(),
                secondary: None,
            };
            let write = self.recorder.publish(&event, &queued.regarding);
            match tokio::time::timeout(CALL_TIMEOUT, write).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::debug!(error = %crate::image::chain(&error), reason = event.reason, "event not written");
                }
                Err(_) => tracing::debug!(reason = event.reason, "event not written in time"),
            }
        }
    }
}
