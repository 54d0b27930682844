//! `archaware clean` and `archaware plan`.

use k8s_openapi::api::{
    apps::v1::DaemonSet, coordination::v1::Lease, core::v1::Pod, policy::v1::PodDisruptionBudget,
};
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::{Value, json};

use super::*;

/// Everything in the cluster that archaware could have changed.
async fn picture(cluster: &TestCluster) -> String {
    let nodes = cluster.nodes().list(&ListParams::default()).await.unwrap();
    let nodes = nodes.iter().map(|node| {
        let mut annotations = node.annotations().clone();
        // The controller manager adds it to each node some time after its creation.
        annotations.remove("node.alpha.kubernetes.io/ttl");
        (node.name_any(), taints(node), annotations)
    });
    let sets = Api::<DaemonSet>::all(cluster.client.clone())
        .list(&ListParams::default())
        .await
        .unwrap();
    let sets = sets.iter().map(|set| {
        let spec = set.spec.template.spec.clone();
        let mut annotations = set.annotations().clone();
        // The DaemonSet controller's own counter of rollouts.
        annotations.remove("deprecated.daemonset.template.generation");
        (
            set.name_any(),
            spec.and_then(|spec| spec.tolerations),
            annotations,
        )
    });
    format!(
        "{:?}\n{:?}",
        nodes.collect::<Vec<_>>(),
        sets.collect::<Vec<_>>()
    )
}

fn daemon_set(cluster: &TestCluster, name: &str) -> Value {
    let mut spec = pod_spec(&[cluster.image("multi")]);
    spec["tolerations"] = json!([{"key": "foreign", "operator": "Exists"}]);
    json!({"metadata": {"name": name, "annotations": {"foreign": "yes"}}, "spec": {
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": spec}}})
}

/// A Deployment in archaware's place, whose pods never run.
fn create_deployment(cluster: &TestCluster, replicas: &str) {
    cluster.kubectl(&[
        "-n",
        "archaware",
        "create",
        "deployment",
        "archaware",
        "--image",
        "not-started",
        "--replicas",
        replicas,
    ]);
}

#[tokio::test]
async fn clean_leaves_every_foreign_thing_and_nothing_of_its_own() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    cluster.kubectl(&["taint", "node", "amd64", "foreign=1:NoSchedule"]);
    cluster.kubectl(&["annotate", "node", "amd64", "foreign=yes"]);
    cluster
        .create::<DaemonSet>(daemon_set(&cluster, "agent"))
        .await;
    let before = picture(&cluster).await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster.wait_for_event("agent", "TolerationsChanged").await;
    let with = picture(&cluster).await;
    assert_ne!(before, with);
    let (status, _, error) = cluster.archaware(&["clean"]);
    assert_eq!(status, 3, "while it runs, clean refuses");
    assert!(
        error.contains("--stop-controller") && error.contains("scale deployment"),
        "{error}"
    );
    let (status, out, _) = cluster.archaware(&["clean", "--dry-run"]);
    assert_eq!(status, 0);
    assert!(
        out.contains("Node amd64")
            && out.contains("DaemonSet")
            && out.contains("nothing was changed"),
        "{out}"
    );
    assert_eq!(picture(&cluster).await, with, "a dry run changes nothing");
    assert_eq!(archaware.stop().await, 0);
    let (status, out, error) = cluster.archaware(&["clean"]);
    assert_eq!(status, 0, "{out}{error}");
    assert!(out.contains("Cleaned 5 objects."), "{out}");
    assert_eq!(picture(&cluster).await, before);
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "archaware");
    assert!(leases.get_opt("archaware").await.unwrap().is_none());
    let (status, out, _) = cluster.archaware(&["clean"]);
    assert_eq!(
        (status, out.as_str()),
        (0, "Nothing of archaware is left.\n")
    );
}

#[tokio::test]
async fn clean_recreates_pods_and_respects_budgets() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    for name in ["free", "guarded"] {
        cluster.create::<k8s_openapi::api::apps::v1::Deployment>(json!({"metadata": {"name": name}, "spec": {
            "replicas": 1, "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec(&[cluster.image("arm64")])}}})).await;
    }
    cluster.create_pod("bare", &["arm64"]).await;
    cluster
        .create::<PodDisruptionBudget>(json!({"metadata": {"name": "guarded"}, "spec": {
        "minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}}}))
        .await;
    let placed = |app: &str| {
        let selector = ListParams::default().labels(&format!("app={app}"));
        let pods = cluster.pods();
        async move {
            eventually("a placed pod", DEADLINE, || async {
                let pods = pods.list(&selector).await.ok()?;
                pods.into_iter()
                    .find(|pod: &Pod| pod.spec.as_ref().is_some_and(|s| s.node_name.is_some()))
            })
            .await
        }
    };
    let (free, guarded) = (placed("free").await, placed("guarded").await);
    cluster.wait_until_bound("bare").await;
    // A budget counts a pod that is not Ready as unavailable only while it is running.
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    let patch = kube::api::Patch::Merge(status);
    cluster
        .pods()
        .patch_status(&guarded.name_any(), &Default::default(), &patch)
        .await
        .unwrap();
    eventually("a budget that has counted", DEADLINE, || async {
        let budget = cluster
            .api::<PodDisruptionBudget>()
            .get("guarded")
            .await
            .ok()?;
        (budget.status?.current_healthy == Some(1)).then_some(())
    })
    .await;
    assert_eq!(archaware.stop().await, 0);
    let (status, out, error) = cluster.archaware(&["clean", "--recreate-pods"]);
    assert_eq!(status, 1, "{out}{error}");
    assert!(
        out.contains("PodDisruptionBudget") && out.contains(&guarded.name_any()),
        "{out}"
    );
    eventually("the eviction of the free pod", DEADLINE, || async {
        let pod = cluster.pods().get_opt(&free.name_any()).await.ok()?;
        pod.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some())
            .then_some(())
    })
    .await;
    let bare = cluster.pods().get("bare").await.unwrap();
    assert!(
        bare.metadata.deletion_timestamp.is_none(),
        "a bare pod would not be recreated"
    );
}

#[tokio::test]
async fn clean_stops_the_controller_when_asked() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    create_deployment(&cluster, "1");
    let (status, out, error) = cluster.archaware(&["clean", "--stop-controller"]);
    assert_eq!(status, 0, "{out}{error}");
    let replicas = cluster.kubectl(&[
        "-n",
        "archaware",
        "get",
        "deployment",
        "archaware",
        "-o",
        "jsonpath={.spec.replicas}",
    ]);
    assert_eq!(replicas, "0");
}

/// `kubectl exec deploy/archaware -- archaware clean`: with the shipped permissions, beside a
/// running controller, which it stops.
#[tokio::test]
async fn clean_works_in_a_pod_of_archaware() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    create_deployment(&cluster, "2");
    cluster
        .create::<DaemonSet>(daemon_set(&cluster, "agent"))
        .await;
    let archaware = Controller::start_with_webhook(&cluster, "", "").await;
    cluster.wait_until_tainted().await;
    eventually("a DaemonSet that is changed", DEADLINE, || async {
        let set = cluster.api::<DaemonSet>().get("agent").await.ok()?;
        set.annotations().get("archaware.dev/tolerations").map(drop)
    })
    .await;
    let (status, out, error) = cluster.archaware_in_pod(&["clean"]);
    assert_eq!(status, 0, "{out}{error}");
    assert!(out.contains("Cleaned 6 objects."), "{out}");
    let deployment = ["-n", "archaware", "get", "deployment", "archaware"];
    let replicas = [&deployment[..], &["-o", "jsonpath={.spec.replicas}"]].concat();
    assert_eq!(cluster.kubectl(&replicas), "0");
    let left = picture(&cluster).await;
    assert!(
        !left.contains("archaware.dev") && !left.contains("kubernetes.io/arch"),
        "{left}"
    );
    // Nothing comes back while the controller, which a Deployment would have stopped by now, sees
    // the Lease held.
    assert!(archaware.log().contains("not leading"));
    assert_eq!(archaware.stop().await, 0);
    // The Lease of the command that ended with its pod is waited out.
    let (status, out, error) = cluster.archaware(&["clean", "--stop-controller"]);
    assert_eq!(status, 0, "{out}{error}");
}

/// On a pipe, only the result is on stdout, and nothing about the Lease is between its lines on
/// stderr.
#[tokio::test]
async fn clean_prints_its_lines_only() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64", "amd64").await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    assert_eq!(archaware.stop().await, 0);
    let (status, out, error) = cluster.archaware(&["clean"]);
    assert_eq!((status, error.as_str()), (0, ""));
    let expected = "Node amd64: taint kubernetes.io/arch=amd64:NoSchedule\n\
                    Lease archaware/archaware\nCleaned 2 objects.\n";
    assert_eq!(out, expected);
    let file = cluster.dir().join("wrong.yaml");
    std::fs::write(&file, "taint: {keys: x}\n").unwrap();
    let (status, _, error) = cluster.archaware(&["clean", "--config", file.to_str().unwrap()]);
    assert_eq!(status, 2, "{error}");
}

#[tokio::test]
async fn plan_says_what_run_does_and_changes_nothing() {
    let cluster = TestCluster::take().await;
    for architecture in ["amd64", "arm64", "s390x"] {
        cluster
            .create_cordoned_node(architecture, architecture)
            .await;
    }
    cluster
        .create::<DaemonSet>(daemon_set(&cluster, "agent"))
        .await;
    cluster.create_pod("fits", &["arm64"]).await;
    cluster.create_pod("torn", &["amd64", "arm64"]).await;
    cluster.create_pod("nowhere", &["no-such-image"]).await;
    let before = picture(&cluster).await;
    let (status, out, error) = cluster.archaware(&["plan", "-o", "json"]);
    assert_eq!(status, 0, "{error}");
    let steps: Vec<Value> = serde_json::from_str(&out).unwrap();
    let has = |kind: &str, name: &str, action: &str, detail: &str| {
        steps.iter().any(|step| {
            step["kind"] == kind
                && step["name"] == name
                && step["action"] == action
                && step["detail"].as_str().unwrap().contains(detail)
                && (step["namespace"].is_null() == (kind == "Node"))
        })
    };
    for (kind, name, action, detail) in [
        (
            "Node",
            "amd64",
            "taint",
            "kubernetes.io/arch=amd64:NoSchedule",
        ),
        ("DaemonSet", "agent", "changeTemplate", "starts a rollout"),
        ("Pod", "fits", "tolerate", "arm64"),
        ("Pod", "torn", "none", "share no architecture"),
        ("Pod", "nowhere", "wait", "NotFound"),
    ] {
        assert!(has(kind, name, action, detail), "{kind} {name}: {out}");
    }
    let admin = cluster.kubeconfig("admin");
    let (_, table, _) = cluster.archaware_with(&[("COLUMNS", "120")], &admin, &["plan"]);
    assert!(
        table.lines().all(|line| line.chars().count() <= 120),
        "{table}"
    );
    assert_eq!(picture(&cluster).await, before);
    assert!(architectures_of(&cluster.pods().get("fits").await.unwrap()).is_empty());
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    cluster.wait_for_event("agent", "TolerationsChanged").await;
    let (_, out, _) = cluster.archaware(&["plan", "-o", "json"]);
    let left: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert!(
        left.iter()
            .all(|step| step["kind"] == "Pod" && step["name"] != "fits"),
        "{out}"
    );
}
