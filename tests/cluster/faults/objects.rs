//! Objects that are deleted or replaced while archaware handles them.

use kube::{
    Api,
    api::{DeleteParams, ListParams},
};

use super::*;

const NOW: DeleteParams = DeleteParams {
    grace_period_seconds: Some(0),
    dry_run: false,
    propagation_policy: None,
    preconditions: None,
};

/// A slow registry, and a pod of its image that is being decided.
async fn slow_registry() -> testimg::FakeRegistry {
    let registry = testimg::FakeRegistry::start().await.unwrap();
    let slow = testimg::Script::Slow(std::time::Duration::from_secs(1));
    registry.script("/", slow);
    registry.add("app", &testimg::find("arm64"));
    registry
}

/// Waits until no reconcile is in progress or pending.
async fn idle(archaware: &Controller) {
    eventually("an idle queue", DEADLINE, || async {
        let leads = archaware.metric("archaware_leader").await > 0.5;
        let depth = archaware
            .metric("archaware_queue_depth{controller=\"pods\"}")
            .await;
        let waiting = archaware.metric("archaware_pods_undecided{}").await;
        (leads && depth < 0.5 && waiting < 0.5).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_thousand_pods_deleted_while_being_decided() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let (cluster, registry) = (&scene.cluster, slow_registry().await);
    let pods = cluster.pods();
    let image = registry.image("app");
    let names: Vec<String> = (0..1000).map(|n| format!("short-{n}")).collect();
    for chunk in names.chunks(50) {
        // Each has its own tag, so that each causes a request.
        let create = chunk.iter().map(|name| {
            let spec = pod_spec(&[format!("{image}:{name}")]);
            cluster.create::<Pod>(pod(name, spec, json!({})))
        });
        futures::future::join_all(create).await;
    }
    eventually("many that are being decided", DEADLINE, || async {
        let waiting = scene.archaware.metric("archaware_pods_undecided{}").await;
        (waiting > 500.0).then_some(())
    })
    .await;
    for chunk in names.chunks(50) {
        futures::future::join_all(chunk.iter().map(|name| pods.delete(name, &NOW))).await;
    }
    idle(&scene.archaware).await;
    scene.ends_well().await;
}

#[tokio::test]
async fn a_namespace_deleted_in_the_middle() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let (cluster, registry) = (&scene.cluster, slow_registry().await);
    let name = format!("{}-gone", cluster.namespace);
    cluster
        .create_namespace(&name, json!({"archaware.dev/mode": "inspect"}))
        .await;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &name);
    for n in 0..50 {
        let spec = pod_spec(&[registry.image("app")]);
        let pod = serde_json::from_value(pod(&format!("gone-{n}"), spec, json!({}))).unwrap();
        pods.create(&Default::default(), &pod).await.unwrap();
    }
    eventually("a question to the registry", DEADLINE, || async {
        (!registry.seen().is_empty()).then_some(())
    })
    .await;
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(cluster.client.clone());
    namespaces
        .delete(&name, &DeleteParams::default())
        .await
        .unwrap();
    // Unbound pods are deleted at once; bound ones have no kubelet that ends them.
    eventually("an empty namespace", DEADLINE, || async {
        let _ = pods.delete_collection(&NOW, &ListParams::default()).await;
        pods.list(&ListParams::default())
            .await
            .ok()?
            .items
            .is_empty()
            .then_some(())
    })
    .await;
    idle(&scene.archaware).await;
    scene.ends_well().await;
}

/// A node with the same name is another machine: nothing of the old one applies.
#[tokio::test]
async fn a_node_replaced_by_one_of_another_architecture() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let cluster = &scene.cluster;
    cluster.create_node("machine", "amd64").await;
    cluster.wait_until_tainted().await;
    // The new node may have the old one's metadata, as after restoring a backup.
    let old = cluster.nodes().get("machine").await.unwrap();
    let annotations = json!({"metadata": {"annotations": old.metadata.annotations}, "spec": {"taints": old.spec.unwrap().taints}});
    for more in [json!({}), annotations] {
        cluster
            .nodes()
            .delete("machine", &DeleteParams::default())
            .await
            .unwrap();
        cluster.create_node_with("machine", "arm64", more).await;
        eventually("the taint of the new machine", DEADLINE, || async {
            let taints = taints(&cluster.nodes().get("machine").await.ok()?);
            let own: Vec<_> = taints
                .iter()
                .filter(|taint| taint.contains("kubernetes.io/arch"))
                .collect();
            (own == ["kubernetes.io/arch=arm64:NoSchedule"]).then_some(())
        })
        .await;
    }
    let mut spec = pod_spec(&[cluster.image("arm64")]);
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": "machine"});
    cluster.create::<Pod>(pod("there", spec, json!({}))).await;
    assert_eq!(cluster.wait_until_bound("there").await, "machine");
    cluster.pods().delete("there", &NOW).await.unwrap();
    // Another arm64 node than the one that the pods below are expected on.
    cluster
        .nodes()
        .delete("machine", &DeleteParams::default())
        .await
        .unwrap();
    scene.ends_well().await;
}

/// The answer about the old image comes after the pod has the new one.
#[tokio::test]
async fn an_image_that_was_replaced_decides_nothing() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let (cluster, registry) = (&scene.cluster, slow_registry().await);
    for (number, architecture) in ["amd64", "s390x"].into_iter().enumerate() {
        let name = format!("replaced-{number}");
        registry.add_tag("app", &name, &testimg::find(architecture));
        let image = format!("{}:{name}", registry.image("app"));
        cluster
            .create::<Pod>(pod(&name, pod_spec(&[image]), json!({})))
            .await;
        let path = format!("/manifests/{name}");
        eventually("a question about the old image", DEADLINE, || async {
            let seen = registry.seen();
            seen.iter()
                .any(|seen| seen.path.ends_with(&path))
                .then_some(())
        })
        .await;
        let image = cluster.image("arm64");
        let patch = json!([{"op": "replace", "path": "/spec/containers/0/image", "value": image}]);
        let patch = kube::api::Patch::<()>::Json(serde_json::from_value(patch).unwrap());
        let parameters = kube::api::PatchParams::default();
        let pods = cluster.pods();
        pods.patch(&name, &parameters, &patch).await.unwrap();
        assert_eq!(cluster.wait_until_bound(&name).await, "arm64");
        let pod = pods.get(&name).await.unwrap();
        assert_eq!(architectures_of(&pod), ["arm64".to_owned()].into());
    }
    scene.ends_well().await;
}
