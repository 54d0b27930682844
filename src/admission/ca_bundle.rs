//! Authorities that the API server trusts, one PEM text after the other, the newest first. An old one stays
//! until it has expired: until then some replica may serve what it has signed.

use std::sync::Arc;

use std::time::SystemTime;

/// Authorities for the API server's `caBundle`, PEM. `None`: the user publishes them.
pub(super) type Authorities = Option<Arc<str>>;

/// What the API server has been told to trust.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Published {
    /// Nobody has looked yet.
    #[default]
    Unknown,
    /// Nothing: there is no configuration.
    Nowhere,
    /// These authorities.
    Bundle(Arc<str>),
}

use x509_cert::Certificate;

/// More are left by nothing but mischief; the oldest go.
const MAX: usize = 8;
const END: &str = "-----END CERTIFICATE-----";

/// The bundle with another authority, and without those that have expired.
pub(in crate::admission) fn with(authority: &str, bundle: &str) -> String {
    let mut all: Vec<&str> = parts(authority);
    for one in parts(bundle) {
        if !all.contains(&one) {
            all.push(one);
        }
    }
    join(all)
}

/// The bundle without those that have expired.
pub(in crate::admission) fn pruned(bundle: &str) -> String {
    join(parts(bundle))
}

/// Whether the bundle has this authority.
pub(in crate::admission) fn holds(bundle: &str, authority: &str) -> bool {
    let all = parts(bundle);
    parts(authority).iter().all(|one| all.contains(one))
}

fn join(mut all: Vec<&str>) -> String {
    let now = SystemTime::now();
    all.retain(|one| expires(one).is_some_and(|at| at > now));
    all.truncate(MAX);
    all.iter().flat_map(|one| [one, "\n"]).collect()
}

/// The certificates of a PEM text, without what stands between them.
fn parts(bundle: &str) -> Vec<&str> {
    let part = |text: &'_ str| text.find("-----BEGIN CERTIFICATE-----");
    bundle
        .split_inclusive(END)
        .filter(|text| text.ends_with(END))
        .filter_map(|text| text.get(part(text)?..))
        .collect()
}

/// The first certificate of a PEM text.
pub(super) fn first(pem: &str) -> Option<Certificate> {
    let chain = Certificate::load_pem_chain(pem.as_bytes()).ok()?;
    chain.into_iter().next()
}

/// When the first certificate of a PEM text expires.
pub(super) fn expires(pem: &str) -> Option<SystemTime> {
    Some(
        first(pem)?
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
        let two = with(&new, &format!("{old}words\n{gone}"));
        assert_eq!(parts(&two), [new.trim(), old.trim()]);
        assert_eq!(
            with(&old, &two),
            format!("{}\n{}\n", old.trim(), new.trim())
        );
        assert_eq!(pruned(&format!("{gone}{new}")), format!("{}\n", new.trim()));
        assert_eq!(with("nonsense", ""), "");
        let many: String = (0..20)
            .map(|n| make(now + n * Duration::from_secs(1)))
            .collect();
        assert_eq!(parts(&with(&new, &many)).len(), MAX);
    }
}
