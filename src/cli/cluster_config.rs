//! The configuration of the installation in a cluster, for commands that people run elsewhere.

use anyhow::Context;
use kube::core::{GroupVersionKind, discovery::ApiResource};
use serde_json::Value;

use crate::{
    cluster::{
        self,
        api::{ApiClient, ApiError},
        name::NamespacedName,
    },
    config::{self, Config},
};

use super::Global;

/// A configuration, and the permission that was missing to read the installation's configuration.
pub(super) struct ClusterConfig {
    pub(super) config: Config,
    /// Whether a file or the installation has it; otherwise these are the defaults.
    pub(super) is_found: bool,
    /// The permission without which the configuration of the installation could not be read.
    pub(super) missing_permission: Option<String>,
}

impl ClusterConfig {
    fn found(config: Config) -> Self {
        Self {
            config,
            is_found: true,
            missing_permission: None,
        }
    }

    fn defaults() -> Self {
        Self {
            is_found: false,
            ..Self::found(Config::default())
        }
    }
}

/// Loads the configuration from the `--config` file if it is set, else from the ConfigMap of the
/// installation; without both, the defaults apply. Settings of the ConfigMap that name files in
/// archaware's pods are emptied and logged.
pub(super) async fn load(global: &Global, api: &ApiClient) -> anyhow::Result<ClusterConfig> {
    if global.config.is_some() {
        return Ok(ClusterConfig::found(global.load_config()?));
    }
    let gvk = GroupVersionKind::gvk("", "v1", "ConfigMap");
    let resource = ApiResource::from_gvk_with_plural(&gvk, "configmaps");
    let name = NamespacedName::new(&global.namespace(), cluster::NAME);
    let found = match api.find_dynamic(&resource, &name).await {
        Err(ApiError::Forbidden(_)) => {
            let permission = format!("get configmaps in {}", global.namespace());
            return Ok(ClusterConfig {
                missing_permission: Some(permission),
                ..ClusterConfig::defaults()
            });
        }
        other => other.with_context(|| format!("cannot read ConfigMap {name}"))?,
    };
    let text = found
        .as_ref()
        .and_then(|map| map.pointer("/data/config.yaml"));
    let Some(text) = text.and_then(Value::as_str) else {
        return Ok(ClusterConfig::defaults());
    };
    let source = format!("ConfigMap {name}");
    let mut config = match config::parse(&source, text) {
        Ok(config) => config,
        // The cluster may run a newer version of archaware, with configuration keys that this
        // version does not know.
        Err(error) => {
            tracing::warn!(%error, "cannot use the installation's configuration, so the defaults apply; name a configuration file with --config");
            return Ok(ClusterConfig::defaults());
        }
    };
    let left_out = config.without_files();
    if !left_out.is_empty() {
        let keys = left_out.join(", ");
        tracing::info!("{source} names files of archaware's pods, which are not used here: {keys}");
    }
    Ok(ClusterConfig::found(config))
}
