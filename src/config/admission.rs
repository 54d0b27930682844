//! `admission`: the webhook.

use std::{
    fmt,
    net::{Ipv6Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{duration, mistakes::Mistakes};

/// Minimum lifetime of a certificate. It leaves time to publish the authority, and for every
/// replica to load the certificate.
const MIN_LIFETIME: Duration = Duration::from_mins(1);
/// Minimum budget. A shorter budget would mean not to wait, which `onMiss: pass` expresses.
const MIN_BUDGET: Duration = Duration::from_millis(10);
/// The API server's own limit for a webhook is 30 s, too long for the creation of a pod.
const MAX_BUDGET: Duration = Duration::from_secs(10);

/// The admission webhook.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct AdmissionConfig {
    /// Whether the webhook is served; true in the manifests.
    pub enabled: bool,
    /// The address that it listens on.
    pub listen: ListenAddress,
    /// URL at which the API server calls the webhook; empty: the Service archaware in archaware's
    /// namespace.
    pub url: String,
    /// The webhook's certificate.
    pub certificates: CertificatesConfig,
    /// Whether archaware restores its `MutatingWebhookConfiguration`; if not, it writes only the
    /// `caBundle`.
    pub manage_configuration: bool,
    /// Pods whose images are not known yet; gate in the manifests.
    pub on_miss: OnMiss,
    /// How long the creation of a pod waits for its images at most.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub budget: Duration,
    /// Pods whose images share no architecture.
    pub on_no_common_architecture: OnNoCommonArchitecture,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            listen: ListenAddress(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 8443))),
            url: String::new(),
            certificates: CertificatesConfig::default(),
            manage_configuration: true,
            on_miss: OnMiss::default(),
            budget: Duration::from_secs(1),
            on_no_common_architecture: OnNoCommonArchitecture::default(),
        }
    }
}

/// The webhook's certificate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CertificatesConfig {
    /// Path of a PEM file with the certificate chain, read again when it changes; empty: archaware
    /// issues a certificate.
    pub certificate: PathBuf,
    /// Path of a PEM file with its private key.
    pub key: PathBuf,
    /// Path of a PEM file with the authority that signed it, for the `caBundle`; empty: another
    /// tool maintains the `caBundle`.
    pub authority: PathBuf,
    /// Validity of certificates that archaware issues; they are replaced after two thirds of it.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub lifetime: Duration,
}

impl Default for CertificatesConfig {
    fn default() -> Self {
        Self {
            certificate: PathBuf::new(),
            key: PathBuf::new(),
            authority: PathBuf::new(),
            lifetime: Duration::from_hours(30 * 24),
        }
    }
}

impl CertificatesConfig {
    fn check(&self, mistakes: &mut Mistakes) {
        let is_set = |path: &PathBuf| !path.as_os_str().is_empty();
        mistakes.unless(
            is_set(&self.certificate) == is_set(&self.key),
            &["admission.certificates"],
            "admission.certificates needs both certificate and key, or neither",
        );
        mistakes.unless(
            is_set(&self.certificate) || is_set(&self.key) || !is_set(&self.authority),
            &["admission.certificates.authority"],
            "admission.certificates.authority is of no use without certificate and key",
        );
        mistakes.unless(
            self.lifetime >= MIN_LIFETIME,
            &["admission.certificates.lifetime"],
            "admission.certificates.lifetime is shorter than a minute",
        );
    }
}

/// Timeout of `onMiss: pass`. Cached images resolve without waiting. A private image needs its pull
/// secret first, which takes one API call.
pub const CACHED_ONLY_TIMEOUT: Duration = Duration::from_millis(25);

impl AdmissionConfig {
    pub(super) fn check(&self, mistakes: &mut Mistakes) {
        self.certificates.check(mistakes);
        mistakes.unless(
            self.budget >= MIN_BUDGET,
            &["admission.budget"],
            "admission.budget is shorter than 10ms: no image could ever be looked up",
        );
        mistakes.unless(
            self.budget <= MAX_BUDGET,
            &["admission.budget"],
            "admission.budget is longer than 10s, the most that a pod may wait",
        );
        mistakes.unless(
            self.url.is_empty() || is_webhook_url(&self.url),
            &["admission.url"],
            "admission.url has to be an https URL without user, query or fragment",
        );
    }

    /// How long the creation of a pod waits at most.
    pub fn patience(&self) -> Duration {
        match self.on_miss {
            OnMiss::Wait | OnMiss::Gate => self.budget,
            OnMiss::Pass => CACHED_ONLY_TIMEOUT,
        }
    }
}

/// How to treat pods whose images are not cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnMiss {
    /// Wait for the images within the budget, then admit the pod unchanged; the controller
    /// completes it.
    #[default]
    Wait,
    /// Admit the pod unchanged at once; the controller completes it.
    Pass,
    /// Wait for the images within the budget, then add a scheduling gate, which the controller
    /// removes. Pods whose images share no architecture stay behind it.
    Gate,
}

/// How to treat pods whose images share no architecture.
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
fn is_webhook_url(url: &str) -> bool {
    url.parse::<http::Uri>().is_ok_and(|uri| {
        uri.scheme_str() == Some("https")
            && uri.host().is_some_and(|host| !host.is_empty())
            && uri.query().is_none()
            && !url.contains(['@', '#'])
    })
}
