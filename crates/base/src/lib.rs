//! Small helpers that archaware's libraries share. They depend on neither platforms nor Kubernetes
//! objects.

#![warn(missing_docs)]

pub mod backoff;
pub mod bounded;
pub mod duration;
pub mod error;
pub mod expiring_cache;
pub mod files;
pub mod in_use;
pub mod json;
pub mod lines;
pub mod names;
pub mod proxy;
pub mod single_flight;
pub mod tasks;
pub mod text;
