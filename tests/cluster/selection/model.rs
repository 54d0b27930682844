//! Images that a model selects.

use super::*;

/// A server chooses by a model. If it fails, the rules of the document decide, or nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_model_may_choose() {
    const TYPE: &str = "node.kubernetes.io/instance-type";
    let cluster = TestCluster::take().await;
    let (registry, predictor) = (registry().await, FakeRegistry::start().await.unwrap());
    nodes(&cluster).await;
    for (node, name) in [("fast", "m7i"), ("slow", "m7i"), ("arm", "m7g")] {
        cluster.kubectl(&["label", "node", node, &format!("{TYPE}={name}")]);
    }
    let image = |tag: &str| format!("{}:{tag}", registry.image("app"));
    let models = json!({"compatibilities": [{"tag": "cost", "rules": [{"matchModel": {"model": {
        "type": "sklearn", "direction": "minimize", "name": "price", "filename": "price.pkl",
        "platforms": {"amd64": image("fast"), "arm64": image("any")},
    }}}]}]});
    let layer = "application/vnd.oci.image.model-compatibilities.v1+json";
    let artifact = Image::artifact("application/vnd.test", layer, &models.to_string());
    registry.add_tag("app", "models", &artifact);
    let answer = json!({"selected_instance": {}, "instance": "m7g", "arch": "arm64", "score": 0.1,
        "instance_index": 0, "instance-selector": TYPE});
    predictor.script("/predict", Script::OtherContent(answer.to_string().into()));
    let url = format!(
        "selection: {{predictor: {{url: \"http://{}/predict\"}}}}\n",
        predictor.address()
    );
    let archaware = Controller::start_with_webhook(&cluster, &url, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let annotations = json!({OWN: image("models")});
    cluster
        .create::<Pod>(app(
            "chosen",
            &image("gpu"),
            annotations.clone(),
            &json!({}),
        ))
        .await;
    assert_eq!(landed(&cluster, "chosen").await, is("any", "arm"));
    assert_eq!(predictor.count("POST", "/predict"), 1);
    assert_eq!(archaware.stop().await, 0);
    let config = cluster.dir().join("model.yaml");
    let text = format!("apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n{url}");
    std::fs::write(&config, text).unwrap();
    let explain = [
        "explain",
        "pod/chosen",
        "-o",
        "json",
        "-n",
        &cluster.namespace,
    ];
    let config = ["--config", config.to_str().unwrap()];
    let (status, output, error) = cluster.archaware(&[&explain[..], &config].concat());
    assert_eq!(status, 0, "{error}");
    let explained: Value = serde_json::from_str(&output).unwrap();
    let candidates = &explained[0]["selections"][0]["candidates"];
    assert!(candidates.is_array(), "{output}");
    let [fast, any] = ["fast", "any"].map(|tag| {
        let mut all = candidates.as_array().unwrap().iter();
        all.find(|one| one["tag"] == image(tag)).unwrap()
    });
    assert_eq!(
        (&fast["chosen"], &any["chosen"]),
        (&json!(false), &json!(true))
    );
    let outcome = any["outcome"].as_str().unwrap();
    assert!(outcome.contains(&format!("{TYPE}=m7g")), "{outcome}");
    // Another process has no answer in memory.
    predictor.unscript();
    predictor.script("/predict", Script::Status(500, Vec::new()));
    let archaware = Controller::start_with_webhook(&cluster, &url, "onMiss: gate").await;
    cluster
        .create::<Pod>(app("kept", &image("gpu"), annotations, &json!({})))
        .await;
    cluster.wait_until_bound("kept").await;
    assert_eq!(
        image_of(&cluster.pods().get("kept").await.unwrap()),
        image("gpu")
    );
    archaware.wait_for_log("selection.predictor failed").await;
    // Where there are rules, too, they decide then.
    let fast = json!([{"matchFeatures": [{"matchExpressions": [{"key": KEY, "op": "In", "value": ["fast"]}]}]}]);
    let rules =
        json!({"version": "v1alpha1", "compatibilities": [{"tag": image("fast"), "rules": fast}]});
    let both = artifact.with_layer(OCIFIT, &rules.to_string());
    registry.add_tag("app", "both", &both);
    let annotations = json!({OWN: image("both")});
    cluster
        .create::<Pod>(app("ruled", &image("gpu"), annotations, &json!({})))
        .await;
    assert_eq!(landed(&cluster, "ruled").await, is("fast", "fast"));
    assert_eq!(archaware.stop().await, 0);
    // It chooses by a label that it is told because the configuration names it.
    let answer = json!({"instance": "fast", "arch": "arm64", "instance-selector": KEY});
    predictor.unscript();
    predictor.script("/predict", Script::OtherContent(answer.to_string().into()));
    for (labels, expected) in [("[]", "gpu"), ("[example.com/]", "any")] {
        let config = url.replace("}}", &format!(", labels: {labels}}}}}"));
        let archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
        let name = format!("labels-{expected}");
        let annotations = json!({OWN: image("models")});
        cluster
            .create::<Pod>(app(&name, &image("gpu"), annotations, &json!({})))
            .await;
        assert_eq!(landed(&cluster, &name).await.0, expected, "{labels}");
        assert_eq!(archaware.stop().await, 0);
    }
}
