//! The kubelet's credential provider plugins (a provider is a plugin with its configuration): which ones run for an image, and how long their answers are used.

mod config;
mod protocol;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use quick_cache::sync::Cache;

use crate::{
    error::chain,
    image::{reference::Reference, single_flight::SingleFlight},
};

use super::{Credential, Keyring, command::Programs};

use config::Provider;
pub use config::ProviderError;
use protocol::CacheKey;

/// Maximum number of cached answers. Each plugin decides whether one applies to an image, a registry or everything.
const MAX_ANSWERS: usize = 1024;
/// How long a failed plugin is not run again for the same image.
const FAILURE_TTL: Duration = Duration::from_secs(10);
/// Cache key of answers that apply to every image.
const GLOBAL: &str = "global";

/// The plugins of a node.
pub struct Providers {
    list: Vec<Arc<Provider>>,
    folder: PathBuf,
    shared: Arc<Shared>,
    programs: Programs,
}

struct Shared {
    answers: Cache<(usize, String), CachedCredentials>,
    flights: SingleFlight<(usize, String), Arc<Keyring>>,
}

#[derive(Clone)]
struct CachedCredentials {
    keyring: Arc<Keyring>,
    expires: Instant,
}

impl Providers {
    /// Loads the configuration: one file, or all files of a folder in the order of their names. Programs are looked
    /// up in `folder`.
    ///
    /// # Errors
    ///
    /// When the configuration is unreadable, malformed or violates the kubelet's rules.
    pub fn load(config: &Path, folder: &Path) -> Result<Self, ProviderError> {
        Ok(Self {
            list: config::load(config)?.into_iter().map(Arc::new).collect(),
            folder: folder.to_owned(),
            shared: Arc::new(Shared {
                answers: Cache::new(MAX_ANSWERS),
                flights: SingleFlight::new(),
            }),
            programs: Programs::default(),
        })
    }

    /// The credentials of all matching plugins, as one keyring.
    pub(super) async fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let suiting = self
            .list
            .iter()
            .enumerate()
            .filter(|(_, provider)| provider.matches(reference));
        let asked =
            suiting.map(|(index, provider)| self.request_credentials(index, provider, reference));
        let answers = futures::future::join_all(asked).await;
        Keyring::union(answers.iter().map(|keyring| &**keyring)).lookup(reference)
    }

    async fn request_credentials(
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
        let plugin = provider.name.clone();
        let (provider, program) = (provider.clone(), self.folder.join(&plugin));
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
                    (image, FAILURE_TTL, Keyring::default())
                }
            };
            let keyring = Arc::new(keyring);
            if !life.is_zero() {
                let answer = CachedCredentials {
                    keyring: keyring.clone(),
                    expires: Instant::now() + life,
                };
                kept.answers.insert((index, key), answer);
            }
            keyring
        };
        let work = async move { shared.flights.run(key, || run.boxed()).await };
        self.programs
            .wait_for(&plugin, work)
            .await
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
