//! `admission`: the webhook.

use std::{fmt, net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::duration;

/// The admission webhook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AdmissionConfig {
    /// Whether the webhook is served.
    pub enabled: bool,
    /// Address to listen on.
    pub listen: ListenAddress,
    /// URL where the API server reaches the webhook; empty: the Service `archaware` in archaware's own namespace.
    pub url: String,
    /// The webhook's certificate.
    pub certificates: CertificatesConfig,
    /// Whether archaware puts back what its `MutatingWebhookConfiguration` needs; otherwise only the `caBundle`.
    pub manage_configuration: bool,
    /// What happens to pods whose images are not cached.
    pub on_miss: OnMiss,
    /// How long a pod's creation may wait for its images.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub budget: Duration,
    /// What happens to pods whose images share no architecture.
    pub on_no_common_architecture: OnNoCommonArchitecture,
}

/// The webhook's certificate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CertificatesConfig {
    /// File with the certificate chain, PEM, read again when it changes; empty: archaware issues its own.
    pub certificate: PathBuf,
    /// File with the private key, PEM.
    pub key: PathBuf,
    /// File with the certificate authority for the `caBundle`, PEM; empty: another tool maintains the `caBundle`.
    pub authority: PathBuf,
    /// Validity of certificates that archaware issues. They are replaced after two thirds of it.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub lifetime: Duration,
}

/// Timeout of `onMiss: pass`. Cached images resolve without waiting. A private image needs its pull secret first, which
/// takes one API call.
pub const CACHED_ONLY_TIMEOUT: Duration = Duration::from_millis(25);

impl AdmissionConfig {
    /// How long the creation of a pod waits at most.
    pub fn patience(&self) -> Duration {
        match self.on_miss {
            OnMiss::Wait | OnMiss::Gate => self.budget,
            OnMiss::Pass => CACHED_ONLY_TIMEOUT,
        }
    }
}

/// What happens to pods whose images are not cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnMiss {
    /// Wait for the images within the budget, then admit the pod unchanged; the controller completes it.
    #[default]
    Wait,
    /// Admit the pod unchanged at once; the controller completes it.
    Pass,
    /// Wait for the images within the budget, then add a scheduling gate, which the controller removes. Pods whose images
    /// share no architecture stay behind it.
    Gate,
}

/// What happens to pods whose images share no architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnNoCommonArchitecture {
    /// Admit them with a warning; they stay pending.
    #[default]
    Allow,
    /// Reject them.
    Deny,
}

/// An address to listen on; `:8443` means all addresses, as in Go.
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

/// Whether the API server accepts `url` for a webhook: https, a host, optionally a port and a path
/// (`validateWebhookURL` of `k8s.io/apiserver`).
pub(super) fn is_webhook_url(url: &str) -> bool {
    url.parse::<http::Uri>().is_ok_and(|uri| {
        uri.scheme_str() == Some("https")
            && uri.host().is_some_and(|host| !host.is_empty())
            && uri.query().is_none()
            && !url.contains(['@', '#'])
    })
}
