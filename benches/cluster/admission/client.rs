//! Clients of the webhook that behave like the API server, and the floor.

use std::{sync::Arc, time::Instant};

use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    client::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsConnector, client::TlsStream};

use testsupport::cluster::self_signed;

/// One connection.
pub(super) struct Connection(http1::SendRequest<Full<Bytes>>);

/// Address and authority for a client.
#[derive(Clone)]
pub(super) struct Target {
    port: u16,
    tls: Arc<rustls::ClientConfig>,
}

impl Target {
    pub(super) fn new(port: u16, authorities: &[u8]) -> Self {
        let mut roots = rustls::RootCertStore::empty();
        for authority in CertificateDer::pem_slice_iter(authorities) {
            roots.add(authority.unwrap()).unwrap();
        }
        let tls = rustls::ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Self {
            port,
            tls: Arc::new(tls),
        }
    }

    pub(super) async fn stream(&self, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let mut tls = (*self.tls).clone();
        tls.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let tls = TlsConnector::from(Arc::new(tls));
        tls.connect(name, stream).await.unwrap()
    }

    pub(super) async fn connect(&self) -> Connection {
        let stream = self.stream(&[b"http/1.1"]).await;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Connection(sender)
    }
}

impl Connection {
    /// Sends a request; returns milliseconds and the response.
    pub(super) async fn ask(&mut self, question: &Bytes) -> (f64, Bytes) {
        let request = Request::post("/pods")
            .header("host", "127.0.0.1")
            .header("content-type", "application/json")
            .body(Full::new(question.clone()))
            .unwrap();
        let started = Instant::now();
        let answer = self.0.send_request(request).await.unwrap();
        assert_eq!(answer.status(), 200);
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (started.elapsed().as_secs_f64() * 1000.0, body)
    }
}

/// A request about a pod of 8 KB: two containers with many environment variables, as the API server
/// sends it.
pub(super) fn question(image: &str) -> Bytes {
    let environment = |n: usize| json!({"name": format!("SETTING_{n}"), "value": format!("https://service-{n}.example.svc:8443/path")});
    let environment: Vec<Value> = (0..41).map(environment).collect();
    let container = |name: &str| {
        json!({
            "name": name, "image": image, "imagePullPolicy": "IfNotPresent", "env": environment,
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}},
            "readinessProbe": {"httpGet": {"path": "/ready", "port": 8080, "scheme": "HTTP"}, "periodSeconds": 10},
            "volumeMounts": [{"name": "kube-api-access-abcde", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true}],
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
        })
    };
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "generateName": "web-7d9c5b8f6d-", "namespace": "default", "labels": {"app": "web", "pod-template-hash": "7d9c5b8f6d"},
            "annotations": {"prometheus.io/scrape": "true"},
            "managedFields": [{"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": {"f:metadata": {"f:labels": {}}}}],
        },
        "spec": {
            "containers": [container("web"), container("side")], "schedulerName": "default-scheduler",
            "serviceAccountName": "default", "terminationGracePeriodSeconds": 30, "dnsPolicy": "ClusterFirst",
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            ],
        },
    });
    let size = pod.to_string().len();
    assert!((7500..8700).contains(&size), "{size}");
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "6d4b1f3e-3b0c-4f63-9d3c-0d1f2d1e8a11", "operation": "CREATE", "namespace": "default", "dryRun": false,
            "kind": {"group": "", "version": "v1", "kind": "Pod"}, "resource": {"group": "", "version": "v1", "resource": "pods"},
            "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
            "object": pod, "oldObject": null,
        },
    });
    review.to_string().into()
}

/// The floor: a server that reads the request and returns a constant response.
pub(super) fn floor() -> Target {
    let (tls, certificate) = self_signed();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let target = Target::new(
        listener.local_addr().unwrap().port(),
        certificate.as_bytes(),
    );
    let serve = async move {
        let listener = TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let tls = tls.clone();
            tokio::spawn(async move {
                let answer = service_fn(|request: Request<Incoming>| async move {
                    request.into_body().collect().await?;
                    let allowed = r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":"6d4b1f3e-3b0c-4f63-9d3c-0d1f2d1e8a11","allowed":true}}"#;
                    Ok::<_, hyper::Error>(Response::new(Full::new(Bytes::from(allowed))))
                });
                let stream = TokioIo::new(tls.accept(stream).await.unwrap());
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(stream, answer)
                    .await;
            });
        }
    };
    // A thread of its own, like the process that it stands for. Ends with this process.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(serve);
    });
    target
}
