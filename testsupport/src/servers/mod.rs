//! Real servers for one test each, in temporary folders. They end with the test and with its
//! process.

mod browser;
mod containerd;
pub mod node_feature_discovery;
mod pki;
mod referrers;
mod registry;
mod tokens;

use std::{
    fs::{self, File},
    future::Future,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

pub use browser::Browser;
pub use containerd::Containerd;
pub use pki::Pki;
pub use referrers::Referrers;
pub use registry::Registry;
pub use tokens::Tokens;

/// An idle machine needs a second; one that builds an image at the same time, half a minute.
pub const DEADLINE: Duration = Duration::from_mins(1);

/// A server process. Killed on drop, and by the kernel when this process dies.
pub struct Process(Child);

impl Process {
    /// Starts a program with its output in `log`, unprivileged if `plain` is set.
    pub fn start(
        program: impl AsRef<std::ffi::OsStr>,
        arguments: &[&str],
        log: &Path,
        plain: bool,
    ) -> Self {
        let log = File::create(log).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if plain && is_root() {
            let nobody = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"];
            command
                .args(nobody)
                .args(["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]);
        }
        let child = command
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self(child)
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Whether it has exited.
    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    /// Waits until it exits; returns the exit status.
    pub async fn exited(&mut self) -> i32 {
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            assert!(Instant::now() < end, "it does not end");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([signal, &self.0.id().to_string()])
            .status();
        assert!(status.unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The user id of the shipped manifests.
pub const NOBODY: &str = "65532";

pub fn is_root() -> bool {
    let id = Command::new("id").arg("-u").output().unwrap();
    id.stdout.starts_with(b"0\n")
}

/// Runs a program and requires success.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Polls until `check` returns something.
pub async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    mut ask: impl FnMut() -> F,
) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < end, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes a configuration file with these settings.
pub fn config_file(folder: &Path, settings: &serde_json::Value) -> PathBuf {
    let mut whole =
        serde_json::json!({"apiVersion": "archaware.dev/v1alpha1", "kind": "Configuration"});
    let settings = settings.as_object().unwrap().clone();
    whole.as_object_mut().unwrap().extend(settings);
    let path = folder.join("config.yaml");
    fs::write(&path, whole.to_string()).unwrap();
    path
}
