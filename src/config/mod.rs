//! The configuration file: one YAML document, read at start. Unknown keys, wrong types and impossible values are
//! errors with line and column.

mod admission;
mod affinity;
mod contradiction;
mod defaults;
mod duration;
mod file;
mod location;
mod policy;
mod selection;

use std::{
    collections::{BTreeMap, BTreeSet},
    num::{NonZeroU16, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    image::{Rewrite, registry::TokenEndpoint},
    names::QualifiedName,
    placement::{
        Effect, LabelSelector, Mode, PodRule, RuntimeClasses, TaintKind, TolerationRule,
        UnknownVariants, emulation::Emulator, failure::FailureAction,
    },
    platform::Architecture,
};

pub use admission::{
    AdmissionConfig, CACHED_ONLY_TIMEOUT, CertificatesConfig, ListenAddress, OnMiss,
    OnNoCommonArchitecture,
};
pub use affinity::{AffinityConfig, PreferenceConfig};
pub use file::{ConfigError, load, parse, schema};
pub use selection::{AttachedDocuments, LabelPattern, OnNoMatch, PredictorConfig, SelectionConfig};

/// `apiVersion` of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// The only version.
    #[default]
    #[serde(rename = "archaware.dev/v1alpha1")]
    V1Alpha1,
}

/// `kind` of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Kind {
    /// The only kind.
    #[default]
    Configuration,
}

/// All settings. A key that is left out has its default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    /// Version of the format.
    pub api_version: ApiVersion,
    /// Always `Configuration`.
    pub kind: Kind,
    /// The taint of nodes.
    #[serde(default)]
    pub taint: TaintConfig,
    /// How pods are handled unless their annotations say otherwise.
    #[serde(default)]
    pub pods: PodsConfig,
    /// How DaemonSets are handled whose template tolerates too little or too much.
    #[serde(default)]
    pub daemon_sets: DaemonSets,
    /// What happens to pods that cannot run where they are, because an image is for another architecture.
    #[serde(default)]
    pub misplaced: Misplaced,
    /// For each node architecture, the further architectures whose images it can run.
    #[serde(default = "defaults::compatibility")]
    pub compatibility: BTreeMap<Architecture, Vec<Architecture>>,
    /// The only architectures that are considered; empty means all.
    #[serde(default)]
    pub schedulable_architectures: Vec<Architecture>,
    /// Nodes that run images of further architectures by emulation, by their labels.
    #[serde(default)]
    pub emulation: Vec<Emulator>,
    /// Additional tolerations for pods of some platforms.
    #[serde(default)]
    pub tolerations: Vec<TolerationRule>,
    /// Rules from pods to nodes.
    #[serde(default)]
    pub rules: Vec<PodRule>,
    /// The platforms that runtime classes run.
    #[serde(default)]
    pub runtime_classes: RuntimeClasses,
    /// Whether new pods without a runtime class get one of these if their images share no architecture.
    #[serde(default)]
    pub assign_runtime_class: bool,
    /// Node affinity to add to pods.
    #[serde(default)]
    pub affinity: AffinityConfig,
    /// What happens to nodes of unknown variant if an image needs more than the lowest one, e.g. `linux/amd64/v3`.
    #[serde(default)]
    pub variants: UnknownVariants,
    /// The node label whose value is the variant of the node's CPU.
    #[serde(default = "defaults::variant_label")]
    pub variant_label: QualifiedName,
    /// Behaviour at start.
    #[serde(default)]
    pub startup: StartupConfig,
    /// How images are resolved.
    #[serde(default)]
    pub resolution: ResolutionConfig,
    /// The selection of images by compatibility documents.
    #[serde(default)]
    pub selection: SelectionConfig,
    /// Access to registries.
    #[serde(default)]
    pub registries: RegistriesConfig,
    /// The kubelet's credential provider plugins.
    #[serde(default)]
    pub credential_providers: CredentialProvidersConfig,
    /// The node's containerd.
    #[serde(default)]
    pub containerd: ContainerdConfig,
    /// Limits of concurrency.
    #[serde(default)]
    pub concurrency: ConcurrencyConfig,
    /// The admission webhook.
    #[serde(default)]
    pub admission: AdmissionConfig,
}

/// The taint of nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct TaintConfig {
    /// Whether nodes are tainted. If not, taints that archaware owns are removed.
    pub manage: bool,
    /// Key of the taint. Its value is the node's architecture.
    pub key: QualifiedName,
    /// `NoSchedule` or `NoExecute`.
    pub effect: Effect,
    /// Only nodes of these architectures are tainted; empty means all.
    pub architectures: Vec<Architecture>,
    /// Only nodes that this label selector matches are tainted; empty means all.
    pub node_selector: LabelSelector,
    /// What happens to the pods that run on a node before it is tainted.
    pub bound_pods: BoundPods,
    /// Whether the value of the taint contains the variant of the node's CPU, where that is known: `amd64-v3`.
    pub variants: bool,
}

/// What happens to the pods that run on a node before it is tainted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum BoundPods {
    /// They get a toleration for the taint. With the effect `NoExecute` only those whose images can run there.
    #[default]
    Tolerate,
    /// They are not changed.
    Leave,
}

/// How pods are handled unless their annotations say otherwise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodsConfig {
    /// The mode of pods.
    pub mode: Mode,
    /// Namespaces whose pods tolerate every architecture without reading their images.
    pub exempt_namespaces: BTreeSet<String>,
}

/// How DaemonSets are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum DaemonSets {
    /// Their templates get the tolerations that their images allow, which causes a rollout.
    #[default]
    Manage,
    /// They are not changed; a Warning event reports what is missing.
    Report,
}

/// What happens to pods that cannot run where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Misplaced {
    /// A Warning event reports them.
    #[default]
    Report,
    /// Those that controllers make anew elsewhere are evicted, one after the other for each controller.
    Evict,
}

/// Behaviour at start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct StartupConfig {
    /// How long nodes stay untainted while existing pods and DaemonSets are decided first.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
}

/// How images are resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResolutionConfig {
    /// Timeout of one registry request.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Timeout of one attempt to resolve all images of a pod.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub budget: Duration,
    /// In-memory caches.
    pub cache: CacheConfig,
    /// What happens to pods whose images cannot be resolved.
    pub failure: FailureConfig,
}

/// In-memory caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CacheConfig {
    /// Maximum number of images.
    pub images: NonZeroUsize,
    /// How long a tag is used without asking again.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub tag_ttl: Duration,
    /// The same for `latest` and for pull policy `Always`.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub latest_ttl: Duration,
    /// Whether pods share answers only with pods of the same credentials. containerd is not used then, as it does not
    /// know credentials.
    pub per_credential: bool,
}

/// What happens to pods whose images cannot be resolved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct FailureConfig {
    /// Time from the first failure until the action applies.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub after: Duration,
    /// The action after that.
    pub action: FailureAction,
    /// Architectures for `action: tolerate`.
    pub architectures: Vec<Architecture>,
}

/// Access to registries.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RegistriesConfig {
    /// File with registry credentials in the format of docker's `config.json`.
    pub docker_config: PathBuf,
    /// File with certificate authorities to trust in addition to the system's, PEM.
    pub ca_bundle: PathBuf,
    /// Registries (`host[:port]`) that use plain HTTP; loopback does by default.
    pub plain_http: Vec<String>,
    /// Directories with containerd's `hosts.toml` files. The first one that contains a registry is used.
    pub hosts_directories: Vec<PathBuf>,
    /// Whether mirrors get the credentials of the registry that they mirror.
    pub mirror_credentials: bool,
    /// Rules to resolve images under other names, applied in order.
    pub rewrites: Vec<Rewrite>,
    /// Token servers on another domain than their registry, which get its credentials.
    pub token_endpoints: Vec<TokenEndpoint>,
    /// Hosts, without port, whose names may resolve to loopback and link-local addresses and to those of metadata services.
    pub allow_local_addresses: Vec<String>,
}

/// The kubelet's credential provider plugins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct CredentialProvidersConfig {
    /// A `CredentialProviderConfig` file, or a folder of them.
    pub config: PathBuf,
    /// Folder of the plugins.
    pub bin_directory: PathBuf,
}

/// The node's containerd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerdConfig {
    /// Path of its socket; empty: containerd is not used.
    pub socket: PathBuf,
    /// Namespaces whose image records and content are read, in this order.
    pub read_namespaces: Vec<String>,
    /// archaware's own namespace, where fetched documents are persisted; empty: they are not.
    pub cache_namespace: String,
}

/// Limits of concurrency.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConcurrencyConfig {
    /// Pods, and as many DaemonSets, that are resolved and decided concurrently.
    pub pods: NonZeroU16,
    /// Concurrent patches of pods, DaemonSets and nodes.
    pub writes: NonZeroU16,
    /// Concurrent requests to one registry.
    pub per_registry: NonZeroU16,
    /// Evictions in a minute, for all reasons together; those of ten seconds may happen at once.
    pub evictions_per_minute: NonZeroU16,
}

impl Config {
    /// Whether DaemonSets are left to the webhook: without a taint, their pods need no toleration, so the controller changes no template.
    pub fn webhook_handles_daemon_sets(&self) -> bool {
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
