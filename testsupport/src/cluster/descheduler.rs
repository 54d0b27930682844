//! A real descheduler.

use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::TestCluster;

impl TestCluster {
    /// Lets the descheduler look at the cluster once, with the default policy of its chart. Returns
    /// its log.
    pub fn deschedule(&self) -> String {
        let folder = std::env::var("ARCHAWARE_TEST_DESCHEDULER")
            .expect("run tests with hack/test.sh: it builds the descheduler");
        let values = std::fs::read_to_string(format!("{folder}/values.yaml")).unwrap();
        let values: Value = serde_saphyr::from_str(&values).unwrap();
        // As `templates/configmap.yaml` of the chart writes it.
        let mut policy = values["deschedulerPolicy"].clone();
        policy["apiVersion"] = values["deschedulerPolicyAPIVersion"].clone();
        policy["kind"] = json!("DeschedulerPolicy");
        let file = self.dir().join("descheduler-policy.json");
        std::fs::write(&file, policy.to_string()).unwrap();
        let mut command = Command::new("timeout");
        command
            .args(["180", &format!("{folder}/descheduler"), "--kubeconfig"])
            .arg(self.kubeconfig("admin"))
            .arg("--policy-config-file")
            .arg(file)
            // Once.
            .args(["--descheduling-interval=0", "--secure-port=0", "--v=2"])
            .stdin(Stdio::null());
        let output = command.output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{log}");
        log
    }
}
