//! The narrow door to a node's containerd. Its socket is root on that node, so the process that talks to
//! registries never holds it: this one does, talks to nobody else, and passes on only what resolution needs.

mod message;
mod rules;

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

use crate::image::containerd::api::{
    CreateNamespaceRequest, Namespace, namespaces_client::NamespacesClient,
};
use bytes::Bytes;
use http::{Request, Response, Uri, request};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::{Code, Status, body::Body, transport::Channel};
use tower::ServiceExt;

use crate::{
    error::RepeatedError,
    image::containerd::{SocketError, connect, in_namespace},
};

pub use rules::Rules;
use rules::Size;

/// archaware keeps one connection; a few more while it restarts.
const MAX_CONNECTIONS: usize = 8;
/// Of one connection: archaware has at most 34 calls under way.
const MAX_STREAMS: u32 = 64;
const MAX_HEADERS: u32 = 16 * 1024;
/// Large requests that are in memory at once.
const MAX_LARGE: usize = 4;
/// A request that does not arrive whole in this time is given up.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// containerd's answer has to begin within this time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// What is under way may finish when the process is told to end.
const DRAIN: Duration = Duration::from_secs(2);

/// Why there is no proxy.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// containerd's socket.
    #[error(transparent)]
    From(#[from] SocketError),
    /// The own socket cannot be made.
    #[error("cannot listen on {path}")]
    Listen {
        /// Its path.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another process answers there.
    #[error("another process listens on {0}")]
    InUse(PathBuf),
    /// Something that is no socket is there.
    #[error("{0} exists and is no socket; it is left as it is")]
    Occupied(PathBuf),
}

struct Proxy {
    rules: Rules,
    containerd: Channel,
    large: Semaphore,
    /// The second in which a refusal was logged last.
    told: AtomicU64,
    /// Refusals since then.
    untold: AtomicU64,
}

/// Passes calls on from `listen` to `from` until `stop`.
pub async fn run(
    from: &str,
    listen: &Path,
    rules: Rules,
    stop: CancellationToken,
) -> Result<(), ProxyError> {
    let containerd = connect(from, ANSWER_TIMEOUT)?;
    let listener = bind(listen).await?;
    tracing::info!(from, listen = %listen.display(), "passing on what resolution needs");
    let making = make_namespace(containerd.clone(), rules.own.clone());
    let _namespace = AbortOnDropHandle::new(tokio::spawn(making));
    let proxy = Arc::new(Proxy {
        rules,
        containerd,
        large: Semaphore::new(MAX_LARGE),
        told: AtomicU64::new(0),
        untold: AtomicU64::new(0),
    });
    let mut connections = JoinSet::new();
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        let (stream, _) = match accepted {
            Ok(accepted) => accepted,
            // Out of file descriptors, or a client that is gone: others come after it.
            Err(error) => {
                tracing::warn!(%error, "a connection was lost");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() < MAX_CONNECTIONS {
            connections.spawn(proxy.clone().serve(stream, stop.clone()));
        }
    }
    let _ = tokio::time::timeout(DRAIN, async {
        while connections.join_next().await.is_some() {}
    })
    .await;
    Ok(())
}

/// The socket appears whole: for its owner alone, and in the place of what an earlier process left.
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

/// Makes the own namespace, so that nobody else has to be let into the service that does.
async fn make_namespace(containerd: Channel, own: Option<String>) {
    let Some(name) = own else { return };
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
        // containerd 1.6 makes it and then fails when the header is missing.
        let create = async { namespaces.create(in_namespace(&name, request)?).await };
        let created = tokio::time::timeout(ANSWER_TIMEOUT, create).await;
        match created.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in 10 s"))) {
            Err(status) if status.code() != Code::AlreadyExists => {
                if let Some(error) = failing.changed(&status) {
                    tracing::warn!(
                        error,
                        "containerd does not answer yet; is --from its socket?"
                    );
                }
            }
            _ => return tracing::info!(namespace = name, "containerd answers"),
        }
        tokio::time::sleep(REQUEST_TIMEOUT).await;
    }
}

impl Proxy {
    async fn serve(self: Arc<Self>, stream: UnixStream, stop: CancellationToken) {
        let service = hyper::service::service_fn(move |request| {
            let proxy = self.clone();
            async move { Ok::<_, std::convert::Infallible>(proxy.answer(request).await) }
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        let ended = tokio::select! {
            ended = &mut connection => ended,
            () = stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "a connection ended");
        }
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        match self.pass(&parts, body).await {
            Ok(response) => response,
            Err(status) => {
                if status.code() == Code::PermissionDenied {
                    self.tell(&parts, &status);
                }
                status.into_http()
            }
        }
    }

    async fn pass(&self, parts: &request::Parts, body: Incoming) -> Result<Response<Body>, Status> {
        let passing = self.rules.check(parts).map_err(Status::permission_denied)?;
        // The whole of it first: what is cut short or too large never reaches containerd.
        let _place = match passing.size {
            Size::Small => None,
            Size::Large => self.large.acquire().await.ok(),
        };
        let whole = Limited::new(body, passing.size.bytes()).collect();
        let body: Bytes = match tokio::time::timeout(REQUEST_TIMEOUT, whole).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(_)) => {
                return Err(Status::resource_exhausted(
                    "the request is too large, or cut short",
                ));
            }
            Err(_) => return Err(Status::deadline_exceeded("the request does not arrive")),
        };
        if !message::is_whole(parts.uri.path(), &body) {
            return Err(Status::invalid_argument(
                "the message lacks what its method reads",
            ));
        }
        let path = parts.uri.path().parse::<Uri>();
        let mut request = Request::new(Body::new(http_body_util::Full::new(body)));
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = path.map_err(|_| Status::permission_denied("this is no gRPC call"))?;
        *request.headers_mut() = passing.headers;
        let passed = self.containerd.clone().oneshot(request).await;
        passed.map_err(|error| {
            Status::unavailable(format!("containerd: {}", crate::error::chain(&error)))
        })
    }

    /// At most one line a second: whoever is refused may try often.
    fn tell(&self, parts: &request::Parts, status: &Status) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs();
        if self.told.swap(now, Ordering::Relaxed) == now {
            self.untold.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let call: String = parts.uri.path().chars().take(100).collect();
        let namespace = parts.headers.get("containerd-namespace");
        let (why, untold) = (status.message(), self.untold.swap(0, Ordering::Relaxed));
        tracing::warn!(call, ?namespace, why, untold, "refused");
    }
}
