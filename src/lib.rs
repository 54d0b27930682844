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
//! DaemonSets and nodes go the same way. `admission` uses the first two steps for objects on their way into the API,
//! and `archaware plan` to say what would change.
//!
//! A dependency points one way: `cli` → `controller`, `admission` → `plan` → `evaluate` → `image`, `placement`,
//! `cluster` → `platform`.

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
