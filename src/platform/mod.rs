//! Platforms as containerd names them, and what an image's documents say about them. Pure: bytes in, values out.

mod architecture;
mod document;
mod name;
mod set;

pub use architecture::{Architecture, Os, Platform};
pub use document::{
    Config, Descriptor, Document, DocumentError, Index, MAX_DOCUMENT, Manifest, media_type,
};
pub use set::{Note, PlatformSet};
