//! The connection to containerd: bounded calls, and none while it does not answer.

use std::{future::Future, time::Duration};

use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};

use super::api::version_client::VersionClient;

use super::breaker::Breaker;

/// containerd answers in under a millisecond; what takes longer than this is slower than a registry.
pub(super) const BUDGET: Duration = Duration::from_millis(250);
/// Calls under way: containerd takes several thousand a second, one after the other.
const MAX_CALLS: usize = 32;

/// Where the socket should be is no usable path.
#[derive(Debug, thiserror::Error)]
#[error("containerd.socket {path:?} is not usable as a socket path")]
pub struct SocketError {
    path: String,
    #[source]
    source: tonic::transport::Error,
}

/// Until when one look-up waits for containerd, all of its calls together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience(Instant);

impl Patience {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self(Instant::now() + BUDGET)
    }
}

/// containerd gave no answer; the caller goes on without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken;

/// Made when first used, and again when it breaks.
pub(super) struct Link {
    pub(super) channel: Channel,
    breaker: Breaker,
    /// Bounds the calls under way: those that queue in containerd would seem to hang.
    slots: Semaphore,
    socket: String,
}

/// A lazy connection to a unix socket whose calls end after `timeout`.
pub fn connect(path: &str, timeout: Duration) -> Result<Channel, SocketError> {
    let path = path.strip_prefix("unix://").unwrap_or(path);
    let failed = |source| SocketError {
        path: path.to_owned(),
        source,
    };
    let endpoint = Endpoint::try_from(format!("unix://{path}")).map_err(failed)?;
    let endpoint = endpoint.connect_timeout(BUDGET).timeout(timeout);
    Ok(endpoint.connect_lazy())
}

impl Link {
    pub(super) fn new(path: &str) -> Result<Self, SocketError> {
        Ok(Self {
            // Each call sets a shorter limit of its own.
            channel: connect(path, Duration::from_secs(10))?,
            breaker: Breaker::default(),
            slots: Semaphore::new(MAX_CALLS),
            socket: path.to_owned(),
        })
    }

    pub(super) fn is_up(&self) -> bool {
        self.breaker.is_closed()
    }

    /// One call under the breaker, in what is left of the asker's patience. `None`: containerd answered that it
    /// has no such thing.
    pub(super) async fn call<T>(
        &self,
        patience: Patience,
        call: impl Future<Output = Result<T, Status>> + Send,
    ) -> Result<Option<T>, Broken> {
        // No slot in time: containerd is busy with others, and not to blame.
        let slot = timeout_at(patience.0, self.slots.acquire()).await;
        let _slot = slot.map_err(|_| Broken)?.map_err(|_| Broken)?;
        let permit = self.breaker.enter().ok_or(Broken)?;
        if permit.is_probe() {
            let mut version = VersionClient::new(self.channel.clone());
            let probe = timeout_at(patience.0, version.version(())).await;
            if !matches!(probe, Ok(Ok(_))) {
                permit.failed();
                return Err(Broken);
            }
        }
        let status = match timeout_at(patience.0, call).await {
            Ok(Ok(answer)) => {
                self.recovered(permit.succeeded());
                return Ok(Some(answer));
            }
            Ok(Err(status)) => status,
            Err(_) => Status::deadline_exceeded("no answer in 250 ms"),
        };
        match status.code() {
            // Answers of a working server: nothing there, a namespace that is closed, a digest that it
            // does not like.
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
                Err(Broken)
            }
        }
    }

    fn recovered(&self, changed: bool) {
        if changed {
            tracing::info!(socket = self.socket, "containerd answers again");
        }
    }
}

/// Adds the header that every call needs.
pub(crate) fn in_namespace<T>(namespace: &str, message: T) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    let value = namespace
        .parse()
        .map_err(|_| Status::not_found("not a namespace"))?;
    request.metadata_mut().insert("containerd-namespace", value);
    Ok(request)
}
