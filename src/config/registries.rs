//! `registries` and `credentialProviders`: access to registries.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::image::{Reference, Rewrite, registry::TokenEndpoint};

use super::mistakes::Mistakes;

/// Access to registries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RegistriesConfig {
    /// Path of a `config.json` of docker with credentials.
    pub docker_config: PathBuf,
    /// Path of a PEM file with certificate authorities, besides the system's.
    pub ca_bundle: PathBuf,
    /// Registries (`host[:port]`) that speak plain HTTP, besides loopback.
    pub plain_http: Vec<String>,
    /// Folders with containerd's `hosts.toml` files; the first one that contains a registry is
    /// used.
    pub hosts_directories: Vec<PathBuf>,
    /// Whether mirrors get the credentials of the registry that they mirror.
    pub mirror_credentials: bool,
    /// Other names for images, like `{prefix: docker.io, replacement: mirror.local/hub}`, applied
    /// in order.
    pub rewrites: Vec<Rewrite>,
    /// Token servers on another domain, like `{registry: reg.example.com, host: sso.example.org}`:
    /// they get credentials of the registry.
    pub token_endpoints: Vec<TokenEndpoint>,
    /// Hosts, without port, whose names may resolve to loopback, link-local and metadata addresses.
    pub allow_local_addresses: Vec<String>,
}

impl RegistriesConfig {
    pub(super) fn check(&self, mistakes: &mut Mistakes) {
        let is_url = |name: &String| name.contains('/');
        mistakes.unless(
            !self.plain_http.iter().any(is_url),
            &["registries.plainHttp"],
            "registries.plainHttp takes host[:port], no URL",
        );
        let is_host = |name: &String| !name.is_empty() && !name.contains(['/', '@', ' ']);
        let is_endpoint = |endpoint: &TokenEndpoint| {
            is_host(&endpoint.registry) && is_host(&endpoint.host) && !endpoint.host.contains(':')
        };
        mistakes.unless(
            self.token_endpoints.iter().all(is_endpoint),
            &["registries.tokenEndpoints"],
            "registries.tokenEndpoints takes a registry (host[:port]) and the host of its token server, no URL",
        );
        let has_port = |name: &String| name.contains(':') && !name.contains("::");
        let local = &self.allow_local_addresses;
        mistakes.unless(
            local.iter().all(|name| is_host(name) && !has_port(name)),
            &["registries.allowLocalAddresses"],
            "registries.allowLocalAddresses takes hosts without port, no URL",
        );
        // Names must begin with a registry: `mirror` alone would be a user of Docker Hub.
        let names_registry = |text: &str| {
            let first = text.split('/').next().unwrap_or_default();
            Reference::parse(&format!("{text}/x")).is_ok_and(|name| name.registry() == first)
        };
        let is_usable =
            |rule: &Rewrite| names_registry(&rule.prefix) && names_registry(&rule.replacement);
        mistakes.unless(
            self.rewrites.iter().all(is_usable),
            &["registries.rewrites"],
            "registries.rewrites takes a prefix and a replacement that begin with a registry's host, like docker.io/library",
        );
    }
}

/// The kubelet's credential provider plugins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CredentialProvidersConfig {
    /// Path of the kubelet's `CredentialProviderConfig`: a file, or a folder of them.
    pub config: PathBuf,
    /// Folder of its plugins.
    pub bin_directory: PathBuf,
}

impl CredentialProvidersConfig {
    pub(super) fn check(&self, mistakes: &mut Mistakes) {
        mistakes.unless(
            self.config.as_os_str().is_empty() == self.bin_directory.as_os_str().is_empty(),
            &["credentialProviders"],
            "credentialProviders needs both config and binDirectory, or neither",
        );
    }
}
