//! `inspect --trace` and `--log-level debug` show each request and each answer from a cache, and no secret.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry};

use testsupport::servers::Containerd;

use crate::operator_credentials::executable;

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
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let response = json!({
        "apiVersion": version, "kind": "CredentialProviderResponse", "cacheKeyType": "Registry",
        "auth": {registry.address(): {"username": "user", "password": "hunter2"}},
    });
    executable(dir.path(), "plugin", &format!("echo '{response}'"));
    let providers = json!({
        "apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": [{"name": "plugin", "matchImages": [registry.address()], "defaultCacheDuration": "1m", "apiVersion": version}],
    });
    let file = dir.path().join("providers.json");
    fs::write(&file, providers.to_string()).unwrap();
    let config = dir.path().join("config.yaml");
    let text = json!({
        "apiVersion": "archaware.dev/v1alpha1", "kind": "Configuration",
        "credentialProviders": {"config": file, "binDirectory": dir.path()},
        "containerd": {"socket": containerd.socket()},
    });
    fs::write(&config, text.to_string()).unwrap();
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
    let digest = testimg::find("multi").root.digest;
    let manifest = |version: &str| format!("/v2/app/manifests/{version}");
    for (peer, method, path, status, attempt, credential) in [
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
            format!("{}/app", registry.address()),
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
    ] {
        let is_it = |call: &&Value| {
            (
                &call["peer"],
                &call["method"],
                &call["path"],
                &call["status"],
            ) == (&json!(peer), &json!(method), &json!(path), &json!(status))
                && (&call["attempt"], &call["credential"]) == (&json!(attempt), &json!(credential))
                && call["milliseconds"].is_u64()
        };
        assert!(
            calls.iter().any(|call| is_it(&call)),
            "{peer} {method} {path}: {calls:#?}"
        );
    }
}
