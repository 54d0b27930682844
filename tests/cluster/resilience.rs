//! What clusters do to controllers.

use kube::api::DeleteParams;

use super::*;

#[tokio::test]
async fn an_api_server_that_restarts_is_survived() {
    let bed = Bed::take().await;
    if bed.is_existing() {
        eprintln!("not run: the API server of an existing cluster is not ours to kill");
        return;
    }
    bed.three_nodes().await;
    let archaware = Controller::start(&bed, "");
    bed.tainted().await;
    bed.kill_api_server();
    archaware.logged("watch interrupted").await;
    bed.restart_api_server();
    bed.create_pod("after", &["arm64"]).await;
    assert_eq!(bed.bound("after").await, "arm64");
    bed.node("late", "amd64").await;
    bed.tainted().await;
    assert_eq!(archaware.http("/readyz").await.0, 200);
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn pods_that_are_deleted_while_being_decided_are_forgotten() {
    let bed = Bed::take().await;
    bed.three_nodes().await;
    let registry = testimg::FakeRegistry::start().await.unwrap();
    registry.script(
        "/",
        testimg::Script::Slow(std::time::Duration::from_millis(300)),
    );
    registry.add("app", &testimg::find("arm64"));
    let archaware = Controller::start(&bed, "");
    bed.tainted().await;
    let names: Vec<String> = (0..50).map(|n| format!("short-{n}")).collect();
    for name in &names {
        let spec = pod_spec(&[registry.image("app")]);
        bed.create::<k8s_openapi::api::core::v1::Pod>(pod(name, spec, serde_json::json!({})))
            .await;
        let now = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        bed.pods().delete(name, &now).await.unwrap();
    }
    bed.create_pod("witness", &["arm64"]).await;
    bed.bound("witness").await;
    eventually("an idle queue", DEADLINE, || async {
        let depth = archaware
            .metric("archaware_queue_depth{controller=\"pods\"}")
            .await;
        let watched = archaware.metric("archaware_pods_watched{}").await;
        (depth < 0.5 && watched < 0.5).then_some(())
    })
    .await;
    assert_eq!(archaware.stop().await, 0);
}

#[tokio::test]
async fn sigterm_ends_at_once_even_while_a_registry_hangs() {
    let bed = Bed::take().await;
    bed.three_nodes().await;
    let registry = testimg::FakeRegistry::start().await.unwrap();
    registry.script("/", testimg::Script::Hang);
    let archaware = Controller::start(&bed, "");
    bed.tainted().await;
    let spec = pod_spec(&[registry.image("app")]);
    bed.create::<k8s_openapi::api::core::v1::Pod>(pod("hung", spec, serde_json::json!({})))
        .await;
    eventually("a request to the registry", DEADLINE, || async {
        (!registry.seen().is_empty()).then_some(())
    })
    .await;
    let started = std::time::Instant::now();
    assert_eq!(archaware.stop().await, 0);
    assert!(
        started.elapsed() < std::time::Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
}

#[tokio::test]
async fn an_api_server_that_cannot_stream_lists_is_read_in_pages() {
    let bed = Bed::start_with("API_ARGS", "--feature-gates=WatchList=false").await;
    bed.three_nodes().await;
    let names: Vec<String> = (0..300).map(|n| format!("paged-{n}")).collect();
    for chunk in names.chunks(50) {
        futures::future::join_all(chunk.iter().map(|name| bed.create_gated_pod(name, "arm64")))
            .await;
    }
    let archaware = Controller::start(&bed, "");
    bed.tainted().await;
    assert!(archaware.log().contains("reading them in pages"));
    let pods = bed.pods().list(&Default::default()).await.unwrap();
    assert_eq!(
        pods.iter()
            .filter(|pod| !architectures_of(pod).is_empty())
            .count(),
        names.len()
    );
    assert_eq!(archaware.stop().await, 0);
}
