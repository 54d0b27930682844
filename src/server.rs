//! The HTTP side: `/metrics`, `/healthz`, `/readyz`. Nothing here takes input.

use std::{
    future::Future,
    io::ErrorKind,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use kube::Client;
use tokio::{net::TcpListener, sync::watch};

use crate::{admission::Readiness, metrics::Metrics};

/// A probe waits a second by default; the answer has to come before.
const API_CHECK: Duration = Duration::from_millis(800);

/// What the endpoints look at.
#[derive(Clone)]
pub struct Health {
    /// Where metrics are.
    pub metrics: Metrics,
    /// Whether every list has been read once.
    pub synced: watch::Receiver<bool>,
    /// Whether the webhook can serve; `None`: there is none.
    pub admission: Option<Readiness>,
    /// To see whether the API server answers.
    pub client: Client,
}

/// Listens. Fails at once when the address is taken. Every address means those of IPv4 where a machine
/// has no IPv6.
pub async fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error)
            if address.ip() == Ipv6Addr::UNSPECIFIED && error.kind() != ErrorKind::AddrInUse =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        bound => bound,
    }
}

/// Serves until `stop`.
pub async fn serve(
    listener: TcpListener,
    health: Health,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(health);
    axum::serve(listener, router)
        .with_graceful_shutdown(stop)
        .await
}

async fn metrics(State(health): State<Health>) -> impl IntoResponse {
    match health.metrics.encode() {
        Ok(body) => {
            let media_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(CONTENT_TYPE, media_type)], body).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(health): State<Health>) -> (StatusCode, &'static str) {
    if !*health.synced.borrow() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "lists of namespaces, pods, DaemonSets and nodes not read yet\n",
        );
    }
    if health.admission.as_ref().is_some_and(|ready| !ready()) {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "the admission webhook has no certificate that is good now\n",
        );
    }
    match tokio::time::timeout(API_CHECK, health.client.apiserver_version()).await {
        Ok(Ok(_)) => (StatusCode::OK, "ok\n"),
        _ => (
            StatusCode::SERVICE_UNAVAILABLE,
            "the API server does not answer\n",
        ),
    }
}
