//! Credentials that every pod of the node may use: an operator's `config.json` with its helpers, and the
//! kubelet's provider plugins.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::FutureExt;
use parking_lot::Mutex;
use quick_cache::sync::Cache;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use tokio::{process::Command, sync::Semaphore};

use crate::{
    error::{RepeatedError, chain},
    image::{flight::Flights, reference::Reference},
};

use super::{
    Credential,
    command::{self, AT_ONCE, CommandError, Programs},
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
    file: Option<File>,
    helpers: Option<Arc<Helpers>>,
    providers: Option<Providers>,
    programs: Programs,
}

struct File {
    path: PathBuf,
    content: Arc<Mutex<Content>>,
}

struct Content {
    config: Arc<DockerConfig>,
    /// When the file was last read.
    read: Instant,
    is_reading: bool,
    failing: RepeatedError,
}

struct Helpers {
    answers: Cache<String, (Option<Credential>, Instant)>,
    flights: Flights<String, Option<Credential>>,
    slots: Semaphore,
}

impl NodeCredentials {
    /// With the `config.json` at `path` and these plugins.
    pub fn new(
        path: Option<PathBuf>,
        providers: Option<Providers>,
    ) -> Result<Self, DockerConfigError> {
        let file = path.map(File::open).transpose()?;
        let helpers = Helpers {
            answers: Cache::new(MAX_ANSWERS),
            flights: Flights::new(),
            slots: Semaphore::new(AT_ONCE),
        };
        let helpers = file.as_ref().map(|_| Arc::new(helpers));
        Ok(Self {
            file,
            helpers,
            providers,
            programs: Programs::default(),
        })
    }

    /// Everything for an image, best match first.
    pub(crate) async fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let mut found = Vec::new();
        if let (Some(file), Some(helpers)) = (&self.file, &self.helpers) {
            let config = file.current().await;
            if let Some(helper) = config.helper(reference) {
                let answer = helpers.ask(&self.programs, &helper, server(reference));
                found.extend(answer.await);
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
        let content = Content {
            config: Arc::new(DockerConfig::load(&path)?),
            read: Instant::now(),
            is_reading: false,
            failing: RepeatedError::default(),
        };
        Ok(Self {
            path,
            content: Arc::new(Mutex::new(content)),
        })
    }

    /// What the file says now; what it said before while it cannot be read, or another look-up reads it.
    async fn current(&self) -> Arc<DockerConfig> {
        {
            let mut content = self.content.lock();
            // One read at a time: each that hangs holds a thread.
            if content.is_reading || content.read.elapsed() < READ_AGAIN {
                return content.config.clone();
            }
            content.is_reading = true;
        }
        // Off the runtime's workers: a file system may hang.
        let (path, content) = (self.path.clone(), self.content.clone());
        let read = move || {
            let read = DockerConfig::load(&path);
            let mut content = content.lock();
            (content.read, content.is_reading) = (Instant::now(), false);
            match read {
                Ok(config) => {
                    content.config = Arc::new(config);
                    content.failing.clear();
                }
                Err(error) => {
                    if let Some(error) = content.failing.changed(&error) {
                        tracing::warn!(error, "the docker configuration of before is used");
                    }
                }
            }
        };
        // It fails only when the runtime is ending.
        let _ = tokio::task::spawn_blocking(read).await;
        self.content.lock().config.clone()
    }
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
    async fn ask(
        self: &Arc<Self>,
        programs: &Programs,
        helper: &str,
        server: &str,
    ) -> Option<Credential> {
        let key = format!("{helper} {server}");
        if let Some((answer, at)) = self.answers.get(&key)
            && at.elapsed() < ANSWER
        {
            return answer;
        }
        let (this, program, server) = (
            self.clone(),
            format!("docker-credential-{helper}"),
            server.to_owned(),
        );
        let kept = key.clone();
        let run = async move {
            let answer = get(&program, &server, &this.slots)
                .await
                .unwrap_or_else(|error| {
                    let error = chain(&error);
                    tracing::warn!(program, server, error, "no credentials from the helper");
                    None
                });
            this.answers.insert(kept, (answer.clone(), Instant::now()));
            answer
        };
        let this = self.clone();
        let flight = async move { this.flights.run(key, || run.boxed()).await };
        programs.wait_for(helper, flight).await?
    }
}

/// What a helper prints that has nothing (`errCredentialsNotFound` of `docker-credential-helpers`).
const NOTHING: &[u8] = b"credentials not found";

/// Asks a helper by docker's protocol (`docker-credential-helpers`).
async fn get(
    program: &str,
    server: &str,
    slots: &Semaphore,
) -> Result<Option<Credential>, CommandError> {
    let mut command = Command::new(program);
    command.arg("get");
    let answer = command::run(command, server.as_bytes(), slots).await;
    let answer = match answer {
        // It says so when it has nothing for a server, with a status of failure.
        Err(CommandError::Failed(_, said)) if said.starts_with(NOTHING) => return Ok(None),
        other => other?,
    };
    let Ok(answer) = serde_json::from_slice::<Answer>(&answer) else {
        return Err(CommandError::Malformed);
    };
    let empty = answer.secret.expose_secret().is_empty();
    let credential = match answer.username.as_str() {
        // The secret is a token then, by the same protocol.
        "<token>" => Credential::identity_token(answer.secret),
        _ => Credential::password(answer.username, answer.secret),
    };
    Ok((!empty).then_some(credential))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_file_is_read_again_when_it_changes_and_kept_while_it_is_broken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let write = |user: &str| {
            let entry =
                format!(r#"{{"auths": {{"r.io": {{"username": "{user}", "password": "p"}}}}}}"#);
            std::fs::write(&path, entry).unwrap();
        };
        let image = Reference::parse("r.io/x").unwrap();
        write("a");
        let file = File::open(path.clone()).unwrap();
        let before = file.current().await.keyring.lookup(&image)[0].fingerprint();
        write("longer");
        let now = file.current().await.keyring.lookup(&image)[0].fingerprint();
        assert_eq!(now, before, "within its time");
        for (broken, changed) in [(false, true), (true, true)] {
            if broken {
                std::fs::write(&path, "hunter2").unwrap();
            }
            file.content.lock().read = Instant::now().checked_sub(READ_AGAIN).unwrap();
            let now = file.current().await.keyring.lookup(&image)[0].fingerprint();
            assert_eq!(now != before, changed);
        }
        let content = format!("{:?}", file.content.lock().failing);
        assert!(content.contains("malformed") && !content.contains("hunter2"));
        write("a");
        file.content.lock().read = Instant::now().checked_sub(READ_AGAIN).unwrap();
        assert_eq!(
            file.current().await.keyring.lookup(&image)[0].fingerprint(),
            before
        );
    }
}
