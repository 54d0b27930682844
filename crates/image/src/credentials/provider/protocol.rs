//! The protocol of credential provider plugins (`credentialprovider.kubelet.k8s.io`).

use std::{collections::BTreeMap, path::Path, time::Duration};

use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::credentials::{
    Credential, CredentialSource, Keyring,
    command::{self, CommandError},
};
use archaware_base::json::{self, Object};

use super::config::Provider;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CredentialProviderRequest<'a> {
    api_version: &'a str,
    kind: &'static str,
    image: &'a str,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CredentialProviderResponse {
    api_version: String,
    kind: String,
    cache_key_type: CacheKey,
    cache_duration: Option<String>,
    auth: Option<BTreeMap<String, Object<AuthConfig>>>,
}

#[derive(Deserialize)]
struct AuthConfig {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: SecretString,
}

/// What an answer applies to (`cacheKeyType`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
pub(super) enum CacheKey {
    Image,
    Registry,
    Global,
}

/// Why a plugin's answer cannot be used. No message contains any of it.
#[derive(Debug, thiserror::Error)]
pub(super) enum AnswerError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("its answer is not a CredentialProviderResponse")]
    Malformed,
    #[error("its answer is of another apiVersion or kind")]
    Version,
    #[error("its answer has a malformed cacheDuration")]
    Duration,
}

/// Runs a plugin for an image.
pub(super) async fn run(
    provider: &Provider,
    program: &Path,
    image: &str,
) -> Result<(CacheKey, Duration, Keyring), AnswerError> {
    let request = CredentialProviderRequest {
        api_version: &provider.api_version,
        kind: "CredentialProviderRequest",
        image,
    };
    let question = serde_json::to_vec(&request).map_err(|_| AnswerError::Malformed)?;
    let mut command = Command::new(program);
    command.args(provider.args.iter().flatten());
    let environment = provider.env.iter().flatten();
    command.envs(environment.map(|variable| (&variable.name, &variable.value)));
    let answer = command::run(command, image, &question).await?;
    parse(provider, &answer)
}

/// What the answer applies to, its lifetime, and the credentials.
fn parse(provider: &Provider, answer: &[u8]) -> Result<(CacheKey, Duration, Keyring), AnswerError> {
    let answer: CredentialProviderResponse =
        json::object(answer).map_err(|_| AnswerError::Malformed)?;
    if answer.api_version != provider.api_version || answer.kind != "CredentialProviderResponse" {
        return Err(AnswerError::Version);
    }
    let life = match answer.cache_duration {
        // A negative duration means that the answer is not cached.
        Some(text) if text.starts_with('-') => Duration::ZERO,
        Some(text) => archaware_base::duration::parse(&text).ok_or(AnswerError::Duration)?,
        None => provider.life,
    };
    let entries = answer.auth.into_iter().flatten();
    let source = CredentialSource::Provider(provider.name.as_str().into());
    let credential = |entry: AuthConfig| {
        Credential::password(entry.username, entry.password).from_source(source.clone())
    };
    let entries = entries.map(|(key, Object(entry))| (key, credential(entry)));
    Ok((answer.cache_key_type, life, Keyring::new(entries)))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;
    use serde_json::json;
    use testsupport::mutated;

    use super::*;

    proptest! {
        #[test]
        fn any_answer_has_credentials_or_an_error(answer in mutated(json!({
            "apiVersion": "credentialprovider.kubelet.k8s.io/v1", "kind": "CredentialProviderResponse",
            "cacheKeyType": "Registry", "cacheDuration": "5m",
            "auth": {"*.example.com/a": {"username": "user", "password": "secret"}, "b:5000": {}},
        }))) {
            let provider = json!({"name": "p", "apiVersion": "credentialprovider.kubelet.k8s.io/v1"});
            let provider: Provider = serde_json::from_value(provider).unwrap();
            match parse(&provider, answer.to_string().as_bytes()) {
                // `Instant` cannot hold every `Duration`.
                Ok((_, life, _)) => prop_assert!(Instant::now().checked_add(life).is_some()),
                Err(error) => prop_assert!(!error.to_string().contains("secret")),
            }
        }
    }
}
