//! The admission webhook.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::duration;

/// The admission webhook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AdmissionConfig {
    /// Whether there is one.
    pub enabled: bool,
    /// Where it listens.
    pub listen: ListenAddress,
    /// Where the API server finds it; empty: the Service `archaware` in archaware's own namespace.
    pub url: String,
    /// What it shows the API server.
    pub certificates: CertificatesConfig,
    /// Whether its `MutatingWebhookConfiguration` is kept by archaware itself.
    pub manage_configuration: bool,
    /// What happens to pods whose images are not known yet.
    pub on_miss: OnMiss,
    /// How long a pod waits at most.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub budget: Duration,
    /// What happens to pods whose images share no architecture.
    pub on_no_common_architecture: OnNoCommonArchitecture,
}

/// What the webhook shows the API server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CertificatesConfig {
    /// A chain, PEM, read again when it changes; empty: archaware makes its own.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The authority that has signed it, PEM, for the API server; empty: somebody else tells it.
    pub authority: PathBuf,
    /// How long a certificate that archaware makes is good for; it is replaced after two thirds.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub lifetime: Duration,
}

/// What happens to pods whose images are not known yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnMiss {
    /// They wait within the budget, then pass.
    #[default]
    Wait,
    /// They pass; the controller completes them.
    Pass,
    /// They get a scheduling gate, which the controller removes.
    Gate,
}

/// What happens to pods whose images share no architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnNoCommonArchitecture {
    /// They are created, and wait; a warning tells their author.
    #[default]
    Allow,
    /// They are refused.
    Deny,
}

/// An address to listen on; `:8443` means every address, as in Go's servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct ListenAddress(pub SocketAddr);

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let every = text.strip_prefix(':').map(|port| format!("[::]:{port}"));
        let parsed = every.as_deref().unwrap_or(text).parse();
        parsed
            .map(Self)
            .map_err(|_| format!("{text:?} is not an address like 127.0.0.1:8443 or :8443"))
    }
}

impl TryFrom<String> for ListenAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.ip() {
            std::net::IpAddr::V6(ip) if ip.is_unspecified() => write!(f, ":{}", self.0.port()),
            _ => self.0.fmt(f),
        }
    }
}

impl From<ListenAddress> for String {
    fn from(address: ListenAddress) -> Self {
        address.to_string()
    }
}

/// Whether `url` is one that the API server takes for a webhook: https, a host, perhaps a port and a path
/// (`validateWebhookURL` of `k8s.io/apiserver`).
pub(super) fn is_webhook_url(url: &str) -> bool {
    url.parse::<http::Uri>().is_ok_and(|uri| {
        uri.scheme_str() == Some("https")
            && uri.host().is_some_and(|host| !host.is_empty())
            && uri.query().is_none()
            && !url.contains(['@', '#'])
    })
}
