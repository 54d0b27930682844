//! The webhook's `caBundle`: certificate authorities as PEM, the newest first. An old authority
//! stays until it expires, because a replica may still serve a certificate from this authority.

use std::{sync::Arc, time::SystemTime};

use x509_cert::Certificate;

/// Authorities for the `caBundle`, PEM; `None` if the user maintains the `caBundle`.
pub(super) type CaBundle = Option<Arc<str>>;

/// The `caBundle` in the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Published {
    /// Not read yet, or not written because another writer keeps changing the configuration.
    #[default]
    Unknown,
    /// There is no configuration, or archaware does not maintain its `caBundle`.
    NoBundle,
    /// The published `caBundle` contains these authorities (PEM).
    Bundle(Arc<str>),
}

/// Maximum number of authorities; the oldest are removed. Normal operation never reaches it.
const MAX_AUTHORITIES: usize = 8;
const END: &str = "-----END CERTIFICATE-----";

/// The bundle plus an authority, minus expired authorities.
pub(in crate::admission) fn with_authority(authority: &str, bundle: &str) -> String {
    let mut authorities: Vec<&str> = pem_certificates(authority);
    for certificate in pem_certificates(bundle) {
        if !authorities.contains(&certificate) {
            authorities.push(certificate);
        }
    }
    join(authorities)
}

/// The bundle without expired authorities.
pub(in crate::admission) fn without_expired(bundle: &str) -> String {
    join(pem_certificates(bundle))
}

/// Whether the bundle contains this authority.
pub(in crate::admission) fn contains_authority(bundle: &str, authority: &str) -> bool {
    let bundle_certificates = pem_certificates(bundle);
    pem_certificates(authority)
        .iter()
        .all(|authority| bundle_certificates.contains(authority))
}

fn join(mut authorities: Vec<&str>) -> String {
    let now = SystemTime::now();
    authorities.retain(|authority| expires(authority).is_some_and(|at| at > now));
    authorities.truncate(MAX_AUTHORITIES);
    authorities
        .iter()
        .flat_map(|authority| [authority, "\n"])
        .collect()
}

/// The certificates of a PEM text without the text between them.
fn pem_certificates(bundle: &str) -> Vec<&str> {
    let part = |text: &'_ str| text.find("-----BEGIN CERTIFICATE-----");
    bundle
        .split_inclusive(END)
        .filter(|text| text.ends_with(END))
        .filter_map(|text| text.get(part(text)?..))
        .collect()
}

/// The first certificate of a PEM text.
pub(super) fn first_certificate(pem: &str) -> Option<Certificate> {
    let chain = Certificate::load_pem_chain(pem.as_bytes()).ok()?;
    chain.into_iter().next()
}

/// When the first certificate of a PEM text expires.
pub(super) fn expires(pem: &str) -> Option<SystemTime> {
    Some(
        first_certificate(pem)?
            .tbs_certificate
            .validity
            .not_after
            .to_system_time(),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::admission::certificate::issue::issue;

    #[test]
    fn old_authorities_stay_until_they_expire() {
        let (now, hour) = (SystemTime::now(), Duration::from_hours(1));
        let names = ["a.b.svc".to_owned()];
        let make = |at| issue(&names, at, hour).unwrap().authority;
        let (old, new, gone) = (make(now), make(now + hour), make(now - 2 * hour));
        let two = with_authority(&new, &format!("{old}words\n{gone}"));
        assert_eq!(pem_certificates(&two), [new.trim(), old.trim()]);
        assert_eq!(
            with_authority(&old, &two),
            format!("{}\n{}\n", old.trim(), new.trim())
        );
        assert_eq!(
            without_expired(&format!("{gone}{new}")),
            format!("{}\n", new.trim())
        );
        assert_eq!(with_authority("nonsense", ""), "");
        let many: String = (0..20)
            .map(|n| make(now + n * Duration::from_secs(1)))
            .collect();
        assert_eq!(
            pem_certificates(&with_authority(&new, &many)).len(),
            MAX_AUTHORITIES
        );
    }
}
