//! The HTTPS server: TLS 1.2 and 1.3, HTTP/1.1 and HTTP/2, with limits on everything.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use http::header::{CONNECTION, HeaderValue};
use hyper::{
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::BufReader,
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{TlsAcceptor, rustls};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    backoff::jittered,
    connections::{
        ConnectionSlots, ConnectionState, Evict, FIRST_REQUEST_TIMEOUT, IDLE_TIMEOUT, Lifetime,
        MAX_HEADERS, TimedExecutor, serve_until_the_end,
    },
    metrics::AdmissionMetrics,
    tasks,
};

use super::{certificate::CertResolver, http::Handler};

/// Maximum number of connections. API servers use HTTP/1.1 for Services and remote hosts
/// (`k8s.io/apiserver`, `util/webhook`), so each concurrent request has a connection of some tens
/// of KiB. Further connections are closed at once, and their requests fail open.
const MAX_CONNECTIONS: usize = 2048;
/// Timeout of a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection is closed gracefully after a random time between this and twice this, so that the
/// API server's next connection may reach another replica.
const LIFETIME: Duration = Duration::from_mins(5);
/// Receive buffer per connection: one TLS record.
const READ_BUFFER: usize = 16 << 10;
/// Concurrent requests on one HTTP/2 connection.
const MAX_STREAMS: u32 = 1000;
/// How long connections are accepted after SIGTERM, until all API servers know that this replica is
/// going away.
const ACCEPT_AFTER_SIGTERM: Duration = Duration::from_secs(3);
/// How long requests in progress may take after that, in addition to `admission.budget`.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

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
        // A cluster has few API servers, so one address may use all connections.
        let slots = ConnectionSlots::new(MAX_CONNECTIONS, MAX_CONNECTIONS, Evict::Unused);
        let drain = CancellationToken::new();
        let refused = || self.metrics.connection_refused();
        let accepting = slots.accept(&self.listener, refused, |stream, _, slot| {
            let (tls, handler, drain) = (tls.clone(), self.handler.clone(), drain.clone());
            let state = slot.state().clone();
            let serving = connection(stream, tls, handler, state, drain);
            self.tasks
                .spawn(tasks::timed("admission connection", slot.hold(serving)));
        });
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
    state: Arc<ConnectionState>,
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
    let until = Instant::now() + jittered(LIFETIME);
    let seen = state.clone();
    let service = service_fn(move |request| {
        let handler = handler.clone();
        let answering = seen.begin();
        async move {
            let mut answer = handler.handle(request).await;
            drop(answering);
            // An old HTTP/1.1 connection ends with `Connection: close` in a response. If it were
            // closed between two requests, the next request might already be on its way.
            if !is_http2 && Instant::now() > until {
                let close = HeaderValue::from_static("close");
                answer.headers_mut().insert(CONNECTION, close);
            }
            Ok::<_, std::convert::Infallible>(answer)
        }
    });
    let stream = TokioIo::new(stream);
    let life = Lifetime {
        first_request: FIRST_REQUEST_TIMEOUT,
        // Over HTTP/1.1 the last response announces that the connection closes.
        until: is_http2.then_some(until),
    };
    if is_http2 {
        let serving = http2::Builder::new(TimedExecutor("admission request"))
            .timer(TokioTimer::new())
            .max_concurrent_streams(MAX_STREAMS)
            .max_header_list_size(u32::try_from(MAX_HEADERS).unwrap_or(u32::MAX))
            .initial_stream_window_size(256 << 10)
            .initial_connection_window_size(1 << 20)
            .keep_alive_interval(Some(Duration::from_secs(30)))
            .serve_connection(stream, service);
        serve_until_the_end(serving, drain, &state, life).await;
    } else {
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT)
            .max_header_size(MAX_HEADERS)
            .serve_connection(stream, service);
        serve_until_the_end(serving, drain, &state, life).await;
    }
}
