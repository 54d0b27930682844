//! Hostile clients of the webhook's port.

use std::time::{Duration, Instant};

use reqwest::StatusCode;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use super::{direct_client::Webhook, *};

/// A request about a pod with this spec.
fn question(spec: &Value) -> String {
    json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "operation": "CREATE", "namespace": "default",
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"metadata": {"name": "p"}, "spec": spec},
        },
    })
    .to_string()
}

#[tokio::test]
async fn large_pods_cost_neither_memory_nor_requests() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "").await;
    let containers = |number: usize| {
        let one = |n: usize| json!({"image": format!("{}/n{n}", cluster.registry())});
        json!({"containers": (0..number).map(one).collect::<Vec<_>>()})
    };
    let tolerations = json!({"tolerations": vec![0; 1_400_000]});
    for round in 0..2 {
        let (many, some) = (question(&containers(60_000)), question(&containers(900)));
        for (what, body, patched) in [
            ("60,000 images", many, false),
            ("a million tolerations", question(&tolerations), false),
            ("900 images", some, true),
        ] {
            let (status, answer) = webhook.send("/pods", body).await;
            assert_eq!(status, StatusCode::OK, "{what}: {answer}");
            assert_eq!(
                answer.contains("JSONPatch"),
                patched,
                "{what} in round {round}"
            );
        }
    }
    let peak = webhook.archaware.peak_memory();
    assert!(peak < 200.0, "{peak} MiB");
    let asked = webhook
        .archaware
        .metric("archaware_image_resolution_duration_seconds_count")
        .await;
    assert!(asked < 500.0, "{asked} images were looked up");
}

/// The registration excludes mirror pods, but another writer may change it.
#[tokio::test]
async fn mirror_pods_get_nothing_even_in_a_request() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "").await;
    let mut mirror: Value = serde_json::from_str(&question(&json!({"containers": []}))).unwrap();
    mirror["request"]["object"]["metadata"]["annotations"] =
        json!({"kubernetes.io/config.mirror": "x"});
    let (_, answer) = webhook.send("/pods", mirror.to_string()).await;
    assert!(
        answer.contains("\"allowed\":true") && !answer.contains("JSONPatch"),
        "{answer}"
    );
}

/// Connections that send nothing, little or endlessly are closed, while others are served.
#[tokio::test]
async fn idle_and_slow_connections_are_ended() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "").await;
    let address = webhook.address.trim_start_matches("https://").to_owned();
    // No handshake.
    let mut silent = TcpStream::connect(&address).await.unwrap();
    // A handshake and no request.
    let mut idle = webhook.connect().await;
    // A request without its body.
    let mut slow = webhook.connect().await;
    let head = "POST /pods HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
    slow.write_all(head.as_bytes()).await.unwrap();
    assert!(cluster.is_called().await);
    let started = Instant::now();
    let mut said = String::new();
    let ended = async {
        let mut nothing = [0; 1];
        assert!(matches!(silent.read(&mut nothing).await, Ok(0) | Err(_)));
        let _ = slow.read_to_string(&mut said).await;
        assert!(matches!(idle.read(&mut nothing).await, Ok(0) | Err(_)));
    };
    tokio::time::timeout(Duration::from_mins(1), ended)
        .await
        .expect("they are ended");
    assert!(said.starts_with("HTTP/1.1 408"), "{said}");
    assert!(
        started.elapsed() < Duration::from_secs(30),
        "{:?}",
        started.elapsed()
    );
}

/// Both HTTP versions, TLS 1.2 and 1.3, and no older TLS.
#[tokio::test]
async fn old_and_new_protocols() {
    let cluster = TestCluster::take().await;
    let webhook = Webhook::start(&cluster, "").await;
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        for protocol in [&b"h2"[..], b"http/1.1"] {
            let stream = webhook.connect_with(&[version], protocol).await;
            let (_, tls) = stream.get_ref();
            assert_eq!(tls.alpn_protocol(), Some(protocol), "{version:?}");
            assert_eq!(tls.protocol_version(), Some(version.version));
        }
    }
    let port = webhook.address.rsplit(':').next().unwrap();
    let old = std::process::Command::new("openssl")
        .args([
            "s_client",
            "-tls1_1",
            "-cipher",
            "DEFAULT@SECLEVEL=0",
            "-connect",
            &format!("127.0.0.1:{port}"),
        ])
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let says = String::from_utf8_lossy(&old.stderr).to_lowercase();
    assert!(!old.status.success() && says.contains("alert"), "{says}");
}
