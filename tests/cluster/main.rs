//! On a real control plane, with the real scheduler: where pods really land.

mod clean;
mod configuration;
mod daemon_sets;
mod failure;
mod nodes;
mod permissions;
mod placement;
mod property;
mod real_node;
mod resilience;
mod startup;
mod support;

pub(crate) use support::*;
