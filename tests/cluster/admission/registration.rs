//! The registration of the webhook: from the manifests, in the hands of others, and from earlier
//! versions.

use std::time::{Duration, Instant};

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use kube::{
    Api,
    api::{Patch, PatchParams},
};

use super::*;

#[tokio::test]
async fn a_broken_configuration_is_repaired() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let _archaware = Controller::start_with_webhook(&cluster, "", "").await;
    cluster.wait_until_tainted().await;
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    // Another authority, so that the API server trusts no certificate of the webhook.
    let foreign = rcgen::generate_simple_self_signed(["a".to_owned()])
        .unwrap()
        .cert
        .pem();
    let bundle = k8s_openapi::ByteString(foreign.into_bytes());
    let change = json!([
        {"op": "replace", "path": "/webhooks/0/clientConfig/caBundle", "value": bundle},
        {"op": "add", "path": "/webhooks/0/namespaceSelector/matchExpressions/-", "value": {"key": "control-plane", "operator": "DoesNotExist"}},
    ]);
    let change = Patch::<()>::Json(serde_json::from_value(change).unwrap());
    configurations
        .patch("archaware", &PatchParams::default(), &change)
        .await
        .unwrap();
    cluster.create_pod("meanwhile", &["arm64"]).await;
    assert_eq!(
        cluster.wait_until_bound("meanwhile").await,
        "arm64",
        "the reconciler is there"
    );
    // The repair may come before the API server has read the broken one.
    eventually("the authority is archaware's again", DEADLINE, || async {
        let found = configurations.get("archaware").await.ok()?;
        let own = found.webhooks?.first()?.client_config.ca_bundle.clone()?;
        (own != bundle).then_some(())
    })
    .await;
    cluster.wait_until_called().await;
    let found = configurations.get("archaware").await.unwrap();
    let selector = json!(found.webhooks.unwrap()[0].namespace_selector).to_string();
    assert!(
        selector.contains("control-plane"),
        "what others exclude stays: {selector}"
    );
}

/// The user's own configuration is left as it is, but for the authorities that only archaware
/// knows.
#[tokio::test]
async fn a_configuration_of_the_users_own_gets_the_authorities() {
    let cluster = TestCluster::take().await;
    let port = free_port();
    let shipped = cluster.kubectl(&[
        "create",
        "--dry-run=client",
        "-o",
        "json",
        "-f",
        "manifests/archaware.yaml",
        "-l",
        "app.kubernetes.io/component=admission",
    ]);
    let mut own: Value = serde_json::from_str(&shipped).unwrap();
    for webhook in own["webhooks"].as_array_mut().unwrap() {
        let path = webhook["clientConfig"]["service"]["path"]
            .as_str()
            .unwrap()
            .to_owned();
        webhook["clientConfig"] = json!({"url": format!("https://127.0.0.1:{port}{path}")});
        webhook["timeoutSeconds"] = json!(7);
    }
    let file = cluster.dir().join("webhook.json");
    std::fs::write(&file, own.to_string()).unwrap();
    cluster.kubectl(&["apply", "-f", file.to_str().unwrap()]);
    let _archaware = Controller::start(
        &cluster,
        &admission_config(port, "manageConfiguration: false"),
    );
    cluster.wait_until_called().await;
    let timeouts = "jsonpath={.webhooks[*].timeoutSeconds}";
    let found = cluster.kubectl(&[
        "get",
        "mutatingwebhookconfiguration",
        "archaware",
        "-o",
        timeouts,
    ]);
    assert_eq!(found, "7 7 7");
}

/// The stored registration without `caBundle` and URL.
fn without_clients(cluster: &TestCluster) -> Value {
    let found = cluster.kubectl(&[
        "get",
        "mutatingwebhookconfiguration",
        "archaware",
        "-o",
        "json",
    ]);
    let found: Value = serde_json::from_str(&found).unwrap();
    let mut webhooks = found["webhooks"].clone();
    for webhook in webhooks.as_array_mut().unwrap() {
        webhook.as_object_mut().unwrap().remove("clientConfig");
    }
    webhooks
}

/// archaware only adds where it is found, and whom to trust; everything else is as shipped.
#[tokio::test]
async fn the_shipped_registration_is_what_archaware_needs() {
    let cluster = TestCluster::take().await;
    cluster.register();
    let shipped = without_clients(&cluster);
    let _archaware = Controller::start_with_webhook(&cluster, "", "").await;
    assert_eq!(without_clients(&cluster), shipped);
}

/// A file with the registration of the manifests, for a webhook on this port of the host instead of
/// a Service.
fn with_url(cluster: &TestCluster, port: u16) -> String {
    let url = format!("https://127.0.0.1:{port}");
    let shipped = std::fs::read_to_string("manifests/archaware.yaml").unwrap();
    let registration = shipped.split("\n---\n").last().unwrap();
    let lines = registration.lines().map(|line| {
        let Some((indent, service)) = line.split_once("clientConfig: {service: ") else {
            return line.to_owned();
        };
        let path = service.split_once("path: ").unwrap().1;
        let path = path.split_once(',').unwrap().0;
        format!("{indent}clientConfig: {{url: \"{url}{path}\"}}")
    });
    let file = cluster.dir().join("registration.yaml");
    std::fs::write(&file, lines.collect::<Vec<_>>().join("\n")).unwrap();
    file.to_str().unwrap().to_owned()
}

/// `kubectl apply` in both ways, as a person does it and as controllers do it: nothing is taken
/// away, nothing conflicts.
#[tokio::test]
async fn applying_the_manifests_again_takes_nothing_away() {
    let cluster = TestCluster::take().await;
    let port = free_port();
    let file = with_url(&cluster, port);
    let file = file.as_str();
    cluster.kubectl(&["apply", "-f", file]);
    let _archaware = Controller::start(&cluster, &admission_config(port, ""));
    cluster.wait_until_called().await;
    let version = || {
        let path = "jsonpath={.metadata.generation}";
        cluster.kubectl(&[
            "get",
            "mutatingwebhookconfiguration",
            "archaware",
            "-o",
            path,
        ])
    };
    let before = version();
    cluster.kubectl(&["apply", "-f", file]);
    assert_eq!(version(), before, "client-side");
    // The first server-side apply takes the fields over from the client-side one.
    for manager in ["kubectl", "argocd-controller", "kustomize-controller"] {
        let manager = format!("--field-manager={manager}");
        cluster.kubectl(&["apply", "--server-side", &manager, "-f", file]);
        assert_eq!(version(), before, "{manager}");
    }
    assert!(cluster.is_called().await);
}

/// A watch tells of the change.
#[tokio::test]
async fn a_removed_bundle_is_back_at_once() {
    let cluster = TestCluster::take().await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    let configurations: Api<MutatingWebhookConfiguration> = Api::all(cluster.client.clone());
    let bundle = || async {
        let found = configurations.get("archaware").await.ok()?;
        found.webhooks?[0].client_config.ca_bundle.clone()
    };
    let mut times = Vec::new();
    for _ in 0..3 {
        let remove = json!([{"op": "remove", "path": "/webhooks/0/clientConfig/caBundle"}]);
        let remove = Patch::<()>::Json(serde_json::from_value(remove).unwrap());
        configurations
            .patch("archaware", &PatchParams::default(), &remove)
            .await
            .unwrap();
        let started = Instant::now();
        eventually("the bundle", DEADLINE, &bundle).await;
        times.push(started.elapsed());
    }
    times.sort();
    assert!(times[1] < Duration::from_secs(1), "{times:?}");
    assert_eq!(archaware.stop().await, 0);
}

/// After `kubectl apply` and before the first replica is ready, and also when all are gone: the API
/// server trusts nobody and finds nobody, which it knows at once.
#[tokio::test]
async fn without_a_replica_nothing_waits_and_nothing_fails() {
    let cluster = TestCluster::take().await;
    for registration in ["shipped", "moved"] {
        if registration == "shipped" {
            cluster.register();
        } else {
            cluster.kubectl(&["delete", "mutatingwebhookconfiguration", "archaware"]);
            cluster.kubectl(&["apply", "-f", &with_url(&cluster, free_port())]);
        }
        let mut times = Vec::new();
        for n in 0..5 {
            let started = Instant::now();
            cluster
                .create_pod(&format!("{}-{n}", &registration[..4]), &["arm64"])
                .await;
            times.push(started.elapsed());
        }
        times.sort();
        assert!(
            times[2] < Duration::from_millis(500),
            "{registration}: {times:?}"
        );
    }
}

/// Without the registration nothing is created: the log says what to do, and pods are placed by the
/// controller.
#[tokio::test]
async fn a_missing_registration_is_said() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, &admission_config(free_port(), ""));
    archaware
        .wait_for_log("there is no MutatingWebhookConfiguration archaware")
        .await;
    archaware
        .wait_for_metric("archaware_admission_registered{} 0")
        .await;
    cluster.wait_until_tainted().await;
    cluster.create_pod("app", &["arm64"]).await;
    assert_eq!(cluster.wait_until_bound("app").await, "arm64");
    let found = cluster.kubectl(&["get", "mutatingwebhookconfigurations", "-o", "name"]);
    assert_eq!(found.trim(), "");
    // It is used as soon as it is there.
    cluster.register();
    cluster.wait_until_called().await;
    archaware
        .wait_for_metric("archaware_admission_registered{} 1")
        .await;
    // Its end is seen at once, too: the next check would come after half a minute.
    let deleted = Instant::now();
    cluster.kubectl(&["delete", "mutatingwebhookconfiguration", "archaware"]);
    archaware
        .wait_for_metric("archaware_admission_registered{} 0")
        .await;
    let took = deleted.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    assert_eq!(archaware.stop().await, 0);
}

/// What an earlier version created by itself: it is taken over by the manifests, used, and removed
/// by `clean`.
#[tokio::test]
async fn a_registration_of_an_earlier_version_is_taken_over() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let port = free_port();
    let webhook = |name: &str, conditions: Value| {
        json!({
            "name": format!("{name}.archaware.dev"),
            "clientConfig": {"url": format!("https://127.0.0.1:{port}/{name}")},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": [name]}],
            "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Ignore", "timeoutSeconds": 3,
            "matchConditions": conditions,
        })
    };
    let unbound = json!([{"name": "unbound", "expression": "!has(object.spec.nodeName) || object.spec.nodeName == ''"}]);
    let labels = json!({"app.kubernetes.io/name": "archaware", "app.kubernetes.io/component": "admission",
        "app.kubernetes.io/managed-by": "archaware"});
    let own = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": "archaware", "labels": labels},
        "webhooks": [webhook("pods", unbound), webhook("nodes", json!([]))],
    });
    let file = cluster.dir().join("older.json");
    std::fs::write(&file, own.to_string()).unwrap();
    cluster.kubectl(&["create", "-f", file.to_str().unwrap()]);
    cluster.kubectl(&["apply", "-f", &with_url(&cluster, port)]);
    let archaware = Controller::start(&cluster, &admission_config(port, ""));
    cluster.wait_until_called().await;
    let found = cluster.kubectl(&[
        "get",
        "mutatingwebhookconfiguration",
        "archaware",
        "-o",
        "jsonpath={.webhooks[*].name} {.webhooks[0].matchConditions[*].name}",
    ]);
    assert_eq!(
        found.split(' ').collect::<Vec<_>>(),
        [
            "pods.archaware.dev",
            "nodes.archaware.dev",
            "daemonsets.archaware.dev",
            "archaware.dev/no-mirror",
        ]
    );
    assert_eq!(archaware.stop().await, 0);
    let (status, lines, error) = cluster.archaware(&["clean"]);
    assert_eq!(status, 0, "{lines}{error}");
    assert!(
        lines.contains("MutatingWebhookConfiguration archaware"),
        "{lines}"
    );
}
