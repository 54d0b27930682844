//! Tests against an in-process API server that gives rare answers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot go on has failed"
)]

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body, response::Response};
use parking_lot::Mutex;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn kubeconfig(folder: &std::path::Path, server: &str) -> std::path::PathBuf {
    let path = folder.join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters: [{{name: a, cluster: {{server: \"{server}\"}}}}]\nusers: [{{name: a, user: {{}}}}]\ncontexts: [{{name: a, context: {{cluster: a, user: a}}}}]\ncurrent-context: a\n"
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// An empty cluster.
async fn empty_cluster() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = |request: axum::extract::Request| async move {
        let kind = match request.uri().path() {
            "/api/v1/pods" => "PodList",
            "/api/v1/nodes" => "NodeList",
            "/api/v1/namespaces" => "NamespaceList",
            _ => "DaemonSetList",
        };
        let version = if kind == "DaemonSetList" {
            "apps/v1"
        } else {
            "v1"
        };
        let list = json!({"kind": kind, "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": []});
        Response::new(Body::from(list.to_string()))
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    address
}

/// An HTTP proxy that connects every name to `target`. Returns its address and the requests for
/// connections.
async fn proxy(target: std::net::SocketAddr) -> (std::net::SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let requests = seen.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let seen = requests.clone();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(client.read_u8().await.unwrap());
                }
                seen.lock().push(String::from_utf8(head).unwrap());
                let mut server = tokio::net::TcpStream::connect(target).await.unwrap();
                let _ = client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (address, seen)
}

/// As kubectl: the proxy of the environment, unless the server is excepted or loopback.
#[tokio::test]
async fn the_api_server_is_asked_through_the_proxy_of_the_environment() {
    let cluster = empty_cluster().await;
    let (proxy, seen) = proxy(cluster).await;
    let dir = tempfile::tempdir().unwrap();
    let plan = async |server: String, proxy: String, exceptions: &str| {
        let mut command = tokio::process::Command::new(testsupport::program());
        command
            .args(["plan", "--kubeconfig"])
            .arg(kubeconfig(dir.path(), &server));
        for name in ["HTTP_PROXY", "HTTPS_PROXY"] {
            command.env(name, &proxy).env_remove(name.to_lowercase());
        }
        command
            .env("NO_PROXY", exceptions)
            .env_remove("no_proxy")
            .kill_on_drop(true);
        let ended = tokio::time::timeout(Duration::from_secs(30), command.output()).await;
        ended.expect("it ends").unwrap()
    };
    let through = format!("http://user:p%40ss@{proxy}");
    let output = plan(
        "http://k8s.test:8001".to_owned(),
        through.clone(),
        "10.0.0.0/8,other.test",
    )
    .await;
    assert!(output.status.success(), "{output:?}");
    let asked = seen.lock().clone();
    assert!(!asked.is_empty());
    for request in asked {
        assert!(request.starts_with("CONNECT k8s.test:8001 "), "{request}");
        assert!(
            request
                .to_lowercase()
                .contains("proxy-authorization: basic dxnlcjpwqhnz"),
            "{request}"
        );
    }
    seen.lock().clear();
    // A server on loopback, and one that is excepted, are asked directly.
    let output = plan(format!("http://{cluster}"), through.clone(), "").await;
    assert!(output.status.success(), "{output:?}");
    let output = plan("http://k8s.test:8001".to_owned(), through, "k8s.test").await;
    assert!(!output.status.success());
    assert!(seen.lock().is_empty(), "{:?}", seen.lock());
}

/// Without a cluster, one line on stderr says what to do.
#[tokio::test]
async fn the_error_without_a_cluster_is_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let nobody = kubeconfig(dir.path(), "https://127.0.0.1:1");
    let malformed = dir.path().join("malformed");
    std::fs::write(&malformed, "clusters: [\n").unwrap();
    for command in ["plan", "clean", "run"] {
        for (file, said) in [
            (None, "no cluster: name a kubeconfig"),
            (Some(&nobody), "https://127.0.0.1:1"),
            (Some(&malformed), "the kubeconfig is not usable"),
        ] {
            // `run` waits for nobody either, but tells the call that failed.
            if command == "run" && file == Some(&nobody) {
                continue;
            }
            let mut archaware = tokio::process::Command::new(testsupport::program());
            archaware.arg(command).env_clear().env("HOME", dir.path());
            if let Some(file) = file {
                archaware.arg("--kubeconfig").arg(file);
            }
            let ended = archaware.kill_on_drop(true).output();
            let ended = tokio::time::timeout(Duration::from_secs(30), ended).await;
            let output = ended.expect("it ends").unwrap();
            let error = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert!(
                error.starts_with("error: ") && error.contains(said),
                "{error}"
            );
            assert_eq!(error.lines().count(), 1, "{command}: {error}");
        }
        // The variable names a file that is not there.
        let mut archaware = tokio::process::Command::new(testsupport::program());
        archaware.arg(command).env_clear().env("HOME", dir.path());
        archaware.env("KUBECONFIG", dir.path().join("nowhere"));
        let ended = archaware.kill_on_drop(true).output();
        let ended = tokio::time::timeout(Duration::from_secs(30), ended).await;
        let error = String::from_utf8(ended.expect("it ends").unwrap().stderr).unwrap();
        assert!(
            error.contains("cannot read the kubeconfig") && error.contains("nowhere"),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1, "{command}: {error}");
    }
}

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
    let kubeconfig = kubeconfig(dir.path(), &format!("http://{address}"));
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
