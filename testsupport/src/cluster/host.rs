//! Manipulates the processes of a cluster: kills, stops, corrupts.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use serde_json::json;

use super::TestCluster;

fn script(path: &str, arguments: &[&str]) -> String {
    let output = Command::new(path).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{path} {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn kill(signal: &str, pid: &str) {
    assert!(
        Command::new("kill")
            .args([signal, pid])
            .status()
            .unwrap()
            .success()
    );
}

impl TestCluster {
    /// Whether the cluster was not started by `hack/test.sh`.
    pub fn is_existing(&self) -> bool {
        self.dir().join("existing").exists()
    }

    fn pid(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir().join("pid").join(name))
            .unwrap()
            .trim()
            .to_owned()
    }

    /// Sends a signal to a component of the control plane. Waits until a killed one is gone,
    /// because a large process takes a while to release its memory and port.
    pub fn signal_component(&self, signal: &str, name: &str) {
        let pid = self.pid(name);
        kill(signal, &pid);
        let gone = Instant::now() + Duration::from_secs(30);
        while signal == "-KILL" && Path::new("/proc").join(&pid).exists() {
            assert!(Instant::now() < gone, "{name} does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Resumes all components, in case a test stopped one and failed.
    pub fn resume_components(&self) {
        for file in std::fs::read_dir(self.dir().join("pid"))
            .into_iter()
            .flatten()
        {
            let pid = std::fs::read_to_string(file.unwrap().path()).unwrap();
            // The component may have been killed.
            let _ = Command::new("kill").args(["-CONT", pid.trim()]).status();
        }
    }

    /// Restarts the components that have ended.
    pub fn restart_components(&self) {
        script("hack/testbed/up.sh", &[self.dir().to_str().unwrap()]);
    }

    /// Compacts etcd to its current revision, so that watches lose their history.
    pub async fn compact(&self) {
        let ports = std::fs::read_to_string(self.dir().join("ports")).unwrap();
        let port = ports
            .split_whitespace()
            .find_map(|one| one.strip_prefix("ETCD="));
        let url = format!("http://127.0.0.1:{}/v3/kv/", port.unwrap());
        let http = reqwest::Client::builder()
            .tls_certs_only([])
            .build()
            .unwrap();
        let ask = async |path: &str, body: serde_json::Value| {
            let request = http.post(format!("{url}{path}")).body(body.to_string());
            let answer = request.send().await.unwrap().error_for_status().unwrap();
            serde_json::from_str::<serde_json::Value>(&answer.text().await.unwrap()).unwrap()
        };
        let now = ask("range", json!({"key": "Zm9v"})).await;
        ask(
            "compaction",
            json!({"revision": now["header"]["revision"], "physical": true}),
        )
        .await;
    }

    pub fn socket(&self) -> String {
        self.node_dir("containerd/containerd.sock")
    }

    pub fn node_dir(&self, path: &str) -> String {
        self.dir()
            .join("node")
            .join(path)
            .to_str()
            .unwrap()
            .to_owned()
    }

    /// A content proxy for the node's containerd, with the permissions of the shipped manifests.
    /// Its socket is in a separate folder.
    pub fn content_proxy(&self) -> (String, std::process::Child) {
        let folder = self.dir().join("door");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).unwrap();
        script("chmod", &["777", folder.to_str().unwrap()]);
        let socket = folder.join("containerd.sock").to_str().unwrap().to_owned();
        // Its user cannot read the build folder.
        let program = folder.join("archaware");
        crate::copy_program(&crate::program(), &program);
        let child = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "--reuid",
                "65532",
                "--regid",
                "0",
                "--clear-groups",
            ])
            .args(["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"])
            .arg(program)
            .args([
                "content-proxy",
                "--from",
                &self.socket(),
                "--listen",
                &socket,
            ])
            .spawn()
            .unwrap();
        (socket, child)
    }

    /// Runs ctr in the kubelet's namespace.
    pub fn ctr(&self, arguments: &[&str]) {
        self.ctr_in("k8s.io", arguments);
    }

    /// The output of ctr in a namespace.
    pub fn ctr_in(&self, namespace: &str, arguments: &[&str]) -> String {
        let socket = self.socket();
        script(
            "ctr",
            &[&["-a", &socket, "-n", namespace], arguments].concat(),
        )
    }

    /// Imports an image of one platform, as `kind load` does.
    pub fn import(&self, name: &str, architecture: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        let image = testimg::find(architecture);
        let config = image
            .blobs
            .iter()
            .find(|blob| blob.media_type.contains("config"))
            .unwrap();
        let layer = image
            .blobs
            .iter()
            .find(|blob| !blob.media_type.contains("config"))
            .unwrap();
        std::fs::write(path.join("config.json"), &config.bytes).unwrap();
        std::fs::write(path.join("layer.tar"), &layer.bytes).unwrap();
        let manifest =
            json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
        std::fs::write(path.join("manifest.json"), manifest.to_string()).unwrap();
        let (archive, folder) = (path.join("image.tar"), path.to_str().unwrap());
        script(
            "tar",
            &[
                "-cf",
                archive.to_str().unwrap(),
                "-C",
                folder,
                "config.json",
                "layer.tar",
                "manifest.json",
            ],
        );
        self.ctr(&["images", "import", archive.to_str().unwrap()]);
    }

    /// Changes a blob on containerd's disk without changing its size.
    pub fn corrupt(&self, digest: &str) {
        let blob = format!(
            "containerd/root/io.containerd.content.v1.content/blobs/{}",
            digest.replace(':', "/")
        );
        let path = self.node_dir(&blob);
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] = b' ';
        script("chmod", &["u+w", &path]);
        std::fs::write(&path, bytes).unwrap();
    }

    pub fn signal_containerd(&self, signal: &str) {
        kill(signal, &self.pid("containerd"));
    }

    pub fn kill_containerd(&self) {
        self.signal_containerd("-KILL");
    }

    pub fn restart_containerd(&self) {
        let registry = self.registry();
        script(
            "hack/testbed/node/up.sh",
            &[self.dir().to_str().unwrap(), &registry],
        );
    }
}
