//! Tests on a real control plane with a real scheduler.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    reason = "a test that cannot go on has failed"
)]

mod admission;
mod autoscaling;
mod bound_pods;
mod clean;
mod configuration;
mod daemon_sets;
mod explain;
mod failure;
mod faults;
mod golden;
mod helm;
mod hostile;
mod image_uses;
mod monitoring;
mod nodes;
mod permissions;
mod placement;
mod plugin;
mod property;
mod pull_secrets;
mod real_node;
mod replicas;
mod report;
mod rules;
mod runtime_classes;
mod secrecy;
mod selection;
mod startup;
mod tutorial;
mod variants;
mod wrong_architecture;

pub(crate) use testsupport::cluster::*;
