//! archaware keeps pods off nodes whose CPU architecture their images cannot run on.
//!
//! ```text
//!  kube API ──watch──▶ controller::pods ──images──▶ image::Resolver ──▶ containerd / registry
//!     ▲                     │    ▲                        │
//!     │                     │    └──── PlatformSets ◀─────┘
//!     │                     ▼
//!     │              placement::pod (pure) ──▶ cluster::patch ──guarded JSON patch──▶ kube API
//!     └── nodes ──▶ controller::nodes ──▶ placement::node (pure) ──▲
//! ```
//!
//! `admission` does the same to objects on their way into the API, with the same `inspect`.
//!
//! A dependency points one way: `cli` → `controller`, `admission` → `inspect` → `image`, `placement`, `cluster` →
//! `platform`.

pub mod admission;
pub mod backoff;
pub mod cli;
pub mod cluster;
pub mod config;
pub mod content_proxy;
pub mod controller;
mod duration;
pub mod error;
pub mod evaluate;
mod files;
pub mod image;
pub mod metrics;
mod names;
pub mod placement;
mod plan;
pub mod platform;
#[cfg(test)]
mod scripted_api;
pub mod server;
pub mod telemetry;
