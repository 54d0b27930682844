//! Decisions: values in, values out. Nothing here knows a client, a clock or the environment.

pub mod daemon_set;
pub mod failure;
pub mod mode;
pub mod node;
pub mod pod;
mod taint;

pub use mode::Mode;
pub use taint::{Effect, Taint, TaintKind, tolerates};

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
    /// On DaemonSets: the tolerations in the template that archaware owns.
    pub const TOLERATIONS: &str = "archaware.dev/tolerations";
    /// All of them.
    pub const PREFIX: &str = "archaware.dev/";
}
