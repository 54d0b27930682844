//! Decisions: values in, values out. Nothing here knows a client, a clock or the environment.

pub mod added;
pub mod affinity;
pub mod daemon_set;
pub mod decision;
pub mod failure;
pub mod mode;
pub mod node;
pub mod pod;
pub mod preference;
mod selector;
mod taint;
mod toleration;
mod toleration_rule;

pub use decision::Decision;
pub use mode::Mode;
pub use pod::Policy;
pub use selector::{LabelSelector, SelectorError};
pub use taint::{Effect, Taint, TaintKey, TaintKind, tolerates};
pub use toleration_rule::{
    RulePlatform, TolerationConfig, TolerationEffect, TolerationOperator, TolerationRule,
};

/// Prefix of every label and annotation of archaware.
pub mod annotation {
    /// On nodes: the taint that archaware owns.
    pub const TAINT: &str = "archaware.dev/taint";
    /// On nodes (label or annotation): `"true"` keeps archaware's taint away.
    pub const IGNORE: &str = "archaware.dev/ignore";
    /// On pods: what was decided.
    pub const DECISION: &str = "archaware.dev/decision";
    /// On pods, DaemonSet templates and namespaces: the mode.
    pub const MODE: &str = "archaware.dev/mode";
    /// On pods and DaemonSet templates: architectures that are trusted without looking at images.
    pub const ARCHITECTURES: &str = "archaware.dev/architectures";
    /// On pods and namespaces: weights of architectures that are preferred.
    pub const PREFERRED_ARCHITECTURES: &str = "archaware.dev/preferred-architectures";
    /// On pods: what archaware has added, so that a pod that is changed on its way, or made from the YAML of
    /// another one, can be decided anew.
    pub const ADDED: &str = "archaware.dev/added";
    /// On DaemonSets: the tolerations in the template that archaware owns.
    pub const TOLERATIONS: &str = "archaware.dev/tolerations";
    /// Label of namespaces: `"disabled"` keeps the webhook away.
    pub const ADMISSION: &str = "archaware.dev/admission";
    /// All of them.
    pub const PREFIX: &str = "archaware.dev/";
}

/// The scheduling gate of pods whose images were not known when they were created.
pub const GATE: &str = "archaware.dev/inspect";
