//! Events that other programs publish about pods.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use serde::Deserialize;

use super::stored;

/// An event (`events.k8s.io/v1`).
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Event {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    /// The object of the event.
    pub regarding: Regarding,
    /// The reason in one word.
    pub reason: Option<String>,
    /// The message.
    pub note: Option<String>,
    /// Time of the last occurrence, if the source of the event counts occurrences, as the kubelet
    /// does.
    pub deprecated_last_timestamp: Option<Time>,
}

impl Event {
    /// When it happened last.
    pub fn last_time(&self) -> Option<jiff::Timestamp> {
        let last = self.deprecated_last_timestamp.as_ref();
        let time = last.or(self.metadata.creation_timestamp.as_ref())?;
        Some(time.0)
    }
}

/// The object that an event is about.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Regarding {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The part of the object, like `spec.containers{app}`.
    pub field_path: String,
}

impl Regarding {
    /// The container that it is about.
    pub fn container(&self) -> Option<&str> {
        let (_, name) = self.field_path.split_once('{')?;
        name.strip_suffix('}')
    }
}
