//! Rules from pods to nodes (docs/rules.md), with a real scheduler.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, PostParams};
use serde_json::{Value, json};
use testimg::{FakeRegistry, Script};

use super::*;

const RULES: &str = "
rules:
- {name: gpu, pods: app=training, namespaces: 'team in (vision)', nodes: [gpu=a100, gpu=h100],
   preferredNodes: [{nodes: zone=b, weight: 100}],
   tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]}
- {name: pools, matchNodeLabels: [example.com/pool]}
";

/// A node of each kind: `plain`, in a pool, with a tainted GPU of each type.
async fn create_nodes(cluster: &TestCluster) {
    for (name, labels, taint) in [
        ("plain", json!({}), Value::Null),
        ("pooled", json!({"example.com/pool": "x"}), Value::Null),
        ("gpu-a", json!({"gpu": "a100", "zone": "a"}), json!("gpu")),
        ("gpu-b", json!({"gpu": "h100", "zone": "b"}), json!("gpu")),
    ] {
        let mut all = json!({"kubernetes.io/arch": "amd64"});
        json_patch::merge(&mut all, &labels);
        let mut node = json!({"metadata": {"labels": all}});
        if !taint.is_null() {
            node["spec"]["taints"] =
                json!([{"key": taint, "value": "yes", "effect": "NoSchedule"}]);
        }
        cluster.create_node_with(name, "amd64", node).await;
    }
    let label = json!({"metadata": {"labels": {"team": "vision"}}}).to_string();
    cluster.kubectl(&["patch", "namespace", &cluster.namespace, "-p", &label]);
}

fn labelled(
    cluster: &TestCluster,
    name: &str,
    labels: Value,
    change: impl FnOnce(&mut Value),
) -> Value {
    let mut spec = pod_spec(&[cluster.image("multi")]);
    change(&mut spec);
    let mut pod = pod(name, spec, json!({}));
    pod["metadata"]["labels"] = labels;
    pod
}

#[tokio::test]
async fn pods_land_where_rules_say() {
    let cluster = TestCluster::take().await;
    create_nodes(&cluster).await;
    let archaware = Controller::start_with_webhook(&cluster, RULES, "onMiss: gate").await;
    let training = json!({"app": "training"});
    let pools = json!({"example.com/pool": "x"});
    let in_zone_a = |spec: &mut Value| spec["nodeSelector"] = json!({"zone": "a"});
    let elsewhere = |spec: &mut Value| spec["nodeSelector"] = json!({"gpu": "none"});
    for pod in [
        labelled(&cluster, "train", training.clone(), |_| {}),
        labelled(&cluster, "train-in-a", training.clone(), in_zone_a),
        labelled(&cluster, "pooled", pools, |_| {}),
    ] {
        cluster.create::<Pod>(pod).await;
    }
    // Preferred among those that are required; together with the author's; by a label of its own.
    for (name, node) in [
        ("train", "gpu-b"),
        ("train-in-a", "gpu-a"),
        ("pooled", "pooled"),
    ] {
        assert_eq!(cluster.wait_until_bound(name).await, node, "{name}");
    }
    // The author's selection stays, and it is told.
    let contradicting = labelled(&cluster, "elsewhere", training, elsewhere);
    let created: Pod = cluster
        .pods()
        .create(
            &PostParams::default(),
            &serde_json::from_value(contradicting).unwrap(),
        )
        .await
        .unwrap();
    let affinity = serde_json::to_string(&created.spec.unwrap().affinity).unwrap();
    assert!(!affinity.contains("a100"), "{affinity}");
    let told = cluster.wait_for_event("elsewhere", "RuleLeftOut").await;
    assert!(told.contains("rule gpu is left out"), "{told}");
    for (rule, count) in [("gpu", 1.0), ("pools", 0.0)] {
        let metric = format!("archaware_rules_left_out_total{{rule=\"{rule}\"}}");
        let found = archaware.metric(&metric).await;
        assert!((found - count).abs() < 0.5, "{rule}: {found}");
    }
    let config = cluster.dir().join("rules.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&config, format!("{head}{RULES}")).unwrap();
    let explained = |name: &str| {
        let pod = format!("pod/{name}");
        let config = config.to_str().unwrap();
        let (_, out, error) = cluster.archaware(&[
            "explain",
            &pod,
            "-n",
            &cluster.namespace,
            "--config",
            config,
        ]);
        assert!(!out.is_empty(), "{error}");
        out
    };
    assert!(
        explained("train").contains("Rules:       gpu"),
        "{}",
        explained("train")
    );
    assert!(explained("elsewhere").contains("rule gpu is left out"));
}

/// A pod whose images are not known yet gets what the rules say when its gate is removed.
#[tokio::test]
async fn gated_pods_get_what_rules_say() {
    let cluster = TestCluster::take().await;
    create_nodes(&cluster).await;
    let slow = FakeRegistry::start().await.unwrap();
    slow.add_tag("app", "v1", &testimg::find("multi"));
    slow.script("/", Script::Slow(std::time::Duration::from_millis(1500)));
    let _archaware = Controller::start_with_webhook(&cluster, RULES, "onMiss: gate").await;
    let gated = labelled(&cluster, "gated", json!({"app": "training"}), |spec| {
        spec["containers"][0]["image"] = json!(format!("{}:v1", slow.image("app")));
        let zone = json!({"key": "zone", "operator": "Exists"});
        spec["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [zone]}]}}});
    });
    let created: Pod = cluster.create(gated).await;
    assert_eq!(
        created
            .spec
            .unwrap()
            .scheduling_gates
            .unwrap_or_default()
            .len(),
        1
    );
    // Its terms can only be narrowed, so it gets the first nodes of the rule.
    assert_eq!(cluster.wait_until_bound("gated").await, "gpu-a");
    let pods = cluster.pods().list(&ListParams::default()).await.unwrap();
    let tolerations =
        serde_json::to_string(&pods.items[0].spec.as_ref().unwrap().tolerations).unwrap();
    assert!(tolerations.contains("\"gpu\""), "{tolerations}");
}

/// A rule requires nodes for which the image does not exist: the pod waits behind the gate, and is
/// told the name of the rule.
#[tokio::test]
async fn a_rule_that_contradicts_the_images_is_named() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let rules = "rules:\n- {name: arm-only, pods: app=web, nodes: [kubernetes.io/arch=arm64]}\n";
    let archaware = Controller::start_with_webhook(&cluster, rules, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    for (name, image) in [("torn", "amd64"), ("fine", "multi")] {
        let mut pod = pod(name, pod_spec(&[cluster.image(image)]), json!({}));
        pod["metadata"]["labels"] = json!({"app": "web"});
        cluster.create::<Pod>(pod).await;
    }
    assert_eq!(cluster.wait_until_bound("fine").await, "arm64");
    let note = cluster.wait_for_event("torn", "NoCommonArchitecture").await;
    for part in ["rule arm-only", "kubernetes.io/arch in (arm64)", "amd64"] {
        assert!(note.contains(part), "{note}");
    }
    assert!(!note.contains("node selector"), "{note}");
    let waiting = cluster.pods().get("torn").await.unwrap();
    let gates = waiting.spec.unwrap().scheduling_gates.unwrap_or_default();
    assert_eq!(gates.len(), 1);
    let config = cluster.dir().join("arm-only.yaml");
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    std::fs::write(&config, format!("{head}{rules}")).unwrap();
    let arguments = ["pod/torn", "--config", config.to_str().unwrap()];
    let explained = explain::explained(&cluster, &arguments);
    let conclusion = explained["conclusion"].as_str().unwrap();
    assert!(conclusion.starts_with("Rule arm-only"), "{conclusion}");
    let advice = explained["advice"].to_string();
    assert!(advice.contains("Change the rule arm-only"), "{advice}");
    assert_eq!(archaware.stop().await, 0);
}
