//! Content of the Secret with the webhook's certificate, and the next step of its renewal.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use k8s_openapi::{
    ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use crate::cluster::ADMISSION_SECRET as NAME;

use super::{super::ca_bundle, KeyPairPem};

const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";

/// Content of the Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredCertificates {
    pub(super) authorities: String,
    pub(super) current: KeyPairPem,
    pub(super) next: Option<KeyPairPem>,
}

/// The leader's next step.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RenewalStep {
    Nothing,
    /// Issue a new certificate and publish its authority.
    Prepare,
    /// Replace the old certificate by the new one.
    Promote,
    /// Remove expired authorities.
    Prune,
}

pub(super) fn renewal_step(
    stored: &StoredCertificates,
    now: SystemTime,
    lifetime: Duration,
    names: &[String],
    settled: bool,
) -> RenewalStep {
    if stored.next.is_some() {
        return if settled {
            RenewalStep::Promote
        } else {
            RenewalStep::Nothing
        };
    }
    let left = stored
        .current
        .expires()
        .and_then(|at| at.duration_since(now).ok());
    let left = left.unwrap_or_default();
    // A certificate with a much longer lifetime was issued under another configuration.
    if left < lifetime / 3 || left > lifetime * 2 || !stored.current.is_for(names) {
        RenewalStep::Prepare
    } else if ca_bundle::without_expired(&stored.authorities) != stored.authorities {
        RenewalStep::Prune
    } else {
        RenewalStep::Nothing
    }
}

impl StoredCertificates {
    pub(super) fn parse(secret: &Secret) -> Option<Self> {
        let data = secret.data.as_ref()?;
        let text = |name: &str| String::from_utf8(data.get(name)?.0.clone()).ok();
        let pair = |certificate, key| {
            Some(KeyPairPem {
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
            && self
                .current
                .is_signed_by(&ca_bundle::without_expired(&self.authorities))
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
