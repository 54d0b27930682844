//! Registry credentials: where they come from and which image they are for.

mod command;
mod docker_config;
mod keyring;
mod node;
mod provider;

use std::sync::{Arc, LazyLock};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};

use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest as _, Sha256};

pub use docker_config::{DockerConfigError, Entries, SecretError, docker_cfg, docker_config_json};
pub use keyring::Keyring;
pub use node::NodeCredentials;
pub use provider::{ProviderError, Providers};

/// The keyring of one asker, made when it is first needed: most images are known without it.
pub type Keys = Shared<BoxFuture<'static, Arc<Keyring>>>;

/// A keyring that is there already.
pub fn ready(keyring: Keyring) -> Keys {
    std::future::ready(Arc::new(keyring)).boxed().shared()
}

/// What proves to a registry who asks. Its text shows in no `Debug` output.
#[derive(Clone, Debug)]
pub struct Credential {
    secret: Secret,
    fingerprint: Fingerprint,
}

#[derive(Clone, Debug)]
pub(crate) enum Secret {
    Password {
        username: String,
        password: SecretString,
    },
    /// An `OAuth2` refresh token, exchanged at the token endpoint.
    IdentityToken(SecretString),
    /// The word that what it is for is open to everybody.
    Anonymous,
}

/// Tells credentials (and names) apart without holding them: a hash keyed by this process, so it means
/// nothing outside of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 16]);

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fingerprint(…)")
    }
}

impl Credential {
    /// A user name and password; two empty ones are none.
    pub fn password(username: String, password: SecretString) -> Self {
        if username.is_empty() && password.expose_secret().is_empty() {
            return Self::anonymous();
        }
        let fingerprint = Fingerprint::of(&[
            b"password",
            username.as_bytes(),
            password.expose_secret().as_bytes(),
        ]);
        Self {
            secret: Secret::Password { username, password },
            fingerprint,
        }
    }

    /// An identity token, as `docker login` stores for some registries.
    pub fn identity_token(token: SecretString) -> Self {
        let fingerprint = Fingerprint::of(&[b"token", token.expose_secret().as_bytes()]);
        Self {
            secret: Secret::IdentityToken(token),
            fingerprint,
        }
    }

    /// An entry without any secret: what it is for is asked for anonymously, whatever other entries say.
    pub fn anonymous() -> Self {
        Self {
            secret: Secret::Anonymous,
            fingerprint: Fingerprint::of(&[b"anonymous"]),
        }
    }

    /// What is shown to a registry.
    pub(crate) fn shown(&self) -> Option<&Self> {
        (!matches!(self.secret, Secret::Anonymous)).then_some(self)
    }

    pub(crate) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Its fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

impl Fingerprint {
    /// Of several together, in their order.
    pub(crate) fn of_all(fingerprints: &[Self]) -> Self {
        let parts: Vec<&[u8]> = fingerprints.iter().map(Self::bytes).collect();
        Self::of(&parts)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn of(parts: &[&[u8]]) -> Self {
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
