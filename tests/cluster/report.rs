//! `archaware report` of a cluster: by top owner, with what runs where.

use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment, ReplicaSet},
    batch::v1::CronJob,
    core::v1::{Pod, Secret},
};
use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry};

use super::{golden::assert_golden, *};

/// A container that requests something.
fn container(image: &str) -> Value {
    json!({"name": "app", "image": image, "resources": {"requests": {"cpu": "500m", "memory": "256Mi"}}})
}

fn workload(name: &str, replicas: u32, image: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "replicas": replicas,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container(image)]}},
    }})
}

fn report(cluster: &TestCluster, environment: &[(&str, &str)], arguments: &[&str]) -> String {
    let all: Vec<&str> = ["report"].iter().chain(arguments).copied().collect();
    let admin = cluster.kubeconfig("admin");
    let (status, output, error) = cluster.archaware_with(environment, &admin, &all);
    assert_eq!(status, 0, "{arguments:?}: {error}");
    output
}

fn reported(cluster: &TestCluster) -> Value {
    let output = report(cluster, &[], &["-n", &cluster.namespace, "-o", "json"]);
    serde_json::from_str(&output).unwrap()
}

/// The workloads of a report by kind and name.
fn names(report: &Value) -> Vec<String> {
    let all = report["workloads"].as_array().unwrap().iter();
    let name = |one: &Value| {
        format!(
            "{}/{}",
            one["kind"].as_str().unwrap(),
            one["name"].as_str().unwrap()
        )
    };
    all.map(name).collect()
}

/// An Argo Rollout owns a `ReplicaSet`, as a Deployment does. It runs without its controller here.
async fn create_rollout(cluster: &TestCluster, name: &str, image: &str) {
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "rollouts.argoproj.io"}, "spec": {
            "group": "argoproj.io", "scope": "Namespaced",
            "names": {"kind": "Rollout", "plural": "rollouts", "singular": "rollout", "shortNames": ["ro"]},
            "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "x-kubernetes-preserve-unknown-fields": true}}}]}});
    let folder = tempfile::tempdir().unwrap();
    let apply = |name: &str, object: &Value| {
        let file = folder.path().join(name);
        std::fs::write(&file, object.to_string()).unwrap();
        cluster.try_kubectl(&[
            "apply",
            "-n",
            &cluster.namespace,
            "-f",
            file.to_str().unwrap(),
        ])
    };
    apply("definition.json", &definition);
    let mut rollout = workload(name, 1, image);
    rollout["apiVersion"] = json!("argoproj.io/v1alpha1");
    rollout["kind"] = json!("Rollout");
    eventually("a Rollout", DEADLINE, || async {
        apply("rollout.json", &rollout).0.then_some(())
    })
    .await;
    let uid = cluster.kubectl(&[
        "-n",
        &cluster.namespace,
        "get",
        "rollout",
        name,
        "-o",
        "jsonpath={.metadata.uid}",
    ]);
    let mut set = workload(name, 1, image);
    set["metadata"]["name"] = json!(format!("{name}-1"));
    set["metadata"]["ownerReferences"] = json!([{"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "name": name, "uid": uid, "controller": true}]);
    cluster.create::<ReplicaSet>(set).await;
}

/// The image of the pod `lost` is for amd64, and its node `arm64-1` is for arm64, until a label
/// says that it emulates amd64.
fn where_a_node_emulates_it_it_runs(cluster: &TestCluster) {
    let config = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\nemulation: [{nodes: example.com/runs=amd64, architecture: arm64, runs: [amd64]}]\n";
    let file = cluster.dir().join("emulation.yaml");
    std::fs::write(&file, config).unwrap();
    for (emulates, answer) in [
        (false, "but "),
        (
            true,
            "which emulates an architecture for which its images exist",
        ),
    ] {
        if emulates {
            cluster.kubectl(&["label", "node", "arm64-1", "example.com/runs=amd64"]);
        }
        let run = |command: &str, object: &[&str]| {
            let file = file.to_str().unwrap();
            let own = [
                "--config",
                file,
                command,
                "-n",
                &cluster.namespace,
                "-o",
                "json",
            ];
            let all: Vec<&str> = own.iter().chain(object).copied().collect();
            let (status, output, error) = cluster.archaware(&all);
            assert_eq!(status, 0, "{error}");
            serde_json::from_str::<Value>(&output).unwrap()
        };
        let report = run("report", &[]);
        let workloads = report["workloads"].as_array().unwrap().iter();
        let misplaced = workloads.filter(|one| !one["misplaced"].as_array().unwrap().is_empty());
        assert_eq!(misplaced.count(), usize::from(!emulates));
        let explained = run("explain", &["pod/lost"]);
        let conclusion = explained[0]["conclusion"].as_str().unwrap();
        assert!(conclusion.contains(answer), "{conclusion}");
    }
}

/// The golden files: both widths, with and without colour.
fn tables_are_as_expected(cluster: &TestCluster) {
    for width in ["80", "120"] {
        let output = self::report(cluster, &[("COLUMNS", width)], &["-n", &cluster.namespace]);
        assert!(
            output.starts_with("Of namespace test-audit of cluster https://"),
            "{output}"
        );
        // The address of the API server differs.
        let (_, rest) = output.split_once('\n').unwrap();
        assert_golden(cluster, &format!("report/cluster-{width}.txt"), rest);
        let environment = [("COLUMNS", width), ("CLICOLOR_FORCE", "1")];
        let coloured = self::report(cluster, &environment, &["-n", &cluster.namespace]);
        let (_, rest) = coloured.split_once('\n').unwrap();
        let file = format!("report/cluster-{width}-coloured.txt");
        assert_golden(cluster, &file, rest);
        let plain = console::strip_ansi_codes(rest).into_owned();
        assert_golden(cluster, &format!("report/cluster-{width}.txt"), &plain);
    }
}

/// What people see of a cluster without archaware, before they decide.
#[tokio::test]
async fn a_cluster_without_archaware() {
    let cluster = TestCluster::take().await.in_namespace("test-audit").await;
    cluster.create_node("amd64-1", "amd64").await;
    let image = |name: &str| cluster.image(name);
    cluster
        .create::<Deployment>(workload("web", 2, &image("multi")))
        .await;
    cluster
        .create::<Deployment>(workload("old", 3, &image("amd64")))
        .await;
    cluster
        .create::<Deployment>(workload("idle", 0, &image("arm64")))
        .await;
    cluster
        .create::<DaemonSet>(workload("agent", 1, &image("gone:1")))
        .await;
    let job = json!({"spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [container(&image("amd64"))]}}}});
    cluster.create::<CronJob>(json!({"metadata": {"name": "night"}, "spec": {"schedule": "0 3 * * *", "jobTemplate": job}})).await;
    create_rollout(&cluster, "canary", &image("amd64-arm64")).await;
    let expected = [
        "CronJob/night",
        "DaemonSet/agent",
        "Deployment/idle",
        "Deployment/old",
        "Deployment/web",
        "Rollout/canary",
    ];
    eventually("all pods have a node", DEADLINE, || async {
        let report = reported(&cluster);
        let all = report["workloads"].as_array().unwrap().iter();
        let runs: Vec<&Value> = all.map(|one| &one["runsOn"]).collect();
        let amd64 = |pods: u64| json!({ "amd64": pods });
        let wanted = [json!({}), amd64(1), json!({}), amd64(3), amd64(2), amd64(1)];
        let is_complete = runs == wanted.iter().collect::<Vec<_>>();
        (is_complete && names(&report) == expected).then_some(())
    })
    .await;
    let report = reported(&cluster);
    let summary = &report["summaries"][0];
    let amount = |part: &str| {
        let of = |field: &str| summary[part][field].as_u64().unwrap();
        (of("workloads"), of("pods"), of("cpuMillicores"))
    };
    assert_eq!(amount("total"), (6, 7, 3500));
    assert_eq!(amount("canRun"), (3, 3, 1500));
    assert_eq!(amount("blockedByOneImage"), (2, 3, 1500));
    assert_eq!(amount("unknown"), (1, 1, 500));
    assert_eq!(summary["blockers"][0]["blocksAlone"]["workloads"], 2);
    tables_are_as_expected(&cluster);
    // On a node for which its image does not exist: nothing keeps it away.
    cluster.create_node("arm64-1", "arm64").await;
    let lost = json!({"nodeName": "arm64-1", "containers": [container(&image("amd64"))]});
    let lost = json!({"metadata": {"name": "lost"}, "spec": lost});
    cluster.create::<Pod>(lost).await;
    let report = reported(&cluster);
    let lost = report["workloads"].as_array().unwrap().iter();
    let lost = lost
        .filter(|one| one["kind"] == "Pod")
        .map(|one| &one["misplaced"]);
    let expected = json!([{"pod": "lost", "node": "arm64-1", "architecture": "arm64", "images": [image("amd64")], "failure": null}]);
    assert_eq!(lost.collect::<Vec<_>>(), [&expected]);
    where_a_node_emulates_it_it_runs(&cluster);
    // Warnings are for people, also on a pipe.
    let (status, _, error) = cluster.archaware(&["report", "-n", "default"]);
    assert_eq!(status, 0, "{error}");
    let warning = "there are no workloads in namespace default of cluster https://";
    assert!(error.contains("WARN") && error.contains(warning), "{error}");
    assert!(
        error.ends_with("-A looks at all namespaces\n") && !error.contains('{'),
        "{error}"
    );
    // All namespaces: with what Kubernetes itself runs.
    let all: Value =
        serde_json::from_str(&self::report(&cluster, &[], &["-A", "-o", "json"])).unwrap();
    assert!(names(&all).contains(&"Rollout/canary".to_owned()));
    // A Rollout is explained by its kind, too.
    let (status, output, error) = cluster.archaware(&[
        "explain",
        "-n",
        &cluster.namespace,
        "rollout/canary",
        "-o",
        "json",
    ]);
    assert_eq!(status, 0, "{error}");
    let explained: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(explained[0]["kind"], "Rollout");
    assert_eq!(
        explained[0]["pods"],
        json!([{"count": 1, "phase": "Pending", "architecture": "amd64"}])
    );
    cluster.kubectl(&["delete", "crd", "rollouts.argoproj.io"]);
}

/// Private images by the pull secrets of their namespace, and few permissions.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn pull_secrets_and_permissions() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64-1", "amd64").await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("multi", &testimg::find("multi"));
    registry.require(Auth::Basic("user".into(), "hunter2".into()));
    cluster
        .create::<Deployment>(workload("private", 1, &registry.image("multi")))
        .await;
    let before = reported(&cluster);
    assert_eq!(
        before["summaries"][0]["unknown"]["workloads"], 1,
        "{before}"
    );
    let content =
        json!({"auths": {registry.address(): {"username": "user", "password": "hunter2"}}})
            .to_string();
    let secret = json!({"metadata": {"name": "regcred"}, "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": content}});
    cluster.create::<Secret>(secret).await;
    // The template names none: its pods get that of their ServiceAccount.
    let patch = r#"{"imagePullSecrets": [{"name": "regcred"}]}"#;
    eventually("the ServiceAccount", DEADLINE, || async {
        cluster
            .try_kubectl(&[
                "-n",
                &cluster.namespace,
                "patch",
                "serviceaccount",
                "default",
                "-p",
                patch,
            ])
            .0
            .then_some(())
    })
    .await;
    cluster.kubectl(&[
        "-n",
        &cluster.namespace,
        "delete",
        "pods",
        "--all",
        "--wait=false",
    ]);
    let after = eventually("a credential that counts", DEADLINE, || async {
        let after = reported(&cluster);
        (after["summaries"][0]["canRun"]["workloads"] == 1).then_some(after)
    })
    .await;
    assert!(!after.to_string().contains("hunter2"));
    // A user who may list pods of this namespace only.
    cluster.kubectl(&["-n", "archaware", "create", "serviceaccount", "auditor"]);
    let auditor = cluster.service_account("auditor");
    let namespace = &cluster.namespace;
    cluster.kubectl(&[
        "-n",
        namespace,
        "create",
        "role",
        "auditor",
        "--verb=list",
        "--resource=pods",
    ]);
    cluster.kubectl(&[
        "-n",
        namespace,
        "create",
        "rolebinding",
        "auditor",
        "--role=auditor",
        "--serviceaccount=archaware:auditor",
    ]);
    let arguments = ["report", "-n", namespace, "-o", "json"];
    let (status, output, error) = cluster.archaware_with(&[], &auditor, &arguments);
    assert_eq!(status, 0, "{error}");
    let report: Value = serde_json::from_str(&output).unwrap();
    let missing = report["missingPermissions"].as_array().unwrap();
    assert!(
        missing.contains(&json!("list nodes")) && missing.contains(&json!("list deployments.apps")),
        "{missing:?}"
    );
    assert!(error.contains("list deployments.apps"), "{error}");
    // Its pods are known by the owner that they name.
    assert_eq!(report["workloads"][0]["kind"], "ReplicaSet");
    cluster.kubectl(&["-n", "archaware", "delete", "serviceaccount", "auditor"]);
}

/// A label that only amd64 nodes have keeps a workload from other architectures.
#[tokio::test]
async fn workloads_that_are_pinned_to_nodes_are_told() {
    let cluster = TestCluster::take().await;
    let labelled = |pool: &str| {
        json!({"metadata": {"labels": {"kubernetes.io/os": "linux", "example.com/pool": pool,
            "topology.kubernetes.io/zone": format!("zone-{pool}")}}})
    };
    for (name, architecture, pool) in [("a", "amd64", "fast"), ("b", "arm64", "cheap")] {
        cluster
            .create_node_with(name, architecture, labelled(pool))
            .await;
    }
    let image = cluster.image("multi");
    for (name, selector, expected) in [
        ("free", json!({}), "yes"),
        ("os", json!({"kubernetes.io/os": "linux"}), "yes"),
        ("pinned", json!({"example.com/pool": "fast"}), "no"),
        ("there", json!({"example.com/pool": "cheap"}), "yes"),
        // An autoscaler may make such nodes.
        ("later", json!({"example.com/pool": "new"}), "yes"),
        (
            "zone",
            json!({"topology.kubernetes.io/zone": "zone-fast"}),
            "yes",
        ),
    ] {
        let mut deployment = workload(name, 0, &image);
        deployment["spec"]["template"]["spec"]["nodeSelector"] = selector;
        cluster.create::<Deployment>(deployment).await;
        let report = reported(&cluster);
        let workloads = report["workloads"].as_array().unwrap();
        let found = workloads.iter().find(|one| one["name"] == name).unwrap();
        let answer = &found["answers"][0];
        assert_eq!(answer["canRun"], expected, "{name}: {found}");
        let pinned_to = if name == "pinned" {
            json!(["amd64"])
        } else {
            json!([])
        };
        assert_eq!(answer["pinnedTo"], pinned_to, "{name}");
    }
    let table = report(&cluster, &[], &["-n", &cluster.namespace]);
    assert!(table.contains("pinned to amd64 nodes"), "{table}");
}

/// Zeros would look like a result.
#[tokio::test]
async fn a_report_that_could_read_nothing_fails() {
    let cluster = TestCluster::take().await;
    cluster.kubectl(&["-n", "archaware", "create", "serviceaccount", "stranger"]);
    let stranger = cluster.service_account("stranger");
    let (status, _, error) = cluster.archaware_with(&[], &stranger, &["report", "-A"]);
    assert_eq!(status, 1, "{error}");
    assert!(error.contains("list pods"), "{error}");
}
