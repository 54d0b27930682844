//! The kubelet's credential provider plugins (a provider is a plugin with its configuration): which
//! plugins run for an image, and how long their answers are used.

mod config;
mod protocol;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use crate::{reference::Reference, trace};
use archaware_base::{error::chain, expiring_cache::ExpiringCache};

use super::{Credential, Keyring, command::Programs};

use config::Provider;
pub use config::ProviderError;
use protocol::CacheKey;

/// Maximum number of cached answers. The plugin decides whether an answer applies to an image, a
/// registry or all images.
const MAX_ANSWERS: usize = 1024;
/// How long a failed plugin is not run again for the same image.
const FAILURE_TTL: Duration = Duration::from_secs(10);
/// Cache key of answers that apply to every image. Also the key of a plugin's first run, because
/// only its answer shows the plugin's `cacheKeyType`.
const GLOBAL: &str = "global";
/// How often a caller waits for the run of another image, whose answer may apply to its own image.
const MAX_JOINS: usize = 2;

/// The plugins of a node.
pub struct Providers {
    list: Vec<Arc<Provider>>,
    folder: PathBuf,
    shared: Arc<Shared>,
    programs: Programs<Answer>,
}

struct Shared {
    answers: ExpiringCache<(usize, String), Arc<Keyring>>,
    /// Images for which a plugin failed, until it may run for them again. Looked up after
    /// `answers`, so that a failure hides no cached answer.
    failures: ExpiringCache<(usize, String), ()>,
    /// What the last answer of each plugin applied to; `None` before the first one.
    applies_to: Vec<Mutex<Option<CacheKey>>>,
}

/// The result of one run.
#[derive(Clone)]
struct Answer {
    keyring: Arc<Keyring>,
    applies_to: CacheKey,
    /// The image that the plugin was run for.
    image: Reference,
}

impl Answer {
    fn applies_to(&self, image: &Reference) -> bool {
        match self.applies_to {
            CacheKey::Global => true,
            CacheKey::Registry => self.image.registry() == image.registry(),
            CacheKey::Image => self.image.name() == image.name(),
        }
    }
}

/// The cache key of answers for an image.
fn cache_key(applies_to: CacheKey, image: &Reference) -> String {
    match applies_to {
        CacheKey::Image => image.name(),
        CacheKey::Registry => image.registry().to_owned(),
        CacheKey::Global => GLOBAL.to_owned(),
    }
}

impl Shared {
    /// The cached answer with the narrowest `cacheKeyType` that applies to an image. An empty
    /// keyring if there is none and the plugin failed recently.
    fn cached(&self, index: usize, image: &Reference) -> Option<Arc<Keyring>> {
        let keys = [CacheKey::Image, CacheKey::Registry, CacheKey::Global];
        let mut keys = keys.into_iter();
        let known = keys.find_map(|key| self.answers.get(&(index, cache_key(key, image))));
        let failed = || {
            self.failures
                .get(&(index, image.name()))
                .map(|()| Arc::default())
        };
        known.or_else(failed)
    }

    /// The cached answer, as an [`Answer`] that applies only to that image.
    fn answer(&self, index: usize, image: &Reference) -> Option<Answer> {
        let keyring = self.cached(index, image)?;
        Some(Answer {
            keyring,
            applies_to: CacheKey::Image,
            image: image.clone(),
        })
    }

    fn store(&self, index: usize, answer: &Answer, life: Duration) {
        if let Some(known) = self.applies_to.get(index) {
            *known.lock() = Some(answer.applies_to);
        }
        if !life.is_zero() {
            let key = cache_key(answer.applies_to, &answer.image);
            self.answers
                .insert((index, key), answer.keyring.clone(), life);
        }
    }
}

impl Providers {
    /// Loads the configuration: one file, or all files of a folder in the order of their names.
    /// Programs are looked up in `folder`.
    ///
    /// # Errors
    ///
    /// When the configuration is unreadable, malformed or violates the kubelet's rules.
    pub fn load(config: &Path, folder: &Path) -> Result<Self, ProviderError> {
        let list: Vec<_> = config::load(config)?.into_iter().map(Arc::new).collect();
        Ok(Self {
            folder: folder.to_owned(),
            shared: Arc::new(Shared {
                answers: ExpiringCache::new(MAX_ANSWERS),
                failures: ExpiringCache::new(MAX_ANSWERS),
                applies_to: list.iter().map(|_| Mutex::default()).collect(),
            }),
            list,
            programs: Programs::default(),
        })
    }

    /// The credentials for an image from the combined keyring of all matching plugins.
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

    /// The answer of one plugin. However many images wait, the plugin runs once for each cache key.
    /// Its first answer shows the kind of key (`cacheKeyType`). If a run for another image takes
    /// long, or [`MAX_JOINS`] answers do not apply, the plugin runs for this image.
    async fn request_credentials(
        &self,
        index: usize,
        provider: &Arc<Provider>,
        image: &Reference,
    ) -> Arc<Keyring> {
        let mut is_late = false;
        for attempt in 0..=MAX_JOINS {
            if let Some(known) = self.shared.cached(index, image) {
                let entries = if known.is_empty() { "none" } else { "held" };
                trace::cached("credentials", image.name(), entries);
                return known;
            }
            let learned = self.shared.applies_to.get(index);
            let key = match learned.and_then(|learned| *learned.lock()) {
                Some(applies_to) if attempt < MAX_JOINS && !is_late => cache_key(applies_to, image),
                None if attempt == 0 => GLOBAL.to_owned(),
                _ => image.name(),
            };
            match self.join_run(index, provider, image, &key).await {
                Ok(answer) if answer.applies_to(image) => return answer.keyring,
                Ok(_) => {}
                Err(begun_for) if begun_for == image.name() => break,
                Err(_) => is_late = true,
            }
        }
        Arc::default()
    }

    /// Runs a plugin for an image, or waits for the run under the same key. The error is the image
    /// of a run that takes long.
    async fn join_run(
        &self,
        index: usize,
        provider: &Arc<Provider>,
        image: &Reference,
        key: &str,
    ) -> Result<Answer, String> {
        let (plugin, program) = (provider.clone(), self.folder.join(&provider.name));
        let (shared, subject) = (self.shared.clone(), image.clone());
        let work = || async move { run(&plugin, &program, subject, index, &shared).await };
        let known = || self.shared.answer(index, image);
        let key = format!("{} {key}", provider.name);
        let (programs, slots) = (&self.programs, &provider.slots);
        programs.run(&key, &image.name(), slots, known, work).await
    }
}

/// Runs a plugin for an image, and stores its answer.
async fn run(
    plugin: &Provider,
    program: &Path,
    image: Reference,
    index: usize,
    shared: &Shared,
) -> Answer {
    match protocol::run(plugin, program, &image.name()).await {
        Ok((applies_to, life, keyring)) => {
            let answer = Answer {
                keyring: Arc::new(keyring),
                applies_to,
                image,
            };
            shared.store(index, &answer, life);
            answer
        }
        Err(error) => {
            let (plugin, name, error) = (&plugin.name, image.name(), chain(&error));
            tracing::warn!(
                plugin,
                image = name,
                error,
                "no credentials from the plugin"
            );
            shared.failures.insert((index, name), (), FAILURE_TTL);
            Answer {
                keyring: Arc::default(),
                applies_to: CacheKey::Image,
                image,
            }
        }
    }
}

#[cfg(test)]
mod tests;
