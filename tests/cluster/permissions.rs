//! Exactly the shipped permissions, and what happens without one of them.

use k8s_openapi::api::rbac::v1::ClusterRole;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::*;

/// Every other test runs with the shipped permissions; this one looks at the whole picture.
#[tokio::test]
async fn the_shipped_permissions_are_enough_and_no_request_is_forbidden() {
    let bed = Bed::take().await;
    bed.three_nodes().await;
    let archaware = Controller::start(&bed, "");
    bed.tainted().await;
    bed.create_pod("app", &["arm64"]).await;
    bed.create_pod("torn", &["arm64", "amd64"]).await;
    bed.bound("app").await;
    bed.event("torn", "NoCommonArchitecture").await;
    let (_, metrics) = archaware.http("/metrics").await;
    assert!(!metrics.contains("result=\"4xx\""), "{metrics}");
    let log = archaware.log();
    assert!(!log.contains("forbidden"), "{log}");
}

#[tokio::test]
async fn all_missing_permissions_are_named_at_once() {
    let bed = Bed::take().await;
    bed.kubectl(&["-n", "archaware", "create", "serviceaccount", "nobody"]);
    let mut archaware = Controller::start_as(&bed.service_account("nobody"), "");
    let status = archaware.exited().await;
    bed.kubectl(&["-n", "archaware", "delete", "serviceaccount", "nobody"]);
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
    let bed = Bed::take().await;
    bed.three_nodes().await;
    let archaware = Controller::start(&bed, "");
    bed.tainted().await;
    let roles: Api<ClusterRole> = Api::all(bed.client.clone());
    let shipped = roles.get("archaware").await.unwrap().rules;
    let reduced = json!({"rules": [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}]});
    roles
        .patch("archaware", &PatchParams::default(), &Patch::Merge(reduced))
        .await
        .unwrap();
    bed.create_pod("app", &["arm64"]).await;
    archaware.logged("forbidden").await;
    let back = Patch::Merge(json!({"rules": shipped}));
    roles
        .patch("archaware", &PatchParams::default(), &back)
        .await
        .unwrap();
    assert_eq!(bed.bound("app").await, "arm64");
}

#[tokio::test]
async fn the_manifests_are_valid_and_the_kustomize_base_is_the_same() {
    let bed = Bed::take().await;
    let plain = bed.kubectl(&[
        "apply",
        "--dry-run=server",
        "-o",
        "name",
        "-f",
        "manifests/archaware.yaml",
    ]);
    let kustomized = bed.kubectl(&["apply", "--dry-run=server", "-o", "name", "-k", "manifests"]);
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&plain), sorted(&kustomized));
    assert!(plain.contains("deployment.apps/archaware"), "{plain}");
    // What the ConfigMap holds is a configuration.
    let config = bed.kubectl(&[
        "create",
        "--dry-run=client",
        "-f",
        "manifests/archaware.yaml",
        "-o",
        "jsonpath={.data.config\\.yaml}",
    ]);
    let file = bed.dir().join("shipped.yaml");
    std::fs::write(&file, config).unwrap();
    let (status, _, error) =
        bed.archaware(&["config", "check", "--config", file.to_str().unwrap()]);
    assert_eq!(status, 0, "{error}");
}

#[tokio::test]
async fn one_missing_permission_is_named_and_the_others_are_not() {
    let bed = Bed::take().await;
    bed.kubectl(&["-n", "archaware", "delete", "rolebinding", "archaware"]);
    bed.kubectl(&[
        "-n",
        "archaware",
        "create",
        "role",
        "less",
        "--verb=create,get",
        "--resource=leases.coordination.k8s.io",
    ]);
    bed.kubectl(&[
        "-n",
        "archaware",
        "create",
        "rolebinding",
        "less",
        "--role=less",
        "--serviceaccount=archaware:archaware",
    ]);
    let mut archaware = Controller::start(&bed, "");
    let status = archaware.exited().await;
    bed.kubectl(&["-n", "archaware", "delete", "role,rolebinding", "less"]);
    assert_eq!(status, 1);
    let log = archaware.log();
    assert!(
        log.contains("patch leases.coordination.k8s.io in archaware"),
        "{log}"
    );
    assert_eq!(log.matches("\n  ").count(), 1, "{log}");
}
