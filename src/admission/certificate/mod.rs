//! The webhook's serving certificate, from a Secret or from files.

mod from_files;
pub(super) mod issue;
mod self_signed;
mod stored;

use std::{sync::Arc, time::SystemTime};

use tokio::sync::watch;
use tokio_rustls::rustls::{
    self,
    client::verify_server_name,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::{ClientHello, ParsedCertificate, ResolvesServerCert},
    sign::CertifiedKey,
};
use x509_cert::Certificate;

use crate::files::FileError;

use super::ca_bundle::{expires, first_certificate};

pub(super) use from_files::FromFiles;
pub(super) use self_signed::SelfSigned;

/// Provides the current certificate to rustls. It can be replaced without closing connections.
#[derive(Debug, Default)]
pub(super) struct CertResolver(watch::Sender<Option<ActiveCertificate>>);

#[derive(Debug)]
struct ActiveCertificate {
    key: Arc<CertifiedKey>,
    expires: SystemTime,
}

/// Why a certificate cannot be served. No message contains a key.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertificateError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// The text contains no certificate.
    #[error("the file contains no PEM certificate")]
    NoCertificate,
    /// The authority file contains no certificate, or all of its certificates have expired.
    #[error("the authority file contains no PEM certificate that is still valid")]
    NoAuthority,
    /// The text contains no private key.
    #[error("the file contains no PEM private key")]
    NoKey,
    /// Certificate and key do not match, or the kind of key is not supported.
    #[error("the certificate and the key cannot be used together")]
    Mismatch(#[source] rustls::Error),
    /// A certificate could not be issued.
    #[error("cannot issue a certificate")]
    Issue(#[from] rcgen::Error),
}

/// A certificate and its key, PEM.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct KeyPairPem {
    pub(super) certificate: String,
    pub(super) key: String,
}

impl std::fmt::Debug for KeyPairPem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a certificate and its key")
    }
}

impl CertResolver {
    /// Waits until there is a certificate.
    pub(super) async fn wait_until_available(&self) {
        // This cannot fail: the sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    /// When the certificate expires.
    pub(super) fn expires(&self) -> Option<SystemTime> {
        self.0.borrow().as_ref().map(|active| active.expires)
    }

    /// Replaces the served certificate.
    fn activate(&self, pair: &KeyPairPem) -> Result<(), CertificateError> {
        let active = ActiveCertificate {
            key: Arc::new(pair.load()?),
            expires: pair.expires().ok_or(CertificateError::NoCertificate)?,
        };
        self.0.send_replace(Some(active));
        Ok(())
    }
}

impl ResolvesServerCert for CertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|active| active.key.clone())
    }
}

impl KeyPairPem {
    /// Parses the certificate and the key for rustls. Fails if they do not match.
    fn load(&self) -> Result<CertifiedKey, CertificateError> {
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(self.certificate.as_bytes()).collect();
        let chain = chain.ok().filter(|chain| !chain.is_empty());
        let chain = chain.ok_or(CertificateError::NoCertificate)?;
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes());
        let key = key.map_err(|_| CertificateError::NoKey)?;
        CertifiedKey::from_der(chain, key, &ring::default_provider())
            .map_err(CertificateError::Mismatch)
    }

    /// When the certificate expires.
    fn expires(&self) -> Option<SystemTime> {
        expires(&self.certificate)
    }

    /// Whether the certificate names one of these authorities as its issuer.
    fn is_signed_by(&self, authorities: &str) -> bool {
        let authority_certificates =
            Certificate::load_pem_chain(authorities.as_bytes()).unwrap_or_default();
        let issuer = first_certificate(&self.certificate)
            .map(|certificate| certificate.tbs_certificate.issuer);
        authority_certificates
            .iter()
            .any(|authority| Some(&authority.tbs_certificate.subject) == issuer.as_ref())
    }

    /// Whether the certificate is valid for all of these names.
    fn is_for(&self, names: &[String]) -> bool {
        let Ok(der) = CertificateDer::from_pem_slice(self.certificate.as_bytes()) else {
            return false;
        };
        let Ok(certificate) = ParsedCertificate::try_from(&der) else {
            return false;
        };
        names.iter().all(|name| {
            ServerName::try_from(name.as_str())
                .is_ok_and(|name| verify_server_name(&certificate, &name).is_ok())
        })
    }
}
