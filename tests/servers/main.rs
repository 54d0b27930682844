//! Images on real servers: Debian's docker-registry with every authentication and TLS setting, and
//! real containerds of every supported version, unprivileged.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    reason = "a test that cannot go on has failed"
)]

#[path = "../resolving/mod.rs"]
mod resolving;

mod content_proxy;
mod faults;
mod names;
mod node_feature_discovery;
mod operator_credentials;
mod referrers;
mod registries;
mod report;
mod store;
mod trace;
