//! Certificates created with openssl.

use std::path::{Path, PathBuf};

use super::run;

/// A private certificate authority.
pub struct Pki {
    dir: PathBuf,
}

impl Pki {
    pub fn new(dir: &Path) -> Self {
        let pki = Self {
            dir: dir.to_owned(),
        };
        let (key, certificate) = (pki.path("ca.key"), pki.path("ca.crt"));
        run(
            "openssl",
            &[
                "ecparam",
                "-name",
                "prime256v1",
                "-genkey",
                "-noout",
                "-out",
                &key,
            ],
        );
        run(
            "openssl",
            &[
                "req",
                "-x509",
                "-new",
                "-key",
                &key,
                "-subj",
                "/CN=test authority",
                "-days",
                "2",
                "-out",
                &certificate,
                "-addext",
                "basicConstraints=critical,CA:TRUE",
            ],
        );
        pki
    }

    /// Issues `NAME.crt` and `NAME.key` for 127.0.0.1, also valid for clients.
    pub fn leaf(&self, name: &str) {
        let file = |extension: &str| self.path(&format!("{name}.{extension}"));
        let extensions = "basicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=IP:127.0.0.1\n";
        std::fs::write(self.dir.join(format!("{name}.ext")), extensions).unwrap();
        run(
            "openssl",
            &[
                "genpkey",
                "-algorithm",
                "RSA",
                "-pkeyopt",
                "rsa_keygen_bits:2048",
                "-out",
                &file("key"),
            ],
        );
        run(
            "openssl",
            &[
                "req",
                "-new",
                "-key",
                &file("key"),
                "-subj",
                &format!("/CN={name}"),
                "-out",
                &file("csr"),
            ],
        );
        run(
            "openssl",
            &[
                "x509",
                "-req",
                "-in",
                &file("csr"),
                "-CA",
                &self.path("ca.crt"),
                "-CAkey",
                &self.path("ca.key"),
                "-CAcreateserial",
                "-days",
                "2",
                "-extfile",
                &file("ext"),
                "-out",
                &file("crt"),
            ],
        );
    }

    pub fn path(&self, file: &str) -> String {
        self.dir.join(file).to_str().unwrap().to_owned()
    }
}
