//! Private images: a pod with the credential is decided by its image, one without by the failure
//! policy.

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Pod, Secret, ServiceAccount},
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use testimg::{Auth, FakeRegistry};

use super::*;

const QUICK: &str = "resolution: {failure: {after: 3s}}";

/// A registry that accepts `user` with password `secret`.
async fn private(images: &[&str]) -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    for image in images {
        registry.add(image, &testimg::find(image));
    }
    registry.require(Auth::Basic("user".into(), "secret".into()));
    registry
}

fn docker_config(registry: &FakeRegistry, password: &str) -> Value {
    let entry = json!({"username": "user", "password": password});
    json!({registry.address(): entry})
}

async fn secret(cluster: &TestCluster, name: &str, kind: &str, key: &str, content: &str) {
    let kind = format!("kubernetes.io/{kind}");
    let data = json!({"metadata": {"name": name}, "type": kind, "stringData": {key: content}});
    cluster.create::<Secret>(data).await;
}

async fn good_secret(cluster: &TestCluster, name: &str, registry: &FakeRegistry) {
    let content = json!({"auths": docker_config(registry, "secret")}).to_string();
    secret(
        cluster,
        name,
        "dockerconfigjson",
        ".dockerconfigjson",
        &content,
    )
    .await;
}

async fn create(cluster: &TestCluster, name: &str, image: &str, secrets: &[&str]) {
    let mut spec = pod_spec(&[image.to_owned()]);
    let names: Vec<Value> = secrets.iter().map(|name| json!({"name": name})).collect();
    spec["imagePullSecrets"] = json!(names);
    cluster.create::<Pod>(pod(name, spec, json!({}))).await;
}

#[tokio::test]
async fn a_pod_with_its_secret_is_placed_and_one_without_steps_aside() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = private(&["arm64"]).await;
    let archaware = Controller::start(&cluster, QUICK);
    cluster.wait_until_tainted().await;
    good_secret(&cluster, "regcred", &registry).await;
    create(&cluster, "with", &registry.image("arm64"), &["regcred"]).await;
    assert_eq!(cluster.wait_until_bound("with").await, "arm64");
    // The answer for the first credential is not used for the second pod.
    create(&cluster, "without", &registry.image("arm64"), &[]).await;
    let note = cluster.wait_for_event("without", "ImageNotResolved").await;
    assert!(note.starts_with("Denied: "), "{note}");
    cluster
        .wait_for_event("without", "ToleratesEveryArchitecture")
        .await;
    let pod = cluster.pods().get("without").await.unwrap();
    assert_eq!(architectures_of(&pod), ["any".to_owned()].into());
    // The older format, and a Secret that two pods share.
    let old = docker_config(&registry, "secret").to_string();
    secret(&cluster, "old", "dockercfg", ".dockercfg", &old).await;
    create(&cluster, "old-format", &registry.image("arm64"), &["old"]).await;
    assert_eq!(cluster.wait_until_bound("old-format").await, "arm64");
    let log = archaware.log();
    assert!(
        !log.contains("c2VjcmV0") && !log.contains("\"secret\""),
        "a credential in the log"
    );
}

#[tokio::test]
async fn secrets_that_cannot_be_used_are_passed_over_and_named() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = private(&["arm64"]).await;
    let archaware = Controller::start(&cluster, QUICK);
    cluster.wait_until_tainted().await;
    good_secret(&cluster, "good", &registry).await;
    secret(
        &cluster,
        "broken",
        "dockerconfigjson",
        ".dockerconfigjson",
        r#"{"auths": {"a": {"auth": "hunter2"}}}"#,
    )
    .await;
    cluster
        .create::<Secret>(
            json!({"metadata": {"name": "other"}, "stringData": {"password": "hunter2"}}),
        )
        .await;
    let huge = json!({"auths": {"a": {"auth": "h".repeat(200_000)}}}).to_string();
    secret(
        &cluster,
        "huge",
        "dockerconfigjson",
        ".dockerconfigjson",
        &huge,
    )
    .await;
    let secrets = ["missing", "broken", "other", "huge", "good"];
    create(&cluster, "mixed", &registry.image("arm64"), &secrets).await;
    assert_eq!(cluster.wait_until_bound("mixed").await, "arm64");
    let events: Vec<String> = eventually("four events", DEADLINE, || async {
        let events: Api<k8s_openapi::api::events::v1::Event> = cluster.api();
        let all = events.list(&Default::default()).await.ok()?;
        let notes: Vec<String> = all
            .into_iter()
            .filter(|event| event.reason.as_deref() == Some("PullSecretUnusable"))
            .filter_map(|event| event.note)
            .collect();
        (notes.len() == 4).then_some(notes)
    })
    .await;
    for (name, why) in [
        ("missing", "does not exist"),
        ("broken", "malformed"),
        ("other", "neither kubernetes.io/dockerconfigjson"),
        ("huge", "larger than 128 KiB"),
    ] {
        assert!(
            events
                .iter()
                .any(|note| note.contains(name) && note.contains(why)),
            "{events:?}"
        );
    }
    assert!(!format!("{events:?}{}", archaware.log()).contains("hunter2"));
}

/// Both namespaces have a Secret of the same name, as is common.
#[tokio::test]
async fn two_namespaces_with_one_registry_never_share_a_token_or_an_answer() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = private(&["arm64", "amd64"]).await;
    let bearer = Auth::Bearer(Some(("user".into(), "secret".into())));
    registry.require(bearer);
    let _archaware = Controller::start(&cluster, QUICK);
    cluster.wait_until_tainted().await;
    good_secret(&cluster, "regcred", &registry).await;
    let other = format!("{}-other", cluster.namespace);
    cluster.create_namespace(&other, json!({})).await;
    let content = json!({"auths": docker_config(&registry, "guess")}).to_string();
    let wrong = json!({
        "metadata": {"name": "regcred"}, "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": content},
    });
    let secrets: Api<Secret> = Api::namespaced(cluster.client.clone(), &other);
    let wrong = serde_json::from_value(wrong).unwrap();
    secrets.create(&Default::default(), &wrong).await.unwrap();
    create(&cluster, "right", &registry.image("arm64"), &["regcred"]).await;
    assert_eq!(cluster.wait_until_bound("right").await, "arm64");
    let tokens = registry.count("GET", "/token");
    let mut spec = pod_spec(&[registry.image("arm64")]);
    spec["imagePullSecrets"] = json!([{"name": "regcred"}]);
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &other);
    let stranger = serde_json::from_value(pod("stranger", spec, json!({}))).unwrap();
    pods.create(&Default::default(), &stranger).await.unwrap();
    let aside = || async {
        let set = architectures_of(&pods.get("stranger").await.ok()?);
        (!set.is_empty()).then_some(set)
    };
    let aside = eventually(
        "the other pod to tolerate every architecture",
        DEADLINE,
        aside,
    )
    .await;
    assert_eq!(
        aside,
        ["any".to_owned()].into(),
        "nothing of the other's answer was used"
    );
    assert!(
        registry.count("GET", "/token") > tokens,
        "it asked for a token of its own"
    );
}

#[tokio::test]
async fn a_daemon_set_uses_the_secrets_of_its_service_account() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = private(&["arm64-s390x"]).await;
    let _archaware = Controller::start(&cluster, "");
    cluster.wait_until_tainted().await;
    good_secret(&cluster, "regcred", &registry).await;
    let accounts: Api<ServiceAccount> = cluster.api();
    let secrets = Patch::Merge(json!({"imagePullSecrets": [{"name": "regcred"}]}));
    accounts
        .patch("default", &PatchParams::default(), &secrets)
        .await
        .unwrap();
    let set = json!({
        "metadata": {"name": "agent"},
        "spec": {
            "selector": {"matchLabels": {"app": "agent"}},
            "template": {"metadata": {"labels": {"app": "agent"}}, "spec": pod_spec(&[registry.image("arm64-s390x")])},
        },
    });
    cluster.create::<DaemonSet>(set).await;
    eventually("pods on two nodes", DEADLINE, || async {
        let pods = cluster.pods().list(&Default::default()).await.ok()?;
        let nodes: Vec<_> = pods
            .iter()
            .filter_map(|pod| pod.spec.as_ref()?.node_name.clone())
            .collect();
        (nodes.len() == 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn namespaces_can_decide_whether_their_secrets_are_read() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = private(&["arm64"]).await;
    cluster.kubectl(&["delete", "clusterrolebinding", "archaware-pull-secrets"]);
    let archaware = Controller::start(&cluster, QUICK);
    archaware
        .wait_for_log("only in namespaces with a RoleBinding")
        .await;
    cluster.wait_until_tainted().await;
    good_secret(&cluster, "regcred", &registry).await;
    create(&cluster, "closed", &registry.image("arm64"), &["regcred"]).await;
    let note = cluster.wait_for_event("closed", "PullSecretUnusable").await;
    assert!(
        note.contains("regcred") && note.contains("may not read"),
        "{note}"
    );
    cluster
        .wait_for_event("closed", "ToleratesEveryArchitecture")
        .await;
    let binding = [
        "create",
        "rolebinding",
        "archaware-pull-secrets",
        "--clusterrole=archaware-pull-secrets",
    ];
    let account = "--serviceaccount=archaware:archaware";
    cluster.kubectl(&[&["-n", &cluster.namespace], &binding[..], &[account]].concat());
    // A missing permission is cached briefly.
    let tried = |n: u32| format!("open-{n}");
    let mut n = 0;
    loop {
        n += 1;
        create(&cluster, &tried(n), &registry.image("arm64"), &["regcred"]).await;
        cluster.wait_until_bound(&tried(n)).await;
        let pod = cluster.pods().get(&tried(n)).await.unwrap();
        if architectures_of(&pod) == ["arm64".to_owned()].into() {
            break;
        }
        assert!(n < 10, "it still may not read the secret");
    }
}
