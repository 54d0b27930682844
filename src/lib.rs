//! archaware keeps pods off nodes whose CPU architecture their images cannot run on.
//!
//! ```text
//!               evaluate (reads)              plan (pure)              apply
//!  kube API ──watch──▶ evaluate::Evaluator ──▶ plan::pod ──▶ controller::reconcile ──▶ cluster::api ──▶ kube API
//!                          │       ▲
//!                          ▼       │ PlatformSets
//!                      image::Resolver ──▶ containerd / registry
//! ```
//!
//! Pods, DaemonSets and nodes are reconciled in the same three steps. The webhook (`admission`) and `archaware plan`
//! evaluate in the same way. They keep no state per object, so they call `placement` for pods and nodes, and
//! `plan::daemon_set::change` for DaemonSets, instead of the whole of `plan`.
//!
//! | module | purpose | does not know |
//! |---|---|---|
//! | `platform` | operating systems, architectures, image documents | IO |
//! | `placement` | decides tolerations, node affinity and taints | IO, clocks, `image`, `cluster` |
//! | `image` | image reference → platforms: containerd, registries, credentials, caches | Kubernetes |
//! | `config` | the configuration file | IO except reading that file |
//! | `cluster` | Kubernetes API: client, watches, Lease, events, JSON patches | `image`, `evaluate` |
//! | `evaluate` | step 1: reads what a decision depends on | patches |
//! | `plan` | step 2: decides the patch, the events and when to reconcile again, without IO | clients, stores |
//! | `controller` | step 3: applies plans; watches, retries, leadership | HTTP servers |
//! | `admission` | the webhook, its certificate and its registration | `controller` |
//! | `content_proxy` | limits what archaware can do with a node's containerd | Kubernetes |
//! | `metrics`, `telemetry`, `server` | metrics, logs, `/metrics` and probes | decisions |
//! | `cli` | the commands; builds the parts and connects them | |
//!
//! A module uses only those above it in the list of `tests/shape.rs`.

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
