//! The shipped permissions are sufficient, and each of them is needed.

use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use super::*;

/// Every other test uses the shipped permissions; this one looks at the denied requests.
#[tokio::test]
async fn the_shipped_permissions_are_enough_and_no_request_is_forbidden() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster.create_pod("app", &["arm64"]).await;
    cluster.create_pod("torn", &["arm64", "amd64"]).await;
    cluster.wait_until_bound("app").await;
    cluster.wait_for_event("torn", "NoCommonArchitecture").await;
    let (_, metrics) = archaware.http("/metrics").await;
    assert!(!metrics.contains("result=\"4xx\""), "{metrics}");
    let log = archaware.log();
    assert!(!log.contains("forbidden"), "{log}");
}

#[tokio::test]
async fn all_missing_permissions_are_named_at_once() {
    let cluster = TestCluster::take().await;
    cluster.kubectl(&[
        "-n",
        "archaware",
        "create",
        "serviceaccount",
        "unprivileged",
    ]);
    let mut archaware = Controller::start_as(&cluster.service_account("unprivileged"), "");
    let status = archaware.exited().await;
    cluster.kubectl(&[
        "-n",
        "archaware",
        "delete",
        "serviceaccount",
        "unprivileged",
    ]);
    assert_eq!(status, 1);
    let log = archaware.log();
    for permission in [
        "patch nodes",
        "watch pods",
        "patch daemonsets.apps",
        "create events.events.k8s.io",
        "patch leases.coordination.k8s.io in archaware",
    ] {
        assert!(log.contains(permission), "{log}");
    }
    assert!(!log.contains("panicked"));
}

#[tokio::test]
async fn a_permission_that_is_taken_away_while_running_is_reported_and_comes_back() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let roles: Api<ClusterRole> = Api::all(cluster.client.clone());
    let shipped = roles.get("archaware").await.unwrap().rules;
    let reduced = json!({"rules": [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}]});
    roles
        .patch("archaware", &PatchParams::default(), &Patch::Merge(reduced))
        .await
        .unwrap();
    cluster.create_pod("app", &["arm64"]).await;
    archaware.wait_for_log("forbidden").await;
    let back = Patch::Merge(json!({"rules": shipped}));
    roles
        .patch("archaware", &PatchParams::default(), &back)
        .await
        .unwrap();
    assert_eq!(cluster.wait_until_bound("app").await, "arm64");
}

#[tokio::test]
async fn the_manifests_are_valid_and_the_kustomize_base_is_the_same() {
    let cluster = TestCluster::take().await;
    let plain = cluster.kubectl(&[
        "apply",
        "--dry-run=server",
        "-o",
        "name",
        "-f",
        "manifests/archaware.yaml",
    ]);
    let kustomized =
        cluster.kubectl(&["apply", "--dry-run=server", "-o", "name", "-k", "manifests"]);
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&plain), sorted(&kustomized));
    assert!(plain.contains("deployment.apps/archaware"), "{plain}");
    // The ConfigMap contains a valid configuration.
    let config = cluster.kubectl(&[
        "create",
        "--dry-run=client",
        "-f",
        "manifests/archaware.yaml",
        "-o",
        "jsonpath={.data.config\\.yaml}",
    ]);
    let file = cluster.dir().join("shipped.yaml");
    std::fs::write(&file, config).unwrap();
    let (status, _, error) =
        cluster.archaware(&["config", "check", "--config", file.to_str().unwrap()]);
    assert_eq!(status, 0, "{error}");
}

/// The violations of the restricted Pod Security Standard; empty if none.
fn against_the_restricted_standard(cluster: &TestCluster, folder: &str) -> Vec<String> {
    let kustomized = cluster.kubectl(&["kustomize", folder]);
    let deployment = kustomized
        .split("\n---\n")
        .find(|part| part.contains("kind: Deployment"))
        .unwrap();
    let file = cluster.dir().join("deployment.yaml");
    std::fs::write(&file, deployment).unwrap();
    let json = [
        "create",
        "--dry-run=client",
        "-o",
        "json",
        "-f",
        file.to_str().unwrap(),
    ];
    let deployment: serde_json::Value = serde_json::from_str(&cluster.kubectl(&json)).unwrap();
    let mut pod = deployment["spec"]["template"].clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!("trial");
    // Priority class and ServiceAccount belong to another namespace and do not matter to the
    // standard.
    pod["spec"]["priorityClassName"] = json!(null);
    pod["spec"]["serviceAccountName"] = json!("default");
    std::fs::write(&file, pod.to_string()).unwrap();
    let (file, namespace) = (file.to_str().unwrap().to_owned(), cluster.namespace.clone());
    let kubectl = std::env::var("ARCHAWARE_KUBECTL").unwrap();
    let output = std::process::Command::new(kubectl)
        .arg("--kubeconfig")
        .arg(cluster.kubeconfig("admin"))
        .args(["-n", &namespace, "create", "--dry-run=server", "-f", &file])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let violations = said
        .split_once("restricted:latest\": ")
        .map(|(_, list)| list.to_owned());
    assert!(output.status.success() || violations.is_some(), "{said}");
    violations
        .iter()
        .flat_map(|list| list.trim().split("), "))
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn every_way_to_deploy_is_valid_and_as_restricted_as_it_says() {
    let cluster = TestCluster::take().await;
    let restricted = "pod-security.kubernetes.io/enforce=restricted";
    cluster.kubectl(&["label", "namespace", &cluster.namespace, restricted]);
    for (folder, violations) in [
        ("manifests/none", 0),
        ("manifests/sidecar", 0),
        ("manifests/host", 1),
        ("manifests/controller-only", 1),
    ] {
        let said = against_the_restricted_standard(&cluster, folder);
        assert_eq!(said.len(), violations, "{folder}: {said:?}");
        // In the default overlay, only the volume violates the standard.
        assert!(
            said.iter().all(|violation| violation.contains("hostPath")),
            "{said:?}"
        );
        let applied = cluster.kubectl(&["apply", "--dry-run=server", "-o", "name", "-k", folder]);
        assert!(
            applied.contains("deployment.apps/archaware"),
            "{folder}: {applied}"
        );
        let kustomized = cluster.kubectl(&["kustomize", folder]);
        // Without the webhook nothing of it is left, also no permission.
        let with_webhook = folder != "manifests/controller-only";
        for part in [
            "kind: MutatingWebhookConfiguration",
            "name: archaware-webhook",
            "onMiss: gate",
        ] {
            assert_eq!(kustomized.contains(part), with_webhook, "{folder}: {part}");
        }
        let config = kustomized.split("config.yaml: |").nth(1).unwrap();
        let lines = config
            .lines()
            .skip(1)
            .take_while(|line| line.starts_with("    "));
        let config: Vec<&str> = lines.map(|line| line.trim_start_matches("    ")).collect();
        let config = config.join("\n");
        let file = cluster.dir().join("overlay.yaml");
        std::fs::write(&file, &config).unwrap();
        let (status, _, error) =
            cluster.archaware(&["config", "check", "--config", file.to_str().unwrap()]);
        assert_eq!(status, 0, "{folder}: {config}: {error}");
    }
}

/// The rules of a role with one verb on one resource removed, for each of them, and the name of
/// that permission.
fn less_by_one(rules: &Value) -> Vec<(String, Value)> {
    let mut less = Vec::new();
    let strings = |list: &Value| -> Vec<String> { serde_json::from_value(list.clone()).unwrap() };
    for (at, rule) in rules.as_array().unwrap().iter().enumerate() {
        for resource in strings(&rule["resources"]) {
            for verb in strings(&rule["verbs"]) {
                let (mut others, mut kept) = (rule.clone(), rule.clone());
                let other = |list: &Value, gone: &str| {
                    strings(list)
                        .into_iter()
                        .filter(|one| one != gone)
                        .collect::<Vec<_>>()
                };
                others["resources"] = json!(other(&rule["resources"], &resource));
                kept["resources"] = json!([resource]);
                kept["verbs"] = json!(other(&rule["verbs"], &verb));
                let mut all = rules.as_array().unwrap().clone();
                all.splice(at..=at, [others, kept]);
                let lists = |rule: &Value| {
                    ["resources", "verbs"]
                        .iter()
                        .all(|list| rule[list] != json!([]))
                };
                all.retain(lists);
                let group = rule["apiGroups"][0].as_str().unwrap();
                let dot = if group.is_empty() { "" } else { "." };
                less.push((format!("{verb} {resource}{dot}{group}"), json!(all)));
            }
        }
    }
    less
}

/// Without any of the granted permissions archaware names it and does not start.
#[tokio::test]
async fn nothing_is_granted_that_is_not_needed() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let webhook = admission_config(free_port(), "");
    // The binding grants reading all Secrets, the webhook's own too.
    cluster.kubectl(&["delete", "clusterrolebinding", "archaware-pull-secrets"]);
    // For `archaware clean`, which has tests of its own.
    cluster.kubectl(&["delete", "clusterrolebinding", "archaware-clean"]);
    cluster.kubectl(&[
        "-n",
        "archaware",
        "delete",
        "rolebinding",
        "archaware-clean",
    ]);
    let mut tried = 0;
    for role in [
        "clusterrole/archaware",
        "role/archaware",
        "clusterrole/archaware-webhook",
        "role/archaware-webhook",
    ] {
        let shipped: Value =
            serde_json::from_str(&cluster.kubectl(&["-n", "archaware", "get", role, "-o", "json"]))
                .unwrap();
        let patch = |rules: &Value| {
            let rules = json!({"rules": rules}).to_string();
            cluster.kubectl(&[
                "-n",
                "archaware",
                "patch",
                role,
                "--type=merge",
                "-p",
                &rules,
            ]);
        };
        for (permission, rules) in less_by_one(&shipped["rules"]) {
            patch(&rules);
            // The authorizer sees the change a moment later.
            eventually(
                &format!("a start that fails without {permission}"),
                DEADLINE,
                || async {
                    let mut archaware = Controller::start(&cluster, &webhook);
                    let asked = async {
                        archaware.wait_for_log("this replica is leading").await;
                    };
                    let ended = tokio::time::timeout(DEADLINE, archaware_ends(&archaware));
                    tokio::select! {
                        () = asked => return None,
                        ended = ended => ended.unwrap(),
                    }
                    assert_eq!(archaware.exited().await, 1);
                    let log = archaware.log();
                    assert!(
                        log.contains(&format!("  {permission}")),
                        "{permission}: {log}"
                    );
                    assert_eq!(log.matches("\n  ").count(), 1, "{permission}: {log}");
                    Some(())
                },
            )
            .await;
            tried += 1;
            patch(&shipped["rules"]);
        }
    }
    assert!(tried > 20, "{tried}");
}

/// The log contains the reason for exiting.
async fn archaware_ends(archaware: &Controller) {
    archaware.wait_for_log("archaware lacks permissions").await;
}
