//! The age of a pod.

use std::time::Duration;

use crate::cluster::objects::Pod;

/// Time since its creation, by the local clock.
pub(super) fn age(pod: &Pod) -> Duration {
    let created = pod.metadata.creation_timestamp.as_ref();
    let age = created.map(|time| jiff::Timestamp::now().duration_since(time.0));
    age.and_then(|age| Duration::try_from(age).ok())
        .unwrap_or_default()
}
