//! archaware keeps pods off nodes whose CPU architecture their images cannot run on.
//!
//! ```text
//!                        controller::reconcile
//!                  ┌────────────────┬───────────────┐
//!  kube API ─watch─▶ 1. evaluate ──▶ 2. plan ──────▶ 3. apply ──▶ cluster::api ──▶ kube API
//!                      │       ▲      (pure)
//!                      ▼       │ platforms
//!                  image::Resolver ──▶ containerd / registry
//! ```
//!
//! Pods, DaemonSets and nodes are reconciled in the same three steps. The webhook (`admission`) and
//! the command `archaware plan` evaluate in the same way. They keep no state per object, so instead
//! of the module `plan` they call `Subject::change` for pods, `placement::node` for nodes and
//! `plan::daemon_set::change` for DaemonSets.
//!
//! | module | purpose | does not know |
//! |---|---|---|
//! | `platform` | operating systems, architectures, image documents | IO |
//! | `placement` | decides tolerations, node affinity and taints | IO, clocks, `image`, `cluster` |
//! | `image` | image reference → platforms: containerd, registries, credentials, caches | the Kubernetes API |
//! | `config` | the configuration file | IO except reading that file |
//! | `cluster` | Kubernetes API: client, watches, Lease, events, JSON patches | `image`, `evaluate` |
//! | `evaluate` | step 1: reads, and decides by annotations or images | patches |
//! | `selection`, `sources` | image selection; the list of all sources of demands | patches |
//! | `explain` | why a pod runs, or does not run, where it is expected | IO, clocks |
//! | `report` | which architectures workloads could run on | IO, clocks |
//! | `plan` | step 2: adds the failure policy and stored state; makes the patch and events, without IO | clients, stores |
//! | `controller` | step 3: applies plans; watches, retries, leadership | HTTP servers |
//! | `admission` | the webhook, its certificate and its registration | `controller` |
//! | `content_proxy` | limits what archaware can do with a node's containerd | Kubernetes |
//! | `connections` | limits of the HTTP servers | everything else |
//! | `metrics`, `telemetry` | metrics and logs | everything else but `image` |
//! | `server` | `/metrics`, probes, log level | decisions |
//! | `cli` | the commands; builds the parts and connects them | |
//!
//! `platform`, `placement` and `image` are crates of their own, as are the small helpers in
//! `archaware_base`, so Cargo ensures that they do not depend on this crate. A module uses only
//! modules above it in the list of `tests/shape/main.rs`.

pub mod admission;
pub mod cli;
pub mod cluster;
pub mod config;
mod connections;
pub mod content_proxy;
pub mod controller;
pub mod evaluate;
pub mod explain;
pub mod metrics;
mod plan;
pub mod report;
#[cfg(test)]
mod scripted_api;
pub mod selection;
pub mod server;
pub mod sources;
pub mod telemetry;

// Re-exports the crates under the names of their folders, so that they are used like modules.
pub use archaware_base::{backoff, error};
pub use archaware_image as image;
pub use archaware_placement as placement;
pub use archaware_platform as platform;

use archaware_base::{
    bounded, duration, expiring_cache, files, json, lines, names, proxy, single_flight, tasks, text,
};
