//! All Kubernetes plumbing: the one way to the API server, slim types, watches, guarded patches, events, the
//! Lease.

pub mod access;
pub mod api;
pub mod events;
pub mod lease;
pub mod name;
pub mod namespaces;
pub mod objects;
pub mod patch;
pub mod watch;
pub mod writer;

/// Name of the Lease, the Deployment and everything else of archaware's own.
pub const NAME: &str = "archaware";
/// Name of the Secret with the webhook's certificate.
pub const ADMISSION_SECRET: &str = "archaware-admission";
