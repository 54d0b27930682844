//! A real Helm.

use std::process::Command;

use super::TestCluster;

impl TestCluster {
    /// Runs helm as administrator; returns success, stdout and stderr.
    pub fn helm(&self, arguments: &[&str]) -> (bool, String, String) {
        let folder = std::env::var("ARCHAWARE_TEST_HELM")
            .expect("run tests with hack/test.sh: it builds helm");
        let home = self.dir().join("helm");
        let output = Command::new(format!("{folder}/helm"))
            .args(arguments)
            .arg("--kubeconfig")
            .arg(self.kubeconfig("admin"))
            .env("HELM_CACHE_HOME", home.join("cache"))
            .env("HELM_CONFIG_HOME", home.join("config"))
            .env("HELM_DATA_HOME", home.join("data"))
            .output()
            .unwrap();
        let (status, out, error) = super::ended(output);
        (status == 0, out, error)
    }
}
