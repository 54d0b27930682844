//! Platforms as containerd names them, and the image documents that name platforms. Pure: no IO.

mod architecture;
mod architectures;
mod document;
mod name;
mod set;
mod variant;

pub use architecture::{Architecture, Os, Platform, UnknownName};
pub use architectures::Architectures;
pub use document::{
    Descriptor, Document, DocumentError, ImageConfig, Index, Layers, MAX_DOCUMENT, Manifest,
    media_type,
};
pub use set::{NoPlatformReason, PlatformSet};
pub use variant::{Variants, known_variant};
