//! Issues certificates. Each has its own authority. Its key is discarded at once, so nobody can
//! issue another certificate that the API server trusts.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use super::KeyPairPem;

/// How far the clocks of API servers may be behind.
const BACKDATED: Duration = Duration::from_hours(1);

/// An issued certificate.
pub(in crate::admission) struct Issued {
    /// The authority, PEM.
    pub(in crate::admission) authority: String,
    /// The certificate and its key.
    pub(in crate::admission) pair: KeyPairPem,
}

/// Issues an authority and a certificate for these DNS names or addresses, valid for `lifetime`
/// from `now`.
pub(in crate::admission) fn issue(
    names: &[String],
    now: SystemTime,
    lifetime: Duration,
) -> Result<Issued, rcgen::Error> {
    let (from, until) = (now - BACKDATED, now + lifetime);
    let mut authority = CertificateParams::default();
    authority.not_before = from.into();
    authority.not_after = until.into();
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    authority.distinguished_name.remove(DnType::CommonName);
    // The names of authorities must differ, because some verifiers select authorities by name.
    let millis = now
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_millis();
    let name = format!("archaware admission {millis}");
    authority.distinguished_name.push(DnType::CommonName, name);
    let issuer = CertifiedIssuer::self_signed(authority, KeyPair::generate()?)?;

    let mut leaf = CertificateParams::new(names.to_vec())?;
    leaf.not_before = from.into();
    leaf.not_after = until.into();
    leaf.use_authority_key_identifier_extension = true;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.distinguished_name.remove(DnType::CommonName);
    leaf.distinguished_name
        .push(DnType::CommonName, "archaware admission");
    let key = KeyPair::generate()?;
    let certificate = leaf.signed_by(&key, &issuer)?;
    Ok(Issued {
        authority: issuer.pem(),
        pair: KeyPairPem {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        },
    })
}
