//! Credentials that every pod of the node may use: an operator's `config.json` with its helpers, and the
//! kubelet's provider plugins.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use futures::FutureExt;
use quick_cache::sync::Cache;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::image::{chain, flight::Flights, reference::Reference};

use super::{
    Credential,
    command::{self, CommandError},
    docker_config::{DockerConfig, DockerConfigError},
    provider::Providers,
};

/// The file is looked at again after this time: tokens in mounted Secrets are renewed.
const READ_AGAIN: Duration = Duration::from_secs(5);
/// How long the answer of a helper is used. Helpers keep their own tokens.
const ANSWER: Duration = Duration::from_mins(1);
/// One per registry.
const MAX_ANSWERS: usize = 1024;

/// What the operator knows.
#[derive(Default)]
pub struct NodeCredentials {
    file: Option<Mutex<File>>,
    helpers: Option<Helpers>,
    providers: Option<Providers>,
}

struct File {
    path: PathBuf,
    config: Arc<DockerConfig>,
    stamp: Option<Stamp>,
    looked: Instant,
}

/// Tells versions of a file apart without reading it.
type Stamp = (SystemTime, u64);

struct Helpers {
    answers: Arc<Cache<String, (Option<Credential>, Instant)>>,
    flights: Flights<String, Option<Credential>>,
}

impl NodeCredentials {
    /// With the `config.json` at `path` and these plugins.
    pub fn new(
        path: Option<PathBuf>,
        providers: Option<Providers>,
    ) -> Result<Self, DockerConfigError> {
        let file = path.map(File::open).transpose()?;
        let helpers = file.as_ref().map(|_| Helpers {
            answers: Arc::new(Cache::new(MAX_ANSWERS)),
            flights: Flights::new(),
        });
        Ok(Self {
            file: file.map(Mutex::new),
            helpers,
            providers,
        })
    }

    /// Everything for an image, best match first.
    pub(crate) async fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let mut found = Vec::new();
        if let (Some(file), Some(helpers)) = (&self.file, &self.helpers) {
            let config = lock(file).current();
            if let Some(helper) = config.helper(reference) {
                found.extend(helpers.ask(&helper, server(reference)).await);
            }
            found.extend(config.keyring.lookup(reference));
        }
        if let Some(providers) = &self.providers {
            found.extend(providers.lookup(reference).await);
        }
        found
    }
}

impl File {
    fn open(path: PathBuf) -> Result<Self, DockerConfigError> {
        let stamp = stamp(&path);
        let config = Arc::new(DockerConfig::load(&path)?);
        Ok(Self {
            path,
            config,
            stamp,
            looked: Instant::now(),
        })
    }

    /// What the file says now; what it said before while it cannot be read.
    fn current(&mut self) -> Arc<DockerConfig> {
        if self.looked.elapsed() >= READ_AGAIN {
            self.looked = Instant::now();
            let stamp = stamp(&self.path);
            if stamp != self.stamp {
                self.stamp = stamp;
                match DockerConfig::load(&self.path) {
                    Ok(config) => self.config = Arc::new(config),
                    Err(error) => {
                        tracing::warn!(
                            error = chain(&error),
                            "the docker configuration of before is used"
                        );
                    }
                }
            }
        }
        self.config.clone()
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

fn lock(file: &Mutex<File>) -> MutexGuard<'_, File> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Docker's own name for a registry: that of Docker Hub is older than the others.
fn server(reference: &Reference) -> &str {
    match reference.registry() {
        "docker.io" => "https://index.docker.io/v1/",
        registry => registry,
    }
}

impl DockerConfig {
    fn helper(&self, reference: &Reference) -> Option<String> {
        let named = [server(reference), reference.registry()]
            .into_iter()
            .find_map(|name| self.helpers.get(name));
        let store = Some(&self.store).filter(|store| !store.is_empty());
        named.or(store).cloned()
    }
}

/// What `docker-credential-… get` prints.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    #[serde(default)]
    username: String,
    secret: SecretString,
}

impl Helpers {
    async fn ask(&self, helper: &str, server: &str) -> Option<Credential> {
        let key = format!("{helper} {server}");
        if let Some((answer, at)) = self.answers.get(&key)
            && at.elapsed() < ANSWER
        {
            return answer;
        }
        let (answers, kept) = (self.answers.clone(), key.clone());
        let (program, server) = (format!("docker-credential-{helper}"), server.to_owned());
        let run = move || {
            async move {
                let answer = get(&program, &server).await.unwrap_or_else(|error| {
                    let error = chain(&error);
                    tracing::warn!(program, server, error, "no credentials from the helper");
                    None
                });
                answers.insert(kept, (answer.clone(), Instant::now()));
                answer
            }
            .boxed()
        };
        self.flights.run(key, run).await
    }
}

/// Asks a helper by docker's protocol (`docker-credential-helpers`).
async fn get(program: &str, server: &str) -> Result<Option<Credential>, CommandError> {
    let arguments = ["get".to_owned()];
    let answer = command::run(Path::new(program), &arguments, &[], server.as_bytes()).await;
    let answer = match answer {
        // It says so when it has nothing for a server, with a status of failure.
        Err(CommandError::Failed(_)) => return Ok(None),
        other => other?,
    };
    let Ok(answer) = serde_json::from_slice::<Answer>(&answer) else {
        return Ok(None);
    };
    let empty = answer.secret.expose_secret().is_empty();
    let credential = match answer.username.as_str() {
        // The secret is a token then, by the same protocol.
        "<token>" => Credential::identity_token(answer.secret),
        _ => Credential::password(answer.username, answer.secret),
    };
    Ok((!empty).then_some(credential))
}
