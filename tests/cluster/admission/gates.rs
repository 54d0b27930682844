//! Images that are not cached: pods wait, pass, or get a gate; and every gate is removed.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::PodSchedulingGate;
use kube::{ResourceExt, api::DeleteParams};
use testimg::{FakeRegistry, Script};

use super::*;

fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().unwrap().scheduling_gates.as_deref();
    gates
        .unwrap_or_default()
        .iter()
        .any(|gate| gate.name == "archaware.dev/inspect")
}

async fn registry(image: &str, script: Option<Script>) -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    registry.add(image, &testimg::find(image));
    if let Some(script) = script {
        registry.script("/", script);
    }
    registry
}

async fn create_from(
    cluster: &TestCluster,
    name: &str,
    registry: &FakeRegistry,
    image: &str,
) -> Pod {
    cluster
        .create(pod(name, pod_spec(&[registry.image(image)]), json!({})))
        .await
}

#[tokio::test]
async fn waiting_pods_wait_no_longer_than_the_budget() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let slow = registry("arm64", Some(Script::Slow(Duration::from_millis(50)))).await;
    let dead = registry("amd64", Some(Script::Hang)).await;
    let archaware =
        Controller::start_with_webhook(&cluster, "resolution: {failure: {after: 3s}}\n", "").await;
    cluster.wait_until_tainted().await;
    let placed = create_from(&cluster, "slow", &slow, "arm64").await;
    assert_eq!(
        architectures_of(&placed),
        set(&["arm64"]),
        "three requests fit into a second"
    );
    let started = Instant::now();
    let passed = create_from(&cluster, "dead", &dead, "amd64").await;
    let took = started.elapsed();
    assert!(architectures_of(&passed).is_empty() && !is_gated(&passed));
    assert!(took >= Duration::from_secs(1), "{took:?}");
    assert!(
        took < Duration::from_millis(2900),
        "the API server gives up after 3 s: {took:?}"
    );
    // The failure policy decides.
    cluster
        .wait_for_event("dead", "ToleratesEveryArchitecture")
        .await;
    cluster.wait_until_bound("dead").await;
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn passing_pods_are_completed_by_the_controller() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let slow = registry("arm64", Some(Script::Slow(Duration::from_millis(300)))).await;
    let _archaware = Controller::start_with_webhook(&cluster, "", "onMiss: pass").await;
    cluster.wait_until_tainted().await;
    let started = Instant::now();
    let passed = create_from(&cluster, "first", &slow, "arm64").await;
    assert!(
        started.elapsed() < Duration::from_millis(300),
        "no pod waits for the registry"
    );
    assert!(architectures_of(&passed).is_empty() && !is_gated(&passed));
    assert_eq!(cluster.wait_until_bound("first").await, "arm64");
    let dead = registry("amd64", Some(Script::Hang)).await;
    let started = Instant::now();
    let waits = create_from(&cluster, "dead", &dead, "amd64").await;
    assert!(
        started.elapsed() < Duration::from_secs(1),
        "no pod waits for a dead registry either"
    );
    assert!(architectures_of(&waits).is_empty() && !is_gated(&waits));
    let known = create_from(&cluster, "second", &slow, "arm64").await;
    assert_eq!(architectures_of(&known), set(&["arm64"]));
    assert_eq!(
        slow.count("HEAD", ""),
        1,
        "what the webhook began is not begun again"
    );
}

#[tokio::test]
async fn gated_pods_get_tolerations_and_affinity_with_the_removal_of_the_gate() {
    let cluster = TestCluster::take().await;
    // Without taints, only affinity decides where it runs.
    cluster.create_three_nodes().await;
    let slow = registry("arm64", Some(Script::Slow(Duration::from_millis(300)))).await;
    let config = "taint: {manage: false}\naffinity: {required: true, preferred: [{architecture: arm64, weight: 7}]}\n";
    let _archaware =
        Controller::start_with_webhook(&cluster, config, "onMiss: gate, budget: 50ms").await;
    let zone = json!({"key": "kubernetes.io/os", "operator": "Exists"});
    let mut gated = pod("gated", pod_spec(&[slow.image("arm64")]), json!({}));
    gated["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}}});
    let gated: Pod = cluster.create(gated).await;
    assert!(is_gated(&gated) && architectures_of(&gated).is_empty());
    assert_eq!(cluster.wait_until_bound("gated").await, "arm64");
    let placed = cluster.pods().get("gated").await.unwrap();
    assert!(!is_gated(&placed));
    let spec = json!(placed.spec);
    let node = &spec["affinity"]["nodeAffinity"];
    let arch =
        |value: &str| json!({"key": "kubernetes.io/arch", "operator": "In", "values": [value]});
    let expected = json!({
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [zone, arch("arm64")]}]},
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 7, "preference": {"matchExpressions": [arch("arm64")]}}],
    });
    assert_eq!(*node, expected);
    // Created, then one patch of archaware; the rest is the scheduler's.
    assert_eq!(placed.metadata.generation, Some(2));
    // System-critical pods never get a gate.
    let unknown = registry("amd64", Some(Script::Hang)).await;
    let mut critical = pod("critical", pod_spec(&[unknown.image("amd64")]), json!({}));
    critical["spec"]["priorityClassName"] = json!("system-cluster-critical");
    let critical: Pod = cluster.create(critical).await;
    assert!(!is_gated(&critical));
}

/// After the failure policy, unless its action is to wait.
#[tokio::test]
async fn gates_open_although_the_registry_is_dead() {
    for action in ["tolerateAll", "hold", "tolerate, architectures: [arm64]"] {
        let cluster = TestCluster::take().await;
        cluster.create_three_nodes().await;
        let dead = registry("arm64", Some(Script::Status(503, Vec::new()))).await;
        let config = format!("resolution: {{failure: {{after: 2s, action: {action}}}}}\n");
        let _archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
        cluster.wait_until_tainted().await;
        assert!(is_gated(
            &create_from(&cluster, "gated", &dead, "arm64").await
        ));
        if action == "tolerateAll" {
            cluster.wait_until_bound("gated").await;
        } else if action != "hold" {
            assert_eq!(cluster.wait_until_bound("gated").await, "arm64");
        } else {
            // Four attempts take longer than `after`: 1 s, 2 s and 4 s between them.
            eventually("further attempts", DEADLINE, || async {
                (dead.count("HEAD", "") >= 4).then_some(())
            })
            .await;
            assert!(is_gated(&cluster.pods().get("gated").await.unwrap()));
            dead.unscript();
            assert_eq!(cluster.wait_until_bound("gated").await, "arm64");
        }
    }
}

/// A controller was killed while pods had its gate; the next one starts with or without the
/// webhook.
#[tokio::test]
async fn gates_open_after_a_restart_with_or_without_the_webhook() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    for (round, next) in ["onMiss: gate", "off"].into_iter().enumerate() {
        let dead = registry("arm64", Some(Script::Hang)).await;
        let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
        cluster.wait_until_tainted().await;
        let name = format!("gated-{round}");
        assert!(is_gated(
            &create_from(&cluster, &name, &dead, "arm64").await
        ));
        let mut torn = pod(
            &format!("ignored-{round}"),
            pod_spec(&[dead.image("arm64")]),
            json!({}),
        );
        torn["spec"]["schedulingGates"] =
            json!([{"name": "archaware.dev/inspect"}, {"name": "test/other"}]);
        torn["metadata"]["annotations"] = json!({"archaware.dev/mode": "ignore"});
        let torn: Pod = cluster.create(torn).await;
        archaware.signal("-KILL");
        drop(archaware);
        // Created while no webhook is served: it is admitted unchanged.
        let passed = create_from(&cluster, &format!("passed-{round}"), &dead, "arm64").await;
        assert!(!is_gated(&passed));
        dead.unscript();
        let archaware = if next == "off" {
            Controller::start(&cluster, "admission: {enabled: false}\n")
        } else {
            Controller::start_with_webhook(&cluster, "", next).await
        };
        assert_eq!(cluster.wait_until_bound(&name).await, "arm64");
        assert_eq!(cluster.wait_until_bound(&passed.name_any()).await, "arm64");
        if next == "off" {
            // The registration is not archaware's to delete.
            let what = "kubectl delete mutatingwebhookconfiguration archaware";
            archaware.wait_for_log(what).await;
        }
        // Its mode is `ignore`, so only archaware's own gate is removed.
        let gates = eventually("the removal of one gate", DEADLINE, || async {
            let gates = cluster
                .pods()
                .get(&torn.name_any())
                .await
                .ok()?
                .spec?
                .scheduling_gates?;
            (gates.len() == 1).then_some(gates)
        })
        .await;
        assert_eq!(
            gates,
            [PodSchedulingGate {
                name: "test/other".to_owned()
            }]
        );
    }
}

#[tokio::test]
async fn clean_opens_gates_and_removes_the_webhook() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let dead = registry("arm64", Some(Script::Hang)).await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    assert!(is_gated(
        &create_from(&cluster, "gated", &dead, "arm64").await
    ));
    assert_eq!(archaware.stop().await, 0);
    let (status, planned, error) = cluster.archaware(&["clean", "--dry-run"]);
    assert_eq!(status, 0, "{error}");
    assert!(
        is_gated(&cluster.pods().get("gated").await.unwrap()),
        "{planned}"
    );
    let (status, lines, error) = cluster.archaware(&["clean"]);
    let log = format!("{lines}{error}");
    assert_eq!(status, 0, "{log}");
    for part in [
        "MutatingWebhookConfiguration archaware",
        "scheduling gate",
        "Secret archaware/archaware-admission",
    ] {
        assert!(log.contains(part), "{part}: {log}");
    }
    cluster.wait_until_bound("gated").await;
    for kind in ["mutatingwebhookconfigurations", "-n=archaware secrets"] {
        let found = cluster.kubectl(
            &[
                &["get"][..],
                &kind.split(' ').rev().collect::<Vec<_>>(),
                &["-o", "name"],
            ]
            .concat(),
        );
        assert!(found.trim().is_empty(), "{found}");
    }
    let (status, says, _) = cluster.archaware(&["clean"]);
    assert_eq!(
        (status, says.contains("Nothing of archaware is left")),
        (0, true),
        "{says}"
    );
    cluster
        .pods()
        .delete("gated", &DeleteParams::default())
        .await
        .unwrap();
}

/// A quota or policy may reject tolerations. The gate must be removed all the same.
#[tokio::test]
async fn a_refused_patch_opens_the_gate_all_the_same() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let slow = registry("arm64", Some(Script::Slow(Duration::from_millis(300)))).await;
    let _policy = cluster.forbid_tolerations().await;
    let _archaware =
        Controller::start_with_webhook(&cluster, "", "onMiss: gate, budget: 50ms").await;
    assert!(is_gated(
        &create_from(&cluster, "gated", &slow, "arm64").await
    ));
    eventually("an open gate", DEADLINE, || async {
        (!is_gated(&cluster.pods().get("gated").await.ok()?)).then_some(())
    })
    .await;
    cluster.wait_for_event("gated", "ChangeRefused").await;
}

/// The leader removes gates, and there is always a new leader.
#[tokio::test]
async fn another_replica_opens_the_gates_of_one_that_is_gone() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let dead = registry("arm64", Some(Script::Hang)).await;
    let first = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let port = free_port();
    let second = Controller::start(&cluster, &admission_config(port, "onMiss: gate"));
    second.wait_for_log("admission certificate served").await;
    assert!(is_gated(
        &create_from(&cluster, "gated", &dead, "arm64").await
    ));
    dead.unscript();
    first.signal("-KILL");
    drop(first);
    assert_eq!(cluster.wait_until_bound("gated").await, "arm64");
    // By now the new leader has published its authorities.
    cluster.wait_until_called().await;
    assert_eq!(second.stop().await, 0);
}

/// Behind the gate a pod waits for another image of the same tag, and gets its affinity then. Its
/// event says so all the time.
#[tokio::test]
async fn a_pod_without_common_architecture_stays_behind_the_gate() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    let registry = registry("amd64", None).await;
    registry.add("arm64", &testimg::find("arm64"));
    let images = [registry.image("amd64"), registry.image("arm64")];
    let config = "resolution: {cache: {tagTtl: 1s, latestTtl: 1s}}\n";
    let archaware = Controller::start_with_webhook(&cluster, config, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let torn: Pod = cluster
        .create(pod("torn", pod_spec(&images), json!({})))
        .await;
    assert!(is_gated(&torn));
    let annotations = torn.metadata.annotations.unwrap();
    assert_eq!(annotations["archaware.dev/decision"], "none");
    assert_eq!(torn.spec.unwrap().affinity, None);
    cluster.wait_for_event("torn", "NoCommonArchitecture").await;
    // A selection that no image fits is the same case.
    let mut elsewhere = pod("elsewhere", pod_spec(&images[..1]), json!({}));
    elsewhere["spec"]["nodeSelector"] = json!({"kubernetes.io/arch": "arm64"});
    assert!(is_gated(&cluster.create(elsewhere).await));
    cluster
        .wait_for_event("elsewhere", "ArchitectureExcluded")
        .await;
    // Unless its author tolerates the taint: then the image is trusted less than the author.
    let mut meant = pod("meant", pod_spec(&images[..1]), json!({}));
    meant["spec"]["nodeSelector"] = json!({"kubernetes.io/arch": "arm64"});
    meant["spec"]["tolerations"] = json!([{"key": "kubernetes.io/arch", "value": "arm64"}]);
    assert!(!is_gated(&cluster.create(meant).await));
    assert_eq!(cluster.wait_until_bound("meant").await, "arm64");
    // Nobody gates pods of DaemonSets and of the system: a contradiction keeps autoscalers off.
    let mut critical = pod("critical", pod_spec(&images), json!({}));
    critical["spec"]["priorityClassName"] = json!("system-cluster-critical");
    let critical: Pod = cluster.create(critical).await;
    assert!(!is_gated(&critical));
    let terms = &json!(critical.spec.unwrap().affinity)["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        ["nodeSelectorTerms"];
    let on = |name: &str| json!({"key": "kubernetes.io/arch", "operator": "In", "values": [name]});
    assert_eq!(
        *terms,
        json!([{"matchExpressions": [on("amd64"), on("arm64")]}])
    );
    registry.add("amd64", &testimg::find("amd64-arm64"));
    // The next look is ten minutes away; a change of the pod is another one. What is known of the
    // tag is a second old by then.
    let looks = std::cell::Cell::new(0);
    eventually("an open gate", DEADLINE, || async {
        if !is_gated(&cluster.pods().get("torn").await.ok()?) {
            return Some(());
        }
        looks.set(looks.get() + 1);
        let again = format!("archaware.dev/look={}", looks.get());
        let namespace = &cluster.namespace;
        cluster.kubectl(&[
            "-n",
            namespace,
            "annotate",
            "--overwrite",
            "pod",
            "torn",
            &again,
        ]);
        None
    })
    .await;
    assert_eq!(cluster.wait_until_bound("torn").await, "arm64");
    let placed = cluster.pods().get("torn").await.unwrap();
    let affinity = json!(placed.spec.unwrap().affinity).to_string();
    assert!(
        affinity.contains("arm64") && !affinity.contains("amd64"),
        "{affinity}"
    );
    assert_eq!(archaware.stop().await, 0);
}
