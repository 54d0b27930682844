//! `inspect --trace` and `--log-level debug` show each request and each answer from a cache, and no
//! secret.

use std::{path::Path, process::Command};

use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry};

use testsupport::servers::{Containerd, config_file};

use crate::operator_credentials::plugin;

const SECRETS: [&str; 4] = ["hunter2", "aHVudGVyMg", "token-1", "Basic "];

/// Runs `inspect` with these arguments and credentials from a plugin. Returns stderr.
async fn inspect(arguments: &[&str], config: &Path, image: &str) -> String {
    let output = tokio::process::Command::from(Command::new(testsupport::program()))
        .arg("inspect")
        .args(arguments)
        .args(["--config", config.to_str().unwrap(), image])
        .env("COLUMNS", "400")
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[tokio::test]
async fn requests_are_seen_and_secrets_are_not() {
    let containerd = Containerd::start(&Containerd::binaries()[0]).await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Bearer(Some(("user".into(), "hunter2".into()))));
    let dir = tempfile::tempdir().unwrap();
    let file = plugin(dir.path(), &registry.address(), "hunter2");
    let settings = json!({
        "credentialProviders": {"config": file, "binDirectory": dir.path()},
        "containerd": {"socket": containerd.socket()},
    });
    let config = config_file(dir.path(), &settings);
    let image = registry.image("app");
    let table = inspect(&["--trace"], &config, &image).await;
    let log = inspect(
        &["--log-level", "debug", "--log-format", "json"],
        &config,
        &image,
    )
    .await;
    for secret in SECRETS {
        assert!(
            !table.contains(secret) && !log.contains(secret),
            "{secret}: {table} {log}"
        );
    }
    assert!(
        table.contains("/v2/app/manifests/latest "),
        "as wide as COLUMNS: {table}"
    );
    for cell in [
        "ASKED",
        "registry",
        "token server",
        "program",
        "containerd",
        "memory",
        "bearer",
        "password",
        "none",
    ] {
        assert!(table.contains(cell), "{cell}: {table}");
    }
    let calls: Vec<Value> = log
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(|line: &Value| line["message"] == "call")
        .collect();
    for expected in expected_calls(&image, &registry.address()) {
        let is_it = |call: &Value| {
            let field = |name: &str| call[name].to_string().trim_matches('"').to_owned();
            let shown = ["peer", "method", "path", "status", "attempt", "credential"].map(field);
            shown == expected && call["milliseconds"].is_u64()
        };
        assert!(calls.iter().any(is_it), "{expected:?}: {calls:#?}");
    }
}

/// Peer, method, path, status, attempt and credential of each call for an image whose plugin
/// answers.
fn expected_calls(image: &str, registry: &str) -> Vec<[String; 6]> {
    let digest = testimg::find("multi").root.digest;
    let manifest = |version: &str| format!("/v2/app/manifests/{version}");
    let calls = [
        (
            "containerd",
            "Images/Get",
            format!(" {image}:latest"),
            "NotFound",
            1,
            "none",
        ),
        ("program", "run", format!(" {image}"), "answered", 1, "none"),
        ("registry", "HEAD", manifest("latest"), "401", 1, "none"),
        (
            "token server",
            "GET",
            "/token".to_owned(),
            "200",
            1,
            "password",
        ),
        (
            "registry",
            "HEAD",
            manifest("latest"),
            "200",
            2,
            "bearer token",
        ),
        (
            "memory",
            "token",
            format!("{registry}/app"),
            "held",
            1,
            "none",
        ),
        (
            "containerd",
            "Content/Read",
            format!(" {digest}"),
            "NotFound",
            1,
            "none",
        ),
        (
            "registry",
            "GET",
            manifest(&digest),
            "200",
            1,
            "bearer token",
        ),
    ];
    let text = |(peer, method, path, status, attempt, credential): (
        &str,
        &str,
        String,
        &str,
        u32,
        &str,
    )| {
        [
            peer.to_owned(),
            method.to_owned(),
            path,
            status.to_owned(),
            attempt.to_string(),
            credential.to_owned(),
        ]
    };
    calls.into_iter().map(text).collect()
}
