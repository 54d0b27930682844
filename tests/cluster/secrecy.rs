//! A complete run with log level trace for all libraries prints no secret.

use base64::{Engine, prelude::BASE64_STANDARD};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry};

use super::*;

/// Distinct from everything else in a log.
const PASSWORDS: [&str; 3] = [
    "hunter2-basic-0c5f",
    "hunter2-bearer-7ad1",
    "hunter2-node-93be",
];

async fn private(auth: Auth) -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("arm64"));
    registry.require(auth);
    registry
}

fn auths(registry: &FakeRegistry, password: &str) -> String {
    let entry = json!({"username": "user", "password": password});
    json!({"auths": {registry.address(): entry}}).to_string()
}

/// Every form that must not occur: plain, and as encoded in headers and Secrets.
fn forms(secret: &str) -> Vec<String> {
    let user = format!("user:{secret}");
    // base64 of a substring depends on its offset: all three cases.
    let shifted = (0..3).map(|by| {
        let encoded = BASE64_STANDARD.encode(format!("{}{secret}", "x".repeat(by)));
        encoded[4..encoded.len() - 4].to_owned()
    });
    let encoded = [BASE64_STANDARD.encode(user), secret.to_owned()];
    encoded.into_iter().chain(shifted).collect()
}

#[tokio::test]
async fn no_secret_is_printed_even_at_trace_level() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let basic = private(Auth::Basic("user".into(), PASSWORDS[0].into())).await;
    let user = Some(("user".into(), PASSWORDS[1].into()));
    let bearer = private(Auth::Bearer(user)).await;
    let of_node = private(Auth::Basic("user".into(), PASSWORDS[2].into())).await;
    let closed = private(Auth::Basic("user".into(), "another".into())).await;
    let file = cluster.dir().join("docker.json");
    std::fs::write(&file, auths(&of_node, PASSWORDS[2])).unwrap();
    let config = format!(
        "registries: {{dockerConfig: {}}}\nresolution: {{failure: {{after: 2s}}}}\n{}",
        file.display(),
        admission_config(free_port(), "")
    );
    cluster.register();
    let archaware = Controller::start_loud(&cluster, &config);
    cluster.wait_until_called().await;
    cluster.wait_until_tainted().await;
    let registries = [
        ("basic", &basic, 0),
        ("bearer", &bearer, 1),
        ("node", &of_node, 2),
        ("closed", &closed, 0),
    ];
    for (name, registry, password) in registries {
        let content = json!({".dockerconfigjson": auths(registry, PASSWORDS[password])});
        let data = json!({
            "metadata": {"name": name},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": content,
        });
        cluster
            .create::<k8s_openapi::api::core::v1::Secret>(data)
            .await;
        let mut spec = pod_spec(&[registry.image("app")]);
        if name != "node" {
            spec["imagePullSecrets"] = json!([{"name": name}]);
        }
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
    }
    for name in ["basic", "bearer", "node"] {
        assert_eq!(cluster.wait_until_bound(name).await, "arm64");
    }
    let event = "ToleratesEveryArchitecture";
    cluster.wait_for_event("closed", event).await;
    assert!(bearer.count("GET", "/token") > 0);

    // The ServiceAccount's token, the certificate's private key, and the registry's tokens.
    let kubeconfig = std::fs::read_to_string(cluster.kubeconfig("token-archaware")).unwrap();
    let token = kubeconfig
        .split("{token: ")
        .nth(1)
        .unwrap()
        .split('}')
        .next()
        .unwrap()
        .to_owned();
    let command = "-n archaware get secret archaware-admission -o json";
    let command: Vec<&str> = command.split(' ').collect();
    let stored: Value = serde_json::from_str(&cluster.kubectl(&command)).unwrap();
    let key = BASE64_STANDARD
        .decode(stored["data"]["tls.key"].as_str().unwrap())
        .unwrap();
    let key = String::from_utf8(key).unwrap();
    let line = key.lines().nth(1).unwrap().to_owned();
    let mut secrets: Vec<String> = PASSWORDS.iter().flat_map(|one| forms(one)).collect();
    let signature = token.rsplit('.').next().unwrap().to_owned();
    secrets.extend([
        signature,
        line,
        "Bearer token-1".to_owned(),
        "\"token-1\"".to_owned(),
    ]);

    let (_, metrics) = archaware.http("/metrics").await;
    let events = cluster.kubectl(&["get", "events", "-A", "-o", "json"]);
    let pods = cluster.kubectl(&["get", "pods", "-A", "-o", "json"]);
    let log = archaware.log();
    assert!(
        log.contains("\"TRACE\"") && log.contains("kube_client::") && log.contains("h2::"),
        "the libraries talk"
    );
    for secret in &secrets {
        for (what, text) in [
            ("log", &log),
            ("metrics", &metrics),
            ("events", &events),
            ("pods", &pods),
        ] {
            if let Some(at) = text.find(secret.as_str()) {
                let line = text[..at].rfind('\n').map_or(0, |start| start + 1);
                let end = text[at..].find('\n').map_or(text.len(), |end| at + end);
                panic!("{secret} in {what}: {}", &text[line..end.min(line + 2000)]);
            }
        }
    }
    assert_eq!(archaware.stop().await, 0);
}
