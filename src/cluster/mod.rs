//! Kubernetes: the API client, types with only the fields that are read, watches, guarded JSON
//! patches, events and the Lease. This module resolves no images, and decisions come from
//! `placement` as values.

pub mod access;
pub mod api;
pub mod cluster_nodes;
pub mod events;
pub(crate) mod evictor;
pub mod field_managers;
pub mod kinds;
pub mod lease;
pub mod name;
pub mod namespaces;
pub mod objects;
pub mod patch;
pub mod watch;
pub mod workload;
pub mod writer;

/// Name of the Lease, the Deployment and archaware's other objects.
pub const NAME: &str = "archaware";
/// Name of the Secret with the webhook's certificate.
pub const ADMISSION_SECRET: &str = "archaware-admission";
