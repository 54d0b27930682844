//! The operator's credentials with a real registry that requires a password: `config.json`, its
//! helpers, and the kubelet's plugins, run by the program.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use tempfile::TempDir;

use testsupport::servers::{Registry, config_file};

fn executable(folder: &Path, name: &str, text: &str) {
    testsupport::write_script(&folder.join(name), text);
}

/// A plugin with this password for a registry. Returns its configuration.
pub(crate) fn plugin(folder: &Path, registry: &str, password: &str) -> PathBuf {
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let response = json!({
        "apiVersion": version, "kind": "CredentialProviderResponse", "cacheKeyType": "Registry",
        "auth": {registry: {"username": "user", "password": password}},
    });
    executable(
        folder,
        "plugin",
        &format!("cat > \"$0.asked\"; echo '{response}'"),
    );
    let config = json!({
        "apiVersion": "kubelet.config.k8s.io/v1", "kind": "CredentialProviderConfig",
        "providers": [{"name": "plugin", "matchImages": [registry], "defaultCacheDuration": "1m", "apiVersion": version}],
    });
    let file = folder.join("providers.json");
    fs::write(&file, config.to_string()).unwrap();
    file
}

/// `archaware inspect` with this configuration; helpers are in the folder.
fn inspect(dir: &TempDir, config: &Value, image: &str) -> (i32, Value, String) {
    let file = config_file(dir.path(), config);
    let path = format!(
        "{}:{}",
        dir.path().display(),
        std::env::var("PATH").unwrap()
    );
    let output = Command::new(testsupport::program())
        .args([
            "inspect",
            "-o",
            "json",
            "--log-level",
            "trace",
            "--config",
            file.to_str().unwrap(),
            image,
        ])
        .env("PATH", path)
        .output()
        .unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let lines: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap(), lines[0].clone(), log)
}

fn docker_config(dir: &TempDir, content: &Value) -> Value {
    let file = dir.path().join("docker.json");
    fs::write(&file, content.to_string()).unwrap();
    json!({"registries": {"dockerConfig": file}})
}

#[tokio::test]
async fn a_docker_config_gives_credentials_to_every_pod() {
    let (registry, dir) = (
        Registry::with_password(&["multi"]).await,
        tempfile::tempdir().unwrap(),
    );
    let (address, image) = (registry.address(), registry.image("multi"));
    let helper = |secret: &str| {
        format!(
            "read -r server\necho \"$server\" >> \"$0.asked\"\necho '{{\"ServerURL\": \"x\", \"Username\": \"user\", \"Secret\": \"{secret}\"}}'"
        )
    };
    executable(dir.path(), "docker-credential-good", &helper("secret"));
    executable(
        dir.path(),
        "docker-credential-empty",
        "echo 'credentials not found in native keychain'; exit 1",
    );
    let auths = json!({address: {"username": "user", "password": "secret"}});
    for (what, content) in [
        ("auths", json!({"auths": auths})),
        ("credHelpers", json!({"credHelpers": {address: "good"}})),
        (
            "credsStore",
            json!({"credsStore": "good", "credHelpers": {"other.io": "empty"}}),
        ),
        (
            "a helper without an answer, then auths",
            json!({"credsStore": "empty", "auths": auths}),
        ),
        (
            "a helper that is missing, then auths",
            json!({"credsStore": "missing", "auths": auths}),
        ),
    ] {
        let (status, line, log) = inspect(&dir, &docker_config(&dir, &content), &image);
        assert_eq!(
            (status, &line["error"]),
            (0, &Value::Null),
            "{what}: {line} {log}"
        );
        assert!(!log.contains("secret\""), "{what}: {log}");
    }
    // A helper that fails or returns nonsense is named, but not its output.
    executable(
        dir.path(),
        "docker-credential-broken",
        "echo hunter2 >&2; echo hunter2; exit 3",
    );
    executable(dir.path(), "docker-credential-odd", "echo hunter2");
    for (helper, why) in [("broken", "exit status: 3"), ("odd", "malformed")] {
        let content = json!({"credHelpers": {address: helper}});
        let (status, _, log) = inspect(&dir, &docker_config(&dir, &content), &image);
        assert_eq!(status, 1);
        assert!(
            log.contains(helper) && log.contains(why) && !log.contains("hunter2"),
            "{log}"
        );
    }
    let asked = fs::read_to_string(dir.path().join("docker-credential-good.asked")).unwrap();
    assert_eq!(asked.lines().next(), Some(address));
    let (status, line, _) = inspect(
        &dir,
        &docker_config(&dir, &json!({"credsStore": "empty"})),
        &image,
    );
    assert_eq!((status, &line["error"]["reason"]), (1, &json!("Denied")));
    let (status, _, log) = inspect(
        &dir,
        &docker_config(&dir, &json!({"credsStore": "../good"})),
        &image,
    );
    assert!(
        status == 2 && log.contains("not the name of a program"),
        "{log}"
    );
}

#[tokio::test]
async fn the_kubelet_s_plugins_give_credentials_to_every_pod() {
    let (registry, dir) = (
        Registry::with_password(&["multi"]).await,
        tempfile::tempdir().unwrap(),
    );
    let file = plugin(dir.path(), registry.address(), "secret");
    let providers = json!({"credentialProviders": {"config": file, "binDirectory": dir.path()}});
    let (status, line, log) = inspect(&dir, &providers, &registry.image("multi"));
    assert_eq!((status, &line["error"]), (0, &Value::Null), "{line} {log}");
    assert!(!log.contains("secret\""), "{log}");
    fs::write(&file, "kind: Other").unwrap();
    let (status, _, log) = inspect(&dir, &providers, &registry.image("multi"));
    assert!(status == 2 && log.contains("providers.json"), "{log}");
}
