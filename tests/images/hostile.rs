//! One tenant's images do not stop those of others.

use std::{collections::BTreeMap, sync::Arc};

use archaware::{
    cluster::{
        api::ApiClient,
        cluster_nodes::ClusterNodes,
        objects::{Namespace, PodSpec},
    },
    config::Config,
    evaluate::{Evaluator, KnownKeys, Stage, Subject, pull_secrets::PullSecrets},
    image::{Reason, credentials::Credential},
    sources::sources,
};
use testimg::{Auth, Script};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::*;

/// Thousands of entries that all mean the same registry, as one Secret can hold.
#[tokio::test]
async fn few_of_many_passwords_are_shown_to_a_registry() {
    let registry = registry().await;
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let entries = (0..1000).map(|number| {
        let key = format!("https://{}/?{number}", registry.address());
        (
            key,
            Credential::password("user".into(), format!("guess-{number}").into()),
        )
    });
    let error = resolve_as(&resolver(), &registry.image("app"), &Keyring::new(entries))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Reason::Denied);
    let shown = registry
        .seen()
        .iter()
        .filter(|seen| seen.authorization.is_some())
        .count();
    assert_eq!(shown, 16);
}

/// A pod may have hundreds of images: few of them are asked for at once, so that others of its
/// tenant get their turn.
#[tokio::test]
async fn few_images_of_one_pod_are_asked_for_at_once() {
    let (hanging, healthy) = (registry().await, registry().await);
    hanging.script("/v2/", Script::Hang);
    healthy.add("app", &testimg::find("multi"));
    let mut settings = settings();
    settings.registry.per_host = 1000;
    let (resolver, config) = (resolver_with(settings), Arc::new(Config::default()));
    let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let api = ApiClient::new(kube::Client::try_from(nowhere).unwrap());
    let nodes = ClusterNodes::default();
    let evaluator = Evaluator {
        resolver: resolver.clone(),
        pull_secrets: PullSecrets::new(api),
        policy: Arc::new((&*config).into()),
        keys: KnownKeys::new(&*config),
        sources: sources(&config.selection, &nodes).unwrap(),
        nodes,
        explains: false,
        config,
    };
    let images = (0..200)
        .map(|number| serde_json::json!({ "image": hanging.image(&format!("app:{number}")) }));
    let spec = serde_json::json!({ "containers": images.collect::<Vec<_>>() });
    let spec: PodSpec = serde_json::from_value(spec).unwrap();
    let evaluating = tokio::spawn(async move {
        let subject = Subject {
            spec: &spec,
            annotations: &BTreeMap::new(),
            labels: &BTreeMap::new(),
            namespace: "greedy",
            stage: Stage::Pod,
            decided_by_policy: None,
        };
        let _ = evaluator.evaluate(subject, &Namespace::default()).await;
    });
    while hanging.seen().len() < 16 {
        assert!(
            !evaluating.is_finished(),
            "{} were asked for",
            hanging.seen().len()
        );
        tokio::task::yield_now().await;
    }
    // Two round trips later there are no more.
    let (image, keyring) = (healthy.image("app"), Keyring::default());
    let witness = resolve_for(&resolver, &image, &keyring, "greedy").await;
    assert!(witness.is_ok());
    assert_eq!(hanging.seen().len(), 16);
    evaluating.abort();
}

/// The images of one tenant hang; those of others are resolved meanwhile, even at the same
/// registry.
#[tokio::test]
async fn a_tenant_whose_images_hang_holds_up_nobody() {
    let (hanging, healthy) = (registry().await, registry().await);
    hanging.script("/v2/", Script::Hang);
    healthy.add("app", &testimg::find("multi"));
    let mut settings = settings();
    settings.registry.per_host = 1000;
    let resolver = resolver_with(settings);
    let tasks: Vec<_> = (0..500)
        .map(|number| {
            let (resolver, image) = (resolver.clone(), hanging.image(&format!("app:{number}")));
            tokio::spawn(async move {
                resolve_for(&resolver, &image, &Keyring::default(), "greedy")
                    .await
                    .map(drop)
            })
        })
        .collect();
    while hanging.seen().len() < 64 {
        tokio::task::yield_now().await;
    }
    let started = std::time::Instant::now();
    resolve_for(
        &resolver,
        &healthy.image("app"),
        &Keyring::default(),
        "other",
    )
    .await
    .unwrap();
    assert!(started.elapsed() < TIMEOUT / 2, "{:?}", started.elapsed());
    assert_eq!(hanging.seen().len(), 64, "at most 64 images of a tenant");
    for task in tasks {
        task.abort();
    }
}

/// Pods with images that are known are decided although their registry hangs for new ones.
#[tokio::test]
async fn a_known_private_image_waits_for_nothing() {
    let registry = registry().await;
    registry.add("app", &testimg::find("multi"));
    registry.require(Auth::Basic("user".into(), "secret".into()));
    let (resolver, known) = (resolver(), registry.image("app"));
    let keyring = credentials::keyring(&registry.address(), "user", "secret");
    resolve_as(&resolver, &known, &keyring).await.unwrap();
    registry.script("/v2/", Script::Hang);
    let tasks: Vec<_> = (0..100)
        .map(|number| {
            let (resolver, keyring) = (resolver.clone(), keyring.clone());
            let image = registry.image(&format!("new:{number}"));
            tokio::spawn(async move { resolve_as(&resolver, &image, &keyring).await.map(drop) })
        })
        .collect();
    let before = registry.seen().len();
    while registry.seen().len() < before + 8 {
        tokio::task::yield_now().await;
    }
    let started = std::time::Instant::now();
    resolve_as(&resolver, &known, &keyring).await.unwrap();
    assert!(started.elapsed() < TIMEOUT / 2, "{:?}", started.elapsed());
    for task in tasks {
        task.abort();
    }
}

#[tokio::test]
async fn a_host_longer_than_any_name_is_no_reference() {
    let image = format!("{}.example/app", "a.".repeat(1000).trim_end_matches('.'));
    let error = resolve(&resolver(), &image).await.unwrap_err();
    assert_eq!(error.reason(), Reason::InvalidReference);
}

/// What a server that is asked for TLS answers, and what was sent to it without TLS afterwards.
async fn server(answer: &'static [u8]) -> (String, Arc<parking_lot::Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let plain: Arc<parking_lot::Mutex<Vec<String>>> = Arc::default();
    let seen = plain.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 4096];
            let length = stream.read(&mut buffer).await.unwrap_or_default();
            if buffer[0] == 0x16 {
                let _ = stream.write_all(answer).await;
            } else {
                seen.lock()
                    .push(String::from_utf8_lossy(&buffer[..length]).into_owned());
                let _ = stream.write_all(b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Basic realm=\"x\"\r\ncontent-length: 0\r\n\r\n").await;
            }
        }
    });
    (address, plain)
}

/// containerd falls back to plain HTTP for a server that speaks no TLS. A certificate that does not
/// fit, or an attacker who breaks the handshake, is no such server.
#[tokio::test]
async fn secrets_never_go_over_plain_http() {
    const ALERT: &[u8] = &[0x15, 3, 3, 0, 2, 2, 40];
    const HTTP: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n";
    for (answer, falls_back) in [(HTTP, true), (ALERT, false), (&b""[..], false)] {
        let (address, plain) = server(answer).await;
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("reg.test");
        std::fs::create_dir(&dir).unwrap();
        let text = format!(
            "server = \"http://127.0.0.1:1\"\n[host.\"http://{address}\"]\n  skip_verify = true\n[host.\"http://{address}\".header]\n  x-operator = \"hunter2\"\n"
        );
        std::fs::write(dir.join("hosts.toml"), text).unwrap();
        let mut settings = settings();
        settings.registry.hosts_directories = vec![root.path().to_owned()];
        settings.registry.mirror_credentials = true;
        let keyring = credentials::keyring("reg.test", "user", "hunter2");
        let resolved = resolve_as(&resolver_with(settings), "reg.test/app", &keyring).await;
        assert!(resolved.is_err());
        let plain = plain.lock().clone();
        assert_eq!(!plain.is_empty(), falls_back, "{answer:?}: {plain:?}");
        for request in plain {
            let lower = request.to_ascii_lowercase();
            assert!(
                !lower.contains("hunter2") && !lower.contains("authorization"),
                "{request}"
            );
        }
    }
}

/// A registry that collects unused children, or hides them from some: the answer is true for nobody
/// else.
#[tokio::test]
async fn an_index_with_missing_children_is_not_kept_for_others() {
    let (incomplete, complete) = (registry().await, registry().await);
    let image = testimg::find("unnamed");
    for registry in [&incomplete, &complete] {
        registry.add("app", &image);
    }
    let child = image.manifests.last().unwrap().digest.clone();
    incomplete.script(&child, Script::Status(404, Vec::new()));
    let mut settings = settings();
    settings.latest_ttl = Duration::from_millis(1);
    let resolver = resolver_with(settings);
    let all = platforms(&resolve(&resolver, &complete.image("app")).await.unwrap()).len();
    // The complete answer is true for everybody.
    assert_eq!(
        platforms(&resolve(&resolver, &incomplete.image("app")).await.unwrap()).len(),
        all
    );
    let mut settings = super::settings();
    settings.latest_ttl = Duration::from_millis(1);
    let resolver = resolver_with(settings);
    let fewer = platforms(&resolve(&resolver, &incomplete.image("app")).await.unwrap()).len();
    assert!(fewer < all, "{fewer} of {all}");
    assert_eq!(
        platforms(&resolve(&resolver, &complete.image("app")).await.unwrap()).len(),
        all
    );
    // Nor for ever: the children may be there again.
    let resolver = resolver_with(super::settings());
    let image = incomplete.image("app");
    assert_eq!(
        platforms(&resolve(&resolver, &image).await.unwrap()).len(),
        fewer
    );
    incomplete.forget();
    assert_eq!(
        platforms(&resolve(&resolver, &image).await.unwrap()).len(),
        fewer
    );
    assert!(
        incomplete.seen().is_empty(),
        "kept for a short time for the same repository"
    );
}
