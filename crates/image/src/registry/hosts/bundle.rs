//! Files of certificate authorities, parsed once and shared by all registries.

use std::{
    hash::{Hash, Hasher},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use quick_cache::sync::Cache;
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use sha2::{Digest as _, Sha256};

/// Maximum number of files: `registries.caBundle`, and those that `hosts.toml` files name.
const MAX_BUNDLES: usize = 64;

/// The certificates of a file. Compared by the digest of their content.
pub(crate) struct Bundle {
    /// DER.
    certificates: Vec<Vec<u8>>,
    digest: [u8; 32],
}

impl PartialEq for Bundle {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Bundle {}

impl Hash for Bundle {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

/// The files that were read, with their size and time of change.
pub(super) struct Bundles(Cache<PathBuf, (u64, Option<SystemTime>, Arc<Bundle>)>);

impl Bundle {
    /// The certificates of a PEM file. Unusable certificates are skipped, as in Go; `None` if no
    /// certificate is usable.
    fn parse(pem: &[u8]) -> Option<Self> {
        let parsable =
            |der: &CertificateDer<'_>| RootCertStore::empty().add(der.clone().into_owned()).is_ok();
        let found = CertificateDer::pem_slice_iter(pem).filter_map(Result::ok);
        let certificates: Vec<_> = found.filter(parsable).map(|der| der.to_vec()).collect();
        let mut digest = Sha256::new();
        for certificate in &certificates {
            digest.update((certificate.len() as u64).to_le_bytes());
            digest.update(certificate);
        }
        (!certificates.is_empty()).then(|| Self {
            certificates,
            digest: digest.finalize().into(),
        })
    }

    /// Each certificate as DER.
    pub(in crate::registry) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.certificates.iter().map(Vec::as_slice)
    }
}

impl Bundles {
    pub(super) fn new() -> Self {
        Self(Cache::new(MAX_BUNDLES))
    }

    /// The certificates of a file, parsed again only if it changed.
    pub(super) fn load(&self, path: &Path) -> Result<Arc<Bundle>, String> {
        let meta = std::fs::metadata(path).ok();
        let size = meta.as_ref().map_or(0, std::fs::Metadata::len);
        let changed = meta.and_then(|meta| meta.modified().ok());
        if let Some((known_size, known_change, bundle)) = self.0.get(path)
            && (known_size, known_change) == (size, changed)
            && changed.is_some()
        {
            return Ok(bundle);
        }
        let pem = super::read::read_file(path)?;
        let bundle = Bundle::parse(&pem);
        let bundle = bundle.ok_or_else(|| format!("{} holds no certificate", path.display()))?;
        let bundle = Arc::new(bundle);
        self.0
            .insert(path.to_owned(), (size, changed, bundle.clone()));
        Ok(bundle)
    }
}
