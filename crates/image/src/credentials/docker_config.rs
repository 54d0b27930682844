//! Parses Docker's `config.json`, from the operator's file or a pull secret.

use std::{collections::BTreeMap, path::Path};

use base64::{
    Engine,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use archaware_base::{
    files::{self, FileError},
    json::{self, Object},
};

use super::{super::Reference, Credential, Keyring};

/// Why a `config.json` cannot be used. No message contains its content.
#[derive(Debug, thiserror::Error)]
pub enum DockerConfigError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// Not JSON, or of another structure.
    #[error("the docker configuration {path} is malformed at line {line}, column {column}")]
    Malformed {
        /// Path of the Docker configuration.
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
    /// A helper's name is a path.
    #[error(
        "the docker configuration {path} names the helper {helper:?}, which is not the name of a program"
    )]
    Helper {
        /// The file.
        path: String,
        /// The name.
        helper: String,
    },
}

/// The operator's `config.json`.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct ConfigJson {
    #[serde(deserialize_with = "json::null_as_default")]
    auths: Auths,
    #[serde(deserialize_with = "json::null_as_default")]
    cred_helpers: BTreeMap<String, String>,
    #[serde(deserialize_with = "json::null_as_default")]
    creds_store: String,
}

/// The part of `.dockerconfigjson` that the kubelet reads. The kubelet ignores all other fields,
/// which may have any type.
#[derive(Deserialize, Default)]
#[serde(default)]
struct SecretJson {
    #[serde(deserialize_with = "json::null_as_default")]
    auths: Auths,
}

/// Entries by registry or repository.
type Auths = BTreeMap<String, Option<Object<AuthEntry>>>;

#[derive(Deserialize, Default)]
#[serde(default)]
struct AuthEntry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<SecretString>,
    identitytoken: Option<SecretString>,
}

/// Maximum number of entries in the pull secrets of a pod, many times the number that a cluster
/// with many registries needs. The kubelet has no limit, but users must not fill archaware's
/// memory.
pub const MAX_ENTRIES: usize = 256;
/// Maximum number of those entries whose key is a pattern, because patterns cost more to match.
pub const MAX_PATTERNS: usize = 32;

/// Why a pull secret cannot be used. No message contains its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// The Secret does not have this key.
    #[error("it has no {0}")]
    Missing(&'static str),
    /// Not JSON, or of another structure.
    #[error("its {key} is malformed at line {line}, column {column}")]
    Malformed {
        /// The key of the Secret.
        key: &'static str,
        /// One-based.
        line: usize,
        /// One-based.
        column: usize,
    },
    /// The `auth` of an entry is not base64 of `user:password`.
    #[error("an auth in its {0} is malformed")]
    Auth(&'static str),
    /// More entries than any cluster needs.
    #[error(
        "its {0} has more than {MAX_ENTRIES} entries, or more than {MAX_PATTERNS} with patterns"
    )]
    TooMany(&'static str),
}

/// The key in Secrets of type `kubernetes.io/dockerconfigjson`.
const DOCKER_CONFIG_JSON: &str = ".dockerconfigjson";
/// The key in Secrets of type `kubernetes.io/dockercfg`, the older format: a map of entries without
/// `auths`.
const DOCKER_CFG: &str = ".dockercfg";

/// Parses a pull secret of type `kubernetes.io/dockerconfigjson`. Helpers named in it are never
/// run, because a user who can write a Secret must not choose a program.
///
/// # Errors
///
/// When the key is missing, its content malformed, or its entries too many.
pub fn docker_config_json(bytes: Option<&[u8]>) -> Result<Keyring, SecretError> {
    let key = DOCKER_CONFIG_JSON;
    let config: SecretJson = parse(key, bytes.ok_or(SecretError::Missing(key))?)?;
    secret_keyring(key, config.auths)
}

/// Parses a pull secret of type `kubernetes.io/dockercfg`.
///
/// # Errors
///
/// When the key is missing, its content malformed, or its entries too many.
pub fn docker_cfg(bytes: Option<&[u8]>) -> Result<Keyring, SecretError> {
    let key = DOCKER_CFG;
    let auths = parse(key, bytes.ok_or(SecretError::Missing(key))?)?;
    secret_keyring(key, auths)
}

fn parse<T: serde::de::DeserializeOwned>(
    key: &'static str,
    bytes: &[u8],
) -> Result<T, SecretError> {
    // serde_json's message may quote the content, so only the position is kept.
    json::object(bytes).map_err(|error| SecretError::Malformed {
        key,
        line: error.line(),
        column: error.column(),
    })
}

/// Creates the keyring of a Secret, without identity tokens, because the kubelet ignores them
/// there.
fn secret_keyring(key: &'static str, auths: Auths) -> Result<Keyring, SecretError> {
    if auths.len() > MAX_ENTRIES {
        return Err(SecretError::TooMany(key));
    }
    let keyring = keyring(auths, AuthEntry::password).map_err(|_| SecretError::Auth(key))?;
    if keyring.size().1 > MAX_PATTERNS {
        return Err(SecretError::TooMany(key));
    }
    Ok(keyring)
}

/// Converts the entries. The error is the key of the malformed entry.
fn keyring(
    auths: Auths,
    credential: impl Fn(AuthEntry) -> Result<Credential, ()>,
) -> Result<Keyring, String> {
    let mut entries = Vec::new();
    for (registry, entry) in auths {
        let Object(entry) = entry.unwrap_or_default();
        match credential(entry) {
            Ok(credential) => entries.push((registry, credential)),
            Err(()) => return Err(registry),
        }
    }
    Ok(Keyring::new(entries))
}

/// The operator's `config.json`. Helper programs are run for this file only.
#[derive(Debug, Default)]
pub(super) struct DockerConfig {
    pub(super) keyring: Keyring,
    /// By registry: the name of the helper after `docker-credential-`.
    pub(super) helpers: BTreeMap<String, String>,
    /// The helper for all other registries; empty if there is none.
    pub(super) default_helper: String,
}

impl DockerConfig {
    /// The credential helper for the registry of an image, if one is named.
    pub(super) fn helper(&self, reference: &Reference) -> Option<String> {
        let named = [server(reference), reference.registry()]
            .into_iter()
            .find_map(|name| self.helpers.get(name));
        let store = Some(&self.default_helper).filter(|store| !store.is_empty());
        named.or(store).cloned()
    }

    pub(super) fn load(path: &Path) -> Result<Self, DockerConfigError> {
        let name = path.display().to_string();
        Self::parse(&name, &files::read("the docker configuration ", path)?)
    }

    fn parse(name: &str, bytes: &[u8]) -> Result<Self, DockerConfigError> {
        let config: ConfigJson = json::object(bytes).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            let path = name.to_owned();
            DockerConfigError::Malformed { path, line, column }
        })?;
        let path = name.to_owned();
        let plain = |helper: &&String| !helper.is_empty() && !helper.contains(['/', '\0']);
        let mut named = config.cred_helpers.values();
        if let Some(helper) = named.find(|helper| !plain(helper)) {
            let helper = helper.clone();
            return Err(DockerConfigError::Helper { path, helper });
        }
        if config.creds_store.contains(['/', '\0']) {
            let helper = config.creds_store;
            return Err(DockerConfigError::Helper { path, helper });
        }
        let keyring = keyring(config.auths, AuthEntry::credential);
        Ok(Self {
            keyring: keyring.map_err(|registry| DockerConfigError::Auth { path, registry })?,
            helpers: config.cred_helpers,
            default_helper: config.creds_store,
        })
    }
}

impl AuthEntry {
    /// The identity token if there is one, as `docker login` stores it.
    fn credential(mut self) -> Result<Credential, ()> {
        let given = |token: &SecretString| !token.expose_secret().is_empty();
        match self.identitytoken.take().filter(given) {
            Some(token) => Ok(Credential::identity_token(token)),
            None => self.password(),
        }
    }

    /// `auth` takes precedence over `username` and `password`. An empty entry means anonymous
    /// access.
    fn password(self) -> Result<Credential, ()> {
        let (username, password) = match self.auth.filter(|auth| !auth.is_empty()) {
            Some(auth) => decode(&auth)?,
            None => (
                self.username.unwrap_or_default(),
                self.password.unwrap_or_default(),
            ),
        };
        Ok(Credential::password(username, password))
    }
}

/// Decodes base64 of `user:password`, with or without padding and line breaks, as Go does. The
/// password may contain colons.
fn decode(auth: &str) -> Result<(String, SecretString), ()> {
    let lenient = GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true);
    let auth: String = auth.split_whitespace().collect();
    let bytes = GeneralPurpose::new(&STANDARD, lenient)
        .decode(auth)
        .map_err(|_| ())?;
    let text = String::from_utf8(bytes).map_err(|_| ())?;
    let (username, password) = text.split_once(':').ok_or(())?;
    // Some versions of Docker pad the password with NULs.
    Ok((username.to_owned(), password.trim_end_matches('\0').into()))
}

/// Docker's name for a registry; Docker Hub's is historical.
pub(super) fn server(reference: &Reference) -> &str {
    match reference.registry() {
        "docker.io" => "https://index.docker.io/v1/",
        registry => registry,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::CredentialSecret, *};
    use crate::Reference;

    #[test]
    fn reads_what_docker_login_writes() {
        let config = br#"{"auths": {
            "a.io": {"auth": "dXNlcjpwYTpzcw=="},
            "b.io": {"auth": "dXNlcjpwYTpzcw", "username": "other", "password": "other"},
            "c.io": {"username": "user", "password": "pa:ss"},
            "d.io": {},
            "e.io": {"identitytoken": "refresh"}
        }, "credsStore": "pass", "credHelpers": {"h.io": "ecr"}, "HttpHeaders": {}}"#;
        let own = DockerConfig::parse("test", config).unwrap();
        assert_eq!(
            (own.default_helper.as_str(), own.helpers["h.io"].as_str()),
            ("pass", "ecr")
        );
        let keyring = own.keyring;
        for (image, expected) in [
            ("a.io/x", "user/pa:ss"),
            ("b.io/x", "user/pa:ss"),
            ("c.io/x", "user/pa:ss"),
        ] {
            let found = keyring.lookup(&Reference::parse(image).unwrap());
            let CredentialSecret::Password { username, password } = found[0].secret() else {
                panic!()
            };
            assert_eq!(format!("{username}/{}", password.expose_secret()), expected);
        }
        assert!(
            keyring.lookup(&Reference::parse("d.io/x").unwrap())[0]
                .authenticated()
                .is_none()
        );
        let token = keyring.lookup(&Reference::parse("e.io/x").unwrap());
        assert!(matches!(
            token[0].secret(),
            CredentialSecret::IdentityToken(_)
        ));
    }

    #[test]
    fn errors_name_the_place_and_hold_no_content() {
        for bad in [
            r#"{"auths": {"a.io": {"auth": "!hunter2!"}}}"#,
            r#"{"auths": "hunter2"}"#,
            r#"{"auths": {"a.io": ["hunter2"]}}"#,
            "[]",
            "\"hunter2\"",
        ] {
            let error = DockerConfig::parse("config.json", bad.as_bytes()).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(
                text.contains("config.json") && !text.contains("hunter2"),
                "{text}"
            );
        }
    }

    #[test]
    fn pull_secrets_have_two_formats_and_run_no_program() {
        let auth = r#"{"auth": "dXNlcjpwYTpzcw=="}"#;
        let bare = format!(r#"{{"a.io": {auth}, "b.io": {{}}}}"#);
        let whole =
            format!(r#"{{"auths": {bare}, "credsStore": "evil", "credHelpers": {{"c.io": "x"}}}}"#);
        let image = Reference::parse("a.io/x").unwrap();
        for keyring in [
            docker_cfg(Some(bare.as_bytes())),
            docker_config_json(Some(whole.as_bytes())),
        ] {
            let found = keyring.unwrap().lookup(&image);
            assert!(found.len() == 1 && found[0].authenticated().is_some());
        }
        // Fields that the kubelet does not read may have any type.
        for odd in [
            r#"{"auths": {"a.io": {"auth": "dXNlcjpw\nYXNz\n"}}, "credsStore": null, "credHelpers": []}"#,
            r#"{"auths": {"a.io": {"auth": "dXNlcjpwYXNzd29yZB=="}}, "credHelpers": null}"#,
            r#"{"auths": {"a.io": null}}"#,
        ] {
            let keyring = docker_config_json(Some(odd.as_bytes())).unwrap();
            assert_eq!(keyring.lookup(&image).len(), 1, "{odd}");
        }
        let empty = docker_config_json(Some(br#"{"auths": null}"#)).unwrap();
        assert_eq!(empty.lookup(&image).len(), 0);
        assert_eq!(
            docker_cfg(None).unwrap_err(),
            SecretError::Missing(".dockercfg")
        );
        for bad in [
            "hunter2",
            "{\"auths\": 1}",
            r#"{"auths": {"a": {"auth": "hunter2"}}}"#,
            r#"{"auths": {"a": ["hunter2"]}}"#,
            "[]",
            "\"\"",
        ] {
            let error = docker_config_json(Some(bad.as_bytes())).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"));
        }
    }

    /// The kubelet's `DockerConfigEntry` has no identity token. So the kubelet reads only the
    /// `auth` of such an entry.
    #[test]
    fn an_identity_token_in_a_secret_is_ignored() {
        let image = Reference::parse("a.io/x").unwrap();
        let read = |entry: &str| {
            let config = format!(r#"{{"auths": {{"a.io": {entry}}}}}"#);
            docker_config_json(Some(config.as_bytes()))
                .unwrap()
                .lookup(&image)
                .remove(0)
        };
        assert!(
            read(r#"{"identitytoken": "refresh"}"#)
                .authenticated()
                .is_none()
        );
        let both = read(r#"{"auth": "MDAwOg==", "identitytoken": "refresh"}"#);
        let CredentialSecret::Password { username, .. } = both.secret() else {
            panic!("{both:?}")
        };
        assert_eq!(username, "000");
    }

    #[test]
    fn a_secret_has_few_entries() {
        let with = |number: usize| {
            let entries =
                (0..number).map(|n| format!(r#""r{n}.io": {{"auth": "dXNlcjpwYTpzcw=="}}"#));
            let config = format!("{{{}}}", entries.collect::<Vec<_>>().join(","));
            docker_cfg(Some(config.as_bytes()))
        };
        assert!(with(MAX_ENTRIES).is_ok());
        assert_eq!(
            with(MAX_ENTRIES + 1).unwrap_err(),
            SecretError::TooMany(".dockercfg")
        );
        let patterns = (0..=MAX_PATTERNS).map(|n| format!(r#""*.r{n}.io": {{}}"#));
        let config = format!("{{{}}}", patterns.collect::<Vec<_>>().join(","));
        assert!(docker_cfg(Some(config.as_bytes())).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_content_makes_it_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200), text in r#"[{}":,a-z=]{0,80}"#) {
            let _ = (docker_cfg(Some(&bytes)), docker_config_json(Some(&bytes)));
            let _ = docker_config_json(Some(format!(r#"{{"auths": {{"a": {{"auth": "{text}"}}}}}}"#).as_bytes()));
        }
    }

    #[test]
    fn helpers_are_names_of_programs() {
        for bad in [
            r#"{"credsStore": "../evil"}"#,
            r#"{"credHelpers": {"a.io": ""}}"#,
        ] {
            let error = DockerConfig::parse("config.json", bad.as_bytes()).unwrap_err();
            assert!(matches!(error, DockerConfigError::Helper { .. }), "{error}");
        }
    }
}
