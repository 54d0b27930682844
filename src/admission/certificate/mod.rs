//! The certificate that the webhook shows, and the authorities that the API server has to trust.

mod files;
pub(super) mod issue;
mod own;
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

use super::ca_bundle::{expires, first};

pub(super) use files::Files;
pub(super) use own::Own;

/// The certificate that is served now; replaced without ending any connection.
#[derive(Debug, Default)]
pub(super) struct Served(watch::Sender<Option<Shown>>);

#[derive(Debug)]
struct Shown {
    key: Arc<CertifiedKey>,
    expires: SystemTime,
}

/// A certificate and key that cannot be served. The text of a key is in no message.
#[derive(Debug, thiserror::Error)]
pub(super) enum CertificateError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] FileError),
    /// No certificate in it.
    #[error("the certificate is not PEM")]
    NoCertificate,
    /// No authority that has not expired.
    #[error("the authority holds no certificate that is still good")]
    NoAuthority,
    /// No private key in it.
    #[error("the key is not PEM")]
    NoKey,
    /// They do not belong together, or the kind of key is unknown.
    #[error("the certificate and the key cannot be used together")]
    Mismatch(#[source] rustls::Error),
    /// None can be made.
    #[error("cannot make a certificate")]
    Issue(#[from] rcgen::Error),
}

/// A certificate with its key, as text.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Pair {
    pub(super) certificate: String,
    pub(super) key: String,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a certificate and its key")
    }
}

impl Served {
    /// Waits until there is one.
    pub(super) async fn is_there(&self) {
        // The sender lives as long as this.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    /// When it expires.
    pub(super) fn expires(&self) -> Option<SystemTime> {
        self.0.borrow().as_ref().map(|shown| shown.expires)
    }

    /// Serves another one from now on.
    fn show(&self, pair: &Pair) -> Result<(), CertificateError> {
        let shown = Shown {
            key: Arc::new(pair.load()?),
            expires: pair.expires().ok_or(CertificateError::NoCertificate)?,
        };
        self.0.send_replace(Some(shown));
        Ok(())
    }
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.borrow().as_ref().map(|shown| shown.key.clone())
    }
}

impl Pair {
    /// For rustls. Fails when certificate and key do not belong together.
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

    /// When the certificate itself expires.
    fn expires(&self) -> Option<SystemTime> {
        expires(&self.certificate)
    }

    /// Whether one of these authorities has signed it, by its name.
    fn is_of(&self, authorities: &str) -> bool {
        let all = Certificate::load_pem_chain(authorities.as_bytes()).unwrap_or_default();
        let issuer = first(&self.certificate).map(|own| own.tbs_certificate.issuer);
        all.iter()
            .any(|one| Some(&one.tbs_certificate.subject) == issuer.as_ref())
    }

    /// Whether it is good for all of these names.
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
