//! Image reference → platforms: references, registries, containerd, credentials and caches.
//! [`Resolver`] is the entry point. Nothing here knows Kubernetes.

#![warn(missing_docs)]

pub mod artifact;
mod cache;
pub mod containerd;
pub mod credentials;
pub mod digest;
mod error;
mod fetch_slots;
pub mod metrics;
pub mod reference;
pub mod registry;
mod resolver;
mod rewrite;
mod summary;
pub mod trace;

pub use error::{ArtifactError, ImageError, Reason};
pub use reference::Reference;
pub use resolver::{
    PullPolicy, ResolutionSource, ResolveRequest, Resolved, Resolver, ResolverSettings, SavedImage,
};
pub use rewrite::Rewrite;
