//! Decides where pods may run and which taints nodes get. Pure functions on values: no client, no
//! clock, no environment.

#![warn(missing_docs)]

pub mod affinity;
pub mod affinity_change;
pub mod author_nodes;
mod configured_keys;
pub mod daemon_set;
pub mod decision;
pub mod demand;
pub mod emulation;
pub mod failure;
pub mod image_locality;
pub mod landing;
pub mod mode;
pub mod node;
pub mod node_set;
pub mod node_view;
pub mod policy;
pub mod preference;
pub mod record;
mod removal;
pub mod requirement;
pub mod rule;
pub mod runtime_class;
mod selector;
mod taint;
mod toleration;
mod toleration_rule;
mod unlabelled;
mod variants;
mod weight;

pub use configured_keys::ConfiguredKeys;
pub use decision::{DecidedBy, Decision};
pub use mode::Mode;
pub use policy::{NodePlatform, PlacementPolicy, change};
pub use rule::PodRule;
pub use runtime_class::{PodRuntime, RunBy, RuntimeClasses};
pub use selector::{LabelSelector, SelectorError};
pub use taint::{Effect, TAINT_KEY, Taint, TaintKind, is_hard, keeps_away, tolerates};
pub use toleration::covers;
pub use toleration_rule::{
    RulePlatform, TolerationConfig, TolerationEffect, TolerationOperator, TolerationRule,
};
pub use unlabelled::UnlabelledNodes;
pub use variants::{NodeVariant, UnknownVariants, VariantPolicy, suffices};
pub use weight::Weight;

/// Names of archaware's labels and annotations.
pub mod annotation {
    /// On nodes: the taint that archaware owns.
    pub const TAINT: &str = "archaware.dev/taint";
    /// On nodes, as label or annotation: `"true"` makes archaware not taint the node.
    pub const IGNORE: &str = "archaware.dev/ignore";
    /// On pods: the decision.
    pub const DECISION: &str = "archaware.dev/decision";
    /// On pods, DaemonSet templates and namespaces: the mode.
    pub const MODE: &str = "archaware.dev/mode";
    /// On pods and DaemonSet templates: the architectures to use instead of those of the images.
    pub const ARCHITECTURES: &str = "archaware.dev/architectures";
    /// On pods and namespaces: weights of preferred architectures.
    pub const PREFERRED_ARCHITECTURES: &str = "archaware.dev/preferred-architectures";
    /// On pods: what archaware added, so that the webhook can decide again for a pod that another
    /// webhook changed, or that was created from another pod's YAML.
    pub const ADDED: &str = "archaware.dev/added";
    /// On DaemonSets: the tolerations of the template that archaware owns.
    pub const TOLERATIONS: &str = "archaware.dev/tolerations";
    /// On the Lease: state that must survive a restart.
    pub const STATE: &str = "archaware.dev/state";
    /// On nodes, as label: the variant of the CPU, e.g. `v3`.
    pub const VARIANT: &str = "archaware.dev/variant";
    /// On namespaces, as label: `"disabled"` excludes the namespace from the webhook.
    pub const ADMISSION: &str = "archaware.dev/admission";
    /// On pods: prefix of an annotation name that ends with the name of a container. The value is
    /// the reference of the compatibility document that selects the image of this container.
    pub const SELECT_IMAGE: &str = "archaware.dev/select-image.";
    /// Prefix of the label and annotations of ocifit-k8s that request the selection of an image for
    /// a pod.
    pub const OCIFIT_PREFIX: &str = "oci.image.compatibilities.selection/";
    /// Common prefix of archaware's labels and annotations.
    pub const PREFIX: &str = "archaware.dev/";
}

/// A value of the configuration's types, from YAML.
#[cfg(test)]
fn yaml<T: serde::de::DeserializeOwned>(text: &str) -> T {
    serde_saphyr::from_str(text).unwrap()
}

/// Maximum length of each list in a pod that archaware handles: some of the work is proportional to
/// the product of two lists.
pub const MAX_LIST: usize = 1024;

/// The scheduling gate of pods whose images were unknown when the pod was created.
pub const GATE: &str = "archaware.dev/inspect";
