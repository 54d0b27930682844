//! The configuration file: one YAML document, read at start. Unknown keys, wrong types and
//! impossible values are errors with line and column.

mod admission;
mod affinity;
mod containerd;
mod duration;
mod file;
mod limits;
mod location;
mod mistakes;
mod pods;
mod policy;
mod reference;
mod registries;
mod resolution;
mod selection;
mod taint;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    names::{QualifiedName, is_dns_subdomain},
    placement::{
        PlacementPolicy, PodRule, RuntimeClasses, TaintKind, TolerationRule, UnknownVariants,
        annotation, emulation::Emulator, runtime_class::RuntimeClass,
    },
    platform::Architecture,
};

use mistakes::Mistakes;

pub use admission::{
    AdmissionConfig, CACHED_ONLY_TIMEOUT, CertificatesConfig, ListenAddress, OnMiss,
    OnNoCommonArchitecture,
};
pub use affinity::{AffinityConfig, PreferenceConfig};
pub use containerd::ContainerdConfig;
pub use file::{ConfigError, load, parse, schema};
pub use limits::{ConcurrencyConfig, StartupConfig};
pub use mistakes::without_effect;
pub use pods::{DaemonSets, Misplaced, PodsConfig};
pub use reference::commented;
pub use registries::{CredentialProvidersConfig, RegistriesConfig};
pub use resolution::{CacheConfig, FailureConfig, ResolutionConfig};
pub use selection::{AttachedDocuments, LabelPattern, OnNoMatch, PredictorConfig, SelectionConfig};
pub use taint::{BoundPods, TaintConfig};

/// Maximum number of rules: each is compared with each new pod.
const MAX_RULES: usize = 64;
/// Maximum number of emulators: each becomes a node affinity term of pods, and archaware writes at
/// most 16 terms (`MAX_TERMS`).
const MAX_EMULATORS: usize = 8;
/// Maximum number of node selectors of a rule: each becomes a node affinity term of the rule's
/// pods.
const MAX_NODES: usize = 16;

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
    /// How pods are handled, unless their annotations say otherwise.
    #[serde(default)]
    pub pods: PodsConfig,
    /// DaemonSets whose template tolerates too little or too much.
    #[serde(default)]
    pub daemon_sets: DaemonSets,
    /// Pods that cannot run on their node: see wrong-architecture.md.
    #[serde(default)]
    pub misplaced: Misplaced,
    /// For each node architecture, the further architectures whose images such nodes run.
    #[serde(default = "compatibility")]
    pub compatibility: BTreeMap<Architecture, Vec<Architecture>>,
    /// The only architectures that are considered; empty means all.
    #[serde(default)]
    pub schedulable_architectures: Vec<Architecture>,
    /// Nodes, selected by labels, that run images of further architectures by emulation: see
    /// runtime-classes.md.
    #[serde(default)]
    pub emulation: Vec<Emulator>,
    /// Further tolerations for pods of some platforms: see configuration.md.
    #[serde(default)]
    pub tolerations: Vec<TolerationRule>,
    /// Rules that add node affinity, tolerations or a runtime class to pods: see rules.md.
    #[serde(default)]
    pub rules: Vec<PodRule>,
    /// The platforms that runtime classes run, like `{wasmtime: {platforms: [wasi/wasm]}}`: see
    /// runtime-classes.md.
    #[serde(default)]
    pub runtime_classes: RuntimeClasses,
    /// Whether new pods without a runtime class get one of `runtimeClasses` if their images share
    /// no architecture.
    #[serde(default)]
    pub assign_runtime_class: bool,
    /// Node affinity that the webhook adds to pods: see admission.md.
    #[serde(default)]
    pub affinity: AffinityConfig,
    /// Nodes of unknown CPU level, for images that need a level, like `linux/amd64/v3`: see
    /// variants.md.
    #[serde(default)]
    pub variants: UnknownVariants,
    /// The node label whose value is the CPU level.
    #[serde(default = "variant_label")]
    pub variant_label: QualifiedName,
    /// Behaviour at start.
    #[serde(default)]
    pub startup: StartupConfig,
    /// How images are resolved.
    #[serde(default)]
    pub resolution: ResolutionConfig,
    /// Images that are chosen by compatibility documents: see image-selection.md.
    #[serde(default)]
    pub selection: SelectionConfig,
    /// Access to registries: see images.md.
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
    /// The webhook: see admission.md.
    #[serde(default)]
    pub admission: AdmissionConfig,
}

/// The default of `variantLabel`.
fn variant_label() -> QualifiedName {
    QualifiedName::constant(annotation::VARIANT)
}

/// The default of `compatibility`.
fn compatibility() -> BTreeMap<Architecture, Vec<Architecture>> {
    PlacementPolicy::default().compatibility
}

impl Default for Config {
    /// The configuration of an empty file.
    fn default() -> Self {
        Self {
            api_version: ApiVersion::default(),
            kind: Kind::default(),
            taint: TaintConfig::default(),
            pods: PodsConfig::default(),
            daemon_sets: DaemonSets::default(),
            misplaced: Misplaced::default(),
            compatibility: compatibility(),
            schedulable_architectures: Vec::new(),
            tolerations: Vec::new(),
            rules: Vec::new(),
            emulation: Vec::new(),
            runtime_classes: BTreeMap::new(),
            assign_runtime_class: false,
            affinity: AffinityConfig::default(),
            variants: UnknownVariants::default(),
            variant_label: variant_label(),
            startup: StartupConfig::default(),
            resolution: ResolutionConfig::default(),
            selection: SelectionConfig::default(),
            registries: RegistriesConfig::default(),
            credential_providers: CredentialProvidersConfig::default(),
            containerd: ContainerdConfig::default(),
            concurrency: ConcurrencyConfig::default(),
            admission: AdmissionConfig::default(),
        }
    }
}

impl Config {
    /// Whether DaemonSets are left to the webhook: without a taint, their pods need no toleration,
    /// so the controller changes no template.
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

    /// Checks the keys that have no section of their own.
    fn check(&self, mistakes: &mut Mistakes) {
        mistakes.unless(
            self.variants != UnknownVariants::Require
                || self.affinity.required
                || self.taint.variants,
            &["variants"],
            "variants: require needs affinity.required or taint.variants",
        );
        let is_class = |(name, class): (&String, &RuntimeClass)| {
            is_dns_subdomain(name) && !class.platforms.is_empty()
        };
        mistakes.unless(
            self.runtime_classes.iter().all(is_class),
            &["runtimeClasses"],
            "runtimeClasses takes names of RuntimeClass objects, each with platforms like wasi/wasm",
        );
        let emulates = |emulator: &Emulator| {
            !emulator.has_empty_selector()
                && !emulator.runs.is_empty()
                && !emulator.runs.contains(&emulator.architecture)
        };
        mistakes.unless(
            self.emulation.len() <= MAX_EMULATORS && self.emulation.iter().all(emulates),
            &["emulation"],
            "emulation takes at most 8 entries. Each needs a selector in nodes that is not empty, and in runs at least one architecture, without the entry's own",
        );
        let may_assign = !self.runtime_classes.is_empty() && self.admission.enabled;
        mistakes.unless(
            !self.assign_runtime_class || may_assign,
            &["assignRuntimeClass"],
            "assignRuntimeClass needs runtimeClasses, and admission.enabled: a class can be set only when a pod is created",
        );
    }

    fn check_rules(&self, mistakes: &mut Mistakes) {
        const KEYS: &[&str] = &["rules"];
        let rules = &self.rules;
        let names: BTreeSet<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
        mistakes.unless(
            names.len() == rules.len() && names.iter().all(|name| is_dns_subdomain(name)),
            KEYS,
            "each rule in rules needs a unique name of lowercase letters, digits, '-' and '.', like gpu-nodes",
        );
        mistakes.unless(
            rules.len() <= MAX_RULES && rules.iter().all(|rule| rule.nodes.len() <= MAX_NODES),
            KEYS,
            "rules takes at most 64 rules, and each rule at most 16 selectors in nodes",
        );
        mistakes.unless(
            !rules.iter().any(PodRule::is_empty),
            KEYS,
            "one of rules adds nothing: it needs nodes, matchNodeLabels, preferredNodes, tolerations or runtimeClass",
        );
        let classes: Vec<_> = rules
            .iter()
            .filter_map(|rule| rule.runtime_class.as_ref())
            .collect();
        mistakes.unless(
            classes.iter().all(|name| is_dns_subdomain(name)),
            KEYS,
            "runtimeClass in rules takes the name of a RuntimeClass object",
        );
        mistakes.unless(
            classes.is_empty() || self.admission.enabled,
            KEYS,
            "runtimeClass in rules needs admission.enabled: a class can be set only when a pod is created",
        );
        mistakes.unless(
            !rules.iter().any(PodRule::has_empty_selector),
            KEYS,
            "a selector in nodes or preferredNodes of rules is empty: it would select every node",
        );
        let mut tolerations = rules.iter().flat_map(|rule| &rule.tolerations);
        mistakes.unless(
            !tolerations.any(|toleration| toleration.value.contains("{arch}")),
            KEYS,
            "rules may not use {arch} in a toleration; only the key tolerations at the top level may",
        );
    }
}
