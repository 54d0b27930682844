//! The HTTP server for `/metrics`, `/healthz`, `/readyz` and `/log-level`. `/log-level` is the only endpoint with
//! input. It accepts loopback clients only, which includes `kubectl port-forward`.

use std::{
    future::Future,
    io::ErrorKind,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::{
    Router,
    extract::{ConnectInfo, DefaultBodyLimit, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use tokio::{net::TcpListener, sync::watch};

use crate::{
    admission::Readiness,
    cluster::api::{ApiClient, ApiError},
    controller::PendingSyncs,
    metrics::Metrics,
    telemetry::LogLevel,
};

/// Kubernetes' probes time out after 1 s by default, so the answer must come earlier.
const API_CHECK: Duration = Duration::from_millis(800);

/// State that the endpoints report.
#[derive(Clone)]
pub struct Health {
    /// Source of `/metrics`.
    pub metrics: Metrics,
    /// Which initial lists are still outstanding.
    pub pending: watch::Receiver<PendingSyncs>,
    /// Whether the webhook can serve; `None` when it is disabled.
    pub admission: Option<Readiness>,
    /// Client that checks whether the API server answers.
    pub api: ApiClient,
    /// The log filter that `/log-level` changes.
    pub log_level: LogLevel,
}

/// Longer than a filter that names every module of archaware and kube.
const MAX_LEVEL: usize = 1024;

/// Binds a listener. `[::]` falls back to `0.0.0.0` on machines without IPv6.
///
/// # Errors
///
/// When the address is in use or not available.
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

/// Serves until `stop` is cancelled.
///
/// # Errors
///
/// When the listener fails.
pub async fn serve(
    listener: TcpListener,
    health: Health,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/log-level", get(log_level).put(set_log_level))
        .layer(DefaultBodyLimit::max(MAX_LEVEL))
        .with_state(health)
        .into_make_service_with_connect_info::<SocketAddr>();
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

/// One line per check, in the format of the API server's own `/readyz?verbose`.
async fn ready(State(health): State<Health>) -> (StatusCode, String) {
    let mut lines = Vec::new();
    let pending = health.pending.borrow().clone();
    lines.push(match pending.as_slice() {
        [] => Ok("lists"),
        pending => Err(format!("lists not read yet: {}", pending.join(", "))),
    });
    if let Some(ready) = &health.admission {
        let why = "the admission webhook has no valid certificate";
        lines.push(ready().then_some("webhook").ok_or(why.to_owned()));
    }
    let version = health.api.with_timeout(API_CHECK).ping().await;
    lines.push(match version {
        Ok(()) => Ok("API server"),
        Err(ApiError::TimedOut(_)) => Err("the API server does not answer".to_owned()),
        Err(error) => Err(format!("the API server: {error}")),
    });
    let all = lines.iter().all(Result::is_ok);
    let body = lines.into_iter().map(|line| match line {
        Ok(part) => format!("[+] {part} ok\n"),
        Err(why) => format!("[-] {why}\n"),
    });
    let status = if all {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, body.collect())
}

async fn log_level(State(health): State<Health>) -> String {
    health.log_level.get() + "\n"
}

async fn set_log_level(
    State(health): State<Health>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    level: String,
) -> (StatusCode, String) {
    if !peer.ip().to_canonical().is_loopback() {
        let why = "only from this machine; with kubectl port-forward, for instance\n";
        return (StatusCode::FORBIDDEN, why.to_owned());
    }
    match health.log_level.set(level.trim()) {
        Ok(()) => (StatusCode::OK, health.log_level.get() + "\n"),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{controller::WATCHES, telemetry};

    /// State of a process that has just started and has no API server.
    fn starting() -> Health {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        Health {
            metrics: Metrics::default(),
            pending: watch::channel(WATCHES.to_vec()).1,
            admission: Some(Arc::new(|| false)),
            api: ApiClient::new(kube::Client::try_from(nowhere).unwrap()),
            log_level: telemetry::init("info", telemetry::LogFormat::Text).unwrap(),
        }
    }

    #[tokio::test]
    async fn readyz_lists_what_is_missing() {
        let (status, says) = ready(State(starting())).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        for part in [
            "[-] lists not read yet: namespaces, pods, DaemonSets, nodes\n",
            "[-] the admission webhook",
            "[-] the API server",
        ] {
            assert!(says.contains(part), "{says}");
        }
    }

    #[tokio::test]
    async fn the_log_level_is_changed_from_loopback_only() {
        for peer in ["192.0.2.1:1000", "[2001:db8::1]:1000"] {
            let peer = ConnectInfo(peer.parse().unwrap());
            let answer = set_log_level(State(starting()), peer, "warn".to_owned()).await;
            assert_eq!(answer.0, StatusCode::FORBIDDEN);
        }
    }
}
