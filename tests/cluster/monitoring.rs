//! The documentation lists exactly the metrics that exist, alerts and dashboard use only those, and
//! Prometheus accepts them.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Value, json};

use super::*;

/// Labels by metric name.
type LabelsByMetric = BTreeMap<String, BTreeSet<String>>;

/// The table in docs/metrics.md.
fn documented() -> LabelsByMetric {
    let docs = std::fs::read_to_string("docs/metrics.md").unwrap();
    let rows = docs
        .lines()
        .filter(|line| line.starts_with("| `archaware_"));
    let mut known = LabelsByMetric::new();
    for row in rows {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let labels: BTreeSet<String> = cells[2]
            .split(',')
            .map(|label| label.trim().to_owned())
            .filter(|label| !label.is_empty())
            .collect();
        for name in cells[1].split(',') {
            known.insert(name.trim().trim_matches('`').to_owned(), labels.clone());
        }
    }
    known
}

/// Metrics of a scrape; labels only of those with values.
fn scraped(text: &str) -> LabelsByMetric {
    let mut known = LabelsByMetric::new();
    let mut histograms = BTreeSet::new();
    for line in text.lines() {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            let (name, kind) = declared.split_once(' ').unwrap();
            let name = if kind == "counter" {
                format!("{name}_total")
            } else {
                name.to_owned()
            };
            if kind == "histogram" {
                histograms.insert(name.clone());
            }
            known.insert(name, BTreeSet::new());
        } else if !line.starts_with('#') {
            let (name, rest) = line.split_once('{').unwrap_or((line, ""));
            let name = name.split(' ').next().unwrap();
            let base = ["_bucket", "_sum", "_count"]
                .into_iter()
                .find_map(|end| {
                    name.strip_suffix(end)
                        .filter(|base| histograms.contains(*base))
                })
                .unwrap_or(name);
            let labels = rest.split_once('}').map_or("", |(labels, _)| labels);
            let labels = labels.split("\",").filter_map(|one| one.split_once('='));
            let labels = labels
                .map(|(name, _)| name.to_owned())
                .filter(|name| name != "le");
            known
                .get_mut(base)
                .unwrap_or_else(|| panic!("{line} was not declared"))
                .extend(labels);
        }
    }
    known
}

#[tokio::test]
async fn the_metrics_are_those_of_the_docs() {
    let cluster = TestCluster::take_with_node().await;
    // Without rules no rule is left out.
    let rules = "rules: [{name: gpu, pods: app=training, nodes: [gpu=yes]}]\n";
    let config = format!("containerd: {{socket: {}}}\n{rules}", cluster.socket());
    let archaware = Controller::start_with_webhook(&cluster, &config, "").await;
    cluster.wait_until_tainted().await;
    cluster.create_pod("app", &["multi"]).await;
    cluster.wait_until_bound("app").await;
    // Excluded from the webhook, so that the controller decides.
    let out = cluster.create_opted_out_namespace().await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &out);
    let unseen = pod("unseen", pod_spec(&[cluster.image("multi")]), json!({}));
    let unseen = serde_json::from_value(unseen).unwrap();
    pods.create(&Default::default(), &unseen).await.unwrap();
    cluster.create_pod("absent", &["absent"]).await;
    cluster.wait_for_event("absent", "ImageNotResolved").await;
    eventually("a pod that waits", DEADLINE, || async {
        let waits = archaware.metric("archaware_pods_undecided{}").await > 0.5;
        let oldest = archaware
            .metric("archaware_pods_undecided_oldest_seconds{}")
            .await;
        let decided = archaware
            .metric("archaware_pod_creation_to_decision_seconds_count")
            .await;
        // What was fetched is written after the decision.
        let (_, text) = archaware.http("/metrics").await;
        let written = text.contains("archaware_containerd_writes_total");
        (waits && oldest > 0.5 && decided > 0.5 && written).then_some(())
    })
    .await;
    // At level debug the log has each call to containerd, the writes too.
    for method in ["Images/Get", "Leases/Create", "Content/Write"] {
        archaware.wait_for_log(method).await;
    }
    let (_, text) = archaware.http("/metrics").await;
    let (documented, scraped) = (documented(), scraped(&text));
    let names = |known: &LabelsByMetric| known.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&scraped), names(&documented));
    for (name, labels) in &scraped {
        assert!(
            labels.is_empty() || *labels == documented[name],
            "{name}: {labels:?}, documented {:?}",
            documented[name]
        );
    }
    assert!(text.ends_with("# EOF\n"), "OpenMetrics ends with a mark");
    for metric in [
        "archaware_decision_duration_seconds_count",
        "archaware_image_resolution_duration_seconds_count",
        "archaware_admission_duration_seconds_count",
        "archaware_admission_certificate_expiry_seconds{}",
        "archaware_leader",
        "archaware_containerd_up{}",
        "archaware_build_info{version=\"0.1.0\"}",
    ] {
        assert!(archaware.metric(metric).await > 0.5, "{metric}: {text}");
    }
    // Present from the start, for the alerts.
    assert!(text.contains("archaware_decisions_total{kind=\"Pod\",result=\"by_policy\"} 0"));
    let failed = format!(
        "archaware_registry_resolutions_total{{registry=\"{}\",result=\"NotFound\"}}",
        cluster.registry()
    );
    assert!(archaware.metric(&failed).await > 0.5, "{text}");
    assert_eq!(archaware.stop().await, 0);
}

/// Metric names in a Prometheus expression.
fn asked(expression: &str) -> impl Iterator<Item = String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names: Vec<String> = words
        .filter(|word| word.starts_with("archaware_"))
        .map(str::to_owned)
        .collect();
    names.into_iter()
}

fn rules() -> Value {
    let file = std::fs::read_to_string("manifests/monitoring/alerts.yaml").unwrap();
    serde_saphyr::from_str(&file).unwrap()
}

fn dashboard() -> Value {
    let file = std::fs::read_to_string("manifests/monitoring/dashboard.json").unwrap();
    serde_json::from_str(&file).unwrap()
}

/// All expressions of alerts and dashboard.
fn expressions() -> Vec<String> {
    let (rules, dashboard) = (rules(), dashboard());
    let alerts = rules["spec"]["groups"][0]["rules"].as_array().unwrap();
    let alerts = alerts.iter().map(|rule| rule["expr"].as_str().unwrap());
    let panels = dashboard["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().unwrap());
    let targets = targets.map(|target| target["expr"].as_str().unwrap());
    alerts.chain(targets).map(str::to_owned).collect()
}

#[test]
fn alerts_and_dashboard_ask_for_what_is_there() {
    let documented = documented();
    for expression in expressions() {
        for name in asked(&expression) {
            let base = ["_bucket", "_sum", "_count"]
                .into_iter()
                .find_map(|end| name.strip_suffix(end))
                .unwrap_or(&name);
            assert!(documented.contains_key(base), "{name} in {expression}");
        }
    }
    // The dashboard shows every documented metric.
    let shown: BTreeSet<String> = expressions().iter().flat_map(|one| asked(one)).collect();
    for name in documented.keys() {
        let here = shown.iter().any(|shown| shown.starts_with(name.as_str()));
        let elsewhere = [
            "archaware_events_dropped_total",
            "archaware_pods_watched",
            "archaware_registry_rate_limit",
        ];
        assert!(
            here || elsewhere.contains(&name.as_str()),
            "{name} is shown nowhere"
        );
    }
}

#[tokio::test]
async fn the_monitoring_manifests_are_built() {
    let cluster = TestCluster::take().await;
    let built = cluster.kubectl(&["kustomize", "manifests/monitoring"]);
    for kind in ["PrometheusRule", "PodMonitor", "ConfigMap"] {
        assert!(built.contains(&format!("kind: {kind}\n")), "{built}");
    }
}

#[test]
fn prometheus_understands_the_rules_and_each_fires_when_it_should() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let promtool = |arguments: &[&str]| {
        let output = Command::new("promtool")
            .args(arguments)
            .current_dir(dir.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        text
    };
    std::fs::write(path("alerts.yaml"), rules()["spec"].to_string()).unwrap();
    // JSON is YAML. Grafana's variables are replaced by intervals.
    let panels: Vec<Value> = expressions()
        .iter()
        .map(|one| json!({"record": "panel", "expr": one.replace("$__rate_interval", "5m")}))
        .collect();
    let panels = json!({"groups": [{"name": "panels", "rules": panels}]});
    std::fs::write(path("panels.yaml"), panels.to_string()).unwrap();
    promtool(&[
        "check",
        "rules",
        "--lint=none",
        "alerts.yaml",
        "panels.yaml",
    ]);
    std::fs::copy("tests/cluster/alerts.yaml", path("tests.yaml")).unwrap();
    promtool(&["test", "rules", "tests.yaml"]);
    // Every alert has a test and a section in the docs.
    let tests = std::fs::read_to_string("tests/cluster/alerts.yaml").unwrap();
    let docs = std::fs::read_to_string("docs/alerts.md").unwrap();
    for rule in rules()["spec"]["groups"][0]["rules"].as_array().unwrap() {
        let name = rule["alert"].as_str().unwrap();
        assert!(
            tests.contains(&format!("alertname=\"{name}\"")),
            "{name} has no test"
        );
        assert!(
            docs.contains(&format!("## {name}\n")),
            "{name} has no runbook"
        );
        let url = rule["annotations"]["runbook_url"].as_str().unwrap();
        assert!(
            url.ends_with(&format!("alerts.md#{}", name.to_lowercase())),
            "{url}"
        );
    }
}

#[tokio::test]
async fn the_log_level_can_be_changed_while_it_runs() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start_quiet(&cluster, "");
    cluster.wait_until_tainted().await;
    assert_eq!(
        archaware.http("/log-level").await.1,
        "warn,archaware::cli=info\n"
    );
    assert!(!archaware.log().contains("node tainted"));
    assert_eq!(archaware.put("/log-level", "info").await.0, 200);
    cluster.create_node("late", "arm64").await;
    archaware.wait_for_log("node tainted").await;
    let (status, says) = archaware.put("/log-level", "very=loud=indeed").await;
    assert_eq!(status, 400, "{says}");
    assert!(says.contains("is not a log level"), "{says}");
    assert_eq!(archaware.put("/log-level", &"x".repeat(2000)).await.0, 413);
    assert_eq!(archaware.http("/log-level").await.1, "info\n");
    assert_eq!(archaware.stop().await, 0);
}
