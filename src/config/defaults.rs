//! Defaults of keys, as documented in docs/configuration.md; simple ones are beside their type.

use std::{
    collections::BTreeMap,
    net::{Ipv6Addr, SocketAddr},
    num::{NonZeroU16, NonZeroUsize},
    path::PathBuf,
    time::Duration,
};

use crate::{
    names::QualifiedName,
    placement::{
        Effect, LabelSelector, PlacementPolicy, TAINT_KEY, UnknownVariants, annotation,
        failure::FailureAction,
    },
    platform::Architecture,
};

use super::{
    AdmissionConfig, AffinityConfig, ApiVersion, BoundPods, CacheConfig, CertificatesConfig,
    ConcurrencyConfig, Config, ContainerdConfig, CredentialProvidersConfig, DaemonSets,
    FailureConfig, Kind, ListenAddress, Misplaced, OnMiss, OnNoCommonArchitecture, PodsConfig,
    RegistriesConfig, ResolutionConfig, SelectionConfig, StartupConfig, TaintConfig,
};

/// The label of a node's variant.
pub(super) fn variant_label() -> QualifiedName {
    QualifiedName::constant(annotation::VARIANT)
}

/// For each node architecture, the further architectures whose images it can run.
pub(super) fn compatibility() -> BTreeMap<Architecture, Vec<Architecture>> {
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

impl Default for TaintConfig {
    fn default() -> Self {
        Self {
            manage: true,
            key: QualifiedName::constant(TAINT_KEY),
            effect: Effect::NoSchedule,
            architectures: Vec::new(),
            node_selector: LabelSelector::default(),
            bound_pods: BoundPods::default(),
            variants: false,
        }
    }
}

impl Default for AffinityConfig {
    fn default() -> Self {
        Self {
            required: true,
            preferred: Vec::new(),
            recreate_pods: false,
        }
    }
}

impl Default for StartupConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_mins(2),
        }
    }
}

impl Default for ResolutionConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            budget: Duration::from_secs(15),
            cache: CacheConfig::default(),
            failure: FailureConfig::default(),
        }
    }
}

impl Default for CacheConfig {
    fn default() -> Self {
        Self {
            images: NonZeroUsize::MIN.saturating_add(19_999),
            tag_ttl: Duration::from_mins(10),
            latest_ttl: Duration::from_mins(1),
            per_credential: false,
        }
    }
}

impl Default for FailureConfig {
    fn default() -> Self {
        Self {
            after: Duration::from_mins(1),
            action: FailureAction::default(),
            architectures: Vec::new(),
        }
    }
}

impl Default for ContainerdConfig {
    fn default() -> Self {
        Self {
            socket: PathBuf::new(),
            read_namespaces: vec!["k8s.io".to_owned()],
            cache_namespace: "archaware".to_owned(),
        }
    }
}

impl Default for ConcurrencyConfig {
    fn default() -> Self {
        Self {
            pods: NonZeroU16::MIN.saturating_add(4095),
            writes: NonZeroU16::MIN.saturating_add(31),
            per_registry: NonZeroU16::MIN.saturating_add(7),
            evictions_per_minute: NonZeroU16::MIN.saturating_add(599),
        }
    }
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
