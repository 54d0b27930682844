//! The connection to containerd: bounded calls, and no calls while it does not answer.

use std::{future::Future, time::Duration};

use containerd_client::services::v1::version_client::VersionClient;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};

use crate::trace::{self, Call, Peer};

use super::breaker::Breaker;

/// The usual time limit of a lookup. containerd normally answers within a millisecond; if it takes
/// longer than this limit, a registry is faster.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum number of concurrent calls; containerd handles several thousand per second, one after
/// the other.
const MAX_CALLS: usize = 32;

/// The configured path cannot be a socket path.
#[derive(Debug, thiserror::Error)]
#[error("containerd.socket {path:?} is not usable as a socket path")]
pub struct SocketError {
    path: String,
    #[source]
    source: tonic::transport::Error,
}

/// The time limit of one lookup, for all of its calls together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Instant);

/// containerd did not answer; the caller continues without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContainerdUnavailable;

/// Names a call in the trace.
#[derive(Clone, Copy)]
pub(super) struct Rpc<'a> {
    /// Service and method.
    pub(super) method: &'static str,
    pub(super) namespace: &'a str,
    /// Image or digest.
    pub(super) subject: &'a str,
}

impl Rpc<'_> {
    pub(super) fn ended(self, started: std::time::Instant, status: Code) {
        let call = Call {
            peer: Peer::Containerd,
            method: self.method,
            host: self.namespace,
            path: &format!(" {}", self.subject),
            attempt: 1,
            credential: trace::NO_CREDENTIAL,
        };
        call.ended(started, format_args!("{status:?}"));
    }
}

/// Connects on first use and reconnects after a failure.
pub(super) struct Connection {
    pub(super) channel: Channel,
    breaker: Breaker,
    /// Bounds concurrent calls, because calls that queue inside containerd would look like a hang.
    slots: Semaphore,
    socket: String,
    pub(super) lookup_timeout: Duration,
}

/// A lazy connection to a Unix socket. `timeout` limits each call.
///
/// # Errors
///
/// When `path` is not usable as a socket path.
pub fn connect(path: &str, timeout: Duration) -> Result<Channel, SocketError> {
    let path = path.strip_prefix("unix://").unwrap_or(path);
    let failed = |source| SocketError {
        path: path.to_owned(),
        source,
    };
    let endpoint = Endpoint::try_from(format!("unix://{path}")).map_err(failed)?;
    let endpoint = endpoint.connect_timeout(LOOKUP_TIMEOUT).timeout(timeout);
    Ok(endpoint.connect_lazy())
}

impl Connection {
    pub(super) fn new(path: &str, lookup_timeout: Duration) -> Result<Self, SocketError> {
        Ok(Self {
            // Lookups set a shorter timeout of their own.
            channel: connect(path, Duration::from_secs(10))?,
            breaker: Breaker::default(),
            slots: Semaphore::new(MAX_CALLS),
            socket: path.to_owned(),
            lookup_timeout,
        })
    }

    /// The deadline of a lookup that starts now.
    pub(super) fn deadline(&self) -> Deadline {
        Deadline(Instant::now() + self.lookup_timeout)
    }

    pub(super) fn is_up(&self) -> bool {
        self.breaker.is_closed()
    }

    /// One call through the breaker, within the caller's deadline. `None` when containerd answers
    /// that it does not have the object.
    pub(super) async fn call<T>(
        &self,
        deadline: Deadline,
        rpc: Rpc<'_>,
        call: impl Future<Output = Result<T, Status>> + Send,
    ) -> Result<Option<T>, ContainerdUnavailable> {
        // No slot in time: containerd is busy but not broken, so the breaker does not count it.
        let slot = timeout_at(deadline.0, self.slots.acquire()).await;
        let _slot = slot
            .map_err(|_| ContainerdUnavailable)?
            .map_err(|_| ContainerdUnavailable)?;
        let permit = self.breaker.enter().ok_or(ContainerdUnavailable)?;
        if permit.is_probe() {
            let mut version = VersionClient::new(self.channel.clone());
            let probe = Rpc {
                method: "Version/Version",
                namespace: "",
                subject: "",
            };
            let started = std::time::Instant::now();
            let answer = timeout_at(deadline.0, version.version(())).await;
            let code = match &answer {
                Ok(Ok(_)) => Code::Ok,
                Ok(Err(status)) => status.code(),
                Err(_) => Code::DeadlineExceeded,
            };
            probe.ended(started, code);
            if code != Code::Ok {
                permit.failed();
                return Err(ContainerdUnavailable);
            }
        }
        let started = std::time::Instant::now();
        let status = match timeout_at(deadline.0, call).await {
            Ok(Ok(answer)) => {
                rpc.ended(started, Code::Ok);
                self.recovered(permit.succeeded());
                return Ok(Some(answer));
            }
            Ok(Err(status)) => status,
            Err(_) => {
                let limit = self.lookup_timeout;
                Status::deadline_exceeded(format!("no answer in {limit:?}"))
            }
        };
        rpc.ended(started, status.code());
        match status.code() {
            // Answers of a working server: not found, a namespace that may not be read, a digest
            // that it rejects.
            Code::NotFound
            | Code::PermissionDenied
            | Code::InvalidArgument
            | Code::FailedPrecondition => {
                self.recovered(permit.succeeded());
                Ok(None)
            }
            _ => {
                if permit.failed() {
                    let (socket, error) = (&self.socket, status.message());
                    tracing::warn!(
                        socket,
                        error,
                        "containerd does not answer; asking registries instead"
                    );
                }
                Err(ContainerdUnavailable)
            }
        }
    }

    fn recovered(&self, changed: bool) {
        if changed {
            tracing::info!(socket = self.socket, "containerd answers again");
        }
    }
}

/// Adds the namespace header that every call needs.
///
/// # Errors
///
/// `NotFound` when the name cannot be a header value.
pub fn in_namespace<T>(namespace: &str, message: T) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    let value = namespace
        .parse()
        .map_err(|_| Status::not_found("not a namespace"))?;
    request.metadata_mut().insert("containerd-namespace", value);
    Ok(request)
}
