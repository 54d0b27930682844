//! Image reference → platforms: references, registries, containerd, credentials and the caches
//! between them.

mod cache;
pub mod containerd;
pub mod credentials;
pub mod digest;
mod error;
pub(crate) mod flight;
pub mod reference;
pub mod registry;
mod resolver;
mod rewrite;
mod tree;

pub use error::{ImageError, Reason};
pub use reference::Reference;
pub use resolver::{PullPolicy, Request, Resolved, Resolver, Settings, Source};
pub use rewrite::Rewrite;
