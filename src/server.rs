//! The HTTP server for `/metrics`, `/healthz`, `/readyz` and `/log-level`. `/log-level` is the only
//! endpoint with input. It accepts input over loopback only, which includes `kubectl port-forward`.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::{ConnectInfo, DefaultBodyLimit, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use http::Request;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

use crate::{
    admission::Readiness,
    cluster::api::{ApiClient, ApiError},
    connections::{
        ConnectionSlots, ConnectionState, Evict, FIRST_REQUEST_TIMEOUT, Lifetime, MAX_HEADERS,
        serve_until_the_end,
    },
    controller::PendingSyncs,
    metrics::Metrics,
    tasks,
    telemetry::LogLevel,
};

/// Kubernetes' probes time out after 1 s by default, so the answer must come earlier.
const API_CHECK: Duration = Duration::from_millis(800);
/// Minimum time between two checks of the API server, because every client in the pod network can
/// request `/readyz`.
const API_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of connections. Prometheus, the kubelet and people have a few.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of connections from one address, so that a client in the pod network does not use
/// up the kubelet's connections.
const MAX_OF_PEER: usize = 64;
/// How long a connection may be idle between requests. Prometheus opens a new connection if it
/// scrapes less often.
const IDLE: Duration = Duration::from_secs(15);
/// After this time a connection is shut down gracefully. A client that does not read delays its end
/// by two minutes at most (`IDLE_TIMEOUT`).
const LIFETIME: Duration = Duration::from_mins(5);
/// Timeout for receiving and answering a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// State that the endpoints report.
#[derive(Clone)]
pub struct Health {
    /// Source of `/metrics`.
    pub metrics: Metrics,
    /// Which initial lists are still outstanding.
    pub pending: watch::Receiver<PendingSyncs>,
    /// Whether the webhook can serve; `None` when it is disabled.
    pub admission: Option<Readiness>,
    /// Whether the API server answers.
    pub api: Arc<ApiCheck>,
    /// The log filter that `/log-level` changes.
    pub log_level: LogLevel,
}

/// Checks whether the API server answers, with at most one request a second.
pub struct ApiCheck {
    api: ApiClient,
    /// The last answer. The lock is held while archaware asks the API server, so that it sends only
    /// one request.
    last: tokio::sync::Mutex<Option<(Instant, Result<(), String>)>>,
}

impl ApiCheck {
    /// A check without a cached answer.
    pub fn new(api: ApiClient) -> Self {
        Self {
            api: api.with_timeout(API_CHECK),
            last: tokio::sync::Mutex::default(),
        }
    }

    async fn check(self: &Arc<Self>) -> Result<(), String> {
        // A task of its own, so that the answer is cached even if the client disconnects.
        let this = self.clone();
        let check = tasks::spawn("readiness", async move { this.ask().await });
        let stopping = |_| Err("the check was cancelled".to_owned());
        check.await.unwrap_or_else(stopping)
    }

    async fn ask(&self) -> Result<(), String> {
        let mut last = self.last.lock().await;
        if let Some((at, answer)) = &*last
            && at.elapsed() < API_CHECK_INTERVAL
        {
            return answer.clone();
        }
        let answer = self.api.ping().await.map_err(|error| match error {
            ApiError::TimedOut(_) => "the API server does not answer".to_owned(),
            error => error.to_string(),
        });
        *last = Some((Instant::now(), answer.clone()));
        answer
    }
}

/// Maximum bytes of a log filter. A filter that names every module of archaware and kube is
/// shorter.
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
pub async fn serve(listener: TcpListener, health: Health, stop: CancellationToken) {
    let router = router(health);
    let slots = ConnectionSlots::new(MAX_CONNECTIONS, MAX_OF_PEER, Evict::Idle);
    let connections = TaskTracker::new();
    let refused = || tracing::debug!("too many connections to --listen; one is refused");
    let accepting = slots.accept(&listener, refused, |stream, peer, slot| {
        let (router, drain) = (router.clone(), stop.clone());
        let state = slot.state().clone();
        let serving = slot.hold(connection(stream, peer, router, state, drain));
        connections.spawn(tasks::timed("HTTP connection", serving));
    });
    let _ = stop.run_until_cancelled(accepting).await;
    connections.close();
    connections.wait().await;
}

fn router(health: Health) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/log-level", get(log_level).put(set_log_level))
        .layer(DefaultBodyLimit::max(MAX_LEVEL))
        .with_state(health)
}

async fn connection(
    stream: TcpStream,
    peer: SocketAddr,
    router: Router,
    state: Arc<ConnectionState>,
    drain: CancellationToken,
) {
    let seen = state.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let answering = seen.begin();
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(ConnectInfo(peer));
        let router = router.clone();
        async move {
            let answer = tokio::time::timeout(REQUEST_TIMEOUT, router.oneshot(request)).await;
            drop(answering);
            let late = || Ok(StatusCode::REQUEST_TIMEOUT.into_response());
            answer.unwrap_or_else(|_| late())
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_header_size(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    let life = Lifetime {
        first_request: FIRST_REQUEST_TIMEOUT,
        until: Some(Instant::now() + LIFETIME),
    };
    serve_until_the_end(serving, drain, &state, life).await;
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
    lines.push(health.api.check().await.map(|()| "API server"));
    let is_ready = lines.iter().all(Result::is_ok);
    let lines = lines.into_iter().map(|line| match line {
        Ok(part) => format!("[+] {part} ok\n"),
        Err(why) => format!("[-] {why}\n"),
    });
    // Not a condition of readiness: the API server keeps its connection to one replica and may
    // never call this replica.
    let webhook_lines = health.admission.iter().map(|_| {
        health.metrics.admissions.last_asked().map_or_else(
            || {
                "[ ] the API server has not called this webhook yet; if it calls no replica, check that the control plane can reach \
                 admission.listen\n"
                    .to_owned()
            },
            |ago| format!("[ ] the API server asked this webhook {ago} s ago\n"),
        )
    });
    let body = lines.chain(webhook_lines);
    let status = if is_ready {
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
        let why = "the log level can be set only over loopback; use kubectl port-forward\n";
        return (StatusCode::FORBIDDEN, why.to_owned());
    }
    match health.log_level.set(level.trim()) {
        Ok(()) => (StatusCode::OK, health.log_level.get() + "\n"),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

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
            api: Arc::new(ApiCheck::new(ApiClient::new(
                kube::Client::try_from(nowhere).unwrap(),
            ))),
            log_level: telemetry::init("info", telemetry::LogFormat::Text, None).unwrap(),
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
            "[ ] the API server has not called this webhook yet",
        ] {
            assert!(says.contains(part), "{says}");
        }
        let health = starting();
        let time = Duration::from_millis(1);
        health.metrics.admissions.answered("pods", "changed", time);
        let (_, says) = ready(State(health)).await;
        assert!(
            says.contains("[ ] the API server asked this webhook 0 s ago"),
            "{says}"
        );
    }

    #[tokio::test]
    async fn the_log_level_is_changed_from_loopback_only() {
        for peer in ["192.0.2.1:1000", "[2001:db8::1]:1000"] {
            let peer = ConnectInfo(peer.parse().unwrap());
            let answer = set_log_level(State(starting()), peer, "warn".to_owned()).await;
            assert_eq!(answer.0, StatusCode::FORBIDDEN);
        }
    }

    /// An API server that answers every request with an empty object, and counts the requests.
    async fn counting_api() -> (ApiClient, Arc<AtomicUsize>) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        let router = Router::new().fallback(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            async { "{}" }
        });
        tokio::spawn(async move { axum::serve(listener, router).await });
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        let client = kube::Client::try_from(config).unwrap();
        (ApiClient::new(client), count)
    }

    #[tokio::test]
    async fn readiness_costs_one_api_call_a_second() {
        let (api, count) = counting_api().await;
        let check = Arc::new(ApiCheck::new(api));
        let started = Instant::now();
        for _ in 0..50 {
            // Some go away before they are answered.
            let _ = tokio::time::timeout(Duration::from_micros(100), check.check()).await;
            assert_eq!(check.check().await, Ok(()));
        }
        let seconds = usize::try_from(started.elapsed().as_secs()).unwrap();
        let calls = count.load(Ordering::SeqCst);
        assert!(
            (1..=1 + seconds).contains(&calls),
            "{calls} calls in {seconds} s"
        );
    }

    /// Whether the server has closed a connection.
    async fn is_closed(stream: &mut TcpStream, within: Duration) -> bool {
        let mut byte = [0];
        let read = tokio::time::timeout(within, stream.read(&mut byte)).await;
        matches!(read, Ok(Ok(0) | Err(_)))
    }

    #[tokio::test]
    async fn half_a_request_holds_no_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let server = tokio::spawn(serve(listener, starting(), stop.clone()));
        let mut streams = Vec::new();
        for _ in 0..MAX_OF_PEER + 20 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nx: ").await;
            streams.push(stream);
        }
        // Those beyond the limit are closed at once.
        for stream in streams.split_off(MAX_OF_PEER) {
            let mut stream = stream;
            assert!(is_closed(&mut stream, Duration::from_secs(5)).await);
        }
        let first = &mut streams[0];
        assert!(!is_closed(first, Duration::from_millis(100)).await);
        // A request that arrives whole is answered.
        first.write_all(b"y\r\nhost: a\r\n\r\n").await.unwrap();
        let mut answer = [0; 15];
        first.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        // The other connections are closed after ten seconds, and new connections get their slots.
        for stream in &mut streams[1..] {
            assert!(is_closed(stream, Duration::from_secs(20)).await);
        }
        let mut late = TcpStream::connect(address).await.unwrap();
        late.write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
            .await
            .unwrap();
        late.read_exact(&mut answer).await.unwrap();
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(5), server)
            .await
            .unwrap()
            .unwrap();
    }
}
