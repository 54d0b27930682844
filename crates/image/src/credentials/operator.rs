//! Credentials that the operator provides for every pod: a `config.json` with its helpers, and the
//! kubelet's credential provider plugins.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use tokio::{process::Command, sync::Semaphore};

use crate::{reference::Reference, trace};
use archaware_base::{
    error::{RepeatedError, chain},
    expiring_cache::ExpiringCache,
    json,
};

use super::{
    Credential, CredentialSource,
    command::{self, CommandError, MAX_CONCURRENT_RUNS, Programs},
    docker_config::{DockerConfig, DockerConfigError, server},
    provider::Providers,
};

/// The file is read again after this time, because tokens in mounted Secrets are renewed.
const REREAD_INTERVAL: Duration = Duration::from_secs(5);
/// How long a helper's answer is used. Helpers renew their own tokens.
const ANSWER_TTL: Duration = Duration::from_mins(1);
/// Maximum number of cached answers, one per registry.
const MAX_ANSWERS: usize = 1024;

/// Credentials of the operator's configuration: `config.json` (which is read again when it
/// changes), its helpers, and credential provider plugins.
#[derive(Default)]
pub struct OperatorCredentials {
    file: Option<ReloadedFile>,
    helpers: Option<Arc<Helpers>>,
    providers: Option<Providers>,
}

struct ReloadedFile {
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
    answers: ExpiringCache<String, Vec<Credential>>,
    slots: Arc<Semaphore>,
    programs: Programs<Vec<Credential>>,
}

impl OperatorCredentials {
    /// Credentials from the `config.json` at `path` and these plugins.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is malformed.
    pub fn new(
        path: Option<PathBuf>,
        providers: Option<Providers>,
    ) -> Result<Self, DockerConfigError> {
        let file = path.map(ReloadedFile::open).transpose()?;
        let helpers = Helpers {
            answers: ExpiringCache::new(MAX_ANSWERS),
            slots: Arc::new(Semaphore::new(MAX_CONCURRENT_RUNS)),
            programs: Programs::default(),
        };
        let helpers = file.as_ref().map(|_| Arc::new(helpers));
        Ok(Self {
            file,
            helpers,
            providers,
        })
    }

    /// All credentials for an image: from the helper, from `config.json`, then from the plugins.
    pub(crate) async fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let mut found = Vec::new();
        if let (Some(file), Some(helpers)) = (&self.file, &self.helpers) {
            let config = file.current().await;
            if let Some(helper) = config.helper(reference) {
                let answer = helpers.run_helper(&helper, server(reference));
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

impl ReloadedFile {
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

    /// The content of the file; its last good content while it cannot be read or is being read.
    async fn current(&self) -> Arc<DockerConfig> {
        {
            let mut content = self.content.lock();
            // One read at a time, because a read that hangs holds a thread.
            if content.is_reading || content.read.elapsed() < REREAD_INTERVAL {
                return content.config.clone();
            }
            content.is_reading = true;
        }
        // `spawn_blocking`, because a file system may hang.
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
                        tracing::warn!(
                            error,
                            "cannot read the docker configuration; using the previous one"
                        );
                    }
                }
            }
        };
        // Fails only during shutdown of the runtime.
        let _ = tokio::task::spawn_blocking(read).await;
        self.content.lock().config.clone()
    }
}

/// The output of `docker-credential-… get`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HelperResult {
    #[serde(default)]
    username: String,
    secret: SecretString,
}

impl Helpers {
    async fn run_helper(self: &Arc<Self>, helper: &str, server: &str) -> Vec<Credential> {
        let key = format!("{helper} {server}");
        if let Some(known) = self.answers.get(&key) {
            let held = if known.is_empty() { "none" } else { "held" };
            trace::cached("credentials", &key, held);
            return known;
        }
        let (this, answer_key) = (self.clone(), key.clone());
        let (program, server) = (format!("docker-credential-{helper}"), server.to_owned());
        let work = || async move {
            let answer = get(&program, &server).await.unwrap_or_else(|error| {
                let error = chain(&error);
                tracing::warn!(program, server, error, "no credentials from the helper");
                None
            });
            let answer: Vec<_> = answer.into_iter().collect();
            this.answers.insert(answer_key, answer.clone(), ANSWER_TTL);
            answer
        };
        let known = || self.answers.get(&key);
        let ran = self.programs.run(&key, helper, &self.slots, known, work);
        ran.await.unwrap_or_default()
    }
}

/// The output of a helper that has no credentials (`errCredentialsNotFound` of
/// `docker-credential-helpers`).
const CREDENTIALS_NOT_FOUND: &[u8] = b"credentials not found";

/// Runs a helper with the protocol of `docker-credential-helpers`.
async fn get(program: &str, server: &str) -> Result<Option<Credential>, CommandError> {
    let mut command = Command::new(program);
    command.arg("get");
    let answer = command::run(command, server, server.as_bytes()).await;
    let answer = match answer {
        // A helper without credentials for a server exits with an error status.
        Err(CommandError::Failed(_, output)) if output.starts_with(CREDENTIALS_NOT_FOUND) => {
            return Ok(None);
        }
        other => other?,
    };
    let Ok(answer) = json::object::<HelperResult>(&answer) else {
        return Err(CommandError::Malformed);
    };
    let empty = answer.secret.expose_secret().is_empty();
    let credential = match answer.username.as_str() {
        // By the protocol this user name means that the secret is an identity token.
        "<token>" => Credential::identity_token(answer.secret),
        _ => Credential::password(answer.username, answer.secret),
    };
    let source = CredentialSource::Helper(program.into());
    Ok((!empty).then_some(credential.from_source(source)))
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
        let file = ReloadedFile::open(path.clone()).unwrap();
        let before = file.current().await.keyring.lookup(&image)[0].fingerprint();
        write("longer");
        let now = file.current().await.keyring.lookup(&image)[0].fingerprint();
        assert_eq!(now, before, "within its time");
        for (broken, changed) in [(false, true), (true, true)] {
            if broken {
                std::fs::write(&path, "hunter2").unwrap();
            }
            file.content.lock().read = Instant::now().checked_sub(REREAD_INTERVAL).unwrap();
            let now = file.current().await.keyring.lookup(&image)[0].fingerprint();
            assert_eq!(now != before, changed);
        }
        let content = format!("{:?}", file.content.lock().failing);
        assert!(content.contains("malformed") && !content.contains("hunter2"));
        write("a");
        file.content.lock().read = Instant::now().checked_sub(REREAD_INTERVAL).unwrap();
        assert_eq!(
            file.current().await.keyring.lookup(&image)[0].fingerprint(),
            before
        );
    }
}
