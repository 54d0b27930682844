//! Images against real servers: Debian's docker-registry with each way of authorising and securing it, real
//! containerds of every supported version, run without any privilege.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    reason = "a test that cannot go on has failed"
)]

mod content_proxy;
mod faults;
mod node_credentials;
mod registries;
mod store;
