//! Platforms as containerd names them, and the image documents that name platforms. Pure: no IO.

mod architecture;
mod document;
mod name;
mod set;

pub use architecture::{Architecture, Os, Platform};
pub use document::{
    Descriptor, Document, DocumentError, ImageConfig, Index, MAX_DOCUMENT, Manifest, media_type,
};
pub use set::{NoPlatformReason, PlatformSet};
