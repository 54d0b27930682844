//! Converts the configuration into the policies of `placement`.

use std::path::PathBuf;

use crate::placement::{
    ConfiguredKeys, VariantPolicy,
    failure::FailurePolicy,
    node,
    policy::{PlacementPolicy, Tainted},
};

use super::{Config, FailureConfig};

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
    /// Empties the settings of image access and image selection that name files, because these
    /// files exist only in the pods of the installation. Returns the keys of the settings that were
    /// set.
    pub fn without_files(&mut self) -> Vec<&'static str> {
        let (registries, plugins) = (&mut self.registries, &mut self.credential_providers);
        let mut found = Vec::new();
        let mut report_unless_empty = |key, is_empty: bool| {
            if !is_empty {
                found.push(key);
            }
        };
        let clear_path = |path: &mut PathBuf| std::mem::take(path).as_os_str().is_empty();
        report_unless_empty("containerd.socket", clear_path(&mut self.containerd.socket));
        report_unless_empty(
            "registries.dockerConfig",
            clear_path(&mut registries.docker_config),
        );
        report_unless_empty("registries.caBundle", clear_path(&mut registries.ca_bundle));
        let directories = std::mem::take(&mut registries.hosts_directories);
        report_unless_empty("registries.hostsDirectories", directories.is_empty());
        report_unless_empty(
            "credentialProviders.config",
            clear_path(&mut plugins.config),
        );
        report_unless_empty(
            "credentialProviders.binDirectory",
            clear_path(&mut plugins.bin_directory),
        );
        report_unless_empty(
            "selection.predictor.caBundle",
            clear_path(&mut self.selection.predictor.ca_bundle),
        );
        found
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::{
        config::parse,
        placement::{
            author_nodes::AuthorNodes,
            demand::Demands,
            rule::{self, RuledPod},
        },
        platform::Os,
    };

    /// The demands of a configuration's rules for a pod with these labels.
    fn by_rules(config: &Config, labels: &[(&str, &str)]) -> Demands {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let (labels, none) = (labels.collect(), BTreeMap::new());
        let author = AuthorNodes {
            node_selector: &none,
            affinity: None,
        };
        let pod = RuledPod {
            labels: &labels,
            namespace_labels: &none,
            author,
            runtime_class: None,
            is_new: true,
        };
        rule::apply(&config.rules, pod).demands
    }

    /// docs/coming-from.md translates the settings of other tools, and the placement stays the
    /// same.
    #[test]
    fn settings_of_other_tools_give_the_same_placement() {
        let page = include_str!("../../docs/coming-from.md");
        let blocks: Vec<&str> = page.split("```yaml\n").skip(1).collect();
        let configs: Vec<Config> = blocks
            .iter()
            .map(|block| parse("page", block.split("```").next().unwrap()).unwrap())
            .collect();
        let [noe, tolerable, multiarcher, all, ocifit] = configs.as_slice() else {
            panic!("{} configurations", configs.len());
        };
        let tolerations = |config: &Config, images: &str| {
            let policy = PlacementPolicy::from(config);
            let decision = policy.limit(images.parse().unwrap());
            policy.missing_tolerations(&decision, &Os::linux(), &[])
        };
        let equal = |key: &str, value: &str| json!({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"});

        // noe: the architectures that are schedulable, a label that pod and node share, the
        // preferred architecture.
        let policy = PlacementPolicy::from(noe);
        let decision = policy.limit("amd64,arm64,s390x".parse().unwrap());
        assert_eq!(decision.annotation(), "amd64,arm64");
        let shared = by_rules(noe, &[("example.com/pool", "x"), ("app", "web")]).required();
        let shared: Vec<String> = shared
            .terms()
            .iter()
            .flatten()
            .map(ToString::to_string)
            .collect();
        assert_eq!(shared, ["example.com/pool in (x)"]);
        assert!(by_rules(noe, &[("app", "web")]).required().is_every());
        let preferred = noe.affinity.preferences();
        assert_eq!(preferred.into_values().collect::<Vec<_>>(), [100]);

        // tolerable: a toleration for each supported architecture that all images have.
        let arch = "kubernetes.io/arch";
        let both = [equal(arch, "amd64"), equal(arch, "arm64")];
        assert_eq!(tolerations(tolerable, "amd64,arm64,s390x"), both);
        assert_eq!(tolerations(tolerable, "arm64"), [equal(arch, "arm64")]);

        // k8smultiarcher: its own toleration if the images are for linux/arm64.
        let own_toleration = equal("k8smultiarcher", "arm64Supported");
        assert!(tolerations(multiarcher, "amd64,arm64").contains(&own_toleration));
        assert!(!tolerations(multiarcher, "amd64").contains(&own_toleration));
        assert_eq!(
            by_rules(all, &[]).tolerations().collect::<Vec<_>>(),
            [&own_toleration]
        );

        // ocifit-k8s refuses a pod if no image fits.
        assert_eq!(ocifit.selection.on_no_match, crate::config::OnNoMatch::Deny);
        assert!(ocifit.admission.enabled);
    }
}
