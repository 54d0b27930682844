//! What the Secret of the webhook's certificate holds, and what is to be done about it next.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use k8s_openapi::{
    ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::cluster::ADMISSION_SECRET as NAME;

use super::{super::ca_bundle, Pair};

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// What the Secret holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) authorities: String,
    pub(super) current: Pair,
    pub(super) next: Option<Pair>,
}

/// What the leader does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// A new certificate is made and its authority published.
    Prepare,
    /// The new certificate takes the old one's place.
    Promote,
    /// Authorities that have expired go.
    Prune,
}

pub(super) fn step(
    stored: &Stored,
    now: SystemTime,
    lifetime: Duration,
    names: &[String],
    settled: bool,
) -> Step {
    if stored.next.is_some() {
        return if settled {
            Step::Promote
        } else {
            Step::Nothing
        };
    }
    let left = stored
        .current
        .expires()
        .and_then(|at| at.duration_since(now).ok());
    let left = left.unwrap_or_default();
    // One that lasts much longer was made when more was allowed.
    if left < lifetime / 3 || left > lifetime * 2 || !stored.current.is_for(names) {
        Step::Prepare
    } else if ca_bundle::pruned(&stored.authorities) != stored.authorities {
        Step::Prune
    } else {
        Step::Nothing
    }
}

impl Stored {
    pub(super) fn parse(secret: &Secret) -> Option<Self> {
        let data = secret.data.as_ref()?;
        let text = |name: &str| String::from_utf8(data.get(name)?.0.clone()).ok();
        let pair = |certificate, key| {
            Some(Pair {
                certificate: text(certificate)?,
                key: text(key)?,
            })
        };
        Some(Self {
            authorities: text(AUTHORITIES)?,
            current: pair(CERTIFICATE, KEY)?,
            next: pair(NEXT_CERTIFICATE, NEXT_KEY).filter(|next| next.load().is_ok()),
        })
    }

    pub(super) fn is_usable(&self) -> bool {
        let now = SystemTime::now();
        self.current.expires().is_some_and(|at| at > now)
            && self.current.load().is_ok()
            && self.current.is_of(&ca_bundle::pruned(&self.authorities))
    }

    pub(super) fn fields(&self) -> BTreeMap<&'static str, Option<&str>> {
        let next = self.next.as_ref();
        BTreeMap::from([
            (AUTHORITIES, Some(&*self.authorities)),
            (CERTIFICATE, Some(&*self.current.certificate)),
            (KEY, Some(&*self.current.key)),
            (NEXT_CERTIFICATE, next.map(|next| &*next.certificate)),
            (NEXT_KEY, next.map(|next| &*next.key)),
        ])
    }

    pub(super) fn to_secret(&self) -> Secret {
        let fields = self.fields().into_iter();
        let data = fields.filter_map(|(name, text)| {
            Some((name.to_owned(), ByteString(text?.as_bytes().to_vec())))
        });
        Secret {
            metadata: ObjectMeta {
                name: Some(NAME.to_owned()),
                labels: Some(crate::admission::labels()),
                ..ObjectMeta::default()
            },
            type_: Some("kubernetes.io/tls".to_owned()),
            data: Some(data.collect()),
            ..Secret::default()
        }
    }
}

#[cfg(test)]
mod tests;
