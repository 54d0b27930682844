//! With a real kubelet and containerd: images on the node need no registry.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;

fn containerd_config(cluster: &TestCluster) -> String {
    config_of(&cluster.socket())
}

fn config_of(socket: &str) -> String {
    format!("containerd: {{socket: {socket}}}\nregistries: {{plainHttp: [reg.local]}}")
}

async fn on_the_node(cluster: &TestCluster, name: &str, image: &str) -> Pod {
    let mut spec = pod_spec(&[image.to_owned()]);
    spec["hostNetwork"] = json!(true);
    spec["containers"][0]["imagePullPolicy"] = json!("IfNotPresent");
    cluster.create(pod(name, spec, json!({}))).await
}

async fn phase_becomes(cluster: &TestCluster, name: &str, phase: &str) {
    eventually(&format!("phase {phase} of {name}"), DEADLINE, || async {
        (cluster.pods().get(name).await.ok()?.status?.phase? == phase).then_some(())
    })
    .await;
}

/// `archaware inspect` with the node's containerd. Only the node can reach the registry's name.
fn inspect(cluster: &TestCluster, image: &str) -> Value {
    let file = cluster.dir().join("containerd.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&file, format!("{head}{}", containerd_config(cluster))).unwrap();
    let (_, out, error) = cluster.archaware(&[
        "inspect",
        "-o",
        "json",
        "--config",
        file.to_str().unwrap(),
        image,
    ]);
    let lines: Vec<Value> = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
    lines[0].clone()
}

#[tokio::test]
async fn the_node_s_containerd_answers_without_a_registry() {
    let cluster = TestCluster::take_with_node().await;
    let archaware = Controller::start(&cluster, &containerd_config(&cluster));
    cluster.wait_until_tainted().await;
    // Pulled by the kubelet: an index with one platform on the node, and a single manifest.
    for (name, image) in [
        ("multi", "reg.local/testimg/multi:latest"),
        ("single", "reg.local/testimg/docker-amd64:latest"),
    ] {
        // reg.local resolves only for the node's containerd, so archaware needs the image record.
        cluster.ctr(&[
            "images",
            "pull",
            "--hosts-dir",
            &cluster.node_dir("certs.d"),
            image,
        ]);
        on_the_node(&cluster, name, image).await;
        phase_becomes(&cluster, name, "Running").await;
    }
    let multi = inspect(&cluster, "reg.local/testimg/multi:latest");
    assert_eq!(multi["source"], "containerd", "{multi}");
    assert_eq!(
        multi["platforms"],
        json!(["linux/amd64", "linux/arm64", "linux/s390x"]),
        "all of the index, not only what was pulled"
    );
    let pod = cluster.pods().get("single").await.unwrap();
    assert_eq!(architectures_of(&pod), ["amd64".to_owned()].into());
    // Images by digest need no record.
    let digest = format!(
        "reg.local/testimg/multi@{}",
        multi["digest"].as_str().unwrap()
    );
    assert_eq!(inspect(&cluster, &digest)["source"], "containerd");
    assert!(archaware.metric("archaware_containerd_up{}").await > 0.5);
    assert_eq!(archaware.stop().await, 0);
}

/// As in the shipped manifests: archaware has no access to containerd's socket, only to the
/// proxy's.
#[tokio::test]
async fn the_node_s_containerd_answers_through_the_content_proxy() {
    let cluster = TestCluster::take_with_node().await;
    let (socket, mut door) = cluster.content_proxy();
    let archaware = Controller::start(&cluster, &config_of(&socket));
    cluster.wait_until_tainted().await;
    let image = "reg.local/testimg/multi:latest";
    cluster.ctr(&[
        "images",
        "pull",
        "--hosts-dir",
        &cluster.node_dir("certs.d"),
        image,
    ]);
    on_the_node(&cluster, "multi", image).await;
    phase_becomes(&cluster, "multi", "Running").await;
    assert!(archaware.metric("archaware_containerd_up{}").await > 0.5);
    // Answers of a registry are persisted too: the pod's registry has another name than the node's.
    cluster.create_pod("elsewhere", &["unnamed"]).await;
    cluster.wait_until_bound("elsewhere").await;
    let digest = testimg::find("unnamed").root.digest;
    eventually(
        "the tree and its tag in archaware's namespace",
        DEADLINE,
        || async {
            let held = cluster.ctr_in("archaware", &["content", "ls"]);
            let root = held.lines().find(|line| line.starts_with(&digest))?;
            root.contains("archaware.dev/tag.").then_some(())
        },
    )
    .await;
    assert_eq!(archaware.stop().await, 0);
    // After a restart neither image needs a request: nothing listens at the registry's address.
    let archaware = Controller::start(
        &cluster,
        &format!(
            "{}\nresolution: {{failure: {{action: hold}}}}",
            config_of(&socket)
        ),
    );
    on_the_node(&cluster, "again", image).await;
    phase_becomes(&cluster, "again", "Running").await;
    cluster.create_pod("elsewhere-again", &["unnamed"]).await;
    cluster.wait_until_bound("elsewhere-again").await;
    let from_registry = archaware
        .metric("archaware_image_resolutions_total{source=\"registry\",result=\"Resolved\"}")
        .await;
    assert!(from_registry < 0.5, "{from_registry}");
    let from_containerd = archaware
        .metric("archaware_image_resolutions_total{source=\"containerd\",result=\"Resolved\"}")
        .await;
    assert!(from_containerd > 1.5, "{from_containerd}");
    assert_eq!(archaware.stop().await, 0);
    door.kill().unwrap();
    door.wait().unwrap();
}

#[tokio::test]
async fn an_imported_image_is_not_believed() {
    let cluster = TestCluster::take_with_node().await;
    // Imported: one platform under the name of an image that has three in its registry.
    let image = cluster.image("multi");
    let name = format!("{image}:latest");
    cluster.import(&name, "amd64");
    let line = inspect(&cluster, &image);
    cluster.ctr(&["images", "rm", &name]);
    assert_eq!(line["source"], "registry", "{line}");
    assert_eq!(line["architectures"], json!(["amd64", "arm64", "s390x"]));
}

/// An imported image that no registry has: its copy says nothing for sure, and more than nothing.
#[tokio::test]
async fn nodes_for_an_imported_image_are_preferred() {
    let cluster = TestCluster::take_with_node().await;
    let name = "registry.invalid/imported:1";
    cluster.import(name, "amd64");
    let config = format!(
        "{}\nresolution: {{failure: {{after: 1s}}}}\n",
        containerd_config(&cluster)
    );
    let _archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
    let mut spec = pod_spec(&[name.to_owned()]);
    spec["nodeSelector"] = json!({"no": "node"});
    cluster
        .create::<Pod>(pod("imported", spec, json!({})))
        .await;
    let note = cluster
        .wait_for_event("imported", "ToleratesEveryArchitecture")
        .await;
    cluster.ctr(&["images", "rm", name]);
    let said = format!("archaware's own node holds copies of {name} for amd64");
    assert!(note.contains(&said), "{note}");
    let pod = json!(cluster.pods().get("imported").await.unwrap());
    let path = "/spec/affinity/nodeAffinity/preferredDuringSchedulingIgnoredDuringExecution";
    let preferred = pod.pointer(path).unwrap().as_array().unwrap();
    let likely = json!({"weight": 50, "preference": {"matchExpressions": [
        {"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64"]}]}});
    assert!(preferred.contains(&likely), "{preferred:?}");
}

#[tokio::test]
async fn a_pod_of_the_wrong_architecture_never_starts() {
    let cluster = TestCluster::take_with_node().await;
    let _archaware = Controller::start(&cluster, &containerd_config(&cluster));
    cluster.wait_until_tainted().await;
    cluster.ctr(&[
        "images",
        "pull",
        "--hosts-dir",
        &cluster.node_dir("certs.d"),
        "--platform",
        "linux/arm64",
        "reg.local/testimg/arm64:latest",
    ]);
    on_the_node(&cluster, "wrong", "reg.local/testimg/arm64:latest").await;
    let tolerated = eventually("a decision", DEADLINE, || async {
        let set = architectures_of(&cluster.pods().get("wrong").await.ok()?);
        (!set.is_empty()).then_some(set)
    })
    .await;
    assert_eq!(tolerated, ["arm64".to_owned()].into());
    // The scheduler has tried since, and found no node.
    cluster.wait_for_event("wrong", "FailedScheduling").await;
    let pod = cluster.pods().get("wrong").await.unwrap();
    assert!(pod.spec.unwrap().node_name.is_none());
    assert!(
        pod.status.unwrap().container_statuses.is_none(),
        "it was never started"
    );
}

#[tokio::test]
async fn containerd_may_restart_hang_or_be_absent() {
    let cluster = TestCluster::take_with_node().await;
    let archaware = Controller::start(&cluster, &containerd_config(&cluster));
    cluster.wait_until_tainted().await;
    cluster.ctr(&[
        "images",
        "pull",
        "--hosts-dir",
        &cluster.node_dir("certs.d"),
        "reg.local/testimg/multi:latest",
    ]);
    let through_containerd = |name: &'static str| {
        let cluster = &cluster;
        async move {
            on_the_node(cluster, name, "reg.local/testimg/multi:latest").await;
            phase_becomes(cluster, name, "Running").await;
        }
    };
    through_containerd("before").await;
    // containerd is killed: registries answer instead, and it recovers by itself.
    cluster.kill_containerd();
    cluster.create_pod("meanwhile", &["s390x"]).await;
    let decided = || async {
        let set = architectures_of(&cluster.pods().get("meanwhile").await.ok()?);
        (!set.is_empty()).then_some(set)
    };
    assert_eq!(
        eventually("a decision without containerd", DEADLINE, decided).await,
        ["s390x".to_owned()].into()
    );
    cluster.restart_containerd();
    let line = inspect(&cluster, "reg.local/testimg/multi:latest");
    assert_eq!(line["source"], "containerd", "{line}");
    // containerd is stopped: each call times out, and the registry answers within the budget.
    cluster.signal_containerd("-STOP");
    let started = std::time::Instant::now();
    let line = inspect(&cluster, &cluster.image("arm64-s390x"));
    let took = started.elapsed();
    cluster.signal_containerd("-CONT");
    assert_eq!(line["source"], "registry", "{line}");
    assert!(took < std::time::Duration::from_secs(3), "{took:?}");
    through_containerd("after").await;
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn content_that_is_corrupt_on_the_node_is_not_used() {
    let cluster = TestCluster::take_with_node().await;
    // No other test has it on this node: what is corrupt stays on the disk as long as any namespace
    // of containerd holds it.
    let (name, image) = ("amd64-arm64", "reg.local/testimg/amd64-arm64:latest");
    let hosts = cluster.node_dir("certs.d");
    cluster.ctr(&["images", "pull", "--hosts-dir", &hosts, image]);
    let digest = testimg::find(name).root.digest;
    let before = inspect(&cluster, &format!("{}@{digest}", cluster.image(name)));
    assert_eq!(before["platforms"].as_array().unwrap().len(), 2, "{before}");
    cluster.corrupt(&digest);
    let after = inspect(&cluster, &format!("{}@{digest}", cluster.image(name)));
    cluster.ctr(&["images", "rm", "--sync", image]);
    assert_eq!(
        (&after["source"], &after["error"]),
        (&json!("registry"), &Value::Null),
        "{after}"
    );
}
