//! A minimal registry client: gets the digest of a tag, and documents by digest. Never pulls
//! layers.

mod address;
mod auth;
mod body;
mod challenge;
mod client;
mod clients;
mod dns;
mod exchange;
mod exchange_error;
mod host_limiter;
mod hosts;
mod request;
mod settings;
mod token_endpoint;

pub(crate) use client::{Head, Registry, RegistryResponse};
pub use clients::TlsError;
pub use host_limiter::Quota;
pub use settings::{RegistryClient, TokenEndpoint};
