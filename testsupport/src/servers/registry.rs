//! Debian's docker-registry.

use std::fs;

use tempfile::TempDir;

use crate::free_port;

use super::{Pki, Process, Tokens, eventually};

/// A running registry with test images. They are pushed while it is open.
pub struct Registry {
    address: String,
    scheme: &'static str,
    dir: TempDir,
    process: Option<Process>,
}

/// `user` with password `secret` as bcrypt, the only format that the registry accepts.
const HTPASSWD: &str = "user:$2b$05$k79l2cQfEm9PrZPuQrDTreokb8anr1hvPqTgzrc1D34UlUQYp3yXG\n";

impl Registry {
    /// Without authentication.
    pub async fn open(images: &[&str]) -> Self {
        let registry = Self::start("", "http", |_| String::new()).await;
        registry.push(images).await;
        registry
    }

    /// Requires a user name and password.
    pub async fn with_password(images: &[&str]) -> Self {
        let auth = |dir: &std::path::Path| {
            let file = dir.join("htpasswd");
            fs::write(&file, HTPASSWD).unwrap();
            format!(
                "auth: {{htpasswd: {{realm: test, path: {}}}}}\n",
                file.display()
            )
        };
        Self::open(images).await.restarted("", "http", auth).await
    }

    /// Requires a token of this server.
    pub async fn with_tokens(images: &[&str], tokens: &Tokens) -> Self {
        let auth = |_: &std::path::Path| {
            let (realm, bundle) = (tokens.realm(), tokens.certificate());
            format!(
                "auth: {{token: {{realm: \"{realm}\", service: test, issuer: test, rootcertbundle: {bundle}}}}}\n"
            )
        };
        Self::open(images).await.restarted("", "http", auth).await
    }

    /// Serves TLS with the leaf `server` of an authority, optionally requiring client certificates.
    pub async fn with_tls(images: &[&str], pki: &Pki, clients: bool) -> Self {
        let authority = pki.path("ca.crt");
        let clients = if clients {
            format!(", clientcas: [{authority}]")
        } else {
            String::new()
        };
        let tls = format!(
            ", tls: {{certificate: {}, key: {}{clients}}}",
            pki.path("server.crt"),
            pki.path("server.key")
        );
        Self::open(images)
            .await
            .restarted(&tls, "https", |_| String::new())
            .await
    }

    async fn restarted(
        mut self,
        http: &str,
        scheme: &'static str,
        auth: impl Fn(&std::path::Path) -> String,
    ) -> Self {
        self.process = None;
        self.launch(http, scheme, auth).await;
        self
    }

    async fn start(
        http: &str,
        scheme: &'static str,
        auth: impl Fn(&std::path::Path) -> String,
    ) -> Self {
        let mut registry = Self {
            address: String::new(),
            scheme,
            dir: tempfile::tempdir().unwrap(),
            process: None,
        };
        registry.launch(http, scheme, auth).await;
        registry
    }

    async fn launch(
        &mut self,
        http: &str,
        scheme: &'static str,
        auth: impl Fn(&std::path::Path) -> String,
    ) {
        let dir = self.dir.path();
        self.address = format!("127.0.0.1:{}", free_port());
        self.scheme = scheme;
        let config = format!(
            "version: 0.1\nlog: {{level: warn, accesslog: {{disabled: false}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}/data}}}}\n\
             http: {{addr: \"{}\"{http}}}\n{}",
            dir.display(),
            self.address,
            auth(dir)
        );
        let file = dir.join("config.yml");
        fs::write(&file, config).unwrap();
        let log = dir.join("log");
        self.process = Some(Process::start(
            "docker-registry",
            &["serve", file.to_str().unwrap()],
            &log,
            false,
        ));
        eventually("a registry", || async {
            tokio::net::TcpStream::connect(&self.address).await.ok()
        })
        .await;
    }

    async fn push(&self, images: &[&str]) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .tls_certs_only([])
            .build()
            .unwrap();
        for name in images {
            let image = testimg::find(name);
            testimg::push(&http, &self.address, name, "latest", &image)
                .await
                .unwrap();
        }
    }

    /// `127.0.0.1:PORT`
    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    /// Number of answered requests with this method, by the registry's access log.
    pub fn count(&self, method: &str) -> usize {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap();
        log.matches(&format!("\"{method} /v2/")).count()
    }
}
