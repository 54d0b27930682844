//! `archaware explain`, as its users see it.

mod creation;

use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use k8s_openapi::api::{
    apps::v1::{DaemonSet, StatefulSet},
    core::v1::{Node, Pod, Secret},
};
use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry};

use super::{golden::assert_golden, *};

/// The failure policy applies soon.
const QUICK: &str = "resolution: {failure: {after: 3s}}\n";

fn workload(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "serviceName": name,
        "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": spec},
    }})
}

/// A spec of one container that asks for this much CPU.
fn spec(image: &str, cpu: &str) -> Value {
    json!({"containers": [{"name": "app", "image": image, "resources": {"requests": {"cpu": cpu}}}]})
}

/// A pod with an image for amd64 only.
async fn create_pod(cluster: &TestCluster) {
    let spec = spec(&cluster.image("amd64"), "1");
    cluster
        .create::<Pod>(json!({"metadata": {"name": "p"}, "spec": spec}))
        .await;
}

fn explain(cluster: &TestCluster, environment: &[(&str, &str)], arguments: &[&str]) -> String {
    let all: Vec<&str> = ["explain", "-n", &cluster.namespace]
        .iter()
        .chain(arguments)
        .copied()
        .collect();
    let admin = cluster.kubeconfig("admin");
    let (status, output, error) = cluster.archaware_with(environment, &admin, &all);
    assert_eq!(status, 0, "{arguments:?}: {error}");
    output
}

pub(super) fn explained(cluster: &TestCluster, arguments: &[&str]) -> Value {
    let all: Vec<&str> = arguments.iter().chain(&["-o", "json"]).copied().collect();
    let list: Vec<Value> = serde_json::from_str(&explain(cluster, &[], &all)).unwrap();
    list.into_iter().next().unwrap()
}

/// Waits until the explanation of an object has this conclusion.
async fn wait_for_conclusion(cluster: &TestCluster, object: &str, part: &str) {
    eventually(&format!("{object}: {part}"), DEADLINE, || async {
        let found = explained(cluster, &[object]);
        let conclusion = found["conclusion"].as_str().unwrap_or_default();
        conclusion.contains(part).then_some(())
    })
    .await;
}

/// The golden files: both widths, with and without colour.
fn outputs_are_as_expected(cluster: &TestCluster) {
    for (object, file) in [
        ("sts/web", "web"),
        ("pod/torn-0", "torn"),
        ("ds/agent", "agent"),
    ] {
        for width in ["80", "120"] {
            let output = explain(cluster, &[("COLUMNS", width)], &[object]);
            assert!(
                output
                    .lines()
                    .all(|line| line.chars().count() <= width.parse().unwrap())
            );
            assert_golden(cluster, &format!("explain/{file}-{width}.txt"), &output);
        }
    }
    for width in ["80", "120"] {
        let environment = [("COLUMNS", width), ("CLICOLOR_FORCE", "1")];
        let coloured = explain(cluster, &environment, &["sts/web"]);
        let file = format!("explain/web-{width}-coloured.txt");
        assert_golden(cluster, &file, &coloured);
        let plain = console::strip_ansi_codes(&coloured).into_owned();
        assert_golden(cluster, &format!("explain/web-{width}.txt"), &plain);
    }
}

/// Of an image that cannot be read: what the failure policy decided, and when a new pod's would be
/// asked for again.
fn unreadable_images_are_explained(cluster: &TestCluster) {
    // The failure policy let it run anywhere.
    let gone = explained(cluster, &["sts/gone"]);
    assert_eq!(gone["added"]["decision"], "any");
    assert_eq!(gone["images"][0]["error"]["reason"], "NotFound");
    assert_eq!(gone["images"][0]["error"]["nextTry"], Value::Null);
    assert_eq!(gone["added"]["byFailurePolicy"], true);
    let web = explained(cluster, &["sts/web"]);
    assert_eq!(web["added"]["byFailurePolicy"], false);
    let table = explain(cluster, &[], &["sts/gone"]);
    assert!(
        table.contains("decision any, probably of the failure policy"),
        "{table}"
    );
    // Of a pod that is created now, it is known when its image would be asked for again.
    let new = cluster.dir().join("new.json");
    let new_pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "new"},
        "spec": pod_spec(&[cluster.image("no-such-image")])});
    std::fs::write(&new, new_pod.to_string()).unwrap();
    let new = explained(cluster, &["-f", new.to_str().unwrap()]);
    let next = new["images"][0]["error"]["nextTry"].as_str().unwrap();
    assert!(next.starts_with("after 5 s"), "{next}");
}

/// What people ask about, on a real scheduler, as it is printed.
#[tokio::test]
async fn the_usual_questions_have_answers() {
    // Golden outputs name the namespace.
    let cluster = TestCluster::take().await.in_namespace("test-shop").await;
    for name in ["amd64-1", "amd64-2"] {
        cluster.create_node(name, "amd64").await;
    }
    cluster.create_node("arm64-1", "arm64").await;
    let archaware = Controller::start(&cluster, QUICK);
    cluster.wait_until_tainted().await;
    let image = |name| cluster.image(name);
    cluster
        .create::<StatefulSet>(workload("web", spec(&image("amd64"), "65")))
        .await;
    cluster
        .create::<StatefulSet>(workload("api", spec(&image("multi"), "1")))
        .await;
    let torn = json!({"containers": [
        {"name": "app", "image": image("amd64-arm64")}, {"name": "proxy", "image": image("s390x")}]});
    cluster.create::<StatefulSet>(workload("torn", torn)).await;
    cluster
        .create::<StatefulSet>(workload("gone", spec(&image("gone:1"), "1")))
        .await;
    cluster
        .create::<DaemonSet>(workload("agent", spec(&image("arm64"), "1")))
        .await;
    wait_for_conclusion(&cluster, "sts/web", "Insufficient cpu").await;
    wait_for_conclusion(&cluster, "sts/api", "for which its images exist").await;
    wait_for_conclusion(&cluster, "sts/torn", "share no architecture").await;
    wait_for_conclusion(&cluster, "sts/gone", "is bound to node").await;
    eventually("what is shown of them", DEADLINE, || async {
        let (torn, agent) = (
            explained(&cluster, &["sts/torn"]),
            explained(&cluster, &["ds/agent"]),
        );
        let torn_is_told = torn["added"] != Value::Null && torn["pod"]["scheduler"] != Value::Null;
        let pods = json!([{"count": 1, "phase": "Pending", "architecture": "arm64"}]);
        let agent_is_done = agent["added"] != Value::Null && agent["pods"] == pods;
        (torn_is_told && agent_is_done).then_some(())
    })
    .await;
    outputs_are_as_expected(&cluster);
    unreadable_images_are_explained(&cluster);
    // What is not there is an error with its name.
    let (status, _, error) =
        cluster.archaware(&["explain", "-n", &cluster.namespace, "deploy/none"]);
    assert_eq!(status, 1);
    assert!(
        error.contains("there is no Deployment \"none\" in namespace \"test-shop\""),
        "{error}"
    );
    let (status, _, error) = cluster.archaware(&["explain", "unicorn/none"]);
    assert_eq!(status, 1);
    assert!(
        error.contains("this cluster has no kind of object with the name \"unicorn\""),
        "{error}"
    );
    // A name without its kind is taken for a pod's: the error names the object that has it.
    let (status, _, error) = cluster.archaware(&["explain", "-n", &cluster.namespace, "web"]);
    assert_eq!(status, 1);
    assert!(error.contains("did you mean statefulset/web?"), "{error}");
    // Without a name: what waits or fails. With several: each of them.
    let waiting = explain(&cluster, &[], &["-o", "json"]);
    let waiting: Vec<Value> = serde_json::from_str(&waiting).unwrap();
    let names: Vec<_> = waiting
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    for name in ["torn-0", "web-0"] {
        assert!(names.contains(&name), "{names:?}");
    }
    let several = explain(&cluster, &[], &["pod", "web-0", "torn-0", "-o", "json"]);
    let several: Vec<Value> = serde_json::from_str(&several).unwrap();
    assert_eq!(
        (&several[0]["name"], &several[1]["name"]),
        (&json!("web-0"), &json!("torn-0"))
    );
    let (_, nothing, _) = cluster.archaware(&["explain", "-n", "default"]);
    assert_eq!(nothing, "No pod in namespace default waits or fails.\n");
    let (_, nothing, _) = cluster.archaware(&["explain"]);
    let hint = "No pod in namespace default waits or fails (-n looks at another namespace).\n";
    assert_eq!(nothing, hint);
    let (status, _, error) = cluster.archaware(&["explain", "-n", "typo"]);
    assert!(
        status == 1 && error.contains("there is no namespace \"typo\""),
        "{error}"
    );
    archaware.stop().await;
}

/// Without archaware, and for objects that do not exist.
#[tokio::test]
async fn manifests_are_explained_before_they_are_applied() {
    let cluster = TestCluster::take().await;
    let namespace = &cluster.namespace;
    cluster.kubectl(&["annotate", "ns", namespace, "archaware.dev/mode=any"]);
    cluster.create_node("amd64-1", "amd64").await;
    cluster.create_node("arm64-1", "arm64").await;
    eventually("nodes that are ready", DEADLINE, || async {
        let nodes = cluster.nodes().list(&Default::default()).await.ok()?;
        let is_free = |node: &Node| {
            let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
            taints.is_none_or(Vec::is_empty)
        };
        nodes.iter().all(is_free).then_some(())
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("all.yaml");
    let (amd64, multi) = (cluster.image("amd64"), cluster.image("multi"));
    let manifests = format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: one}}\nspec: {{template: {{spec: {{containers: [{{name: c, image: '{amd64}'}}]}}}}}}\n\
         ---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: no-pods}}\n\
         ---\napiVersion: batch/v1\nkind: CronJob\nmetadata: {{name: two}}\nspec: {{jobTemplate: {{spec: {{template: {{spec: {{containers: [{{name: c, image: '{multi}'}}]}}}}}}}}}}\n"
    );
    std::fs::write(&file, manifests).unwrap();
    let file = file.to_str().unwrap();
    let output = explain(&cluster, &[], &["-f", file, "-o", "json"]);
    let list: Vec<Value> = serde_json::from_str(&output).unwrap();
    assert_eq!(list.len(), 2, "{output}");
    let one = &list[0];
    assert_eq!(one["kind"], "Deployment");
    assert_eq!(one["pod"], Value::Null);
    assert_eq!(
        one["notes"],
        json!([
            "archaware seems not to be installed: there is no Lease archaware in namespace archaware (set ARCHAWARE_NAMESPACE if it runs in another namespace)"
        ])
    );
    assert_eq!(
        one["applies"]["source"],
        "annotation archaware.dev/mode of its namespace"
    );
    assert_eq!(one["applies"]["rule"], "any");
    // Nothing would keep it away from the node on which it dies.
    let deadly =
        "Nothing keeps it away from 1 arm64 node, where it dies with \"exec format error\".";
    assert_eq!(one["advice"], json!([deadly]));
    assert_eq!(list[1]["kind"], "CronJob");
    cluster.kubectl(&["annotate", "ns", namespace, "archaware.dev/mode-"]);
    let output = explain(&cluster, &[], &["-f", file, "-o", "json"]);
    let list: Vec<Value> = serde_json::from_str(&output).unwrap();
    let conclusion = list[0]["conclusion"].as_str().unwrap();
    assert_eq!(
        conclusion,
        format!("A pod of it can run on 1 amd64 node: {amd64} is for amd64 only.")
    );
    let reasons: Vec<&Value> = list[0]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|group| &group["reason"])
        .collect();
    let but = format!("nothing keeps it away, but {amd64} is for amd64 only");
    assert_eq!(reasons, [&Value::Null, &json!(but)]);
    let conclusion = list[1]["conclusion"].as_str().unwrap();
    assert_eq!(
        conclusion,
        "A pod of it can run on 1 amd64 node and 1 arm64 node."
    );
    assert_eq!(list[1]["pending"], Value::Null);
    std::fs::write(file, "a: [").unwrap();
    let (status, _, error) = cluster.archaware(&["explain", "-f", file]);
    assert_eq!(status, 1);
    assert!(error.contains("is not YAML"), "{error}");
}

/// A private image, without and with its credential; what the webhook added is said to be its work.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn credentials_are_named_and_never_shown() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("amd64", &testimg::find("amd64"));
    registry.require(Auth::Basic("user".into(), "hunter2".into()));
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: wait, budget: 10s").await;
    cluster.wait_until_tainted().await;
    let content =
        json!({"auths": {registry.address(): {"username": "user", "password": "hunter2"}}});
    let wrong = json!({"auths": {registry.address(): {"username": "user", "password": "hunter1"}}});
    for (name, content) in [("regcred", content), ("old", wrong)] {
        let secret = json!({"metadata": {"name": name}, "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": content.to_string()}});
        cluster.create::<Secret>(secret).await;
    }
    let (image, selector) = (registry.image("amd64"), json!({"nowhere": "true"}));
    for (name, secrets) in [
        ("without", json!([])),
        ("wrong", json!([{"name": "old"}])),
        ("with", json!([{"name": "regcred"}])),
    ] {
        let mut spec = spec(&image, "1");
        spec["imagePullSecrets"] = secrets;
        spec["nodeSelector"] = selector.clone();
        cluster
            .create::<Pod>(json!({"metadata": {"name": name}, "spec": spec}))
            .await;
    }
    let without = explained(&cluster, &["pod/without"]);
    assert_eq!(without["verdict"], "unresolved");
    assert_eq!(without["images"][0]["error"]["tried"], json!([]));
    let advice = without["advice"][0].as_str().unwrap();
    assert!(advice.contains("imagePullSecrets"), "{advice}");
    let wrong = explained(&cluster, &["pod/wrong"]);
    assert_eq!(
        wrong["images"][0]["error"]["tried"],
        json!(["pull secret old"])
    );
    let with = explained(&cluster, &["pod/with"]);
    assert_eq!(with["images"][0]["credential"], "pull secret regcred");
    assert_eq!(with["images"][0]["source"], "registry");
    for object in ["pod/without", "pod/wrong", "pod/with"] {
        let all =
            explain(&cluster, &[], &[object]) + &explain(&cluster, &[], &[object, "-o", "yaml"]);
        assert!(!all.contains("hunter"), "{all}");
    }
    // A known image: the webhook adds tolerations and affinity.
    let mut spec = spec(&cluster.image("amd64"), "1");
    spec["nodeSelector"] = selector;
    cluster
        .create::<Pod>(json!({"metadata": {"name": "known"}, "spec": spec}))
        .await;
    let by_webhook = explained(&cluster, &["pod/known"]);
    assert_eq!(by_webhook["added"]["by"][0]["part"], "webhook");
    assert_eq!(
        by_webhook["added"]["required"],
        json!(["kubernetes.io/arch in (amd64)"])
    );
    assert_eq!(
        by_webhook["added"]["tolerations"],
        json!(["kubernetes.io/arch=amd64:NoSchedule"])
    );
    archaware.stop().await;
}

/// A user who may read little is told what is missing, and gets an answer.
#[tokio::test]
async fn few_permissions_suffice() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64-1", "amd64").await;
    create_pod(&cluster).await;
    wait_for_conclusion(&cluster, "p", "is bound to node").await;
    cluster.kubectl(&["-n", "archaware", "create", "serviceaccount", "reader"]);
    let reader = cluster.service_account("reader");
    let explain = |more: &[&str]| {
        let all: Vec<&str> = ["explain", "-n", &cluster.namespace, "pod/p"]
            .iter()
            .chain(more)
            .copied()
            .collect();
        cluster.archaware_with(&[], &reader, &all)
    };
    let (status, _, error) = explain(&[]);
    assert_eq!(status, 1);
    assert!(error.contains("(permission: get pods in test-"), "{error}");
    cluster.kubectl(&[
        "-n",
        &cluster.namespace,
        "create",
        "role",
        "reader",
        "--verb=get",
        "--resource=pods",
    ]);
    cluster.kubectl(&[
        "-n",
        &cluster.namespace,
        "create",
        "rolebinding",
        "reader",
        "--role=reader",
        "--serviceaccount=archaware:reader",
    ]);
    let (status, output, error) = explain(&["-o", "json"]);
    assert_eq!(status, 0, "{error}");
    let list: Vec<Value> = serde_json::from_str(&output).unwrap();
    let expected = [
        "get configmaps in archaware",
        "get leases.coordination.k8s.io in archaware",
        "get namespaces",
        "list nodes",
    ];
    assert_eq!(list[0]["missingPermissions"], json!(expected));
    assert_eq!(list[0]["nodes"], Value::Null);
    assert_eq!(list[0]["images"][0]["platforms"], json!(["linux/amd64"]));
    let (_, output, _) = explain(&[]);
    assert!(
        output.contains("Permissions that are missing here\nget configmaps in archaware\n"),
        "{output}"
    );
    // What the scheduler says does not need the nodes.
    let nowhere = json!({"metadata": {"name": "nowhere"}, "spec": {"nodeSelector": {"disk": "none"},
        "containers": [{"name": "app", "image": cluster.image("amd64")}]}});
    cluster.create::<Pod>(nowhere).await;
    eventually("what the scheduler says", DEADLINE, || async {
        let all = ["explain", "-n", &cluster.namespace, "pod/nowhere"];
        let (_, output, _) = cluster.archaware_with(&[], &reader, &all);
        let says = "The scheduler says: 0/1 nodes are available";
        output.contains(says).then_some(())
    })
    .await;
    cluster.kubectl(&["-n", "archaware", "delete", "serviceaccount", "reader"]);
}

/// Without a name: those that wait or fail. Of the pods that have failed, those whose node cannot
/// run their programs.
#[tokio::test]
async fn pods_that_died_of_their_architecture_are_among_the_troubled() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64-1", "amd64").await;
    for (name, message) in [("wrong", "exec /app: exec format error"), ("else", "")] {
        let spec = json!({"restartPolicy": "Never", "nodeName": "amd64-1",
            "containers": [{"name": "app", "image": cluster.image("amd64")}]});
        cluster
            .create::<Pod>(json!({"metadata": {"name": name}, "spec": spec}))
            .await;
        let ended = json!({"exitCode": 1, "reason": "Error", "message": message});
        let container = json!({"name": "app", "image": "app", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": ended}});
        let status = json!({"status": {"phase": "Failed", "containerStatuses": [container]}});
        let (params, patch) = (Default::default(), kube::api::Patch::Merge(status));
        cluster
            .pods()
            .patch_status(name, &params, &patch)
            .await
            .unwrap();
    }
    let output = explain(&cluster, &[], &[]);
    assert!(
        output.contains("wrong") && !output.contains("else"),
        "{output}"
    );
}

/// The configuration of the installation applies, and its files, which are on other machines, do
/// not.
#[tokio::test]
async fn the_configuration_of_the_cluster_applies() {
    let cluster = TestCluster::take().await;
    cluster.create_node("amd64-1", "amd64").await;
    create_pod(&cluster).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    let config = format!(
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\npods: {{exemptNamespaces: [{}]}}\ncontainerd: {{socket: /run/none.sock}}\n",
        cluster.namespace
    );
    std::fs::write(&file, config).unwrap();
    let from = format!("--from-file=config.yaml={}", file.display());
    cluster.kubectl(&["-n", "archaware", "create", "configmap", "archaware", &from]);
    let admin = cluster.kubeconfig("admin");
    let arguments = ["explain", "-n", &cluster.namespace, "p", "-o", "json"];
    let (status, output, error) = cluster.archaware_with(&[], &admin, &arguments);
    cluster.kubectl(&["-n", "archaware", "delete", "configmap", "archaware"]);
    assert_eq!(status, 0, "{error}");
    let list: Vec<Value> = serde_json::from_str(&output).unwrap();
    assert_eq!(
        list[0]["applies"]["source"],
        "pods.exemptNamespaces in the configuration"
    );
    assert!(error.contains("containerd.socket"), "{error}");
}

/// The schema that is printed is that of the output.
#[tokio::test]
async fn the_output_follows_its_schema() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    create_pod(&cluster).await;
    let (status, schema, _) = cluster.archaware(&["explain", "--schema"]);
    assert_eq!(status, 0);
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let output: Value =
        serde_json::from_str(&explain(&cluster, &[], &["p", "-o", "json"])).unwrap();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<_> = validator
        .iter_errors(&output)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
}

/// 5,000 nodes: an answer within three seconds. On a busy machine, within six times what a bare
/// client needs to list them: about three times on an idle one, with programs that are not
/// optimised.
#[tokio::test]
async fn thousands_of_nodes_take_no_longer_than_a_few() {
    let cluster = TestCluster::take().await;
    let numbers = stream::iter(0..5000).map(|n: usize| {
        let cluster = &cluster;
        async move {
            let architecture = ["amd64", "arm64"][n % 2];
            cluster
                .create_node(&format!("node-{n}"), architecture)
                .await;
        }
    });
    numbers.buffer_unordered(32).collect::<Vec<()>>().await;
    let never = json!({"schedulerName": "none", "containers": [{"name": "app", "image": cluster.image("amd64")}]});
    let never = json!({"metadata": {"name": "p"}, "spec": never});
    cluster.create::<Pod>(never).await;
    // The first one fills the API server's caches, and other tests run beside them: the fastest one
    // says what it costs.
    let (mut took, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let began = Instant::now();
        let listed = cluster.nodes().list(&Default::default()).await.unwrap();
        floor.push(began.elapsed());
        assert_eq!(listed.items.len(), 5000);
        let began = Instant::now();
        let explained = explained(&cluster, &["p"]);
        took.push(began.elapsed());
        let groups = explained["nodes"].as_array().unwrap().iter();
        // New nodes have another taint for a while, so there may be more than two groups.
        let arm64 = groups.filter(|group| group["architecture"] == "arm64");
        let counts = arm64.map(|group| group["count"].as_u64().unwrap());
        assert_eq!(counts.sum::<u64>(), 2500);
    }
    took.sort();
    floor.sort();
    println!("explained with 5,000 nodes in {took:?}; a bare client lists them in {floor:?}");
    assert!(
        took[0] < Duration::from_secs(3).max(6 * floor[0]),
        "{took:?}, {floor:?}"
    );
}
