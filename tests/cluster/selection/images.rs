//! Images that are selected by lists of images, on nodes that differ by their labels.

use super::*;

/// Nodes that a rule excludes do not count. Nodes whose taint a rule tolerates do.
#[tokio::test]
async fn rules_say_which_nodes_count() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let rules = "rules:\n- {name: slow, pods: speed=low, nodes: ['!example.com/cpu']}\n\
                 - {name: gpu, pods: speed=high, tolerations: [{key: example.com/gpu, operator: Exists}]}\n";
    let _archaware = Controller::start_with_webhook(&cluster, rules, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let own = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    for (speed, tag, node) in [("low", "any", "slow"), ("high", "gpu", "gpu")] {
        let mut pod = app(speed, "placeholder:latest", own.clone(), &json!({}));
        pod["metadata"]["labels"] = json!({"speed": speed});
        cluster.create::<Pod>(pod).await;
        assert_eq!(landed(&cluster, speed).await, is(tag, node));
    }
}

#[tokio::test]
async fn the_best_image_is_selected_and_its_pod_lands_where_it_fits() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let document = format!("{}:compatibility", registry.image("app"));
    let own = json!({OWN: document});
    let on = |node: &str| json!({"nodeSelector": {"kubernetes.io/hostname": node}});
    let tolerates = json!({"tolerations": [{"key": "example.com/gpu", "operator": "Exists"}]});
    // `arm` says that it is fast, but the fast image is for amd64; `gpu` is not tolerated.
    for (name, image, annotations, more, tag, node) in [
        (
            "best",
            "nowhere.invalid/app:1",
            &own,
            json!({}),
            "fast",
            "fast",
        ),
        (
            "again",
            "placeholder:latest",
            &own,
            json!({}),
            "fast",
            "fast",
        ),
        (
            "here",
            "placeholder:latest",
            &own,
            on("slow"),
            "any",
            "slow",
        ),
        ("there", "placeholder:latest", &own, on("arm"), "any", "arm"),
        (
            "gpu",
            "placeholder:latest",
            &own,
            tolerates.clone(),
            "gpu",
            "gpu",
        ),
    ] {
        let pod: Pod = cluster
            .create(app(name, image, annotations.clone(), &more))
            .await;
        assert_eq!(landed(&cluster, name).await, is(tag, node), "{pod:?}");
    }
    // Whatever the pod tolerates, the image has to run on its node: `arm` has the label, too.
    for (name, annotation, value) in [
        ("anywhere", "archaware.dev/mode", "any"),
        ("stated", "archaware.dev/architectures", "amd64,arm64"),
    ] {
        let mut annotations = own.clone();
        annotations[annotation] = json!(value);
        cluster
            .create::<Pod>(app(name, "placeholder:latest", annotations, &json!({})))
            .await;
        let pod = cluster.pods().get(name).await.unwrap();
        let affinity = json!(pod.spec.unwrap().affinity).to_string();
        assert!(affinity.contains(r#""values":["amd64"]"#), "{affinity}");
        assert_eq!(landed(&cluster, name).await, is("fast", "fast"));
    }
    // As users of ocifit-k8s write it.
    let mut pod = app(
        "ocifit",
        "placeholder:latest",
        json!({
            "oci.image.compatibilities.selection/image-ref": document,
        }),
        &json!({}),
    );
    pod["metadata"]["labels"] = json!({"oci.image.compatibilities.selection/enabled": "true"});
    cluster.create::<Pod>(pod).await;
    assert_eq!(landed(&cluster, "ocifit").await, is("fast", "fast"));
    // No selection is missed later.
    let selector = kube::api::ListParams::default().fields("reason=ImageNotSelected");
    let events = cluster.api::<k8s_openapi::api::core::v1::Event>();
    assert!(events.list(&selector).await.unwrap().items.is_empty());
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn a_replica_that_is_created_anew_may_get_another_image() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let own = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let mut template = app("x", "placeholder:latest", own.clone(), &json!({}));
    template["metadata"]["labels"] = json!({"app": "web"});
    let deployment = json!({"metadata": {"name": "web"}, "spec": {"replicas": 1,
        "selector": {"matchLabels": {"app": "web"}}, "template": {"metadata": {
            "labels": {"app": "web"}, "annotations": own}, "spec": template["spec"]}}});
    cluster.create::<Deployment>(deployment).await;
    let replica = |gone: Option<String>| {
        let cluster = &cluster;
        async move {
            let gone = &gone;
            eventually("a replica", DEADLINE, || async move {
                let selector = kube::api::ListParams::default().labels("app=web");
                let pods = cluster.pods().list(&selector).await.ok()?;
                let names = pods.items.into_iter().filter_map(|pod| pod.metadata.name);
                names.into_iter().find(|name| Some(name) != gone.as_ref())
            })
            .await
        }
    };
    let first = replica(None).await;
    assert_eq!(landed(&cluster, &first).await, is("fast", "fast"));
    let mut copy = json!(cluster.pods().get(&first).await.unwrap());
    cluster.kubectl(&["label", "node", "fast", &format!("{KEY}-")]);
    // Groups of nodes are as old as a second.
    let second = eventually("another image", DEADLINE, || async {
        let name = replica(None).await;
        cluster.kubectl(&[
            "delete",
            "pod",
            &name,
            "-n",
            &cluster.namespace,
            "--grace-period=0",
            "--force",
            "--ignore-not-found",
        ]);
        let next = replica(Some(name)).await;
        let image = image_of(&cluster.pods().get(&next).await.ok()?);
        image.ends_with(":any").then_some(next)
    })
    .await;
    assert_eq!(landed(&cluster, &second).await.0, "any");
    // So does a pod that is created from the YAML of the first one: what archaware changed comes
    // off.
    let metadata = &mut copy["metadata"];
    *metadata = json!({"name": "copy", "annotations": metadata["annotations"]});
    copy["spec"]["nodeName"].take();
    copy["status"].take();
    let copy: Pod = cluster.create(copy).await;
    assert_eq!(landed(&cluster, "copy").await.0, "any", "{copy:?}");
    assert!(!json!(copy).to_string().contains(":fast"), "{copy:?}");
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn where_nothing_fits_it_is_told_or_refused() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    for node in ["fast", "slow", "arm"] {
        cluster.kubectl(&[
            "label",
            "node",
            node,
            "example.com/old=yes",
            &format!("{KEY}-"),
        ]);
    }
    let annotations = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let own = format!("{}:any", registry.image("app"));
    let keep = Controller::start_with_webhook(&cluster, "", "budget: 2s").await;
    cluster.wait_until_tainted().await;
    let file = cluster.dir().join("pod.json");
    let apply = |name: &str, image: &str, annotations: &Value| {
        let mut manifest = app(name, image, annotations.clone(), &json!({}));
        manifest["apiVersion"] = json!("v1");
        manifest["kind"] = json!("Pod");
        std::fs::write(&file, manifest.to_string()).unwrap();
        cluster.try_kubectl(&[
            "create",
            "-n",
            &cluster.namespace,
            "-f",
            file.to_str().unwrap(),
        ])
    };
    let (created, _, said) = apply("kept", &own, &annotations);
    assert!(created, "{said}");
    let expected = "fits the 3 nodes that can take the pod";
    assert!(said.contains(expected), "{said}");
    assert!(said.contains("rule 1 fails on 3"), "{said}");
    cluster.wait_until_bound("kept").await;
    assert_eq!(image_of(&cluster.pods().get("kept").await.unwrap()), own);
    // A request that cannot be carried out is told, too.
    let wrong = json!({"archaware.dev/select-image.other": "x"});
    let (created, _, said) = apply("wrong", &own, &wrong);
    assert!(
        created && said.contains("the pod has no container \"other\""),
        "{said}"
    );
    assert_eq!(keep.stop().await, 0);
    let deny =
        Controller::start_with_webhook(&cluster, "selection: {onNoMatch: deny}\n", "budget: 2s")
            .await;
    let (created, _, said) = apply("denied", &own, &annotations);
    assert!(!created && said.contains(expected), "{said}");
    assert!(said.contains(":gpu: rule 1 fails on 3"), "{said}");
    assert_eq!(deny.stop().await, 0);
}

/// The document is read while the pod waits behind its gate, and a pod without gate is left as it
/// is.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gated_pod_gets_its_image_later() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let annotations = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let archaware =
        Controller::start_with_webhook(&cluster, "", "onMiss: gate, budget: 100ms").await;
    cluster.wait_until_tainted().await;
    registry.script("/", Script::Slow(std::time::Duration::from_millis(800)));
    let terms = json!([
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["fast", "arm"]}]},
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["slow"]}]},
    ]);
    let affinity = json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
    let pod: Pod = cluster
        .create(app(
            "late",
            "placeholder:latest",
            annotations.clone(),
            &affinity,
        ))
        .await;
    assert_eq!(
        pod.spec.unwrap().scheduling_gates.unwrap_or_default().len(),
        1
    );
    assert_eq!(landed(&cluster, "late").await, is("fast", "fast"));
    assert_eq!(archaware.stop().await, 0);
    // What would be done is shown.
    registry.unscript();
    let mut gated = app(
        "gated",
        "placeholder:latest",
        annotations.clone(),
        &json!({}),
    );
    gated["spec"]["schedulingGates"] = json!([{"name": "example.com/quota"}]);
    cluster.kubectl(&[
        "label",
        "namespace",
        &cluster.namespace,
        "archaware.dev/admission=disabled",
        "--overwrite",
    ]);
    cluster.create::<Pod>(gated).await;
    let planned = tokio::task::block_in_place(|| cluster.archaware(&["plan", "-o", "json"]).1);
    let image = format!(
        "tolerates amd64; container app gets {}:fast",
        registry.image("app")
    );
    assert!(planned.contains(&image), "{planned}");
    cluster.kubectl(&["delete", "pod", "gated", "-n", &cluster.namespace]);
    cluster.kubectl(&[
        "label",
        "namespace",
        &cluster.namespace,
        "archaware.dev/admission-",
    ]);
    // Without the webhook its image is not changed, and it is said why.
    let without = Controller::start(&cluster, "");
    let own = format!("{}:any", registry.image("app"));
    cluster
        .create::<Pod>(app(
            "without",
            &own,
            annotations,
            &json!({"nodeSelector": {"nowhere": "yes"}}),
        ))
        .await;
    let note = cluster.wait_for_event("without", "ImageNotSelected").await;
    assert!(
        note.contains("keeps its image: when the pod was created"),
        "{note}"
    );
    assert_eq!(image_of(&cluster.pods().get("without").await.unwrap()), own);
    assert_eq!(without.stop().await, 0);
}

/// Each pod of a `DaemonSet` gets the image that fits its node.
#[tokio::test]
async fn each_daemon_gets_the_image_for_its_node() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let annotations = json!({OWN: format!("{}:compatibility", registry.image("app"))});
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let template = app("x", "placeholder:latest", json!({}), &json!({}));
    let set = json!({"metadata": {"name": "agent"}, "spec": {"selector": {"matchLabels": {"app": "agent"}},
        "template": {"metadata": {"labels": {"app": "agent"}, "annotations": annotations}, "spec": template["spec"]}}});
    cluster.create::<DaemonSet>(set).await;
    let found = eventually("three daemons", DEADLINE, || async {
        let pods = cluster.pods().list(&Default::default()).await.ok()?;
        let mut all = Vec::new();
        for pod in pods {
            let node = pod.spec.as_ref()?.node_name.clone()?;
            all.push((node, image_of(&pod).rsplit(':').next()?.to_owned()));
        }
        all.sort();
        (all.len() == 3).then_some(all)
    })
    .await;
    let expected = [("arm", "any"), ("fast", "fast"), ("slow", "any")];
    let expected = expected.map(|(node, tag)| (node.to_owned(), tag.to_owned()));
    assert_eq!(found, expected);
    assert_eq!(archaware.stop().await, 0);
}

/// Another webhook gives the selected image the name of a mirror: the API server asks again, and
/// both have their way.
#[tokio::test]
async fn another_webhook_may_rename_the_selected_image() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    registry.add_tag("mirror", "fast", &testimg::find("amd64"));
    nodes(&cluster).await;
    let mirrored = format!("{}:fast", registry.image("mirror"));
    let new = mirrored.clone();
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]});
    // It is called after archaware: by name.
    let mirror = RecordingWebhook::start(&cluster, "zz-mirror", rule, move |pod| {
        let image = pod["spec"]["containers"][0]["image"]
            .as_str()
            .unwrap_or_default();
        if image.ends_with("/app:fast") {
            json!([{"op": "replace", "path": "/spec/containers/0/image", "value": new}])
        } else {
            json!([])
        }
    })
    .await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate, budget: 2s").await;
    cluster.wait_until_tainted().await;
    let document = format!("{}:compatibility", registry.image("app"));
    let own = app(
        "own",
        "placeholder:latest",
        json!({OWN: document}),
        &json!({}),
    );
    let reference = json!({"oci.image.compatibilities.selection/image-ref": document});
    let mut ocifit = app("ocifit", "placeholder:latest", reference, &json!({}));
    ocifit["metadata"]["labels"] = json!({"oci.image.compatibilities.selection/enabled": "true"});
    for pod in [own, ocifit] {
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        cluster.create::<Pod>(pod).await;
        let node = cluster.wait_until_bound(&name).await;
        let pod = cluster.pods().get(&name).await.unwrap();
        assert_eq!((&*node, image_of(&pod)), ("fast", mirrored.clone()));
        let added = &pod.metadata.annotations.as_ref().unwrap()["archaware.dev/added"];
        assert!(added.contains(&format!("\"to\":\"{mirrored}\"")), "{added}");
        let affinity = json!(pod.spec.unwrap().affinity).to_string();
        assert!(affinity.contains(KEY), "{affinity}");
    }
    assert!(mirror.seen().len() >= 2);
    assert_eq!(archaware.stop().await, 0);
}

/// The image has to run on each node that the pod can get: not on those of unknown variant with
/// `require`, and on all that the pod names itself.
#[tokio::test]
async fn images_run_on_all_nodes_of_the_choice() {
    let cluster = TestCluster::take().await;
    let registry = FakeRegistry::start().await.unwrap();
    for (tag, image) in [("v3", "amd64-v3"), ("amd64", "amd64"), ("any", "multi")] {
        registry.add_tag("app", tag, &testimg::find(image));
    }
    let image = |tag: &str| format!("{}:{tag}", registry.image("app"));
    for (document, best) in [("level", "v3"), ("architecture", "amd64")] {
        let entries = json!([{"tag": image(best), "weight": 9}, {"tag": image("any")}]);
        let text = json!({"version": "v1alpha1", "compatibilities": entries}).to_string();
        let artifact = Image::artifact("application/vnd.test", OCIFIT, &text);
        registry.add_tag("app", document, &artifact);
    }
    nodes(&cluster).await;
    let ask = async |name: &str, document: &str, more: &Value| {
        let own = json!({OWN: image(document)});
        cluster
            .create::<Pod>(app(name, "placeholder:latest", own, more))
            .await;
        landed(&cluster, name).await.0
    };
    let on = |name: &str| json!({"nodeSelector": {"kubernetes.io/hostname": name}});
    let named = |names: &[&str]| {
        let field = |name: &&str| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]});
        let terms: Vec<_> = names.iter().map(field).collect();
        json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}})
    };
    for (unknown, expected) in [("prefer", "v3"), ("require", "any")] {
        let config = format!("variants: {unknown}\n");
        let archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
        cluster.wait_until_tainted().await;
        assert_eq!(ask(unknown, "level", &on("slow")).await, expected);
        if unknown == "prefer" {
            for (name, nodes, expected) in [
                ("one", &["fast"][..], "amd64"),
                ("both", &["fast", "arm"], "any"),
            ] {
                let found = ask(name, "architecture", &named(nodes)).await;
                assert_eq!(found, expected, "{nodes:?}");
            }
        }
        assert_eq!(archaware.stop().await, 0);
    }
}
