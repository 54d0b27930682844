//! Image selection chooses one of several images for a container, by the features of nodes. A
//! compatibility document lists images with rules. archaware chooses the best image whose rules
//! some nodes satisfy, and limits the pod to these nodes.

mod choice;
mod document;
mod expression;
mod facts;
mod failure;
mod fits;
mod format;
mod keys;
mod limits;
mod model;
mod node_group;
mod opt_in;
mod rule;
mod variables;
mod version;
mod work;

pub use choice::{
    Candidate, CandidateOutcome, Choice, FailedRule, Fit, ImageFit, NoChoice, PassedOver, Runs,
    SelectedNodes,
};
pub use document::{Compatibility, CompatibilityDocument};
pub use expression::{Expression, InvalidExpression, WrittenExpression};
pub use facts::{Fact, NodeFacts, NodeFeatures};
pub use fits::{Fits, FitsWork, TooMuchWork};
pub use format::{DocumentFormat, FeatureRules, LabelRules, Models, of_media_type};
pub use keys::{FeatureKeys, LabelKeys};
pub(super) use limits::MAX_MEMORY;
pub use limits::{InvalidDocument, MAX_SIZE, RuleKeys};
pub use model::Model;
pub use node_group::NodeGroup;
pub use opt_in::{ImageSelection, InvalidSelection, is_requested, requested};
pub use rule::{FeatureMatch, Rule};
