//! What `explain` says of the images that could be selected.

use super::*;

/// Each image of a document, and why it is passed over: before the pod is created, and as if it
/// were created anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn explain_shows_the_candidates() {
    let cluster = TestCluster::take().await;
    let registry = registry().await;
    nodes(&cluster).await;
    let document = format!("{}:compatibility", registry.image("app"));
    let mut pod = app(
        "p",
        "placeholder:latest",
        json!({OWN: document}),
        &json!({}),
    );
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pod.json");
    std::fs::write(&file, pod.to_string()).unwrap();
    let file = file.to_str().unwrap();
    let (status, output, error) = cluster.archaware(&["explain", "-f", file, "-o", "json"]);
    assert_eq!(status, 0, "{error}");
    let explained: Value = serde_json::from_str(&output).unwrap();
    let selection = &explained[0]["selections"][0];
    assert_eq!(selection["container"], "app");
    assert_eq!(
        selection["nodes"], 3,
        "the pod does not tolerate the taint of the fourth"
    );
    let found = |selection: &Value| -> Vec<_> {
        let candidates = selection["candidates"].as_array().unwrap().iter();
        let found = candidates.map(|one| {
            let tag = one["tag"].as_str().unwrap().rsplit(':').next().unwrap();
            let outcome = one["outcome"].as_str().unwrap();
            (tag.to_owned(), one["chosen"] == true, outcome.to_owned())
        });
        found.collect()
    };
    let candidates = [
        (
            "any",
            false,
            "fits, but an earlier entry or an entry of a higher weight also fits",
        ),
        (
            "gpu",
            false,
            "rule 1 fails on 3 nodes (example.com/gpu > 1, but it is missing)",
        ),
        ("fast", true, "selected"),
    ];
    let candidates =
        candidates.map(|(tag, chosen, outcome)| (tag.to_owned(), chosen, outcome.to_owned()));
    assert_eq!(found(selection), candidates);
    assert_eq!(
        explained[0]["images"][0]["image"],
        format!("{}:fast", registry.image("app"))
    );
    let (_, text, _) = cluster.archaware(&["explain", "-f", file]);
    assert!(text.contains("rule 1 fails on 3 nodes"), "{text}");
    // Only the node that the image fits.
    let groups = explained[0]["nodes"].as_array().unwrap().iter();
    let fitting: Vec<_> = groups.filter(|group| group["fits"] == "yes").collect();
    assert_eq!(fitting.len(), 1, "{output}");
    assert_eq!(fitting[0]["examples"], json!(["fast"]));
    // The same for existing pods: one without a selected image, and one with it.
    let explained = |name: &str| {
        let (status, output, error) =
            cluster.archaware(&["explain", name, "-n", &cluster.namespace, "-o", "json"]);
        assert_eq!(status, 0, "{error}");
        let explained: Value = serde_json::from_str(&output).unwrap();
        found(&explained[0]["selections"][0])
    };
    let image = "placeholder:latest";
    let unselected = app("unselected", image, json!({OWN: document}), &json!({}));
    cluster.create::<Pod>(unselected).await;
    assert_eq!(explained("unselected"), candidates);
    let _archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    cluster.create::<Pod>(pod).await;
    assert_eq!(landed(&cluster, "p").await, is("fast", "fast"));
    assert_eq!(explained("p"), candidates);
}
