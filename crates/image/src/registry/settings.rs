//! Settings of the registry client.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings of the registry client.
#[derive(Clone, Debug, Default)]
pub struct RegistryClient {
    /// Timeout of one request, including its body.
    pub timeout: Duration,
    /// Maximum number of concurrent requests per host.
    pub per_host: usize,
    /// Hosts (`host[:port]`) that use plain HTTP, in addition to loopback with a port other than
    /// 443.
    pub plain_http: Vec<String>,
    /// Directories with containerd's `hosts.toml` files.
    pub hosts_directories: Vec<PathBuf>,
    /// Certificate authorities in addition to the system's, PEM.
    pub ca_bundle: Option<PathBuf>,
    /// Whether mirrors get the credentials of the registry that they mirror.
    pub mirror_credentials: bool,
    /// Token servers on another domain than their registry.
    pub token_endpoints: Vec<TokenEndpoint>,
    /// Hosts whose names may resolve to local addresses.
    pub allow_local_addresses: Vec<String>,
}

/// One entry of `registries.tokenEndpoints`: a token server on another domain than its registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenEndpoint {
    /// The registry, `host[:port]`.
    pub registry: String,
    /// The host of its token server, which gets the registry's credentials.
    pub host: String,
}
