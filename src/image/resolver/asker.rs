//! Who asks for what, and what of others' answers serves them.

use std::sync::Arc;

use crate::image::{
    cache::Audience,
    credentials::{Credential, Fingerprint},
    reference::Reference,
    tree::Tree,
};

use super::{PullPolicy, Resolved, Source, tag::Found};

/// Who asks for what.
#[derive(Clone)]
pub(super) struct Asker {
    pub(super) reference: Reference,
    pub(super) policy: PullPolicy,
    pub(super) credentials: Arc<[Credential]>,
    /// Set for who shares nothing: all rights in one.
    pub(super) alone: Option<Fingerprint>,
}

impl Asker {
    pub(super) fn resolved(self, found: Found, tree: &Tree, source: Source) -> Resolved {
        Resolved {
            reference: self.reference,
            digest: found.digest,
            platforms: tree.platforms.clone(),
            media_type: tree.media_type,
            source: found.source.max(source),
        }
    }

    pub(super) fn rights(&self) -> Vec<Fingerprint> {
        self.credentials
            .iter()
            .map(Credential::fingerprint)
            .collect()
    }

    /// Whose documents these are: content-addressed, so everybody's, unless this one shares nothing.
    pub(super) fn owner(&self) -> Audience {
        self.alone.map_or(Audience::Everybody, Audience::Holder)
    }

    /// Whose remembered tags serve this one.
    pub(super) fn audiences(&self) -> Vec<Audience> {
        if self.alone.is_some() {
            return vec![self.owner()];
        }
        let own = self.rights().into_iter().map(Audience::Holder);
        std::iter::once(Audience::Everybody).chain(own).collect()
    }

    /// Whom an answer serves that took this credential, or none.
    pub(super) fn audience(&self, credential: Option<Fingerprint>) -> Audience {
        match (self.alone, credential) {
            (Some(_), _) => self.owner(),
            (None, Some(credential)) => Audience::Holder(credential),
            (None, None) => Audience::Everybody,
        }
    }
}
