//! Publishes Kubernetes events. Events never delay a decision: they are queued, and dropped and
//! counted when the queue is full. An event that cannot be written is dropped too.
//!
//! A repeated event continues the series of the first one, which keeps it from expiring: the API
//! server keeps events for an hour after their last change (`--event-ttl`).

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};

use quick_cache::sync::Cache;
use serde::de::IgnoredAny;
use tokio::{sync::mpsc, time::Instant};

use crate::metrics::Metrics;

use super::{
    NAME,
    api::{ApiClient, ApiError, ApiObject},
    name::NamespacedName,
    patch,
};

/// How long the same event about the same object is not repeated: well below the hour after which
/// the API server removes it.
pub const REPEAT_INTERVAL: Duration = Duration::from_mins(20);
/// Maximum number of remembered events, about a hundred bytes each.
const MAX_RECENT: usize = 8192;
/// Maximum number of queued events. While a registry is down there are a few events for each of its
/// pods.
const QUEUE_LENGTH: usize = 1024;
/// The API server's limit for a note, in bytes.
const MAX_NOTE: usize = 1024;

/// Reasons of events: a fixed set that users can filter by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantNames)]
pub enum EventReason {
    /// On a node: another tool's taint has the key and effect of archaware's taint, but another
    /// value; or the recorded taint has a key that archaware was never configured with.
    TaintConflict,
    /// On a node: another tool reverts archaware's changes of its taints.
    TaintReverted,
    /// On a node: it reports no valid architecture.
    UnknownArchitecture,
    /// On a node: the label for its architecture is missing, or differs from the architecture that
    /// the node reports.
    ArchitectureLabelDiffers,
    /// The images share no architecture.
    NoCommonArchitecture,
    /// The author selects architectures that the images do not exist for.
    ArchitectureExcluded,
    /// An annotation has an invalid value.
    InvalidAnnotation,
    /// An image could not be resolved.
    ImageNotResolved,
    /// A container asks for image selection, but keeps its image.
    ImageNotSelected,
    /// A pull secret was skipped.
    PullSecretUnusable,
    /// The failure policy made the pod tolerate every architecture.
    ToleratesEveryArchitecture,
    /// The failure policy made the pod tolerate the configured architectures.
    ToleratedByPolicy,
    /// On a DaemonSet: archaware changed its template, which starts a rollout.
    TolerationsChanged,
    /// On a DaemonSet: another writer removes archaware's tolerations from its template.
    TolerationsReverted,
    /// On a DaemonSet: its template should be changed, but `daemonSets: report` forbids it.
    TolerationsMissing,
    /// The API server rejected the change.
    ChangeRefused,
    /// A container cannot run on its node, because its image is for another architecture.
    WrongArchitecture,
    /// The pod was evicted, so that its replacement is placed by its images.
    Recreated,
    /// A rule of the configuration selects the pod, but contradicts it, so archaware ignores it.
    RuleLeftOut,
}

impl EventReason {
    /// The reason in the event.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    fn severity(self) -> &'static str {
        match self {
            Self::TolerationsChanged | Self::Recreated => "Normal",
            _ => "Warning",
        }
    }
}

struct Queued {
    reason: EventReason,
    note: String,
    regarding: ObjectReference,
    published: Published,
}

/// A series of equal events about one object.
#[derive(Clone, Debug)]
struct Published {
    /// Name of the event.
    name: String,
    /// How often it was published.
    count: i32,
    /// When it was published last.
    at: Instant,
}

/// Sends events to the queue. Cheap to clone.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Queued>,
    /// The latest events.
    published: Arc<Cache<u64, Published>>,
    metrics: Metrics,
}

/// Writes queued events. Ends when every [`Events`] is dropped.
pub struct EventWriter {
    queue: mpsc::Receiver<Queued>,
    api: ApiClient,
}

/// The sender and the event writer.
pub fn channel(api: ApiClient, metrics: Metrics) -> (Events, EventWriter) {
    let (sender, receiver) = mpsc::channel(QUEUE_LENGTH);
    let recent = Arc::new(Cache::new(MAX_RECENT));
    (
        Events {
            queue: sender,
            published: recent,
            metrics,
        },
        EventWriter {
            queue: receiver,
            api,
        },
    )
}

impl Events {
    /// Queues an event about an object. An event with the same note about the same object is not
    /// repeated within [`REPEAT_INTERVAL`].
    pub fn publish<K: ApiObject>(&self, on: &K, reason: EventReason, mut note: String) {
        let regarding = on.object_ref(&());
        note.truncate(note.floor_char_boundary(MAX_NOTE));
        let mut hasher = DefaultHasher::new();
        (&regarding.uid, &regarding.name, reason, &note).hash(&mut hasher);
        let event_hash = hasher.finish();
        let published = match self.published.get(&event_hash) {
            Some(last) if last.at.elapsed() < REPEAT_INTERVAL => return,
            Some(last) => Published {
                count: last.count.saturating_add(1),
                at: Instant::now(),
                ..last
            },
            None => Published {
                name: event_name(regarding.name.as_deref()),
                count: 1,
                at: Instant::now(),
            },
        };
        // Events only inform people, so they may be dropped.
        match self.queue.try_send(Queued {
            reason,
            note,
            regarding,
            published: published.clone(),
        }) {
            Ok(()) => self.published.insert(event_hash, published),
            Err(_) => self.metrics.event_dropped(),
        }
    }
}

impl EventWriter {
    /// Writes events until the queue is closed. kube's `Recorder` is not used: it aggregates events
    /// with the same reason and keeps only the first note.
    pub async fn run(mut self) {
        while let Some(queued) = self.queue.recv().await {
            let reason = queued.reason.as_str();
            if let Err(error) = self.write(queued).await {
                tracing::debug!(%error, reason, "event not written");
            }
        }
    }

    async fn write(&self, queued: Queued) -> Result<(), ApiError> {
        // Events about objects without namespace are stored in `default`.
        let namespace = queued.regarding.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| "default".to_owned());
        let Published { name, count, .. } = &queued.published;
        if *count > 1 {
            let series = EventSeries {
                count: *count,
                last_observed_time: MicroTime(jiff::Timestamp::now()),
            };
            let name = NamespacedName::new(&namespace, name);
            let patch = patch::event_series(&series);
            match self.api.patch::<Event>(&name, patch).await {
                // It has expired, or a user deleted it.
                Err(ApiError::NotFound(_)) => {}
                result => return result,
            }
        }
        let event = event(queued, namespace.clone());
        let created = self
            .api
            .create::<Event, IgnoredAny>(Some(&namespace), &event);
        created.await.map(|_| ())
    }
}

/// client-go's naming: object name and time.
fn event_name(object: Option<&str>) -> String {
    let now = jiff::Timestamp::now().as_nanosecond();
    format!("{}.{now:x}", object.unwrap_or(NAME))
}

fn event(queued: Queued, namespace: String) -> Event {
    let Queued {
        reason,
        note,
        regarding,
        published,
    } = queued;
    let now = jiff::Timestamp::now();
    Event {
        metadata: ObjectMeta {
            name: Some(published.name),
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
