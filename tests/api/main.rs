//! Against an API server in this process that says what a real one says rarely.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use archaware::cluster::{objects::Pod, watch::follow};
use axum::{Router, body::Body, response::Response};
use futures::{StreamExt, stream};
use kube::{Api, Client, Config, ResourceExt};
use kube_runtime::reflector::ObjectRef;
use serde_json::{Value, json};

fn pod(name: &str) -> Value {
    json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": "2"}})
}

fn end_of_list() -> Value {
    json!({"type": "BOOKMARK", "object": {"kind": "Pod", "apiVersion": "v1",
        "metadata": {"resourceVersion": "2", "annotations": {"k8s.io/initial-events-end": "true"}}}})
}

/// A watch whose events come with a pause in front of each.
fn watch(events: Vec<Value>, stays_open: bool) -> Response {
    let lines = stream::iter(events).then(|event| async move {
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok::<_, std::io::Error>(format!("{event}\n"))
    });
    let rest = stream::pending().take(usize::from(stays_open));
    Response::new(Body::from_stream(lines.chain(rest)))
}

/// Answers the first watch with the first list of events, and so on; the last one stays open.
async fn server(watches: Vec<Vec<Value>>) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (count, watches) = (Arc::new(AtomicUsize::new(0)), Arc::new(watches));
    let answer = move || {
        let number = count.fetch_add(1, Ordering::SeqCst);
        let watches = watches.clone();
        async move {
            let last = number + 1 >= watches.len();
            watch(watches.get(number).cloned().unwrap_or_default(), last)
        }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    Client::try_from(Config::new(format!("http://{address}").parse().unwrap())).unwrap()
}

/// A list that is read again (after 410 Gone) is the store's content only when it is complete. Who is
/// told of an object earlier finds nothing there, and is not told again.
#[tokio::test]
async fn after_a_relist_objects_are_news_when_they_can_be_found() {
    let gone = json!({"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "status": "Failure",
        "reason": "Expired", "message": "too old", "code": 410}});
    let added = |name| json!({"type": "ADDED", "object": pod(name)});
    let client = server(vec![
        vec![added("old"), end_of_list(), gone],
        vec![added("old"), added("new"), end_of_list()],
    ])
    .await;
    let mut pods = follow(Api::<Pod>::all(client), None, |_, _| true);
    let mut names = Vec::new();
    let all = async {
        while names.last().is_none_or(|name| name != "new") {
            if let Some(Ok(pod)) = pods.news.next().await {
                let found = pods.store.get(&ObjectRef::from_obj(&pod));
                assert!(
                    found.is_some(),
                    "{} is news and cannot be found",
                    pod.name_any()
                );
                names.push(pod.name_any());
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all)
        .await
        .expect("the new pod was never news");
    assert!(names.contains(&"old".to_owned()));
}

/// Before the first list is complete, there is nothing to finish.
#[tokio::test]
async fn sigterm_ends_a_start_that_hangs() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let listing = Arc::new(tokio::sync::Notify::new());
    let seen = listing.clone();
    let answer = move |request: axum::extract::Request| {
        let seen = seen.clone();
        async move {
            let path = request.uri().path().to_owned();
            if path.ends_with("/selfsubjectaccessreviews") {
                let allowed = json!({"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "spec": {}, "status": {"allowed": true}});
                return Response::new(Body::from(allowed.to_string()));
            }
            if path.ends_with("/pods") {
                seen.notify_one();
            }
            std::future::pending().await
        }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters: [{{name: a, cluster: {{server: \"http://{address}\"}}}}]\nusers: [{{name: a, user: {{}}}}]\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\ncurrent-context: a\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_archaware"))
        .args(["run", "--listen", "127.0.0.1:0", "--kubeconfig"])
        .arg(&kubeconfig)
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let waits = tokio::time::timeout(Duration::from_secs(30), listing.notified());
    waits.await.expect("pods are listed");
    let pid = child.id().unwrap().to_string();
    let told = std::process::Command::new("kill")
        .args(["-TERM", &pid])
        .status();
    assert!(told.unwrap().success());
    let ended = tokio::time::timeout(Duration::from_secs(15), child.wait());
    let status = ended.await.expect("it ends").unwrap();
    assert_eq!(status.code(), Some(0));
}
