//! The command line as a new user sees it.

use std::process::{Command, Output};

use serde_json::Value;

use super::*;

fn run(arguments: &[&str]) -> Output {
    Command::new(testsupport::program())
        .env_remove("KUBECONFIG")
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn exit_statuses_tell_wrong_usage_from_failure() {
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.yaml");
    std::fs::write(
        &bad,
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\ntaints: {}\n",
    )
    .unwrap();
    let bad = bad.to_str().unwrap();
    for (arguments, status, says) in [
        (&["nonsense"][..], 2, "nonsense"),
        (&["inspect"], 2, "IMAGE"),
        (&["config", "check", "--config", bad], 2, "bad.yaml:3:1"),
        (&["run", "--config", bad], 2, "taints"),
        (&["plan", "--config", "/no/such/file"], 2, "/no/such/file"),
        (
            &["plan", "--docker-config", "/no/such/file"],
            2,
            "/no/such/file",
        ),
        (&["plan", "--kubeconfig", "/no/such/file"], 1, "kubeconfig"),
        (&["inspect", "UPPER CASE"], 1, ""),
        (&["run", "--listen", "nowhere"], 2, "not an address like"),
        (&["config", "check", "--log-level", "a=b=c"], 2, "log level"),
    ] {
        let output = run(arguments);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(error.contains(says), "{arguments:?}: {error}");
        assert!(!error.contains("panicked"), "{error}");
    }
}

#[test]
fn config_prints_what_it_reads() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("printed.yaml");
    let printed = run(&["config", "print"]);
    std::fs::write(&file, &printed.stdout).unwrap();
    let checked = run(&["config", "check", "--config", file.to_str().unwrap()]);
    assert!(checked.status.success(), "{}", text(&checked.stderr));
    let schema: Value = serde_json::from_slice(&run(&["config", "schema"]).stdout).unwrap();
    assert!(schema["properties"]["taint"].is_object(), "{schema}");
}

#[tokio::test]
async fn inspect_has_a_stable_form() {
    let cluster = TestCluster::take().await;
    let images = [
        cluster.image("multi"),
        cluster.image("helm"),
        cluster.image("no-such-image"),
        "Bad Image".to_owned(),
        cluster.image("amd64-v3-arm64"),
    ];
    let mut arguments = vec!["inspect", "-o", "json"];
    arguments.extend(images.iter().map(String::as_str));
    let (status, out, _) = cluster.archaware(&arguments);
    assert_eq!(status, 1, "one of them failed");
    let lines: Vec<Value> = serde_json::from_str(&out).unwrap();
    let keys: Vec<_> = lines[0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        keys,
        [
            "architectures",
            "digest",
            "error",
            "image",
            "mediaType",
            "note",
            "platforms",
            "reference",
            "source",
            "variants"
        ]
    );
    assert_eq!(
        lines[0]["platforms"],
        serde_json::json!(["linux/amd64", "linux/arm64", "linux/s390x"])
    );
    assert_eq!(lines[0]["reference"], format!("{}:latest", images[0]));
    assert_eq!(lines[0]["source"], "registry");
    assert!(lines[0]["error"].is_null());
    assert_eq!(
        (&lines[1]["note"], &lines[1]["platforms"]),
        (&"NotAnImage".into(), &serde_json::json!([]))
    );
    assert_eq!(lines[2]["error"]["reason"], "NotFound");
    assert_eq!(lines[3]["error"]["reason"], "InvalidReference");
    assert!(lines[3]["reference"].is_null());
    let sufficient = serde_json::json!({"amd64": ["v3", "v4"]});
    assert_eq!(lines[4]["variants"], sufficient);
    let (status, table, _) = cluster.archaware(&["inspect", &images[0]]);
    assert_eq!(status, 0);
    assert!(table.contains("linux/arm64"), "{table}");
    assert!(
        table.lines().all(|line| line.chars().count() <= 80),
        "{table}"
    );
}

#[tokio::test]
async fn health_and_metrics_are_served() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster.create_pod("app", &["arm64"]).await;
    cluster.wait_until_bound("app").await;
    assert_eq!(archaware.http("/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(archaware.http("/readyz").await.0, 200);
    assert_eq!(archaware.http("/nonsense").await.0, 404);
    for (metric, value) in [
        (
            "archaware_nodes{architecture=\"arm64\",tainted=\"true\"}",
            1.0,
        ),
        (
            "archaware_decisions_total{kind=\"Pod\",result=\"architectures\"}",
            1.0,
        ),
        (
            "archaware_image_resolutions_total{source=\"registry\",result=\"Resolved\"}",
            1.0,
        ),
        (
            "archaware_writes_total{kind=\"Node\",result=\"applied\"}",
            3.0,
        ),
        (
            "archaware_writes_total{kind=\"Pod\",result=\"applied\"}",
            1.0,
        ),
        ("archaware_leader", 1.0),
    ] {
        let seen = archaware.metric(metric).await;
        assert!(seen >= value, "{metric} is {seen}");
    }
}
