//! Matches credentials to images by the kubelet's rules
//! (`k8s.io/kubernetes/pkg/credentialprovider`, `BasicDockerKeyring`).

use std::{collections::HashSet, sync::Arc};

use crate::reference::{Reference, host_and_port};

use super::{Credential, CredentialSource};

/// Maximum number of credentials for one image, so that users cannot make archaware guess thousands
/// of passwords: it tries each credential until one works.
pub(crate) const MAX_CREDENTIALS: usize = 16;

/// Maximum bytes of a label in the DNS (RFC 1035, 2.3.4).
const MAX_LABEL: usize = 63;

/// Credentials by registry or repository.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    /// In reverse lexicographic order of keys, so that longer paths come first; equal keys keep
    /// their order.
    entries: Vec<(Key, Credential)>,
}

/// `host[:port][/path]`; each component of the host may be a glob. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key(Arc<str>);

impl Keyring {
    /// A keyring from pairs of key and credential in a docker `config.json`.
    pub fn new(entries: impl IntoIterator<Item = (String, Credential)>) -> Self {
        let entries = entries.into_iter();
        Self::from_entries(entries.map(|(key, credential)| (Key::new(&key), credential)))
    }

    /// Creates a keyring from entries with normalised keys. Equal credentials under the same key
    /// count once.
    fn from_entries(entries: impl IntoIterator<Item = (Key, Credential)>) -> Self {
        let mut entries: Vec<_> = entries.into_iter().collect();
        // Stable: equal keys keep their order.
        entries.sort_by(|(a, _), (b, _)| b.cmp(a));
        let mut seen = HashSet::new();
        entries.retain(|(key, credential)| seen.insert((key.clone(), credential.fingerprint())));
        Self { entries }
    }

    /// These credentials, with another source than a docker `config.json`.
    #[must_use]
    pub fn from_source(mut self, source: &CredentialSource) -> Self {
        for (_, credential) in &mut self.entries {
            *credential = credential.clone().from_source(source.clone());
        }
        self
    }

    /// Combines keyrings. Under equal keys the entries of earlier keyrings come first.
    pub fn union<'a>(keyrings: impl Iterator<Item = &'a Self>) -> Self {
        Self::from_entries(keyrings.flat_map(|keyring| keyring.entries.iter().cloned()))
    }

    /// Number of its entries, and of those whose key is a pattern.
    pub fn size(&self) -> (usize, usize) {
        let patterns = self.entries.iter().filter(|(key, _)| key.is_pattern());
        (self.entries.len(), patterns.count())
    }

    /// Whether it has no entry.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The credentials for an image, the best match first, each once and at most 16. If there are
    /// any, archaware, like the kubelet, does not try anonymous access.
    pub fn lookup(&self, reference: &Reference) -> Vec<Credential> {
        let found = self.distinct(|key| key.matches(reference));
        // Docker's tools store the credentials of Docker Hub under its old name.
        if found.is_empty() && reference.registry() == "docker.io" {
            return self.distinct(|key| &*key.0 == "index.docker.io");
        }
        found
    }

    fn distinct(&self, matches: impl Fn(&Key) -> bool) -> Vec<Credential> {
        let mut seen = HashSet::new();
        let matching = self.entries.iter().filter(|(key, _)| matches(key));
        let distinct = matching.filter(|(_, credential)| seen.insert(credential.fingerprint()));
        distinct
            .take(MAX_CREDENTIALS)
            .map(|(_, credential)| credential.clone())
            .collect()
    }
}

impl Key {
    /// A pattern of `matchImages`. Unlike a key it has no scheme and no API version.
    pub(super) fn pattern(text: &str) -> Self {
        Self(text.split(['?', '#']).next().unwrap_or(text).into())
    }

    pub(super) fn new(text: &str) -> Self {
        let bare = text
            .strip_prefix("https://")
            .or_else(|| text.strip_prefix("http://"))
            .unwrap_or(text);
        // The kubelet parses a key as a URL and uses its host and path.
        let bare = bare.split(['?', '#']).next().unwrap_or(bare);
        let (host, path) = bare.split_once('/').unwrap_or((bare, ""));
        // In `https://index.docker.io/v1/` the API version is not part of the repository. Without
        // the trailing slash, `v1` is a repository prefix, as in the kubelet.
        let path = path
            .strip_prefix("v1/")
            .or_else(|| path.strip_prefix("v2/"))
            .unwrap_or(path);
        Self(if path.is_empty() {
            host.into()
        } else {
            format!("{host}/{path}").into()
        })
    }

    fn is_pattern(&self) -> bool {
        self.0.contains(['*', '['])
    }

    /// Ports must be equal, each component of the host must match its glob, and the path is a plain
    /// prefix.
    pub(super) fn matches(&self, reference: &Reference) -> bool {
        let (registry, repository) = (reference.registry(), reference.repository());
        let (key_registry, key_path) = self.0.split_once('/').unwrap_or((&*self.0, ""));
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

/// Go's `filepath.Match` for one component of a host name: `*`, and classes like `[a-c]` or `[^a]`.
/// A malformed pattern matches nothing. `?` does not occur, because the kubelet parses it as the
/// start of a query.
///
/// Users choose the pattern and the text, so the number of steps must stay below the product of
/// their lengths. After a mismatch, only the last `*` is extended by one character, because
/// extending an earlier `*` finds no further match.
fn glob_matches(pattern: &str, text: &str) -> bool {
    // DNS labels are never longer. So longer components only match literally.
    if pattern.len() > MAX_LABEL || text.len() > MAX_LABEL {
        return pattern == text;
    }
    let (pattern, text): (Vec<_>, Vec<_>) = (pattern.chars().collect(), text.chars().collect());
    let (mut rest, mut place) = (pattern.as_slice(), 0);
    // The pattern behind the last `*`, and where that `*` ends in the text.
    let mut star: Option<(&[char], usize)> = None;
    loop {
        let next = match (rest.split_first(), text.get(place)) {
            (None, None) => return true,
            (Some(('*', behind)), _) => {
                star = Some((behind, place));
                rest = behind;
                continue;
            }
            (None, Some(_)) => None,
            (Some(('[', class_and_rest)), Some(c)) => match class(class_and_rest, *c) {
                Some((hit, behind)) => hit.then_some(behind),
                None => return false,
            },
            (Some((literal, behind)), Some(c)) => (literal == c).then_some(behind),
            (Some(_), None) => return false,
        };
        (rest, place) = match (next, star) {
            (Some(behind), _) => (behind, place + 1),
            (None, Some((behind, end))) => {
                star = Some((behind, end + 1));
                (behind, end + 1)
            }
            (None, None) => return false,
        };
    }
}

/// Returns whether `c` is in the class that `pattern` starts with, and the rest of `pattern` after
/// that class. The `[` is already removed. `None` if the class is malformed.
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

    /// Generated by `BasicDockerKeyring.Lookup` of `k8s.io/kubernetes` v1.36.3: keys, an image, and
    /// the positions of the matching keys in the order of their use. Keys with character classes
    /// are left out: Go 1.26 rejects them as malformed IPv6 literals, earlier versions did not.
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

    /// Reference implementation of [`glob_matches`]: tries every length for each `*`.
    fn glob_by_definition(pattern: &[char], text: &[char]) -> bool {
        match pattern.split_first() {
            None => text.is_empty(),
            Some(('*', rest)) => (0..=text.len()).any(|end| glob_by_definition(rest, &text[end..])),
            Some(('[', rest)) => text.split_first().is_some_and(|(c, tail)| {
                class(rest, *c).is_some_and(|(hit, rest)| hit && glob_by_definition(rest, tail))
            }),
            Some((c, rest)) => text
                .split_first()
                .is_some_and(|(t, tail)| t == c && glob_by_definition(rest, tail)),
        }
    }

    proptest! {
        #[test]
        fn globs_match_what_their_definition_matches(
            pattern in "([ab*]|\\[a\\]|\\[\\^a\\]|\\[a-b\\]){0,8}",
            text in "[abc]{0,10}",
        ) {
            let chars = |text: &str| text.chars().collect::<Vec<_>>();
            let expected = glob_by_definition(&chars(&pattern), &chars(&text));
            prop_assert_eq!(glob_matches(&pattern, &text), expected, "{} {}", pattern, text);
        }
    }

    /// With backtracking into every `*`, the second and third pattern would take more than 10^11
    /// steps and block a thread of the runtime.
    #[test]
    fn a_hostile_glob_takes_few_steps() {
        let text = "a".repeat(MAX_LABEL);
        let started = std::time::Instant::now();
        for pattern in [
            "*a*a*a*ab".to_owned(),
            "*a".repeat(31) + "b",
            "*[a-z]".repeat(10) + "b",
        ] {
            for _ in 0..100 {
                assert!(!glob_matches(&pattern, &text));
            }
        }
        assert!(
            started.elapsed() < std::time::Duration::from_secs(10),
            "{:?}",
            started.elapsed()
        );
    }

    #[test]
    fn a_credential_counts_once_and_an_image_gets_few() {
        let same: Vec<&str> = ["https://reg.io/v1/", "reg.io", "http://reg.io", "*.io"].into();
        let one = Credential::password("user".into(), "secret".into());
        let entries = same.iter().map(|key| ((*key).to_owned(), one.clone()));
        let image = Reference::parse("reg.io/app").unwrap();
        assert_eq!(Keyring::new(entries).lookup(&image).len(), 1);
        let numbered: Vec<String> = (0..2000)
            .map(|n| format!("https://reg.io/?{n:04}"))
            .collect();
        let keys: Vec<&str> = numbered.iter().map(String::as_str).collect();
        let found = users(&keys, "reg.io/app");
        assert_eq!(
            found,
            keys[..MAX_CREDENTIALS],
            "the first ones of the Secret"
        );
    }

    #[test]
    fn secrets_do_not_show() {
        let credential = Credential::password("user".into(), "hunter2".into());
        assert!(!format!("{credential:?}").contains("hunter2"));
    }
}
