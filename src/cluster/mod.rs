//! All Kubernetes plumbing: slim types, watches, guarded patches, events, the Lease.

pub mod access;
pub mod client;
pub mod events;
pub mod lease;
pub mod list;
pub mod namespaces;
pub mod objects;
pub mod patch;
pub mod pull_secrets;
pub mod secrets;
pub mod spec;
pub mod watch;
pub mod writer;

use std::time::Duration;

/// Of one call that is no watch. The API server's own limit for requests is a minute; what takes
/// longer than this is better tried again.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Field manager of every write.
pub const FIELD_MANAGER: &str = "archaware";
/// Name of the Lease, the Deployment and everything else of archaware's own.
pub const NAME: &str = "archaware";
/// Name of the Secret with the webhook's certificate.
pub const ADMISSION_SECRET: &str = "archaware-admission";
/// Objects per page of a list: a page of large pods is a few MiB.
pub const PAGE: u32 = 250;

/// Between once and twice `time`, at random: so that many who wait do not march in step.
pub(crate) fn spread(time: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let thousandths = u32::try_from(RandomState::new().hash_one(0) % 1000).unwrap_or_default();
    time + time * thousandths / 1000
}
