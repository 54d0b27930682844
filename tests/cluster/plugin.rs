//! archaware as a plugin of a real kubectl.

use std::{os::unix::fs::symlink, process::Command};

use super::*;

#[tokio::test]
async fn kubectl_runs_and_completes_it() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let folder = tempfile::tempdir().unwrap();
    symlink(
        testsupport::program(),
        folder.path().join("kubectl-archaware"),
    )
    .unwrap();
    // As hack/release.sh packs it.
    let completer = folder.path().join("kubectl_complete-archaware");
    let script = "exec \"$(dirname \"$0\")/kubectl-archaware\" __complete \"$@\"";
    testsupport::write_script(&completer, script);
    let path = std::env::var("PATH").unwrap();
    let kubectl = |arguments: &[&str]| {
        let output = Command::new(std::env::var("ARCHAWARE_KUBECTL").unwrap())
            .args(arguments)
            .env("PATH", format!("{}:{path}", folder.path().display()))
            .env("KUBECONFIG", cluster.kubeconfig("admin"))
            .env("COLUMNS", "200")
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    };
    let version = kubectl(&["archaware", "version"]);
    assert!(version.starts_with("archaware 0.1.0"), "{version}");
    let nothing = kubectl(&["archaware", "explain", "-n", &cluster.namespace]);
    assert!(nothing.ends_with("waits or fails.\n"), "{nothing}");
    let words = kubectl(&["__complete", "archaware", "rep"]);
    assert!(words.starts_with("report\t"), "{words}");
}
