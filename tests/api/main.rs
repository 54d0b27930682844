//! Tests against an in-process API server that gives rare answers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body, response::Response};
use serde_json::json;

/// Before the first list is complete there is nothing to finish.
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
    let mut child = tokio::process::Command::new(testsupport::program())
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
