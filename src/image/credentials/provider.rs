//! The kubelet's credential provider plugins: its configuration, its protocol and its cache
//! (`kubelet.config.k8s.io` and `credentialprovider.kubelet.k8s.io`).

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use quick_cache::sync::Cache;
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use crate::image::{chain, flight::Flights, reference::Reference};

use super::{
    Credential, Keyring,
    command::{self, AT_ONCE, CommandError, PATIENCE},
    keyring::Key,
};

/// Larger files are no configuration.
const MAX_SIZE: u64 = 1024 * 1024;
/// Answers kept: one per image, registry or provider, as the plugin says.
const MAX_ANSWERS: usize = 1024;
/// How long a plugin that has failed is not run again for the same image.
const FAILED: Duration = Duration::from_secs(10);

/// Why a `CredentialProviderConfig` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// A file cannot be read.
    #[error("cannot read credentialProviders.config {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Larger than 1 MiB.
    #[error("credentialProviders.config {0} is larger than 1 MiB")]
    TooLarge(PathBuf),
    /// Not YAML or JSON of the right shape.
    #[error("credentialProviders.config {path}: {problem}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// A rule of the kubelet is broken.
    #[error("credentialProviders.config {path}: provider {name:?} {problem}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The provider.
        name: String,
        /// The rule.
        problem: &'static str,
    },
    /// The folder holds no file.
    #[error("credentialProviders.config {0} holds no .json, .yaml or .yml file")]
    Empty(PathBuf),
}

/// The plugins of a node.
pub struct Providers {
    list: Vec<Arc<Provider>>,
    folder: PathBuf,
    shared: Arc<Shared>,
}

struct Shared {
    answers: Cache<(usize, String), Answer>,
    flights: Flights<(usize, String), Arc<Keyring>>,
}

#[derive(Clone)]
struct Answer {
    keyring: Arc<Keyring>,
    expires: Instant,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    api_version: String,
    kind: String,
    #[serde(default)]
    providers: Vec<Provider>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Provider {
    name: String,
    #[serde(default)]
    match_images: Vec<String>,
    default_cache_duration: Option<String>,
    api_version: String,
    args: Option<Vec<String>>,
    env: Option<Vec<Variable>>,
    token_attributes: Option<serde::de::IgnoredAny>,
    #[serde(skip)]
    keys: Vec<Key>,
    #[serde(skip)]
    life: Duration,
    #[serde(skip, default = "slots")]
    slots: Arc<Semaphore>,
}

fn slots() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(AT_ONCE))
}

#[derive(Clone, Deserialize)]
struct Variable {
    name: String,
    #[serde(default)]
    value: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Request<'a> {
    api_version: &'a str,
    kind: &'static str,
    image: &'a str,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    api_version: String,
    kind: String,
    cache_key_type: CacheKey,
    #[serde(default)]
    cache_duration: Option<String>,
    #[serde(default)]
    auth: Option<BTreeMap<String, Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: SecretString,
}

#[derive(Clone, Copy, Deserialize)]
enum CacheKey {
    Image,
    Registry,
    Global,
}

/// Why a plugin's answer is none. Nothing of it is quoted.
#[derive(Debug, thiserror::Error)]
enum AnswerError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("its answer is no CredentialProviderResponse")]
    Malformed,
    #[error("its answer is of another apiVersion or kind")]
    Version,
    #[error("its answer has a malformed cacheDuration")]
    Duration,
}

impl Providers {
    /// Reads the configuration: one file, or all of a folder in the order of their names. Programs are
    /// looked for in `folder`.
    pub fn load(config: &Path, folder: &Path) -> Result<Self, ProviderError> {
        let mut providers: Vec<Provider> = Vec::new();
        for path in files(config)? {
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
        Ok(Self {
            list: providers.into_iter().map(Arc::new).collect(),
            folder: folder.to_owned(),
            shared: Arc::new(Shared {
                answers: Cache::new(MAX_ANSWERS),
                flights: Flights::new(),
            }),
        })
    }

    /// What the plugins know for an image: all that match together, as one keyring.
    pub(super) async fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let suiting = self
            .list
            .iter()
            .enumerate()
            .filter(|(_, provider)| provider.suits(reference));
        let asked = suiting.map(|(index, provider)| self.ask(index, provider, reference));
        let answers = futures::future::join_all(asked).await;
        Keyring::union(answers.iter().map(|keyring| &**keyring)).lookup(reference)
    }

    async fn ask(
        &self,
        index: usize,
        provider: &Arc<Provider>,
        reference: &Reference,
    ) -> Arc<Keyring> {
        let image = reference.name();
        for key in [image.as_str(), reference.registry(), GLOBAL] {
            if let Some(answer) = self.shared.answers.get(&(index, key.to_owned()))
                && Instant::now() < answer.expires
            {
                return answer.keyring;
            }
        }
        let (provider, program) = (provider.clone(), self.folder.join(&provider.name));
        let (shared, registry) = (self.shared.clone(), reference.registry().to_owned());
        let key = (index, image.clone());
        let kept = self.shared.clone();
        let run = async move {
            let (key, life, keyring) = match provider.run(&program, &image).await {
                Ok((CacheKey::Image, life, keyring)) => (image, life, keyring),
                Ok((CacheKey::Registry, life, keyring)) => (registry, life, keyring),
                Ok((CacheKey::Global, life, keyring)) => (GLOBAL.to_owned(), life, keyring),
                Err(error) => {
                    let (plugin, error) = (&provider.name, chain(&error));
                    tracing::warn!(plugin, image, error, "no credentials from the plugin");
                    (image, FAILED, Keyring::default())
                }
            };
            let keyring = Arc::new(keyring);
            if !life.is_zero() {
                let answer = Answer {
                    keyring: keyring.clone(),
                    expires: Instant::now() + life,
                };
                kept.answers.insert((index, key), answer);
            }
            keyring
        };
        // A task of its own, so that a slow plugin ends its work although the pod cannot wait for it.
        let flight = tokio::spawn(async move { shared.flights.run(key, || run.boxed()).await });
        match tokio::time::timeout(PATIENCE, flight).await {
            Ok(Ok(keyring)) => keyring,
            _ => Arc::default(),
        }
    }
}

/// The cache key of answers that hold for every image.
const GLOBAL: &str = "global";

impl Provider {
    fn suits(&self, reference: &Reference) -> bool {
        self.keys.iter().any(|key| key.matches(reference))
    }

    async fn run(
        &self,
        program: &Path,
        image: &str,
    ) -> Result<(CacheKey, Duration, Keyring), AnswerError> {
        let request = Request {
            api_version: &self.api_version,
            kind: "CredentialProviderRequest",
            image,
        };
        let question = serde_json::to_vec(&request).map_err(|_| AnswerError::Malformed)?;
        let environment: Vec<_> = self
            .env
            .iter()
            .flatten()
            .map(|variable| (variable.name.clone(), variable.value.clone()))
            .collect();
        let arguments = self.args.as_deref().unwrap_or_default();
        let answer = command::run(program, arguments, &environment, &question, &self.slots).await?;
        let answer: Response =
            serde_json::from_slice(&answer).map_err(|_| AnswerError::Malformed)?;
        if answer.api_version != self.api_version || answer.kind != "CredentialProviderResponse" {
            return Err(AnswerError::Version);
        }
        let life = match answer.cache_duration {
            // Less than nothing is used and not kept.
            Some(text) if text.starts_with('-') => Duration::ZERO,
            Some(text) => duration(&text).ok_or(AnswerError::Duration)?,
            None => self.life,
        };
        let entries = answer.auth.into_iter().flatten();
        let credential = |entry: Entry| Credential::password(entry.username, entry.password);
        let entries = entries.map(|(key, entry)| (key, credential(entry)));
        Ok((answer.cache_key_type, life, Keyring::new(entries)))
    }

    /// The kubelet's own checks (`validateCredentialProviderConfig`).
    fn check(&mut self) -> Result<(), &'static str> {
        if self.name.is_empty()
            || self.name.contains(['/', ' '])
            || [".", ".."].contains(&&*self.name)
        {
            return Err("has no name of a file");
        }
        if self.match_images.is_empty() {
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
        self.life = duration(life).ok_or("has a malformed defaultCacheDuration")?;
        self.keys = self
            .match_images
            .iter()
            .map(|image| Key::pattern(image))
            .collect();
        Ok(())
    }
}

const VERSIONS: [&str; 3] = ["v1", "v1beta1", "v1alpha1"];

/// The file itself, or those of a folder (`*.json`, `*.yaml`, `*.yml`) by name.
fn files(config: &Path) -> Result<Vec<PathBuf>, ProviderError> {
    let failed = |source| ProviderError::Read {
        path: config.to_owned(),
        source,
    };
    if !std::fs::metadata(config).map_err(failed)?.is_dir() {
        return Ok(vec![config.to_owned()]);
    }
    let mut files = Vec::new();
    for file in std::fs::read_dir(config).map_err(failed)? {
        let path = file.map_err(failed)?.path();
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
    let failed = |source| ProviderError::Read {
        path: path.to_owned(),
        source,
    };
    if std::fs::metadata(path).map_err(failed)?.len() > MAX_SIZE {
        return Err(ProviderError::TooLarge(path.to_owned()));
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let malformed = |problem| ProviderError::Malformed {
        path: path.to_owned(),
        problem,
    };
    let options = serde_saphyr::options! { with_snippet: false };
    let file: File = serde_saphyr::from_str_with_options(&text, options)
        .map_err(|error| malformed(error.to_string()))?;
    let known = VERSIONS
        .iter()
        .any(|v| file.api_version == format!("kubelet.config.k8s.io/{v}"));
    if !known || file.kind != "CredentialProviderConfig" {
        let wanted =
            "is no CredentialProviderConfig of kubelet.config.k8s.io/v1, v1beta1 or v1alpha1";
        return Err(malformed(wanted.to_owned()));
    }
    let mut providers = Vec::new();
    for mut provider in file.providers {
        if let Err(problem) = provider.check() {
            let (path, name) = (path.to_owned(), provider.name);
            return Err(ProviderError::Invalid {
                path,
                name,
                problem,
            });
        }
        if provider.token_attributes.is_some() {
            // They would need a token of whatever ServiceAccount a pod has: too much power for archaware.
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

/// Go's format, not negative: `12h`, `0s`.
fn duration(text: &str) -> Option<Duration> {
    let signed: jiff::SignedDuration = match text {
        "0" => jiff::SignedDuration::ZERO,
        text => text.parse().ok()?,
    };
    // Longer than a year is as good as for ever, and an Instant can hold it.
    Some(
        Duration::try_from(signed)
            .ok()?
            .min(Duration::from_hours(24 * 365)),
    )
}

#[cfg(test)]
#[path = "provider/tests.rs"]
mod tests;
