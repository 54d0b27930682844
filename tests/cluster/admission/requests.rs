//! Requests of a real API server, stored as fixtures, and invalid requests.

use std::path::{Path, PathBuf};

use base64::{Engine, engine::general_purpose::STANDARD};
use futures::StreamExt;
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use reqwest::StatusCode;

use super::{direct_client::Webhook, *};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("tests/cluster/admission/fixtures/{name}.json"))
}

/// Without the parts that differ each time.
fn settled(review: &Value, cluster: &TestCluster) -> Value {
    fn settle(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    let id = "authentication.kubernetes.io/credential-id";
                    let changes = ["uid", "resourceVersion", "managedFields", id];
                    // For example `kube-api-access-x7k2p`, and its mounts.
                    let random = value
                        .as_str()
                        .is_some_and(|text| text.starts_with("kube-api-access-"));
                    if key == "creationTimestamp" && !value.is_null() {
                        *value = json!("2026-01-01T00:00:00Z");
                    } else if changes.contains(&key.as_str()) && !value.is_null() {
                        *value = json!("CHANGES");
                    } else if random {
                        *value = json!("kube-api-access-CHANGES");
                    } else {
                        settle(value);
                    }
                }
            }
            Value::Array(all) => all.iter_mut().for_each(settle),
            _ => {}
        }
    }
    let mut review = review.clone();
    settle(&mut review);
    if review["request"]["kind"]["kind"] == "DaemonSet" {
        for object in ["object", "oldObject"] {
            review["request"][object]
                .as_object_mut()
                .map(|object| object.remove("status"));
        }
    }
    let text = review
        .to_string()
        .replace(&cluster.namespace, "NAMESPACE")
        .replace(&cluster.registry(), "REGISTRY");
    serde_json::from_str(&text).unwrap()
}

/// The fixtures equal what this version's API server sends. `ARCHAWARE_UPDATE_FIXTURES=yes`
/// rewrites them.
#[tokio::test]
async fn the_fixtures_are_what_the_api_server_sends() {
    let cluster = TestCluster::take().await;
    let rule = |group: &str, resource: &str| json!({"apiGroups": [group], "apiVersions": ["v1"], "resources": [resource], "operations": ["CREATE", "UPDATE"]});
    let mut rules = rule("", "pods");
    rules["resources"] = json!(["pods", "nodes"]);
    let core = RecordingWebhook::start(&cluster, "core", rules, |_| json!([])).await;
    let apps =
        RecordingWebhook::start(&cluster, "apps", rule("apps", "daemonsets"), |_| json!([])).await;
    // Until the API server calls the new webhooks.
    eventually("the first question", DEADLINE, || async {
        let node = cluster.create_node("settling", "amd64").await;
        cluster.nodes().delete("settling", &DeleteParams::default()).await.unwrap();
        drop(node);
        let mut probe = pod_spec(&["probe".to_owned()]);
        probe["schedulerName"] = json!("none");
        let set = json!({"metadata": {"name": "probe"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": probe}}});
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let set: DaemonSet = serde_json::from_value(set).unwrap();
        cluster.api::<DaemonSet>().create(&dry_run, &set).await.unwrap();
        (!core.seen().is_empty() && !apps.seen().is_empty()).then_some(())
    })
    .await;
    let pod = json!({
        "metadata": {"generateName": "web-", "labels": {"app": "web"}, "annotations": {"archaware.dev/preferred-architectures": "arm64=5"}},
        "spec": {
            "schedulerName": "none",
            "initContainers": [{"name": "init", "image": cluster.image("amd64-arm64")}],
            "containers": [{"name": "web", "image": cluster.image("multi"), "ports": [{"containerPort": 80}], "resources": {"requests": {"cpu": "10m"}}}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}},
        },
    });
    cluster.create::<Pod>(pod).await;
    cluster.create_node("registers", "arm64").await;
    let set = json!({"metadata": {"name": "agent"}, "spec": {
        "selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}}, "spec": pod_spec(&[cluster.image("amd64-arm64")])},
    }});
    cluster.create::<DaemonSet>(set).await;
    let image = json!([{"op": "replace", "path": "/spec/template/spec/containers/0/image", "value": cluster.image("arm64")}]);
    let image = Patch::<()>::Json(serde_json::from_value(image).unwrap());
    cluster
        .api::<DaemonSet>()
        .patch("agent", &PatchParams::default(), &image)
        .await
        .unwrap();
    let all = [core.seen(), apps.seen()].concat();
    for (name, operation, of) in [
        ("pod-create", "CREATE", "web-"),
        ("node-create", "CREATE", "registers"),
        ("daemonset-create", "CREATE", "agent"),
        ("daemonset-update", "UPDATE", "agent"),
    ] {
        let sent = all.iter().find(|review| {
            let metadata = &review["request"]["object"]["metadata"];
            let named = [&metadata["name"], &metadata["generateName"]];
            let is_status = review["request"]["subResource"].is_string();
            review["request"]["operation"] == operation
                && named.iter().any(|one| **one == of)
                && !is_status
        });
        let sent = settled(sent.unwrap_or_else(|| panic!("no {name}")), &cluster);
        let path = fixture(name);
        if std::env::var("ARCHAWARE_UPDATE_FIXTURES").is_ok_and(|update| update == "yes") {
            std::fs::write(&path, format!("{sent:#}\n")).unwrap();
        }
        let kept: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(
            kept, sent,
            "{name} is out of date: ARCHAWARE_UPDATE_FIXTURES=yes writes it anew"
        );
    }
}

fn load(name: &str, cluster: &TestCluster) -> Value {
    let text = std::fs::read_to_string(fixture(name)).unwrap();
    let text = text
        .replace("NAMESPACE", &cluster.namespace)
        .replace("REGISTRY", &cluster.registry());
    serde_json::from_str(&text).unwrap()
}

/// The operations of a response, as the API server parses them.
fn operations(answer: &str) -> Value {
    let answer: Value = serde_json::from_str(answer).unwrap();
    assert_eq!(answer["apiVersion"], "admission.k8s.io/v1");
    assert_eq!(answer["kind"], "AdmissionReview");
    let response = &answer["response"];
    assert_eq!(
        (&response["uid"], &response["allowed"]),
        (&json!("CHANGES"), &json!(true))
    );
    let Some(patch) = response["patch"].as_str() else {
        return json!([]);
    };
    assert_eq!(response["patchType"], "JSONPatch");
    serde_json::from_slice(&STANDARD.decode(patch).unwrap()).unwrap()
}

#[tokio::test]
async fn fixtures_are_answered_with_the_least_operations() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "affinity: {required: true}\n").await;
    let toleration = |architecture: &str| json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": architecture, "effect": "NoSchedule"});
    let (amd, arm) = (toleration("amd64"), toleration("arm64"));

    let (status, answer) = webhook
        .send("/pods", load("pod-create", &cluster).to_string())
        .await;
    assert_eq!(status, StatusCode::OK);
    let sent = operations(&answer);
    let expression =
        json!({"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]});
    let term = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0/matchExpressions/-";
    let preferred = "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution";
    let arm64 = json!({"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]});
    let soft = json!([{"weight": 5, "preference": {"matchExpressions": [arm64]}}]);
    let recorded = &sent[5]["value"];
    let record = json!({"version": 1, "tolerations": [amd, arm], "affinity": {"require": {"architectures": ["amd64", "arm64"], "terms": [0]}, "prefer": [{"architecture": "arm64", "weight": 5}]}});
    assert_eq!(
        sent,
        json!([
            {"op": "add", "path": "/spec/tolerations/-", "value": amd},
            {"op": "add", "path": "/spec/tolerations/-", "value": arm},
            {"op": "add", "path": term, "value": expression},
            {"op": "add", "path": preferred, "value": soft},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1decision", "value": "amd64,arm64"},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1added", "value": recorded},
        ])
    );
    let recorded: Value = serde_json::from_str(recorded.as_str().unwrap()).unwrap();
    assert_eq!(recorded, record);

    let (_, answer) = webhook
        .send("/nodes", load("node-create", &cluster).to_string())
        .await;
    let taint = operations(&answer).to_string();
    assert!(
        taint.contains(
            r#""value":{"effect":"NoSchedule","key":"kubernetes.io/arch","value":"arm64"}"#
        ),
        "{taint}"
    );
    for (name, tolerations) in [
        ("daemonset-create", vec![&amd, &arm]),
        ("daemonset-update", vec![&arm]),
    ] {
        let (_, answer) = webhook
            .send("/daemonsets", load(name, &cluster).to_string())
            .await;
        let sent = operations(&answer);
        let added = sent
            .as_array()
            .unwrap()
            .iter()
            .find(|one| one["path"] == "/spec/template/spec/tolerations" && one["op"] == "add");
        assert_eq!(
            added.unwrap()["value"],
            json!(tolerations),
            "{name}: {sent}"
        );
    }
}

/// No request crashes the process, exhausts its memory, or gets anything but a 4xx.
#[tokio::test]
async fn invalid_requests_are_refused() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "").await;
    let good = load("pod-create", &cluster);
    let changed = |path: &str, value: Value| {
        let mut review = good.clone();
        *review.pointer_mut(path).unwrap() = value;
        review.to_string()
    };
    let text = good.to_string();
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let bad = StatusCode::BAD_REQUEST;
    for (what, path, body, expected) in [
        ("nothing", "/pods", String::new(), bad),
        ("no JSON", "/pods", "hello".to_owned(), bad),
        ("cut short", "/pods", text[..text.len() / 2].to_owned(), bad),
        ("something after it", "/pods", format!("{text}{text}"), bad),
        (
            "another version",
            "/pods",
            changed("/apiVersion", json!("admission.k8s.io/v1beta1")),
            bad,
        ),
        ("another kind", "/pods", changed("/kind", json!("Pod")), bad),
        ("no request", "/pods", changed("/request", json!(null)), bad),
        (
            "no object",
            "/pods",
            changed("/request/object", json!(null)),
            bad,
        ),
        (
            "another operation",
            "/pods",
            changed("/request/operation", json!("DELETE")),
            bad,
        ),
        ("a pod for nodes", "/nodes", text.clone(), bad),
        (
            "a list for an object",
            "/pods",
            changed("/request/object", json!([])),
            bad,
        ),
        (
            "a text for containers",
            "/pods",
            changed("/request/object/spec/containers", json!("x")),
            bad,
        ),
        (
            "a deep list where one is read",
            "/pods",
            changed("/request/object/spec/tolerations", json!("DEEP"))
                .replace("\"DEEP\"", &deep(100_000)),
            bad,
        ),
        (
            "a deep list beside",
            "/pods",
            format!("{{\"a\":{},{}", deep(100_000), &text[1..]),
            StatusCode::OK,
        ),
        ("no path of ours", "/", text.clone(), StatusCode::NOT_FOUND),
        (
            "no path of ours either",
            "/pods/x",
            text.clone(),
            StatusCode::NOT_FOUND,
        ),
        (
            "too many requests",
            "/pods",
            format!("{text}{}", " ".repeat(3 << 20)),
            StatusCode::PAYLOAD_TOO_LARGE,
        ),
        (
            "nearly too much",
            "/pods",
            format!("{text}{}", " ".repeat(2 << 20)),
            StatusCode::OK,
        ),
    ] {
        let (status, says) = webhook.send(path, body).await;
        assert_eq!(status, expected, "{what}: {says}");
        let short = says.len() < 300 || status == StatusCode::OK;
        assert!(short, "{what} is not repeated at length: {says}");
    }
    assert!(cluster.is_called().await, "and it goes on");
}

/// The same for what is not HTTP, and for endless requests.
#[tokio::test]
async fn endless_requests_are_ended() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "").await;
    let text = load("pod-create", &cluster).to_string();
    let url = format!("{}/pods", webhook.address);
    let get = webhook.client.get(&url).send().await.unwrap();
    assert_eq!(get.status(), StatusCode::METHOD_NOT_ALLOWED);
    let untyped = webhook
        .client
        .post(&url)
        .body(text.clone())
        .send()
        .await
        .unwrap();
    assert_eq!(untyped.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
    // Chunked, without length and without end.
    let chunk = |_| {
        Ok::<_, std::io::Error>(hyper::body::Frame::data(hyper::body::Bytes::from(
            " ".repeat(64 << 10),
        )))
    };
    let endless = http_body_util::StreamBody::new(futures::stream::iter(0..200).map(chunk));
    let endless = reqwest::Body::wrap(endless);
    let endless = webhook
        .client
        .post(&url)
        .header("content-type", "application/json")
        .body(endless);
    // The server may respond or close the connection while the client still sends.
    if let Ok(answer) = endless.send().await {
        assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
    let headers = webhook
        .client
        .post(&url)
        .header("x-large", "x".repeat(60 << 10))
        .body(text.clone());
    if let Ok(answer) = headers.send().await {
        assert!(answer.status().is_client_error(), "{}", answer.status());
    }
    // Plain text at a TLS port.
    assert!(reqwest::get(url.replace("https", "http")).await.is_err());
    let peak = webhook.archaware.peak_memory();
    assert!(peak < 80.0, "{peak} MiB");
    assert!(cluster.is_called().await, "and it goes on");
}
