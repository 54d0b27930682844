//! Faults of the API server, of etcd, and of the network in between.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use testimg::{FakeRegistry, Script};

use super::*;

/// This many pods with a scheduling gate.
async fn held_pods(cluster: &TestCluster, count: usize) -> Vec<String> {
    let names: Vec<String> = (0..count).map(|n| format!("held-{n}")).collect();
    for chunk in names.chunks(20) {
        let create = chunk
            .iter()
            .map(|name| cluster.create_gated_pod(name, "arm64"));
        futures::future::join_all(create).await;
    }
    names
}

/// Whether each of them has exactly the toleration for its image.
async fn are_decided(cluster: &TestCluster, names: &[String]) -> bool {
    for name in names {
        let pod = cluster.pods().get(name).await.unwrap();
        if architectures_of(&pod) != ["arm64".to_owned()].into() {
            return false;
        }
    }
    true
}

#[tokio::test]
async fn api_server_killed_and_restarted() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    scene.cluster.signal_component("-KILL", "kube-apiserver");
    scene.archaware.wait_for_log("watch interrupted").await;
    scene.cluster.restart_components();
    scene.ends_well().await;
}

#[tokio::test]
async fn api_server_stopped_for_a_minute() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    scene.cluster.signal_component("-STOP", "kube-apiserver");
    scene.archaware.wait_until_leading(false).await;
    let (status, says) = scene.archaware.http("/readyz").await;
    assert_eq!(status, 503);
    assert!(says.contains("[-] the API server"), "{says}");
    // The fault itself takes a minute.
    tokio::time::sleep(Duration::from_mins(1)).await;
    scene.cluster.signal_component("-CONT", "kube-apiserver");
    scene.ends_well().await;
}

#[tokio::test]
async fn etcd_killed_and_restarted() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    scene.cluster.signal_component("-KILL", "etcd");
    // Half of the Lease's duration: renewals fail meanwhile.
    scene
        .archaware
        .wait_for_log("cannot acquire or renew the Lease")
        .await;
    scene.cluster.restart_components();
    // Some versions of the API server exit without etcd; whatever has ended is restarted.
    eventually("an API server", DEADLINE, || async {
        scene.cluster.restart_components();
        scene.cluster.nodes().get("amd64").await.ok()
    })
    .await;
    scene.ends_well().await;
}

/// The watch cannot resume: everything is listed again, and nothing is patched.
#[tokio::test]
async fn watch_history_compacted() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let Scene {
        cluster, archaware, ..
    } = &scene;
    let names = held_pods(cluster, 200).await;
    eventually("decisions on all", DEADLINE, || async {
        are_decided(cluster, &names).await.then_some(())
    })
    .await;
    let before = archaware.patches().await;
    archaware.signal("-STOP");
    // Changes while archaware is stopped, whose history is gone.
    cluster.signal_component("-KILL", "kube-apiserver");
    cluster.restart_components();
    for round in 0..3 {
        for name in names.iter().take(50) {
            let label = json!({"metadata": {"labels": {"round": round.to_string()}}});
            let patch = kube::api::Patch::Merge(label);
            cluster
                .pods()
                .patch(name, &Default::default(), &patch)
                .await
                .unwrap();
        }
    }
    cluster.compact().await;
    // The new API server's watch cache begins at the current revision.
    cluster.signal_component("-KILL", "kube-apiserver");
    cluster.restart_components();
    archaware.signal("-CONT");
    archaware.wait_for_log("too old resource version").await;
    let paged = archaware.log().contains("reading them in pages");
    assert!(!paged, "this API server streams lists");
    cluster.create_pod("witness", &["arm64"]).await;
    assert_eq!(cluster.wait_until_bound("witness").await, "arm64");
    // The scheduler may be faster than the answer to the patch.
    eventually("the patch of the witness", DEADLINE, || async {
        (archaware.patches().await > before).then_some(())
    })
    .await;
    assert_eq!(
        archaware.patches().await,
        before + 1,
        "the witness, and nothing else"
    );
    scene.ends_well().await;
}

/// Forwards connections to the API server; each of the first `cuts` is reset in the middle of a
/// response.
async fn cutting_proxy(server: String, cuts: Arc<AtomicUsize>) -> String {
    const ENOUGH: usize = 40_000;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, cuts) = (server.clone(), cuts.clone());
            tokio::spawn(async move {
                let upstream = TcpStream::connect(server).await.unwrap();
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = upstream.into_split();
                let up = tokio::spawn(async move {
                    let _ = tokio::io::copy(&mut from_client, &mut to_server).await;
                });
                let (mut buffer, mut passed) = (vec![0; 16 << 10], 0);
                while let Ok(read) = from_server.read(&mut buffer).await {
                    if read == 0 || to_client.write_all(&buffer[..read]).await.is_err() {
                        break;
                    }
                    passed += read;
                    let cut = |left: usize| left.checked_sub(1);
                    if passed > ENOUGH
                        && cuts
                            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, cut)
                            .is_ok()
                    {
                        break;
                    }
                }
                // Both directions end with their tasks, in the middle of a TLS record.
                up.abort();
            });
        }
    });
    address
}

#[tokio::test]
async fn connection_reset_in_mid_list() {
    let cluster = TestCluster::take().await;
    let names = held_pods(&cluster, 300).await;
    let kubeconfig = std::fs::read_to_string(cluster.service_account("archaware")).unwrap();
    let (_, rest) = kubeconfig.split_once("https://").unwrap();
    let server = rest.split('"').next().unwrap().to_owned();
    let cuts = Arc::new(AtomicUsize::new(3));
    let proxy = cutting_proxy(server.clone(), cuts.clone()).await;
    let path = cluster.dir().join("kubeconfig/proxied");
    std::fs::write(&path, kubeconfig.replace(&server, &proxy)).unwrap();
    let scene = Scene::set(cluster, |_| Controller::start_as(&path, "")).await;
    assert_eq!(cuts.load(Ordering::SeqCst), 0, "the cuts were made");
    scene.archaware.wait_for_log("eof in poll").await;
    assert!(
        are_decided(&scene.cluster, &names).await,
        "before nodes are tainted"
    );
    scene.ends_well().await;
}

#[tokio::test]
async fn an_api_server_that_cannot_stream_lists_is_read_in_pages() {
    let cluster = TestCluster::start_with("API_ARGS", "--feature-gates=WatchList=false").await;
    let names = held_pods(&cluster, 300).await;
    let scene = Scene::set(cluster, |cluster| Controller::start(cluster, "")).await;
    assert!(scene.archaware.log().contains("reading them in pages"));
    assert!(
        are_decided(&scene.cluster, &names).await,
        "before nodes are tainted"
    );
    scene.ends_well().await;
}

/// A tenant stores pods that are as large as the API server accepts. A whole page of them does not
/// fit into the memory.
#[tokio::test]
async fn pages_of_large_objects_are_read_in_small_pages() {
    const PODS: usize = 30;
    const SIZE: usize = 1 << 20;
    let cluster = TestCluster::start_with("API_ARGS", "--feature-gates=WatchList=false").await;
    let names: Vec<String> = (0..PODS).map(|n| format!("large-{n}")).collect();
    for name in &names {
        let mut spec = pod_spec(&[cluster.image("arm64")]);
        spec["schedulingGates"] = json!([{"name": "example.com/hold"}]);
        spec["containers"][0]["env"] = json!([{"name": "LARGE", "value": "x".repeat(SIZE)}]);
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
    }
    let scene = Scene::set(cluster, |cluster| Controller::start(cluster, "")).await;
    let log = scene.archaware.log();
    assert!(log.contains("reading smaller pages"), "{log}");
    assert!(
        are_decided(&scene.cluster, &names).await,
        "before nodes are tainted"
    );
    let peak = scene.archaware.peak_memory();
    println!("{PODS} pods of 1 MiB: at most {peak:.0} MiB");
    assert!(peak < 160.0, "{peak} MiB");
    assert_eq!(scene.archaware.stop().await, 0);
}

/// A pod whose image takes a while, so that it is patched when the API server is stopped.
async fn patch_under_way(scene: &Scene) -> FakeRegistry {
    let registry = FakeRegistry::start().await.unwrap();
    registry.add("app", &testimg::find("arm64"));
    registry.script("/", Script::Slow(Duration::from_millis(700)));
    let known = "archaware_image_resolutions_total{source=\"registry\",result=\"Resolved\"}";
    let before = scene.archaware.metric(known).await;
    let spec = pod_spec(&[registry.image("app")]);
    let pod = pod("under-way", spec, json!({}));
    scene.cluster.create::<Pod>(pod).await;
    eventually("a question to the registry", DEADLINE, || async {
        (!registry.seen().is_empty()).then_some(())
    })
    .await;
    scene.cluster.signal_component("-STOP", "kube-apiserver");
    eventually("the image", DEADLINE, || async {
        (scene.archaware.metric(known).await > before + 0.5).then_some(())
    })
    .await;
    registry
}

#[tokio::test]
async fn sigterm_waits_for_a_patch_under_way() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let _registry = patch_under_way(&scene).await;
    scene.archaware.signal("-TERM");
    scene.archaware.wait_for_log("shutting down").await;
    scene.cluster.signal_component("-CONT", "kube-apiserver");
    let Scene {
        cluster,
        mut archaware,
        ..
    } = scene;
    assert_eq!(archaware.exited().await, 0);
    assert_eq!(cluster.wait_until_bound("under-way").await, "arm64");
}

#[tokio::test]
async fn sigterm_does_not_wait_for_an_api_server_that_hangs() {
    let Some(scene) = Scene::begin().await else {
        return;
    };
    let _registry = patch_under_way(&scene).await;
    let Scene {
        cluster, archaware, ..
    } = scene;
    let told = std::time::Instant::now();
    let status = archaware.stop().await;
    let took = told.elapsed();
    cluster.signal_component("-CONT", "kube-apiserver");
    assert_eq!(status, 0);
    assert!(took < Duration::from_secs(10), "{took:?}");
}
