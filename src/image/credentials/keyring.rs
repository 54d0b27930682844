//! Matches credentials to images by the kubelet's rules (`k8s.io/kubernetes/pkg/credentialprovider`,
//! `BasicDockerKeyring`).

use crate::image::reference::{Reference, host_and_port};

use super::Credential;

/// Credentials by registry or repository.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    /// In reverse lexicographic order of keys, so that longer paths come first; equal keys keep their order.
    entries: Vec<(Key, Credential)>,
}

/// `host[:port][/path]`; each component of the host may be a glob.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(String);

impl Keyring {
    /// A keyring from pairs of key and credential in a docker `config.json`.
    pub fn new(entries: impl IntoIterator<Item = (String, Credential)>) -> Self {
        let mut entries: Vec<_> = entries
            .into_iter()
            .map(|(key, credential)| (Key::new(&key), credential))
            .collect();
        entries.sort_by(|(a, _), (b, _)| b.cmp(a));
        Self { entries }
    }

    /// Combines keyrings. Under equal keys the entries of earlier keyrings come first.
    pub(super) fn union<'a>(keyrings: impl Iterator<Item = &'a Self>) -> Self {
        let mut entries: Vec<_> = keyrings
            .flat_map(|keyring| keyring.entries.iter().cloned())
            .collect();
        entries.sort_by(|(a, _), (b, _)| b.cmp(a));
        Self { entries }
    }

    /// All credentials for an image, the best match first. If there is one, the kubelet does not try anonymous
    /// access.
    pub fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let matching = |(key, _): &&(Key, Credential)| key.matches(reference);
        let found: Vec<Credential> = self
            .entries
            .iter()
            .filter(matching)
            .map(|(_, credential)| credential.clone())
            .collect();
        // Docker's tools store the credentials of Docker Hub under its old name.
        if found.is_empty() && reference.registry() == "docker.io" {
            let named = self
                .entries
                .iter()
                .filter(|(key, _)| key.0 == "index.docker.io");
            return named.map(|(_, credential)| credential.clone()).collect();
        }
        found
    }
}

impl Key {
    /// A pattern of `matchImages`. Unlike a key it has no scheme and no API version.
    pub(super) fn pattern(text: &str) -> Self {
        Self(text.split(['?', '#']).next().unwrap_or(text).to_owned())
    }

    pub(super) fn new(text: &str) -> Self {
        let bare = text
            .strip_prefix("https://")
            .or_else(|| text.strip_prefix("http://"))
            .unwrap_or(text);
        // The kubelet parses a key as a URL and uses its host and path.
        let bare = bare.split(['?', '#']).next().unwrap_or(bare);
        let (host, path) = bare.split_once('/').unwrap_or((bare, ""));
        // In `https://index.docker.io/v1/` the API version is not part of the repository. Without the trailing slash
        // the kubelet treats it as part of it, and so does this.
        let path = path
            .strip_prefix("v1/")
            .or_else(|| path.strip_prefix("v2/"))
            .unwrap_or(path);
        Self(if path.is_empty() {
            host.to_owned()
        } else {
            format!("{host}/{path}")
        })
    }

    /// Ports must be equal, each component of the host must match its glob, and the path is a plain prefix.
    pub(super) fn matches(&self, reference: &Reference) -> bool {
        let (registry, repository) = (reference.registry(), reference.repository());
        let (key_registry, key_path) = self.0.split_once('/').unwrap_or((&self.0, ""));
        let (key_host, key_port) = split(key_registry);
        let (host, port) = split(registry);
        let same_parts = key_host.split('.').count() == host.split('.').count();
        key_port == port
            && same_parts
            && key_host
                .split('.')
                .zip(host.split('.'))
                .all(|(glob, part)| glob_matches(glob, part))
            && repository.starts_with(key_path)
    }
}

/// Go's `net.SplitHostPort`: removes the brackets of an IPv6 literal with a port.
fn split(registry: &str) -> (&str, Option<&str>) {
    match host_and_port(registry) {
        (host, Some(port)) => (host.trim_matches(['[', ']']), Some(port)),
        bare => bare,
    }
}

/// Go's `filepath.Match` for one component of a host name: `*`, and classes like `[a-c]` or `[^a]`. A malformed
/// pattern matches nothing. `?` does not occur, because the kubelet parses it as the start of a query.
fn glob_matches(pattern: &str, text: &str) -> bool {
    fn matches(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => {
                (0..=text.len()).any(|n| matches(rest, text.get(n..).unwrap_or(&[])))
            }
            Some(('[', rest)) => text.split_first().is_some_and(|(c, tail)| {
                class(rest, *c).is_some_and(|(hit, rest)| hit && matches(rest, tail))
            }),
            Some((c, rest)) => text
                .split_first()
                .is_some_and(|(t, tail)| t == c && matches(rest, tail)),
        }
    }
    let (pattern, text): (Vec<_>, Vec<_>) = (pattern.chars().collect(), text.chars().collect());
    // Bounds the exponential backtracking of patterns like `*a*a*a*…`.
    pattern.iter().filter(|c| **c == '*').count() <= 4 && matches(&pattern, &text)
}

/// Whether `c` is in the class that `pattern` (after its `[`) opens, and the pattern after the class.
fn class(pattern: &[char], c: char) -> Option<(bool, &[char])> {
    let (negated, pattern) = match pattern.split_first() {
        Some(('^', rest)) => (true, rest),
        _ => (false, pattern),
    };
    let end = pattern.iter().skip(1).position(|c| *c == ']')? + 1;
    let (members, rest) = (pattern.get(..end)?, pattern.get(end + 1..)?);
    let mut hit = false;
    let mut members = members.iter().copied().peekable();
    while let Some(low) = members.next() {
        let high = if members.peek() == Some(&'-') {
            members.next();
            members.next()?
        } else {
            low
        };
        hit |= (low..=high).contains(&c);
    }
    Some((hit != negated, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use secrecy::ExposeSecret;

    use super::{super::CredentialSecret, *};

    fn users(keys: &[&str], image: &str) -> Vec<String> {
        let keyring = Keyring::new(keys.iter().map(|key| {
            (
                (*key).to_owned(),
                Credential::password((*key).to_owned(), "secret".into()),
            )
        }));
        let name = |credential: &Credential| match credential.secret() {
            CredentialSecret::Password { username, .. } => username.clone(),
            CredentialSecret::IdentityToken(token) => token.expose_secret().to_owned(),
            CredentialSecret::Anonymous => String::new(),
        };
        keyring
            .lookup(&Reference::parse(image).unwrap())
            .iter()
            .map(name)
            .collect()
    }

    #[test]
    fn matches_as_the_kubelet_does() {
        for (keys, image, expected) in [
            (&["reg.io"][..], "reg.io/app", &["reg.io"][..]),
            (&["reg.io"], "other.io/app", &[]),
            (&["reg.io"], "reg.io:5000/app", &[]),
            (&["reg.io:5000"], "reg.io/app", &[]),
            (&["reg.io:5000"], "reg.io:5000/app", &["reg.io:5000"]),
            (
                &["https://reg.io/v2/"],
                "reg.io/app",
                &["https://reg.io/v2/"],
            ),
            (&["https://reg.io/v2"], "reg.io/app", &[]),
            (&["*.reg.io"], "a.reg.io/app", &["*.reg.io"]),
            (&["*.reg.io"], "reg.io/app", &[]),
            (&["*.reg.io"], "a.b.reg.io/app", &[]),
            (&["r[a-e]g.io"], "reg.io/app", &["r[a-e]g.io"]),
            (&["r[^a-e]g.io"], "reg.io/app", &[]),
            (&["r?g.io", "r*.io"], "reg.io/app", &["r*.io"]),
            (&["gcr.io/foo"], "gcr.io/foobar/x", &["gcr.io/foo"]),
            (
                &["gcr.io", "gcr.io/foo"],
                "gcr.io/foo/x",
                &["gcr.io/foo", "gcr.io"],
            ),
            (
                &["https://index.docker.io/v1/"],
                "nginx",
                &["https://index.docker.io/v1/"],
            ),
            (&["docker.io"], "nginx", &["docker.io"]),
            (&["registry-1.docker.io"], "nginx", &[]),
            (&["[::1]:5000"], "[::1]:5000/app", &["[::1]:5000"]),
            (&["*.docker.io"], "nginx", &[]),
            (&["["], "reg.io/app", &[]),
        ] {
            assert_eq!(users(keys, image), expected, "{keys:?} {image}");
        }
    }

    /// Generated by `BasicDockerKeyring.Lookup` of `k8s.io/kubernetes` v1.36.3: keys, an image, and the positions of
    /// the matching keys in the order in which they are tried. Keys with character classes are left out: Go 1.26
    /// rejects them as malformed IPv6 literals, earlier versions did not.
    const CORPUS: &str = include_str!("keyring/corpus.tsv");

    #[test]
    fn agrees_with_the_kubelet_on_the_corpus() {
        for line in CORPUS.lines() {
            let mut columns = line.split('\t');
            let (keys, image, expected) = (
                columns.next().unwrap(),
                columns.next().unwrap(),
                columns.next().unwrap(),
            );
            let entries = keys.split(' ').enumerate().map(|(place, key)| {
                let user = place.to_string();
                (key.to_owned(), Credential::password(user, "x".into()))
            });
            let found = Keyring::new(entries).lookup(&Reference::parse(image).unwrap());
            let users: Vec<_> = found
                .iter()
                .map(|credential| match credential.secret() {
                    CredentialSecret::Password { username, .. } => username.as_str(),
                    CredentialSecret::IdentityToken(_) | CredentialSecret::Anonymous => "",
                })
                .collect();
            assert_eq!(users.join(" "), expected, "{keys:?} {image}");
        }
    }

    proptest! {
        #[test]
        fn no_key_makes_the_lookup_panic_or_hang(
            keys in proptest::collection::vec("[a-z*?\\[\\]^.:/-]{0,40}", 0..20),
            image in "[a-c.]{1,20}\\.io/[a-c/]{1,10}",
        ) {
            if let Ok(reference) = Reference::parse(&image) {
                let entries = keys.into_iter().map(|key| (key, Credential::password("a".into(), "b".into())));
                Keyring::new(entries).lookup(&reference);
            }
        }
    }

    #[test]
    fn a_hostile_glob_ends() {
        let pattern = "*a".repeat(200);
        assert!(users(&[&pattern], &format!("{}.io/x", "a".repeat(200))).is_empty());
    }

    #[test]
    fn secrets_do_not_show() {
        let credential = Credential::password("user".into(), "hunter2".into());
        assert!(!format!("{credential:?}").contains("hunter2"));
    }
}
