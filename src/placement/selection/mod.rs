//! Image selection: which of several images a container gets, by what nodes offer. A compatibility document lists images with rules;
//! the best one that some nodes satisfy is chosen, and the pod is limited to these nodes.

mod choice;
mod document;
mod expression;
mod facts;
mod opt_in;
mod rule;

pub use choice::{Choice, NodeGroup, PassedOver};
pub use document::{
    Compatibility, CompatibilityDocument, DocumentFormat, InvalidDocument, MAX_SIZE,
};
pub use expression::{Expression, InvalidExpression};
pub use facts::{Fact, NodeFacts, NodeFeatures};
pub use opt_in::{ImageSelection, InvalidSelection, requested};
pub use rule::{FeatureMatch, Rule};
