//! Images in an in-process registry: every kind of image and every unusual answer.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    reason = "a test that cannot go on has failed"
)]

mod answers;
mod caching;
mod compatibility;
mod connections;
mod credentials;
mod documents;
mod hostile;
mod mirrors;
mod rate_limits;
mod redirects;
mod security;

use std::time::Duration;

use archaware::image::{
    ImageError, PullPolicy, ResolveRequest, Resolved, Resolver, ResolverSettings,
    credentials::{Credential, Keyring, OperatorCredentials, ready_keyring},
    metrics::Resolutions,
    registry,
};
use testimg::FakeRegistry;

/// Short, so that hanging requests end soon; long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_millis(1500);

fn settings() -> ResolverSettings {
    let _ = rustls::crypto::ring::default_provider().install_default();
    ResolverSettings {
        registry: registry::RegistryClient {
            timeout: TIMEOUT,
            per_host: 8,
            ..Default::default()
        },
        rewrites: Vec::new(),
        images: 1000,
        tag_ttl: Duration::from_mins(10),
        latest_ttl: Duration::from_mins(10),
        per_credential: false,
    }
}

fn resolver() -> Resolver {
    resolver_with(settings())
}

fn resolver_with(settings: ResolverSettings) -> Resolver {
    let credentials = OperatorCredentials::default();
    Resolver::new(settings, None, credentials, Resolutions::default())
}

async fn resolve(resolver: &Resolver, image: &str) -> Result<Resolved, ImageError> {
    resolve_as(resolver, image, &Keyring::default()).await
}

async fn resolve_as(
    resolver: &Resolver,
    image: &str,
    keyring: &Keyring,
) -> Result<Resolved, ImageError> {
    resolve_for(resolver, image, keyring, "").await
}

async fn resolve_for(
    resolver: &Resolver,
    image: &str,
    keyring: &Keyring,
    tenant: &str,
) -> Result<Resolved, ImageError> {
    let request = ResolveRequest {
        image,
        policy: PullPolicy::IfNotPresent,
        keyring: &ready_keyring(keyring.clone()),
        tenant,
    };
    resolver.resolve(request).await
}

fn platforms(resolved: &Resolved) -> Vec<String> {
    resolved
        .platforms
        .platforms()
        .iter()
        .map(ToString::to_string)
        .collect()
}

async fn registry() -> FakeRegistry {
    FakeRegistry::start().await.expect("a free port")
}

/// A folder of `hosts.toml` files, by which one registry is a mirror of the other that may not
/// resolve tags.
fn mirrored_by(mirror: &FakeRegistry, origin: &FakeRegistry) -> tempfile::TempDir {
    let address = mirror.address();
    let hosts = format!("[host.\"http://{address}\"]\n  capabilities = [\"pull\"]\n");
    hosts_directory(origin, &hosts)
}

/// A folder of `hosts.toml` files with this file for a registry.
fn hosts_directory(origin: &FakeRegistry, hosts: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let address = origin.address();
    let port = address.rsplit(':').next().unwrap();
    let dir = root.path().join(format!("127.0.0.1_{port}_"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("hosts.toml"), hosts).unwrap();
    root
}
