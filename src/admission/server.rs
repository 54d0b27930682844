//! The HTTPS server: TLS 1.2 and 1.3, HTTP/1.1 and HTTP/2, with limits on everything.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use http::header::{CONNECTION, HeaderValue};
use hyper::{
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use tokio::{
    io::BufReader,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_rustls::{TlsAcceptor, rustls};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{backoff::jittered, metrics::AdmissionMetrics};

use super::{certificate::CertResolver, http::Handler};

/// Maximum number of connections. API servers use HTTP/1.1 for Services and remote hosts (`k8s.io/apiserver`,
/// `util/webhook`), so each concurrent request has a connection of some tens of KiB. Further connections are closed
/// at once: a refused connection fails open immediately, a hanging one after the API server's timeout.
const MAX_CONNECTIONS: usize = 2048;
/// Timeout of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle timeout. Longer than the API server's own (90 s), so that the API server closes the connection first and
/// never sends a request to a closed one.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);
/// Timeout until the first request. Connections are limited, so unused ones are closed.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// After between one and two times this, a connection is closed gracefully, so that the next one may reach another
/// replica.
const LIFETIME: Duration = Duration::from_mins(5);
/// Receive buffer per connection: one TLS record.
const READ_BUFFER: usize = 16 << 10;
/// Maximum bytes of a request's headers.
const MAX_HEADERS: u32 = 16 << 10;
/// Concurrent requests on one HTTP/2 connection.
const MAX_STREAMS: u32 = 1000;
/// How long connections are accepted after SIGTERM, until all API servers know that this replica is going away.
const ACCEPT_AFTER_SIGTERM: Duration = Duration::from_secs(3);
/// How long requests in progress may take after that, in addition to `admission.budget`.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// The server's parts.
pub(super) struct Server {
    pub(super) listener: TcpListener,
    pub(super) served: Arc<CertResolver>,
    pub(super) handler: Arc<Handler>,
    pub(super) metrics: AdmissionMetrics,
    /// How long a request may take.
    pub(super) budget: Duration,
    /// One task per connection.
    pub(super) tasks: TaskTracker,
}

impl Server {
    /// Serves until `stop` and shortly after.
    ///
    /// # Errors
    ///
    /// When TLS cannot be set up.
    pub(super) async fn serve(self, stop: CancellationToken) -> Result<(), rustls::Error> {
        let tls = TlsAcceptor::from(Arc::new(tls(self.served.clone())?));
        let (slots, drain) = (
            Arc::new(Semaphore::new(MAX_CONNECTIONS)),
            CancellationToken::new(),
        );
        let accepting = async {
            loop {
                let stream = match self.listener.accept().await {
                    Ok((stream, _)) => stream,
                    Err(error) => {
                        // Most likely out of file descriptors, which other connections will release.
                        tracing::warn!(%error, "cannot accept a connection");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                };
                let Ok(slot) = slots.clone().try_acquire_owned() else {
                    self.metrics.connection_refused();
                    continue;
                };
                let (tls, handler, drain) = (tls.clone(), self.handler.clone(), drain.clone());
                self.tasks.spawn(async move {
                    connection(stream, tls, handler, drain).await;
                    drop(slot);
                });
            }
        };
        let lingering = async {
            stop.cancelled().await;
            tokio::time::sleep(ACCEPT_AFTER_SIGTERM).await;
        };
        tokio::select! {
            () = accepting => {}
            () = lingering => {}
        }
        drop(self.listener);
        drain.cancel();
        self.tasks.close();
        if tokio::time::timeout(self.budget + DRAIN_TIMEOUT, self.tasks.wait())
            .await
            .is_err()
        {
            tracing::warn!("stopping with admission requests in progress");
        }
        Ok(())
    }
}

fn tls(served: Arc<CertResolver>) -> Result<rustls::ServerConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
        .with_no_client_auth()
        .with_cert_resolver(served);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

async fn connection(
    stream: TcpStream,
    tls: TlsAcceptor,
    handler: Arc<Handler>,
    drain: CancellationToken,
) {
    let _ = stream.set_nodelay(true);
    // Without this, TLS reads in pieces of 4 KiB; with it, a request takes one system call.
    let stream = BufReader::with_capacity(READ_BUFFER, stream);
    let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream));
    let stream = match handshake.await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!(%error, "TLS handshake failed");
            return;
        }
        Err(_) => return,
    };
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let (asked, until) = (
        Arc::new(AtomicBool::new(false)),
        Instant::now() + jittered(LIFETIME),
    );
    let seen = asked.clone();
    let service = service_fn(move |request| {
        let handler = handler.clone();
        seen.store(true, Ordering::Relaxed);
        async move {
            let mut answer = handler.handle(request).await;
            // The connection is closed with the last response, because the next request may already be on its way.
            if !is_http2 && Instant::now() > until {
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(CONNECTION, close);
            }
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let stream = TokioIo::new(stream);
    if is_http2 {
        let serving = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(MAX_HEADERS)
            .initial_stream_window_size(256 << 10)
            .initial_connection_window_size(1 << 20)
            .keep_alive_interval(Some(Duration::from_secs(30)))
            .serve_connection(stream, service);
        until_the_end(serving, drain, asked, Some(until)).await;
    } else {
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .max_header_size(MAX_HEADERS as usize)
            .serve_connection(stream, service);
        until_the_end(serving, drain, asked, None).await;
    }
}

/// Serves until the client closes the connection, it is idle for too long, or its lifetime ends.
async fn until_the_end<C: GracefulConnection>(
    serving: C,
    drain: CancellationToken,
    asked: Arc<AtomicBool>,
    until: Option<Instant>,
) {
    let mut serving = pin!(serving);
    let unused = async {
        tokio::time::sleep(FIRST_REQUEST_TIMEOUT).await;
        if asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let lifetime = async {
        match until {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = serving.as_mut() => return,
        () = unused => return,
        () = drain.cancelled() => {}
        () = lifetime => {}
    }
    serving.as_mut().graceful_shutdown();
    // Requests in progress may finish, within the idle timeout.
    let _ = tokio::time::timeout(IDLE_TIMEOUT, serving).await;
}
