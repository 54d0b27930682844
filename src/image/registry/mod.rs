//! A minimal registry client: gets the digest of a tag, and documents by digest. Never pulls layers.

mod auth;
mod challenge;
mod client;
mod exchange;
mod host_limiter;
mod hosts;
mod request;

pub use client::RegistryClient;
pub(crate) use client::{Head, Registry, RegistryResponse};
pub use exchange::TlsError;
pub use host_limiter::Quota;
