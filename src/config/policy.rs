//! Converts the configuration into the policies of `placement`.

use std::path::PathBuf;

use crate::placement::{
    ConfiguredKeys, Mode, VariantPolicy,
    failure::FailurePolicy,
    node,
    pod::{PlacementPolicy, Tainted},
    preference::Preferences,
};

use super::{AffinityConfig, Config, FailureConfig, PodsConfig};

impl From<&Config> for PlacementPolicy {
    fn from(config: &Config) -> Self {
        Self {
            taint: config.taint_kind(),
            compatibility: config.compatibility.clone(),
            schedulable: config.schedulable_architectures.iter().cloned().collect(),
            tolerations: config.tolerations.clone(),
            emulation: config.emulation.clone(),
            runtime_classes: config.runtime_classes.clone(),
            requires_affinity: config.affinity.required,
            variants: config.into(),
            tainted: match &config.taint {
                taint if !taint.manage => Tainted::Only([].into()),
                taint if taint.architectures.is_empty() => Tainted::All,
                taint => Tainted::Only(taint.architectures.iter().cloned().collect()),
            },
        }
    }
}

impl From<&Config> for ConfiguredKeys {
    fn from(config: &Config) -> Self {
        let rules = config.tolerations.iter();
        Self {
            taints: [config.taint_kind().key].into(),
            tolerations: rules
                .map(|rule| rule.toleration.key.clone().into())
                .collect(),
        }
    }
}

impl From<&Config> for node::TaintPolicy {
    fn from(config: &Config) -> Self {
        Self {
            kind: config.taint.manage.then(|| config.taint_kind()),
            architectures: config.taint.architectures.iter().cloned().collect(),
            selector: config.taint.node_selector.clone(),
            variants: config.into(),
        }
    }
}

impl From<&Config> for VariantPolicy {
    fn from(config: &Config) -> Self {
        Self {
            unknown: config.variants,
            label: config.variant_label.clone().into(),
            taints: config.taint.variants,
        }
    }
}

impl From<&FailureConfig> for FailurePolicy {
    fn from(config: &FailureConfig) -> Self {
        Self {
            after: config.after,
            action: config.action,
            architectures: config.architectures.iter().cloned().collect(),
        }
    }
}

impl Config {
    /// Takes out the files that only the pods of the installation have. Returns the keys of those that are named.
    pub fn without_files(&mut self) -> Vec<&'static str> {
        let (registries, plugins) = (&mut self.registries, &mut self.credential_providers);
        let mut found = Vec::new();
        let mut take = |key, is_empty: bool| {
            if !is_empty {
                found.push(key);
            }
        };
        let taken = |path: &mut PathBuf| std::mem::take(path).as_os_str().is_empty();
        take("containerd.socket", taken(&mut self.containerd.socket));
        take(
            "registries.dockerConfig",
            taken(&mut registries.docker_config),
        );
        take("registries.caBundle", taken(&mut registries.ca_bundle));
        let directories = std::mem::take(&mut registries.hosts_directories);
        take("registries.hostsDirectories", directories.is_empty());
        take("credentialProviders.config", taken(&mut plugins.config));
        take(
            "credentialProviders.binDirectory",
            taken(&mut plugins.bin_directory),
        );
        take(
            "selection.predictor.caBundle",
            taken(&mut self.selection.predictor.ca_bundle),
        );
        found
    }
}

impl PodsConfig {
    /// The mode of pods in a namespace, unless annotations say otherwise.
    pub fn mode_in(&self, namespace: &str) -> Mode {
        if self.exempt_namespaces.contains(namespace) {
            Mode::Any
        } else {
            self.mode
        }
    }
}

impl AffinityConfig {
    /// Weights by architecture.
    pub fn preferences(&self) -> Preferences {
        let weights = self.preferred.iter();
        weights
            .map(|one| (one.architecture.clone(), one.weight.get()))
            .collect()
    }
}
