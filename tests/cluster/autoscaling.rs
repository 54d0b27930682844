//! A real Karpenter beside archaware: a pending pod says by itself on which nodes it can run, so
//! that Karpenter makes those and no others. docs/autoscaling.md has the same cases without
//! archaware and with taints only.

mod consolidation;

use std::time::Duration;

use k8s_openapi::api::{
    apps::v1::{DaemonSet, Deployment},
    core::v1::Pod,
};
use kube::{Api, api::ListParams};
use serde_json::{Value, json};
use testimg::{FakeRegistry, Script};
use testsupport::cluster::{Karpenter, Placement, Service, demand, node_pool, roll_out};

use super::*;

/// As the manifests configure it.
const GATE: &str = "onMiss: gate";

/// A control plane of its own: Karpenter's objects have finalizers that nobody else removes.
///
/// It has no taint eviction controller. That controller sometimes deletes pods here: it still sees
/// the taint `karpenter.sh/unregistered:NoExecute` of a new node when Karpenter has removed it and
/// the scheduler has bound a pod to the node. These pods have no owner that creates them again.
async fn own_cluster() -> TestCluster {
    TestCluster::start_with("KCM_ARGS", "--controllers=*,-taint-eviction-controller").await
}

/// archaware with its webhook.
async fn archaware(cluster: &TestCluster, config: &str) -> Controller {
    cluster.register_for_busy_machines();
    Controller::start_with_webhook(cluster, config, GATE).await
}

/// Waits until this many pods are bound.
async fn bound(cluster: &TestCluster, count: usize) -> Placement {
    // Karpenter, too, has to compute and to register its nodes.
    let all = tokio::time::timeout(4 * DEADLINE, async {
        loop {
            let placement = Placement::of(cluster).await;
            if placement.bound == count {
                return placement;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    });
    let Ok(placement) = all.await else {
        panic!("not {count} pods are bound");
    };
    placement
}

/// The scheduler may have thousands of other pods to try first, or Karpenter a node to make.
async fn wait_for_witness(cluster: &TestCluster) {
    cluster
        .wait_until_bound_within("witness", 4 * DEADLINE)
        .await;
}

/// Waits until Karpenter has looked at every pending pod once more: a pod that fills a node of its
/// own is placed. Returns the state without that pod and its node.
async fn after_another_look(cluster: &TestCluster) -> Placement {
    let bound_before = Placement::of(cluster).await.bound;
    let witness = demand(cluster, "witness", "amd64", |spec| {
        spec["containers"][0]["resources"] = json!({"requests": {"cpu": "3900m"}});
        spec["nodeSelector"] = json!({"kubernetes.io/arch": "amd64"});
    });
    cluster.create::<Pod>(witness).await;
    wait_for_witness(cluster).await;
    // On a busy machine a DaemonSet may have been created without tolerations: then its pod is just
    // being replaced.
    let mut placement = eventually("the pods of before are bound", DEADLINE, || async {
        let placement = Placement::of(cluster).await;
        (placement.bound > bound_before).then_some(placement)
    })
    .await;
    placement.bound -= 1;
    *placement.nodes.get_mut("amd64").unwrap() -= 1;
    placement.nodes.retain(|_, count| *count > 0);
    placement
}

fn nodes(of: &[(&str, usize)]) -> std::collections::BTreeMap<String, usize> {
    of.iter()
        .map(|(name, count)| ((*name).to_owned(), *count))
        .collect()
}

fn assert_placed(placement: &Placement, of: &[(&str, usize)]) {
    assert_eq!(placement.misplaced, [""; 0]);
    assert_eq!(
        (&placement.nodes, placement.empty),
        (&nodes(of), 0),
        "{placement:?}"
    );
}

/// Pods of every kind come at once. Those that no node can run cause no node.
#[tokio::test]
async fn karpenter_makes_the_nodes_that_images_need() {
    let cluster = own_cluster().await;
    let _karpenter = Karpenter::start(&cluster).await;
    let _archaware = archaware(&cluster, "").await;
    let daemon = json!({"metadata": {"name": "agent"}, "spec": {
        "selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}}, "spec": pod_spec(&[cluster.image("arm64")])},
    }});
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    sets.create(
        &Default::default(),
        &serde_json::from_value(daemon).unwrap(),
    )
    .await
    .unwrap();
    for n in 0..2 {
        let mut torn = demand(&cluster, &format!("torn-{n}"), "amd64", |_| {});
        torn["spec"]["containers"][0]["image"] = json!(cluster.image("amd64"));
        torn["spec"]["initContainers"] = json!([{"name": "init", "image": cluster.image("arm64")}]);
        cluster.create::<Pod>(torn).await;
    }
    let excluded = demand(&cluster, "excluded", "amd64", |spec| {
        spec["nodeSelector"] = json!({"kubernetes.io/arch": "arm64"});
    });
    cluster.create::<Pod>(excluded).await;
    // Its author allows both; its image is for one.
    let narrowed = demand(&cluster, "narrowed", "amd64", |spec| {
        let both =
            json!({"key": "kubernetes.io/arch", "operator": "In", "values": ["amd64", "arm64"]});
        spec["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [both]}]}}});
    });
    cluster.create::<Pod>(narrowed).await;
    roll_out(&cluster, &["amd64", "arm64", "multi"], 6).await;
    // 18 pods, the narrowed one, and the DaemonSet's on the one arm64 node.
    bound(&cluster, 20).await;
    let placement = after_another_look(&cluster).await;
    assert_placed(&placement, &[("amd64", 1), ("arm64", 1)]);
    assert_eq!(
        placement.pending, 3,
        "the torn ones and the excluded one: {placement:?}"
    );
}

/// One pool of each architecture, which declare archaware's taint themselves, and a taint that an
/// agent removes.
#[tokio::test]
async fn pools_may_declare_taints() {
    let cluster = own_cluster().await;
    let pool = |architecture: &str, weight: u8| {
        node_pool(architecture, &[architecture], |spec| {
            spec["weight"] = json!(weight);
            let taint =
                json!({"key": "kubernetes.io/arch", "value": architecture, "effect": "NoSchedule"});
            let startup = json!({"key": "example.com/agent", "effect": "NoSchedule"});
            spec["template"]["spec"]["taints"] = json!([taint]);
            spec["template"]["spec"]["startupTaints"] = json!([startup]);
        })
    };
    let _karpenter =
        Karpenter::start_with(&cluster, &[pool("amd64", 10), pool("arm64", 90)], &[]).await;
    let _archaware = archaware(&cluster, "").await;
    roll_out(&cluster, &["amd64", "arm64", "multi"], 6).await;
    let made = eventually("two nodes", DEADLINE, || async {
        let placement = Placement::of(&cluster).await;
        (placement.count() == 2).then_some(placement)
    })
    .await;
    assert_eq!(made.nodes, nodes(&[("amd64", 1), ("arm64", 1)]));
    for node in cluster.nodes().list(&Default::default()).await.unwrap() {
        let all = taints(&node);
        let own = all
            .iter()
            .filter(|taint| taint.starts_with("kubernetes.io/arch="));
        assert_eq!(own.count(), 1, "{all:?}");
        let name = node.metadata.name.unwrap();
        // Karpenter adds it when it sees that the node has registered.
        eventually("its startup taint", DEADLINE, || async {
            let node = cluster.nodes().get(&name).await.ok()?;
            let all = taints(&node);
            all.contains("example.com/agent=:NoSchedule").then_some(())
        })
        .await;
        cluster.kubectl(&["taint", "node", &name, "example.com/agent-"]);
    }
    bound(&cluster, 18).await;
    let nodes = Placement::of(&cluster).await;
    assert_placed(&nodes, &[("amd64", 1), ("arm64", 1)]);
}

/// A preference is no requirement, whether Karpenter respects it or not.
#[tokio::test]
async fn preferences_make_no_wrong_node() {
    // Ignored, all of them fit on the one node that some of them need.
    let both = [("amd64", 1), ("arm64", 1)];
    for (policy, of) in [("Respect", &both[..]), ("Ignore", &both[..1])] {
        let cluster = own_cluster().await;
        let mixed = node_pool("mixed", &["amd64", "arm64"], |_| {});
        let _karpenter =
            Karpenter::start_with(&cluster, &[mixed], &[("PREFERENCE_POLICY", policy)]).await;
        let prefers = "affinity: {preferred: [{architecture: arm64, weight: 100}]}\n";
        let _archaware = archaware(&cluster, prefers).await;
        roll_out(&cluster, &["amd64", "multi"], 6).await;
        bound(&cluster, 12).await;
        let mut placement = after_another_look(&cluster).await;
        // Where the node for amd64 registers first, the scheduler may bind every pod to it: a
        // preference does not wait for the node that it prefers, which then stays empty until
        // Karpenter consolidates.
        if policy == "Respect" {
            assert!(placement.empty <= 1, "{placement:?}");
            placement.empty = 0;
        }
        assert_placed(&placement, of);
    }
}

/// New images from a slow registry at the same time as new nodes: the pods wait behind the gate,
/// where Karpenter does not see them.
#[tokio::test]
async fn a_slow_registry_makes_no_node_twice() {
    let cluster = own_cluster().await;
    let _karpenter = Karpenter::start(&cluster).await;
    let _archaware = archaware(&cluster, "").await;
    let slow = FakeRegistry::start().await.unwrap();
    slow.script("/", Script::Slow(Duration::from_millis(1500)));
    for (n, image) in ["amd64", "arm64", "amd64"].into_iter().enumerate() {
        slow.add_tag("app", &format!("v{n}"), &testimg::find(image));
        for replica in 0..4 {
            let pod = demand(&cluster, &format!("slow-{n}-{replica}"), image, |spec| {
                spec["containers"][0]["image"] = json!(format!("{}:v{n}", slow.image("app")));
            });
            let pod: Pod = cluster.create(pod).await;
            let gates = pod.spec.unwrap().scheduling_gates.unwrap_or_default();
            assert!(replica > 0 || gates.len() == 1, "v{n} is not known yet");
        }
    }
    bound(&cluster, 12).await;
    let placement = after_another_look(&cluster).await;
    assert_placed(&placement, &[("amd64", 1), ("arm64", 1)]);
}

/// As many nodes as Karpenter asks for if the pods' authors say themselves what their images need.
#[tokio::test]
async fn a_large_rollout_costs_no_more_nodes_than_it_needs() {
    // 19 of these pods fit on a node.
    const EACH: usize = 167;
    let mut asked_for = Vec::new();
    for with_archaware in [false, true] {
        let cluster = own_cluster().await;
        let archaware = if with_archaware {
            Some(archaware(&cluster, "").await)
        } else {
            None
        };
        for image in ["amd64", "arm64", "multi"] {
            let pods: Vec<Value> = (0..EACH)
                .map(|n| {
                    demand(&cluster, &format!("{image}-{n}"), image, |spec| {
                        if !with_archaware && image != "multi" {
                            spec["nodeSelector"] = json!({"kubernetes.io/arch": image});
                        }
                    })
                })
                .collect();
            for some in pods.chunks(32) {
                let all = some.iter().map(|pod| cluster.create::<Pod>(pod.clone()));
                futures::future::join_all(all).await;
            }
        }
        // Karpenter computes nodes for the pods that the scheduler has given up, and for all of them
        // at once if all of them are: how it divides later ones into batches depends on the speed of
        // this machine.
        eventually("pods without a node", 2 * DEADLINE, || async {
            let pods = cluster.pods().list(&Default::default()).await.ok()?;
            pods.iter().all(is_unschedulable).then_some(())
        })
        .await;
        let karpenter = Karpenter::start(&cluster).await;
        let first = karpenter.first_computation().await;
        assert_eq!(first.pods, 3 * EACH, "{first:?}");
        asked_for.push(first.nodes);
        // Which pods share a node is then the scheduler's decision. If pods that fit everywhere
        // take the room of those that do not, Karpenter makes more nodes, and the one that it had
        // made for them may stay empty, with and without archaware.
        let placement = bound(&cluster, 3 * EACH).await;
        assert_eq!(placement.misplaced, [""; 0]);
        println!("501 pods, archaware: {with_archaware}: {placement:?}");
        drop(archaware);
    }
    println!("501 pods: {asked_for:?} nodes, by their authors and with archaware");
    // The order in which Karpenter sees the pods: one more or less.
    let [alone, with]: [usize; 2] = [0, 1].map(|n| asked_for[n]);
    assert!(with <= alone + 1, "{asked_for:?}");
}

/// Karpenter reserves room on a new node for the DaemonSets that will run there. It takes their
/// required affinity from the template, and their tolerations: only taints that the `NodePool`
/// declares tell it that a DaemonSet stays off a node.
#[tokio::test]
async fn daemons_of_one_architecture_take_no_room_on_nodes_of_another() {
    let taint = |architecture: &str| json!({"key": "kubernetes.io/arch", "value": architecture, "effect": "NoSchedule"});
    let tainted = |architecture: &str| {
        node_pool(architecture, &[architecture], |spec| {
            spec["template"]["spec"]["taints"] = json!([taint(architecture)]);
        })
    };
    let mixed = node_pool("mixed", &["amd64", "arm64"], |_| {});
    for (pools, of) in [
        (vec![mixed], 2),
        (vec![tainted("amd64"), tainted("arm64")], 1),
    ] {
        let cluster = own_cluster().await;
        let _archaware = archaware(&cluster, "").await;
        let mut spec = pod_spec(&[cluster.image("arm64")]);
        spec["containers"][0]["resources"] = json!({"requests": {"cpu": "1500m"}});
        let daemon = json!({"metadata": {"name": "agent"}, "spec": {
            "selector": {"matchLabels": {"app": "agent"}},
            "template": {"metadata": {"labels": {"app": "agent"}}, "spec": spec},
        }});
        cluster.create::<DaemonSet>(daemon).await;
        roll_out(&cluster, &["amd64"], 15).await;
        let _karpenter = Karpenter::start_with(&cluster, &pools, &[]).await;
        let mut placement = bound(&cluster, 15).await;
        // Without the DaemonSet's pod all of them fit on one node: on that which registers much
        // earlier than the other.
        assert!(placement.empty < of, "{placement:?}");
        placement.empty = 0;
        assert_placed(&placement, &[("amd64", of)]);
    }
}

/// The replicas run on spot nodes: one after the other goes while pods keep coming, and each comes
/// back elsewhere.
#[tokio::test]
async fn replicas_that_go_one_after_the_other_cost_no_node() {
    let cluster = own_cluster().await;
    let _karpenter = Karpenter::start(&cluster).await;
    let ports = [free_port(), free_port()];
    let service = Service::start(ports.into()).await;
    cluster.register();
    let start = |port: u16| Controller::start(&cluster, &service.admission_config(port, GATE));
    let mut replicas = ports.map(start);
    cluster.wait_until_called().await;
    let mut count = 0;
    for (n, port) in ports.into_iter().enumerate() {
        eventually("both replicas", DEADLINE, || async {
            let all = replicas.iter().map(|one| one.http("/readyz"));
            let all = futures::future::join_all(all).await;
            all.iter().all(|(status, _)| *status == 200).then_some(())
        })
        .await;
        // A spot node is given notice, so that its pods are told to end.
        replicas[n].signal("-TERM");
        for image in ["amd64", "arm64", "multi"] {
            for more in 0..4 {
                let name = format!("{image}-{n}-{more}");
                let pod: Pod = cluster.create(demand(&cluster, &name, image, |_| {})).await;
                let decided = pod.metadata.annotations.unwrap_or_default();
                assert!(decided.contains_key("archaware.dev/decision"), "{name}");
                count += 1;
            }
        }
        assert_eq!(replicas[n].exited().await, 0);
        replicas[n] = start(port);
    }
    bound(&cluster, count).await;
    let placement = after_another_look(&cluster).await;
    assert_placed(&placement, &[("amd64", 1), ("arm64", 1)]);
}

/// How many of 2,000 pending pods are bound to one of 200 nodes that register, before the node has
/// its taint. The pods have no affinity, so that the taint alone keeps them off.
async fn slipped(cluster: &TestCluster, architecture: &str) -> usize {
    let image = cluster.image("amd64");
    let names: Vec<String> = (0..2000).map(|n| format!("pending-{n}")).collect();
    for some in names.chunks(32) {
        let all = some.iter().map(|name| {
            cluster.create::<Pod>(pod(name, pod_spec(std::slice::from_ref(&image)), json!({})))
        });
        futures::future::join_all(all).await;
    }
    let nodes: Vec<String> = (0..200).map(|n| format!("late-{n}")).collect();
    for some in nodes.chunks(8) {
        let all = some
            .iter()
            .map(|name| cluster.create_node(name, architecture));
        futures::future::join_all(all).await;
    }
    // Pods that are bound to a node get a toleration before the node gets its taint: up to 2,000 of
    // them.
    cluster.wait_until_tainted_within(4 * DEADLINE).await;
    Placement::of(cluster).await.bound
}

/// The window between the registration of a node and its taint.
#[tokio::test]
async fn no_pod_slips_onto_a_new_node() {
    for (mode, none) in [("webhook", true), ("controller only", false)] {
        let cluster = TestCluster::take().await;
        let config = "affinity: {required: false}\n";
        let _archaware = if none {
            archaware(&cluster, config).await
        } else {
            Controller::start(&cluster, config)
        };
        let slipped = slipped(&cluster, "arm64").await;
        println!(
            "200 nodes beside 2,000 pending pods, {mode}: {slipped} on a node before its taint"
        );
        assert!(!none || slipped == 0, "{slipped}");
    }
}

/// A minute without the webhook under load. Karpenter makes wrong nodes for pods that are created
/// then, until they are created anew.
#[tokio::test]
async fn pods_of_a_minute_without_webhook_are_created_anew() {
    const EACH: usize = 20;
    const STEP: Duration = Duration::from_secs(3);
    let cluster = own_cluster().await;
    let _karpenter = Karpenter::start(&cluster).await;
    cluster.kubectl(&["apply", "-f", "manifests/recreate-pods/permissions.yaml"]);
    // Only the replica is asked that does not lead.
    let asked = free_port();
    let service = Service::start(vec![asked]).await;
    let config = |port| {
        let admission = service.admission_config(port, GATE);
        format!("affinity: {{recreatePods: true}}\n{admission}")
    };
    cluster.register();
    let archaware = Controller::start(&cluster, &config(free_port()));
    archaware.wait_until_leading(true).await;
    let _other = Controller::start(&cluster, &config(asked));
    cluster.wait_until_called().await;
    let images = ["amd64", "arm64"];
    for name in images {
        let template = demand(&cluster, name, name, |_| {});
        let deployment = json!({"metadata": {"name": name}, "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}, "annotations": template["metadata"]["annotations"]},
                "spec": template["spec"]},
        }});
        cluster.create::<Deployment>(deployment).await;
    }
    service.set_reachable(false);
    let alone = demand(&cluster, "alone", "arm64", |_| {});
    cluster.create::<Pod>(alone).await;
    // No pool has this label, so that this pod still waits when the webhook answers again, wherever
    // the rest is by then.
    let waiting = demand(&cluster, "waiting", "arm64", |spec| {
        spec["nodeSelector"] = json!({"example.com/zone": "later"});
    });
    let deployment = json!({"metadata": {"name": "waiting"}, "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "waiting"}},
        "template": {"metadata": {"labels": {"app": "waiting"}}, "spec": waiting["spec"]},
    }});
    cluster.create::<Deployment>(deployment).await;
    let mut next = tokio::time::interval(STEP);
    for n in 1..=EACH {
        next.tick().await;
        for name in images {
            let replicas = format!("--replicas={n}");
            cluster.kubectl(&[
                "scale",
                "deployment",
                name,
                &replicas,
                "-n",
                &cluster.namespace,
            ]);
        }
    }
    // Those for amd64 wait, beside nodes for arm64 that they do not tolerate.
    let down = eventually("nodes for arm64", DEADLINE, || async {
        let down = Placement::of(&cluster).await;
        (down.nodes.get("arm64") > Some(&2)).then_some(down)
    })
    .await;
    assert_eq!(down.nodes.get("amd64"), None, "{down:?}");
    service.set_reachable(true);
    cluster.wait_until_called().await;
    // Before, the controller taints a node some milliseconds after it has registered, and pods may
    // be faster.
    let placement = bound(&cluster, 1 + 2 * EACH).await;
    archaware.wait_for_log("pod evicted").await;
    // A trial during the outage makes archaware wait for a minute before it evicts a pod of the
    // same controller again.
    let deadline = 3 * DEADLINE;
    eventually("a pod that was created anew", deadline, || async {
        let of_deployment = ListParams::default().labels("app=waiting");
        let pods = cluster.pods().list(&of_deployment).await.ok()?;
        let mut specs = pods.iter().filter_map(|pod| pod.spec.as_ref());
        specs.any(|spec| spec.affinity.is_some()).then_some(())
    })
    .await;
    println!("a minute without webhook: {down:?}; a while after it: {placement:?}");
}
