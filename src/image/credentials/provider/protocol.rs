//! What is asked of a plugin, and what it answers (`credentialprovider.kubelet.k8s.io`).

use std::{collections::BTreeMap, path::Path, time::Duration};

use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::image::credentials::{
    Credential, Keyring,
    command::{self, CommandError},
};

use super::config::Provider;

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
    cache_duration: Option<String>,
    auth: Option<BTreeMap<String, Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: SecretString,
}

/// For what an answer holds.
#[derive(Clone, Copy, Deserialize)]
pub(super) enum CacheKey {
    Image,
    Registry,
    Global,
}

/// Why a plugin's answer is none. Nothing of it is quoted.
#[derive(Debug, thiserror::Error)]
pub(super) enum AnswerError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("its answer is no CredentialProviderResponse")]
    Malformed,
    #[error("its answer is of another apiVersion or kind")]
    Version,
    #[error("its answer has a malformed cacheDuration")]
    Duration,
}

impl Provider {
    /// Runs the plugin for an image.
    pub(super) async fn run(
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
        let mut command = Command::new(program);
        command.args(self.args.iter().flatten());
        let environment = self.env.iter().flatten();
        command.envs(environment.map(|variable| (&variable.name, &variable.value)));
        let answer = command::run(command, &question, &self.slots).await?;
        let answer: Response =
            serde_json::from_slice(&answer).map_err(|_| AnswerError::Malformed)?;
        if answer.api_version != self.api_version || answer.kind != "CredentialProviderResponse" {
            return Err(AnswerError::Version);
        }
        let life = match answer.cache_duration {
            // Less than nothing is used and not kept.
            Some(text) if text.starts_with('-') => Duration::ZERO,
            Some(text) => crate::duration::parse(&text).ok_or(AnswerError::Duration)?,
            None => self.life,
        };
        let entries = answer.auth.into_iter().flatten();
        let credential = |entry: Entry| Credential::password(entry.username, entry.password);
        let entries = entries.map(|(key, entry)| (key, credential(entry)));
        Ok((answer.cache_key_type, life, Keyring::new(entries)))
    }
}
