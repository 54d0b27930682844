//! Deterministic test images of every kind, malformed ones included, and a registry that answers as
//! scripted and counts requests.

mod blob;
mod catalogue;
mod elf;
mod push;
mod registry;

pub use blob::{Blob, Image};
pub use catalogue::{Expected, catalogue, find, numbered, swollen};
pub use push::{PushError, push};
pub use registry::{Auth, FakeRegistry, Script, Seen};
