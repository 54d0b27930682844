//! Names of registries, as `/etc/resolv.conf` and `/etc/hosts` say. The program gets its own copies
//! of these files in a mount namespace.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use testimg::FakeRegistry;
use tokio::net::UdpSocket;

use testsupport::servers::config_file;

/// Runs `archaware inspect` with these files.
async fn inspect(dir: &Path, config: &Value, images: &[String]) -> Output {
    let file = config_file(dir, config);
    let script = "mount --bind \"$1/resolv.conf\" /etc/resolv.conf && mount --bind \"$1/hosts\" /etc/hosts && shift && exec \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(dir)
        .arg(testsupport::program())
        .args(["inspect", "-o", "json", "--config"])
        .arg(&file)
        .args(images);
    let running = tokio::process::Command::from(command)
        .kill_on_drop(true)
        .output();
    let ended = tokio::time::timeout(Duration::from_mins(1), running).await;
    ended.expect("it ends").unwrap()
}

/// A folder with a resolv.conf that names a server which never answers, and that server.
async fn silent_name_server() -> (tempfile::TempDir, UdpSocket) {
    let (dir, process) = (tempfile::tempdir().unwrap(), std::process::id());
    let address = format!("127.53.{}.{}", process / 250 % 250, process % 250 + 1);
    let socket = UdpSocket::bind(format!("{address}:53")).await.unwrap();
    let resolv = format!("nameserver {address}\noptions timeout:30 attempts:5\n");
    fs::write(dir.path().join("resolv.conf"), resolv).unwrap();
    fs::write(dir.path().join("hosts"), "127.0.0.1 localhost reg.local\n").unwrap();
    (dir, socket)
}

fn lines(output: &Output) -> Vec<Value> {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

#[tokio::test]
async fn the_names_of_the_machine_decide() {
    let (dir, _silent) = silent_name_server().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("multi"));
    let short = json!({"timeout": "2s", "budget": "4s"});
    // Names that are never answered hold up neither the others nor the end.
    let mut images: Vec<String> = (0..100)
        .map(|number| format!("r{number}.silent.test/app"))
        .collect();
    images.push(registry.image("app"));
    let started = Instant::now();
    let output = inspect(dir.path(), &json!({"resolution": short}), &images).await;
    let took = started.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    let found = lines(&output);
    assert_eq!(found[100]["error"], Value::Null, "{}", found[100]);
    for line in &found[..100] {
        assert_eq!(line["error"]["reason"], "Unavailable", "{line}");
    }
    // A name that leads to this machine is refused, unless the operator allows it.
    let image = registry.image("app").replace("127.0.0.1", "reg.local");
    let host = image.split('/').next().unwrap();
    for (allowed, reason) in [
        (json!([]), json!("Denied")),
        (json!(["reg.local"]), Value::Null),
    ] {
        let registries = json!({"plainHttp": [host], "allowLocalAddresses": allowed});
        let config = json!({"registries": registries, "resolution": short});
        let output = inspect(dir.path(), &config, std::slice::from_ref(&image)).await;
        let line = lines(&output).remove(0);
        assert_eq!(line["error"]["reason"], reason, "{line}");
    }
    assert!(!registry.seen().is_empty());
}
