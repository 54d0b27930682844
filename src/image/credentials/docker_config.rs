//! Docker's `config.json`: the `auths` that `docker login` writes.

use std::{collections::BTreeMap, path::Path};

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use secrecy::SecretString;
use serde::Deserialize;

use super::{Credential, Keyring};

/// A `config.json` larger than this is not one.
const MAX_SIZE: u64 = 1024 * 1024;

/// Why a `config.json` cannot be used. No message holds any of its content.
#[derive(Debug, thiserror::Error)]
pub enum DockerConfigError {
    /// The file cannot be read.
    #[error("cannot read the docker configuration {path}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Larger than 1 MiB.
    #[error("the docker configuration {0} is larger than 1 MiB")]
    TooLarge(String),
    /// Not JSON of the right shape.
    #[error("the docker configuration {path} is malformed at line {line}, column {column}")]
    Malformed {
        /// The file.
        path: String,
        /// One-based.
        line: usize,
        /// One-based.
        column: usize,
    },
    /// The `auth` of an entry is not base64 of `user:password`.
    #[error("the docker configuration {path} has a malformed auth for {registry}")]
    Auth {
        /// The file.
        path: String,
        /// The key of the entry.
        registry: String,
    },
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<SecretString>,
    identitytoken: Option<SecretString>,
}

/// Reads a `config.json`.
pub fn load(path: &Path) -> Result<Keyring, DockerConfigError> {
    let name = path.display().to_string();
    let read = |source| DockerConfigError::Read {
        path: path.display().to_string(),
        source,
    };
    if std::fs::metadata(path).map_err(read)?.len() > MAX_SIZE {
        return Err(DockerConfigError::TooLarge(name));
    }
    parse(&name, &std::fs::read(path).map_err(read)?)
}

fn parse(name: &str, bytes: &[u8]) -> Result<Keyring, DockerConfigError> {
    let config: Config = serde_json::from_slice(bytes).map_err(|error| {
        // The message of the JSON library may quote the content: only the place is passed on.
        let (line, column) = (error.line(), error.column());
        DockerConfigError::Malformed {
            path: name.to_owned(),
            line,
            column,
        }
    })?;
    let mut entries = Vec::new();
    for (registry, entry) in config.auths {
        let malformed = || DockerConfigError::Auth {
            path: name.to_owned(),
            registry: registry.clone(),
        };
        if let Some(credential) = entry.credential().map_err(|()| malformed())? {
            entries.push((registry, credential));
        }
    }
    Ok(Keyring::new(entries))
}

impl Entry {
    /// `auth` goes before `username` and `password`; an empty entry means an anonymous pull.
    fn credential(self) -> Result<Option<Credential>, ()> {
        if let Some(token) = self.identitytoken.filter(|token| !is_empty(token)) {
            return Ok(Some(Credential::identity_token(token)));
        }
        let (username, password) = match self.auth.filter(|auth| !auth.is_empty()) {
            Some(auth) => decode(&auth)?,
            None => (
                self.username.unwrap_or_default(),
                self.password.unwrap_or_default(),
            ),
        };
        let anonymous = username.is_empty() && is_empty(&password);
        Ok((!anonymous).then(|| Credential::password(username, password)))
    }
}

fn is_empty(secret: &SecretString) -> bool {
    use secrecy::ExposeSecret;
    secret.expose_secret().is_empty()
}

/// Base64, padded or not, of `user:password`; the password may hold colons.
fn decode(auth: &str) -> Result<(String, SecretString), ()> {
    let lenient =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let bytes = GeneralPurpose::new(&STANDARD, lenient)
        .decode(auth.trim())
        .map_err(|_| ())?;
    let text = String::from_utf8(bytes).map_err(|_| ())?;
    let (username, password) = text.split_once(':').ok_or(())?;
    // Docker pads the password with NULs in some versions.
    Ok((username.to_owned(), password.trim_end_matches('\0').into()))
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::{super::Secret, *};
    use crate::image::Reference;

    #[test]
    fn reads_what_docker_login_writes() {
        let config = br#"{"auths": {
            "a.io": {"auth": "dXNlcjpwYTpzcw=="},
            "b.io": {"auth": "dXNlcjpwYTpzcw", "username": "other", "password": "other"},
            "c.io": {"username": "user", "password": "pa:ss"},
            "d.io": {},
            "e.io": {"identitytoken": "refresh"}
        }, "credsStore": "ignored-here", "HttpHeaders": {}}"#;
        let keyring = parse("test", config).unwrap();
        for (image, expected) in [
            ("a.io/x", "user/pa:ss"),
            ("b.io/x", "user/pa:ss"),
            ("c.io/x", "user/pa:ss"),
        ] {
            let found = keyring.lookup(&Reference::parse(image).unwrap());
            let Secret::Password { username, password } = found[0].secret() else {
                panic!()
            };
            assert_eq!(format!("{username}/{}", password.expose_secret()), expected);
        }
        assert!(
            keyring
                .lookup(&Reference::parse("d.io/x").unwrap())
                .is_empty()
        );
        let token = keyring.lookup(&Reference::parse("e.io/x").unwrap());
        assert!(matches!(token[0].secret(), Secret::IdentityToken(_)));
    }

    #[test]
    fn errors_name_the_place_and_hold_no_content() {
        for bad in [
            r#"{"auths": {"a.io": {"auth": "!hunter2!"}}}"#,
            r#"{"auths": "hunter2"}"#,
        ] {
            let error = parse("config.json", bad.as_bytes()).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(
                text.contains("config.json") && !text.contains("hunter2"),
                "{text}"
            );
        }
    }
}
