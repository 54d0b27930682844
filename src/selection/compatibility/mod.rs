//! Image selection: which of several images a container gets, by what nodes offer. A compatibility document lists images with rules;
//! the best one that some nodes satisfy is chosen, and the pod is limited to these nodes.

mod choice;
mod document;
mod expression;
mod facts;
mod format;
mod keys;
mod model;
mod nodes;
mod opt_in;
mod platforms;
mod rule;
mod variables;
mod version;

pub use choice::{
    Candidate, CandidateOutcome, Choice, Fit, ImageFit, NoChoice, NodeGroup, PassedOver, Runs,
};
pub use document::{Compatibility, CompatibilityDocument, FeatureRules, LabelRules};
pub use expression::{Expression, InvalidExpression, WrittenExpression};
pub use facts::{Fact, NodeFacts, NodeFeatures};
pub(super) use format::MAX_EXPRESSIONS;
pub use format::{DocumentFormat, InvalidDocument, MAX_SIZE, RuleKeys, of_media_type};
pub use keys::{FeatureKeys, LabelKeys};
pub use model::{Model, Models};
pub use nodes::SelectedNodes;
pub use opt_in::{ImageSelection, InvalidSelection, is_requested, requested};
pub use rule::{FeatureMatch, Rule};
