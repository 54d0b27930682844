//! A thin registry client: the digest of a tag, and documents by digest. Nothing is pulled.

mod auth;
mod challenge;
mod client;
mod exchange;
mod gate;
mod hosts;
mod question;

pub use client::Settings;
pub(crate) use client::{Answer, Head, Registry};
pub use exchange::TlsError;
pub use gate::Quota;
