//! A filtering proxy for a node's containerd. Access to containerd's socket is equivalent to root
//! on the node. So the process that talks to registries gets only this proxy's socket. The proxy
//! talks to containerd only, and forwards only the calls that are needed to resolve images.

mod forwarding;
mod message;

use std::{
    io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use containerd_client::services::v1::{
    CreateNamespaceRequest, Namespace, namespaces_client::NamespacesClient,
};
use http::{Request, Response, Uri, request};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::{Code, Status, body::Body, transport::Channel};
use tower::ServiceExt;

use crate::{
    connections::{ConnectionState, Lifetime, TimedExecutor, serve_until_the_end},
    error::RepeatedError,
    image::containerd::{SocketError, connect, in_namespace},
    tasks,
};

pub use forwarding::Forwarding;
use forwarding::Size;

/// archaware uses one connection; a few more exist while it restarts.
const MAX_CONNECTIONS: usize = 8;
/// Concurrent calls per connection; archaware makes at most 34.
const MAX_STREAMS: u32 = 64;
const MAX_HEADERS: u32 = 16 * 1024;
/// Maximum number of large requests in memory.
const MAX_LARGE: usize = 4;
/// Timeout for receiving a request, and for the first request of a new connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout until containerd's answer begins.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long calls in progress may take during shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the proxy cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// containerd's socket cannot be used.
    #[error(transparent)]
    From(#[from] SocketError),
    /// The proxy's own socket cannot be created.
    #[error("cannot listen on {path}")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Another process listens there.
    #[error("another process listens on {0}")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error(
        "cannot listen on {0}: the path exists and is not a socket; remove it, or set another --listen"
    )]
    Occupied(PathBuf),
}

struct Proxy {
    forwarding: Forwarding,
    containerd: Channel,
    large: Semaphore,
    /// Unix time, in seconds, of the last logged refusal.
    last_logged: AtomicU64,
    /// Refusals that were not logged since then.
    unlogged: AtomicU64,
}

/// Forwards calls to the socket `listen` to containerd's socket `from`, until `stop` is cancelled.
///
/// # Errors
///
/// When a socket cannot be used or created.
pub async fn run(
    from: &str,
    listen: &Path,
    forwarding: Forwarding,
    stop: CancellationToken,
) -> Result<(), ProxyError> {
    let containerd = connect(from, ANSWER_TIMEOUT)?;
    let listener = bind(listen).await?;
    tracing::info!(from, listen = %listen.display(), "forwarding calls to containerd");
    let making = make_namespace(containerd.clone(), forwarding.own.clone());
    let _namespace = AbortOnDropHandle::new(tasks::spawn("containerd namespace", making));
    let proxy = Arc::new(Proxy {
        forwarding,
        containerd,
        large: Semaphore::new(MAX_LARGE),
        last_logged: AtomicU64::new(0),
        unlogged: AtomicU64::new(0),
    });
    let mut connections = JoinSet::new();
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        let (stream, _) = match accepted {
            Ok(accepted) => accepted,
            // Out of file descriptors, or the client is gone. Later connections may succeed.
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() < MAX_CONNECTIONS {
            let serving = proxy.clone().serve(stream, stop.clone());
            connections.spawn(tasks::timed("content proxy", serving));
        }
    }
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    Ok(())
}

/// Creates the socket with restricted permissions and replaces the socket of an earlier process.
async fn bind(path: &Path) -> Result<UnixListener, ProxyError> {
    let failed = |source| ProxyError::Listen {
        path: path.to_owned(),
        source,
    };
    if UnixStream::connect(path).await.is_ok() {
        return Err(ProxyError::InUse(path.to_owned()));
    }
    let is_socket = |meta: std::fs::Metadata| meta.file_type().is_socket();
    if std::fs::symlink_metadata(path).is_ok_and(|meta| !is_socket(meta)) {
        return Err(ProxyError::Occupied(path.to_owned()));
    }
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    let _ = std::fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh).map_err(failed)?;
    std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
    std::fs::rename(&fresh, path).map_err(failed)?;
    Ok(listener)
}

/// Creates archaware's namespace, so that clients need no access to the namespaces service.
async fn make_namespace(containerd: Channel, own_namespace: Option<String>) {
    let Some(name) = own_namespace else { return };
    let mut namespaces = NamespacesClient::new(containerd);
    let mut failing = RepeatedError::default();
    loop {
        let namespace = Namespace {
            name: name.clone(),
            ..Namespace::default()
        };
        let request = CreateNamespaceRequest {
            namespace: Some(namespace),
        };
        // Without the header, containerd 1.6 creates the namespace and then returns an error.
        let create = async { namespaces.create(in_namespace(&name, request)?).await };
        let created = tokio::time::timeout(ANSWER_TIMEOUT, create).await;
        match created.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in 10 s"))) {
            Err(status) if status.code() != Code::AlreadyExists => {
                if let Some(error) = failing.changed(&status) {
                    tracing::warn!(
                        error,
                        namespace = name,
                        "cannot create archaware's namespace in containerd; trying again. Check that --from names containerd's socket"
                    );
                }
            }
            _ => return tracing::info!(namespace = name, "the namespace exists in containerd"),
        }
        tokio::time::sleep(REQUEST_TIMEOUT).await;
    }
}

impl Proxy {
    async fn serve(self: Arc<Self>, stream: UnixStream, stop: CancellationToken) {
        let state = Arc::new(ConnectionState::default());
        let service_state = state.clone();
        let service = hyper::service::service_fn(move |request| {
            let answering = service_state.begin();
            let proxy = self.clone();
            async move {
                let answer = proxy.answer(request).await;
                drop(answering);
                Ok::<_, std::convert::Infallible>(answer)
            }
        });
        let connection = hyper::server::conn::http2::Builder::new(TimedExecutor("content proxy"))
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service);
        let life = Lifetime {
            first_request: REQUEST_TIMEOUT,
            until: None,
        };
        serve_until_the_end(connection, stop, &state, life).await;
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        match self.pass(&parts, body).await {
            Ok(response) => response,
            Err(status) => {
                if status.code() == Code::PermissionDenied {
                    self.log_refusal(&parts, &status);
                }
                status.into_http()
            }
        }
    }

    async fn pass(&self, parts: &request::Parts, body: Incoming) -> Result<Response<Body>, Status> {
        let passing = self
            .forwarding
            .check(parts)
            .map_err(Status::permission_denied)?;
        // Receives the whole request first: truncated and oversized requests never reach
        // containerd.
        let _place = match passing.size {
            Size::Small => None,
            Size::Large => self.large.acquire().await.ok(),
        };
        let receiving = Limited::new(body, passing.size.bytes()).collect();
        let body: Bytes = match tokio::time::timeout(REQUEST_TIMEOUT, receiving).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(_)) => {
                return Err(Status::resource_exhausted(
                    "the request is too large or incomplete",
                ));
            }
            Err(_) => {
                return Err(Status::deadline_exceeded(
                    "the request was not received in time",
                ));
            }
        };
        if !message::is_well_formed(parts.uri.path(), &body) {
            return Err(Status::invalid_argument(
                "the message lacks a required field, has a malformed digest, or does not write a whole document",
            ));
        }
        let path = parts.uri.path().parse::<Uri>();
        let mut request = Request::new(Body::new(http_body_util::Full::new(body)));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = path.map_err(|_| Status::permission_denied("not a gRPC call"))?;
        *request.headers_mut() = passing.headers;
        let passed = self.containerd.clone().oneshot(request).await;
        passed.map_err(|error| {
            Status::unavailable(format!("containerd: {}", crate::error::chain(&error)))
        })
    }

    /// Logs at most one line per second, because a client may repeat its calls.
    fn log_refusal(&self, parts: &request::Parts, status: &Status) {
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = since_epoch.unwrap_or_default().as_secs();
        if self.last_logged.swap(now, Ordering::Relaxed) == now {
            self.unlogged.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let call: String = parts.uri.path().chars().take(100).collect();
        let namespace = parts.headers.get("containerd-namespace");
        let (why, unlogged) = (status.message(), self.unlogged.swap(0, Ordering::Relaxed));
        tracing::warn!(call, ?namespace, why, unlogged, "call refused");
    }
}
