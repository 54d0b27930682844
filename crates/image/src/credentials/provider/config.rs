//! Parses the kubelet's `CredentialProviderConfig` with the kubelet's own checks.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::Deserialize;
use tokio::sync::Semaphore;

use crate::{
    credentials::{command::MAX_CONCURRENT_RUNS, keyring::Key},
    reference::Reference,
};
use archaware_base::files::{self, FileError};

/// Why a `CredentialProviderConfig` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// Not YAML or JSON, or of another structure.
    #[error("credentialProviders.config {path}: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The problem and its position.
        problem: String,
    },
    /// A rule of the kubelet is violated.
    #[error("credentialProviders.config {path}: provider {name:?} {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The provider.
        name: String,
        /// The rule.
        problem: &'static str,
    },
    /// The folder contains no configuration.
    #[error("credentialProviders.config {0} holds no .json, .yaml or .yml file")]
    Empty(PathBuf),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ProviderConfigFile {
    api_version: String,
    kind: String,
    /// `null` means an empty list.
    providers: Option<Vec<Provider>>,
}

/// A plugin and the images that it is run for.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Provider {
    pub(super) name: String,
    match_images: Option<Vec<String>>,
    default_cache_duration: Option<String>,
    pub(super) api_version: String,
    pub(super) args: Option<Vec<String>>,
    pub(super) env: Option<Vec<Variable>>,
    token_attributes: Option<serde::de::IgnoredAny>,
    #[serde(skip)]
    keys: Vec<Key>,
    #[serde(skip)]
    pub(super) life: Duration,
    #[serde(skip, default = "slots")]
    pub(super) slots: Arc<Semaphore>,
}

fn slots() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(MAX_CONCURRENT_RUNS))
}

#[derive(Clone, Deserialize)]
pub(super) struct Variable {
    pub(super) name: String,
    #[serde(default)]
    pub(super) value: String,
}

/// Loads the providers of a file, or of a folder's files in the order of their names.
pub(super) fn load(config: &Path) -> Result<Vec<Provider>, ProviderError> {
    let mut providers: Vec<Provider> = Vec::new();
    for path in paths(config)? {
        for provider in read(&path)? {
            if providers.iter().any(|other| other.name == provider.name) {
                let (name, problem) = (provider.name, "is named twice");
                return Err(ProviderError::Invalid {
                    path,
                    name,
                    problem,
                });
            }
            providers.push(provider);
        }
    }
    Ok(providers)
}

impl Provider {
    pub(super) fn matches(&self, reference: &Reference) -> bool {
        self.keys.iter().any(|key| key.matches(reference))
    }

    /// The kubelet's checks (`validateCredentialProviderConfig`).
    fn check(&mut self) -> Result<(), &'static str> {
        if self.name.is_empty()
            || self.name.contains(['/', ' '])
            || [".", ".."].contains(&&*self.name)
        {
            return Err("has a name that is not a file name");
        }
        let match_images = self.match_images.as_deref().unwrap_or_default();
        if match_images.is_empty() {
            return Err("has no matchImages");
        }
        if !VERSIONS
            .iter()
            .any(|v| self.api_version == format!("credentialprovider.kubelet.k8s.io/{v}"))
        {
            return Err("has no known apiVersion");
        }
        let life = self
            .default_cache_duration
            .as_deref()
            .ok_or("has no defaultCacheDuration")?;
        self.life =
            archaware_base::duration::parse(life).ok_or("has a malformed defaultCacheDuration")?;
        self.keys = match_images
            .iter()
            .map(|image| Key::pattern(image))
            .collect();
        Ok(())
    }
}

const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];

/// Prefix of the file's path in error messages.
const WHAT: &str = "credentialProviders.config ";

/// The file itself, or the `*.json`, `*.yaml` and `*.yml` files of a folder, sorted.
fn paths(config: &Path) -> Result<Vec<PathBuf>, ProviderError> {
    let failed = files::failed(WHAT, config);
    if !std::fs::metadata(config).map_err(&failed)?.is_dir() {
        return Ok(vec![config.to_owned()]);
    }
    let mut files = Vec::new();
    for file in std::fs::read_dir(config).map_err(&failed)? {
        let path = file.map_err(&failed)?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("json" | "yaml" | "yml")) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(ProviderError::Empty(config.to_owned()));
    }
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<Provider>, ProviderError> {
    let text = files::read_text(WHAT, path)?;
    let malformed = |problem| ProviderError::Malformed {
        path: path.to_owned(),
        problem,
    };
    let options = serde_saphyr::options! { with_snippet: false };
    // Parsed as a `Value` first, because the YAML parser's code for each type would make the
    // program larger. So numbers are not accepted as strings, as in the kubelet.
    let value: serde_json::Value = serde_saphyr::from_str_with_options(&text, options)
        .map_err(|error| malformed(error.to_string()))?;
    let file: ProviderConfigFile =
        serde_json::from_value(value).map_err(|error| malformed(error.to_string()))?;
    let known = VERSIONS
        .iter()
        .any(|v| file.api_version == format!("kubelet.config.k8s.io/{v}"));
    if !known || file.kind != "CredentialProviderConfig" {
        let wanted =
            "is not a CredentialProviderConfig of kubelet.config.k8s.io/v1, v1beta1 or v1alpha1";
        return Err(malformed(wanted.to_owned()));
    }
    let mut providers = Vec::new();
    for mut provider in file.providers.unwrap_or_default() {
        if let Err(problem) = provider.check() {
            let (path, name) = (path.to_owned(), provider.name);
            return Err(ProviderError::Invalid {
                path,
                name,
                problem,
            });
        }
        if provider.token_attributes.is_some() {
            // Such plugins need tokens of the pods' ServiceAccounts. archaware should not have
            // the permission to create such tokens.
            tracing::warn!(
                plugin = provider.name,
                "tokenAttributes are not supported; the plugin is not run"
            );
            continue;
        }
        providers.push(provider);
    }
    Ok(providers)
}
