//! Registry credentials: their sources, and which of them apply to an image.

mod command;
mod docker_config;
mod keyring;
mod operator;
mod provider;

use std::sync::{Arc, LazyLock};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};

use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest as _, Sha256};

pub use docker_config::{
    DockerConfigError, MAX_ENTRIES, MAX_PATTERNS, SecretError, docker_cfg, docker_config_json,
};
pub use keyring::Keyring;
pub(crate) use keyring::MAX_CREDENTIALS;
pub use operator::OperatorCredentials;
pub use provider::{ProviderError, Providers};

/// The keyring of one pod, loaded when first needed: most images are cached and need none.
pub type LazyKeyring = Shared<BoxFuture<'static, Arc<Keyring>>>;

/// A keyring that needs no loading.
pub fn ready_keyring(keyring: Keyring) -> LazyKeyring {
    std::future::ready(Arc::new(keyring)).boxed().shared()
}

/// A credential. Cheap to clone: the secret is held once. Its `Debug` output shows no secret.
#[derive(Clone, Debug)]
pub struct Credential {
    secret: Arc<CredentialSecret>,
    fingerprint: Fingerprint,
    source: CredentialSource,
}

/// Where a credential was found. Contains neither a user name nor a password, so it can be shown.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum CredentialSource {
    /// A docker `config.json`.
    DockerConfig,
    /// A credential helper, which a docker `config.json` names.
    Helper(Arc<str>),
    /// A credential provider plugin of the kubelet's protocol.
    Provider(Arc<str>),
    /// A pull secret in the pod's namespace.
    PullSecret(Arc<str>),
}

impl std::fmt::Display for CredentialSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::DockerConfig => f.write_str("docker config.json"),
            Self::Helper(name) => write!(f, "credential helper {name}"),
            Self::Provider(name) => write!(f, "credential provider {name}"),
            Self::PullSecret(name) => write!(f, "pull secret {name}"),
        }
    }
}

#[derive(Debug)]
pub(crate) enum CredentialSecret {
    Password {
        username: String,
        password: SecretString,
    },
    /// An `OAuth2` refresh token, exchanged at the token endpoint.
    IdentityToken(SecretString),
    /// Access without authentication.
    Anonymous,
}

/// Identifies a credential or name without holding it: a hash with a key of this process,
/// meaningless elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 16]);

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fingerprint(…)")
    }
}

impl Credential {
    /// A user name and password; both are empty for anonymous access.
    pub fn password(username: String, password: SecretString) -> Self {
        if username.is_empty() && password.expose_secret().is_empty() {
            return Self::anonymous();
        }
        let fingerprint = Fingerprint::from_parts(&[
            b"password",
            username.as_bytes(),
            password.expose_secret().as_bytes(),
        ]);
        Self::new(
            CredentialSecret::Password { username, password },
            fingerprint,
        )
    }

    /// An identity token, as `docker login` stores for some registries.
    pub fn identity_token(token: SecretString) -> Self {
        let fingerprint = Fingerprint::from_parts(&[b"token", token.expose_secret().as_bytes()]);
        Self::new(CredentialSecret::IdentityToken(token), fingerprint)
    }

    /// An entry without a secret: anonymous access is tried at its position among the entries.
    pub fn anonymous() -> Self {
        let fingerprint = Fingerprint::from_parts(&[b"anonymous"]);
        Self::new(CredentialSecret::Anonymous, fingerprint)
    }

    fn new(secret: CredentialSecret, fingerprint: Fingerprint) -> Self {
        Self {
            secret: Arc::new(secret),
            fingerprint,
            source: CredentialSource::DockerConfig,
        }
    }

    /// This credential, with another source than a docker `config.json`.
    #[must_use]
    pub fn from_source(self, source: CredentialSource) -> Self {
        Self { source, ..self }
    }

    /// Where it was found.
    pub fn source(&self) -> &CredentialSource {
        &self.source
    }

    /// The credential to send; `None` for anonymous access.
    pub(crate) fn authenticated(&self) -> Option<&Self> {
        (!matches!(*self.secret, CredentialSecret::Anonymous)).then_some(self)
    }

    pub(crate) fn secret(&self) -> &CredentialSecret {
        &self.secret
    }

    /// A keyed hash of the credential, for cache keys.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

impl Fingerprint {
    /// The combined fingerprint of several credentials in their order.
    pub(crate) fn combine(fingerprints: &[Self]) -> Self {
        let parts: Vec<&[u8]> = fingerprints.iter().map(Self::bytes).collect();
        Self::from_parts(&parts)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn from_parts(parts: &[&[u8]]) -> Self {
        static KEY: LazyLock<[u8; 32]> = LazyLock::new(rand::random);
        let mut hash = Sha256::new();
        hash.update(*KEY);
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let mut short = [0; 16];
        short
            .iter_mut()
            .zip(hash.finalize())
            .for_each(|(to, from)| *to = from);
        Self(short)
    }
}
