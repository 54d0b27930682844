//! One tenant uses as much as it can of what features have in common. Each test has the same
//! feature used by another tenant, which must not wait for the first.

use std::mem::replace;

use axum::{Router, routing::post};
use testimg::Image;
use tokio::net::TcpListener;

use super::*;
use crate::{
    selection::{NFD_ARTIFACT, NFD_LAYER, apply, node_feature, serve_node_features},
    wrong_architecture::{RESTARTS, crashing, create_bound, publish, set_status},
};

/// Containers of one pod whose images are selected, as many as archaware allows.
const SELECTIONS: usize = 16;
/// Pods of the hostile tenant with so many containers.
const HOSTILE_PODS: usize = 5;
/// How long another tenant's use of the feature may take. Alone it takes less than a second.
const IN_TIME: Duration = Duration::from_secs(10);

/// Creates a namespace, in which the cluster's helpers work from now on. Returns the one before.
async fn enter_hostile_namespace(cluster: &mut TestCluster) -> String {
    let hostile = format!("{}-hostile", cluster.namespace);
    cluster.create_namespace(&hostile, json!({})).await;
    replace(&mut cluster.namespace, hostile)
}

/// A pod whose containers select their images by documents of `registry`, whose tags are
/// `TAG-NUMBER`.
fn selecting_pod(name: &str, registry: &FakeRegistry, tag: &str, numbers: &[usize]) -> Value {
    let (mut containers, mut annotations) = (Vec::new(), json!({}));
    for number in numbers {
        let reference = format!("{}:{tag}-{number}", registry.image("app"));
        annotations[format!("archaware.dev/select-image.c{number}")] = json!(reference);
        let image = format!("{}:multi", registry.image("app"));
        containers.push(json!({"name": format!("c{number}"), "image": image}));
    }
    let mut spec = pod_spec(&[]);
    spec["containers"] = json!(containers);
    pod(name, spec, annotations)
}

/// Creates the hostile pods, with a document of its own for each container.
async fn select_everywhere(cluster: &TestCluster, registry: &FakeRegistry, tag: &str) {
    for pod_number in 0..HOSTILE_PODS {
        let first = pod_number * SELECTIONS;
        let numbers: Vec<usize> = (first..first + SELECTIONS).collect();
        let name = format!("hostile-{pod_number}");
        let pod = selecting_pod(&name, registry, tag, &numbers);
        cluster.create::<Pod>(pod).await;
    }
}

/// A pod that fails on its node has its images looked up. The registry of the hostile pods never
/// answers.
#[tokio::test]
async fn failing_pods_of_one_tenant_delay_no_other_check() {
    const FAILING: usize = 60;
    let mut cluster = TestCluster::take().await;
    let registry = FakeRegistry::start().await.unwrap();
    registry.script("/", Script::Hang);
    let labels = json!({"metadata": {"labels": {"kubernetes.io/arch": "arm64"}}});
    cluster.create_node_with("arm64-1", "arm64", labels).await;
    let archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    let vitals = Vitals::watch(&cluster, &archaware).await;
    let tenant = enter_hostile_namespace(&mut cluster).await;
    for number in 0..FAILING {
        let name = format!("failing-{number}");
        let mut spec = pod_spec(&[format!("{}:v{number}", registry.image("app"))]);
        spec["nodeName"] = json!("arm64-1");
        cluster.create::<Pod>(pod(&name, spec, json!({}))).await;
        set_status(&cluster, &name, "Running", &crashing(1, "")).await;
        publish(&cluster, &name, "BackOff", RESTARTS).await;
    }
    cluster.namespace = tenant;
    create_bound(&cluster, "lacks", "amd64", "arm64-1").await;
    set_status(&cluster, "lacks", "Running", &crashing(1, "")).await;
    publish(&cluster, "lacks", "BackOff", RESTARTS).await;
    let began = Instant::now();
    cluster.wait_for_event("lacks", "WrongArchitecture").await;
    let took = began.elapsed();
    println!("failing pods: the event of another tenant's pod after {took:.1?}");
    assert!(took < IN_TIME, "{took:?}");
    vitals.end(&cluster, &archaware).await;
    assert!(!registry.seen().is_empty(), "the attack was none");
    assert_eq!(archaware.stop().await, 0);
}

/// The predictor never answers the questions of the hostile tenant.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn questions_of_one_tenant_delay_no_prediction() {
    const TYPE: &str = "node.kubernetes.io/instance-type";
    const LAYER: &str = "application/vnd.oci.image.model-compatibilities.v1+json";
    let mut cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    cluster.kubectl(&["label", "node", "--all", &format!("{TYPE}=m7")]);
    let registry = FakeRegistry::start().await.unwrap();
    registry.add_tag("app", "multi", &testimg::find("multi"));
    registry.add_tag("app", "chosen", &testimg::find("amd64"));
    let add = |tag: &str, model: &str| {
        let image = format!("{}:chosen", registry.image("app"));
        let document = json!({"compatibilities": [{"tag": tag, "rules": [{"matchModel": {"model": {
            "type": "sklearn", "direction": "minimize", "name": model, "filename": "price.pkl",
            "platforms": {"amd64": image},
        }}}]}]});
        let artifact = Image::artifact("application/vnd.test", LAYER, &document.to_string());
        registry.add_tag("app", tag, &artifact);
    };
    add("price-0", "price");
    for number in 0..HOSTILE_PODS * SELECTIONS {
        add(&format!("hostile-{number}"), &format!("hostile-{number}"));
    }
    let answer = json!({"instance": "m7", "arch": "amd64", "instance-selector": TYPE}).to_string();
    let answer = async move |question: String| {
        if question.contains("hostile") {
            std::future::pending::<()>().await;
        }
        answer.clone()
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let predictor = axum::serve(listener, Router::new().route("/predict", post(answer)));
    let predictor = tokio::spawn(predictor.into_future());
    let config =
        format!("selection: {{predictor: {{url: \"http://{address}/predict\", timeout: 5s}}}}\n");
    let archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let vitals = Vitals::watch(&cluster, &archaware).await;
    let tenant = enter_hostile_namespace(&mut cluster).await;
    select_everywhere(&cluster, &registry, "hostile").await;
    cluster.namespace = tenant;
    let began = Instant::now();
    let pod = selecting_pod("chosen", &registry, "price", &[0]);
    cluster.create::<Pod>(pod).await;
    cluster.wait_until_bound("chosen").await;
    let took = began.elapsed();
    println!("predictor: another tenant's pod placed after {took:.1?}");
    assert!(took < IN_TIME, "{took:?}");
    vitals.end(&cluster, &archaware).await;
    let pod = cluster.pods().get("chosen").await.unwrap();
    let image = pod.spec.unwrap().containers[0].image.clone().unwrap();
    assert!(image.ends_with(":chosen"), "{image}");
    archaware.wait_for_log("selection.predictor failed").await;
    predictor.abort();
    assert_eq!(archaware.stop().await, 0);
}

/// The documents of the hostile tenant name more features than archaware keeps.
#[tokio::test]
async fn invented_features_displace_no_feature_of_other_tenants() {
    let mut cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    serve_node_features(&cluster);
    apply(&cluster, &node_feature("amd64", &["AVX2"], &[]));
    apply(&cluster, &node_feature("arm64", &["SVE"], &[]));
    let registry = FakeRegistry::start().await.unwrap();
    let image = testimg::find("multi");
    registry.add_tag("app", "multi", &image);
    let document = |tag: &str, features: &[String], flag: &str| {
        let rules: Vec<Value> = features
            .iter()
            .map(|feature| {
                json!({"matchFeatures": [{"feature": feature,
                    "matchExpressions": {flag: {"op": "Exists"}}}]})
            })
            .collect();
        let document = json!({"compatibilities": [{"rules": rules}]}).to_string();
        let artifact = Image::artifact(NFD_ARTIFACT, NFD_LAYER, &document);
        registry.add_tag("app", tag, &artifact);
        artifact
    };
    for number in 0..HOSTILE_PODS * SELECTIONS {
        let invented: Vec<_> = (0..8).map(|n| format!("invented.f{number}-{n}")).collect();
        document(&format!("hostile-{number}"), &invented, "x");
    }
    registry.add("solver", &image);
    let rules = document("unused", &["cpu.cpuid".to_owned()], "SVE");
    let attached = rules.attached_to(&image.root, "2026-01-01T00:00:00Z");
    registry.add_tag("solver", "attached", &attached);
    registry.set_referrers("solver", &image.root.digest, Some(&[&attached]));
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let vitals = Vitals::watch(&cluster, &archaware).await;
    let tenant = enter_hostile_namespace(&mut cluster).await;
    select_everywhere(&cluster, &registry, "hostile").await;
    cluster.namespace = tenant;
    let began = Instant::now();
    let spec = pod_spec(&[registry.image("solver")]);
    let annotations = json!({"archaware.dev/select-image.c0": registry.image("solver")});
    cluster
        .create::<Pod>(pod("solver", spec, annotations))
        .await;
    // Only by the feature is this the only possible node.
    assert_eq!(cluster.wait_until_bound("solver").await, "arm64");
    let took = began.elapsed();
    println!("features: another tenant's pod placed after {took:.1?}");
    assert!(took < IN_TIME, "{took:?}");
    vitals.end(&cluster, &archaware).await;
    assert_eq!(archaware.stop().await, 0);
    cluster.kubectl(&["delete", "crd", "nodefeatures.nfd.k8s-sigs.io"]);
}
