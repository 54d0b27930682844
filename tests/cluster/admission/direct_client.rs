//! The webhook, asked directly and not by the API server.

use std::sync::Arc;

use reqwest::StatusCode;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::*;

/// A webhook that is asked directly.
pub(super) struct Webhook {
    pub(super) client: reqwest::Client,
    bundle: Vec<u8>,
    pub(super) address: String,
    pub(super) archaware: Controller,
}

impl Webhook {
    pub(super) async fn start(cluster: &TestCluster, config: &str) -> Self {
        let port = free_port();
        let config = format!("{config}{}", admission_config(port, ""));
        cluster.register();
        let archaware = Controller::start(cluster, &config);
        cluster.wait_until_called().await;
        let bundle = cluster.webhook_ca().await;
        Self {
            client: client(&bundle),
            bundle,
            address: format!("https://127.0.0.1:{port}"),
            archaware,
        }
    }

    pub(super) async fn send(
        &self,
        path: &str,
        body: impl Into<reqwest::Body>,
    ) -> (StatusCode, String) {
        let request = self.client.post(format!("{}{path}", self.address));
        let request = request
            .header("content-type", "application/json")
            .body(body);
        let response = request.send().await.unwrap();
        (response.status(), response.text().await.unwrap())
    }

    /// A connection after its handshake.
    pub(super) async fn connect(&self) -> TlsStream<TcpStream> {
        self.connect_with(rustls::DEFAULT_VERSIONS, b"http/1.1")
            .await
    }

    pub(super) async fn connect_with(
        &self,
        versions: &[&'static rustls::SupportedProtocolVersion],
        protocol: &[u8],
    ) -> TlsStream<TcpStream> {
        let mut roots = rustls::RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(&self.bundle) {
            roots.add(authority.unwrap()).unwrap();
        }
        let mut tls = rustls::ClientConfig::builder_with_protocol_versions(versions)
            .with_root_certificates(roots)
            .with_no_client_auth();
        tls.alpn_protocols = vec![protocol.to_vec()];
        let address = self.address.trim_start_matches("https://");
        let stream = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        TlsConnector::from(Arc::new(tls))
            .connect(name, stream)
            .await
            .unwrap()
    }
}
