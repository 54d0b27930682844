//! A registry with the referrers API: that of go-containerregistry.

use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::free_port;

use super::{Process, eventually};

/// A running registry, in memory.
pub struct Referrers {
    address: String,
    _dir: TempDir,
    _process: Process,
}

impl Referrers {
    /// Starts on a free port.
    pub async fn start() -> Self {
        let folder = std::env::var("ARCHAWARE_TEST_REFERRERS")
            .expect("run tests with hack/test.sh: it builds the registry");
        let dir = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let program = format!("{folder}/referrers");
        let process = Process::start(program, &[&address], &dir.path().join("log"), false);
        eventually("a registry with the referrers API", || async {
            TcpStream::connect(&address).await.ok()
        })
        .await;
        Self {
            address,
            _dir: dir,
            _process: process,
        }
    }

    /// `127.0.0.1:PORT`
    pub fn address(&self) -> String {
        self.address.clone()
    }
}
