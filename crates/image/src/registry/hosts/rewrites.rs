//! `rewrite` of a host in `hosts.toml`: the repositories have other names there. The containerd of
//! k3s and RKE2 obeys it ("Rewrites" in k3s' documentation of private registries).

use std::{borrow::Cow, sync::Arc};

use regex::Regex;

/// Regular expressions with the replacement for each of their matches, in the order of the file.
#[derive(Clone, Default)]
pub(in super::super) struct Rewrites(Arc<[(Regex, String)]>);

impl PartialEq for Rewrites {
    fn eq(&self, other: &Self) -> bool {
        let texts = |rewrites: &Self| -> Vec<(String, String)> {
            let rewrites = rewrites.0.iter();
            rewrites
                .map(|(pattern, to)| (pattern.as_str().to_owned(), to.clone()))
                .collect()
        };
        texts(self) == texts(other)
    }
}

impl Eq for Rewrites {}

impl FromIterator<(Regex, String)> for Rewrites {
    fn from_iter<I: IntoIterator<Item = (Regex, String)>>(rewrites: I) -> Self {
        Self(rewrites.into_iter().collect())
    }
}

impl Rewrites {
    /// The name of a repository on the host: by the first expression that changes it.
    pub(in super::super) fn apply<'a>(&self, repository: &'a str) -> Cow<'a, str> {
        let changed = self.0.iter().find_map(|(pattern, to)| {
            let name = pattern.replace_all(repository, to);
            (name != repository).then(|| name.into_owned())
        });
        changed.map_or(Cow::Borrowed(repository), Cow::Owned)
    }
}
