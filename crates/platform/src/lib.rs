//! Platforms as containerd names them, and the image documents that name platforms. Pure: no IO.

#![warn(missing_docs)]

mod architecture;
mod architectures;
mod document;
mod name;
mod set;
mod variant;

pub use architecture::{Architecture, Os, Platform, UnknownName};
pub use architectures::{Architectures, ImageArchitectures};
pub use document::{
    Artifact, Descriptor, Document, DocumentError, ImageConfig, Index, MAX_DOCUMENT, Manifest,
    Referrer, Referrers, media_type,
};
pub use set::{NoPlatformReason, PlatformSet};
pub use variant::{Variants, known_variant, with_variant};
