//! The configuration file: one YAML document, read at start. Unknown keys, wrong types and impossible
//! values are errors that name line and column.

mod admission;
mod affinity;
mod defaults;
mod duration;
mod file;
mod policy;

use std::{
    collections::{BTreeMap, BTreeSet},
    num::{NonZeroU16, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    image::Rewrite,
    placement::{
        Effect, LabelSelector, Mode, TaintKey, TaintKind, TolerationRule, failure::FailureAction,
    },
    platform::Architecture,
};

pub use admission::{
    AdmissionConfig, CertificatesConfig, ListenAddress, OnMiss, OnNoCommonArchitecture,
};
pub use affinity::{AffinityConfig, PreferenceConfig, Weight};
pub use file::{ConfigError, load, parse, schema};

/// `apiVersion` of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// The only one.
    #[default]
    #[serde(rename = "archaware.dev/v1alpha1")]
    V1Alpha1,
}

/// `kind` of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Kind {
    /// The only one.
    #[default]
    Configuration,
}

/// Everything that can be set. A key that is left out has its default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    /// Format of this file.
    pub api_version: ApiVersion,
    /// What this file is.
    pub kind: Kind,
    /// The taint on nodes.
    #[serde(default)]
    pub taint: TaintConfig,
    /// How pods are treated unless their annotations say otherwise.
    #[serde(default)]
    pub pods: PodsConfig,
    /// What to do with DaemonSets whose template tolerates too little or too much.
    #[serde(default)]
    pub daemon_sets: DaemonSets,
    /// Which further architectures' images a node's architecture can run.
    #[serde(default = "defaults::compatibility")]
    pub compatibility: BTreeMap<Architecture, Vec<Architecture>>,
    /// The only architectures that are considered; empty means no limit.
    #[serde(default)]
    pub schedulable_architectures: Vec<Architecture>,
    /// Further tolerations for pods of some platforms.
    #[serde(default)]
    pub tolerations: Vec<TolerationRule>,
    /// What is added to the node affinity of pods.
    #[serde(default)]
    pub affinity: AffinityConfig,
    /// The order at start.
    #[serde(default)]
    pub startup: StartupConfig,
    /// How images are looked up.
    #[serde(default)]
    pub resolution: ResolutionConfig,
    /// How registries are spoken to.
    #[serde(default)]
    pub registries: RegistriesConfig,
    /// The kubelet's credential provider plugins.
    #[serde(default)]
    pub credential_providers: CredentialProvidersConfig,
    /// The node's containerd.
    #[serde(default)]
    pub containerd: ContainerdConfig,
    /// How much is done at once.
    #[serde(default)]
    pub concurrency: ConcurrencyConfig,
    /// The admission webhook.
    #[serde(default)]
    pub admission: AdmissionConfig,
}

/// The taint on nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TaintConfig {
    /// Whether nodes are tainted at all. If not, taints that archaware owns are removed.
    pub manage: bool,
    /// Key of the taint; its value is the node's architecture.
    pub key: TaintKey,
    /// `NoSchedule` or `NoExecute`.
    pub effect: Effect,
    /// Only nodes of these architectures are tainted; empty means all.
    pub architectures: Vec<Architecture>,
    /// Only nodes that this label selector matches are tainted; empty means all.
    pub node_selector: LabelSelector,
}

/// How pods are treated unless their annotations say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodsConfig {
    /// What to do with pods.
    pub mode: Mode,
    /// Namespaces whose pods tolerate every architecture without being inspected.
    pub exempt_namespaces: BTreeSet<String>,
}

/// What to do with DaemonSets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum DaemonSets {
    /// Their templates get the tolerations that their images allow. This rolls them.
    #[default]
    Manage,
    /// They are left alone; a Warning event says what is missing.
    Report,
}

/// The order at start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StartupConfig {
    /// How long nodes stay untainted while the first pods and DaemonSets are looked at.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
}

/// How images are looked up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResolutionConfig {
    /// Of one request.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Of one attempt at one pod.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub budget: Duration,
    /// What is remembered.
    pub cache: CacheConfig,
    /// What happens to pods whose images cannot be looked up.
    pub failure: FailureConfig,
}

/// What is remembered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CacheConfig {
    /// Number of images.
    pub images: NonZeroUsize,
    /// How long a tag is believed.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tag_ttl: Duration,
    /// The same for `latest` and for pull policy `Always`.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub latest_ttl: Duration,
    /// Whether pods with credentials share nothing of what is found out with others.
    pub per_credential: bool,
}

/// What happens to pods whose images cannot be looked up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FailureConfig {
    /// How long to try.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub after: Duration,
    /// What to do then.
    pub action: FailureAction,
    /// For `action: tolerate`.
    pub architectures: Vec<Architecture>,
}

/// How registries are spoken to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RegistriesConfig {
    /// A docker `config.json` with credentials.
    pub docker_config: PathBuf,
    /// Certificate authorities to trust besides the system's, PEM.
    pub ca_bundle: PathBuf,
    /// Registries (`host[:port]`) that speak plain http, besides loopback.
    pub plain_http: Vec<String>,
    /// Trees of containerd's `hosts.toml` files; the first that has a registry counts.
    pub hosts_directories: Vec<PathBuf>,
    /// Whether mirrors are shown the credentials of the registry that they mirror.
    pub mirror_credentials: bool,
    /// Names that are looked for under other names, one rule after the other.
    pub rewrites: Vec<Rewrite>,
}

/// The kubelet's credential provider plugins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CredentialProvidersConfig {
    /// A `CredentialProviderConfig`, or a folder of them.
    pub config: PathBuf,
    /// Where the plugins are.
    pub bin_directory: PathBuf,
}

/// The node's containerd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerdConfig {
    /// Path of its socket; empty means that containerd is not asked.
    pub socket: PathBuf,
    /// Namespaces whose records and content are read, in this order.
    pub read_namespaces: Vec<String>,
    /// archaware's own namespace, where what was fetched survives a restart; empty means that it does not.
    pub cache_namespace: String,
}

/// How much is done at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConcurrencyConfig {
    /// Pods that are being decided, those that wait for a registry included.
    pub pods: NonZeroU16,
    /// Requests that write to the Kubernetes API.
    pub writes: NonZeroU16,
    /// Requests to one registry.
    pub per_registry: NonZeroU16,
}

impl Config {
    /// Whether DaemonSets are left to the webhook: there is no taint that their pods would need a toleration
    /// for, so none is rolled.
    pub fn leaves_daemon_sets(&self) -> bool {
        !self.taint.manage && self.tolerations.is_empty() && self.admission.enabled
    }

    /// Key and effect of the taint.
    pub fn taint_kind(&self) -> TaintKind {
        TaintKind {
            key: self.taint.key.clone().into(),
            effect: self.taint.effect,
        }
    }
}
