//! What the node's containerd already knows: image records and manifests, read through its gRPC API.
//!
//! Nothing here can fail a resolution: an image that containerd does not have, and a containerd that
//! is down, absent or forbidden, both mean "ask the registry".

mod breaker;

use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use containerd_client::services::v1::{
    GetImageRequest, InfoRequest, ReadContentRequest, content_client::ContentClient,
    images_client::ImagesClient, version_client::VersionClient,
};
use futures::Future;
use tokio::sync::Semaphore;
use tonic::{
    Code, Request, Status,
    transport::{Channel, Endpoint},
};

use crate::{image::digest::Digest, platform::MAX_DOCUMENT};

use super::reference::{Reference, Version};

use breaker::Breaker;

/// containerd answers in under a millisecond; what takes longer than this is slower than a registry.
const BUDGET: Duration = Duration::from_millis(250);
/// Calls under way: containerd takes several thousand a second, one after the other.
const MAX_CALLS: usize = 32;
/// The label of a root that a pull left: `….<host>: repo,repo`. Imports leave none.
const DISTRIBUTION_SOURCE: &str = "containerd.io/distribution.source.";

/// A connection to containerd, made when first used and again when it breaks.
pub struct Containerd {
    channel: Channel,
    namespaces: Vec<String>,
    breaker: Breaker,
    /// Bounds the calls under way: those that queue in containerd would seem to hang.
    slots: Semaphore,
    socket: String,
}

/// Where the socket should be is no usable path.
#[derive(Debug, thiserror::Error)]
#[error("containerd.socket {path:?} is not usable as a socket path")]
pub struct SocketError {
    path: String,
    #[source]
    source: tonic::transport::Error,
}

/// An image record that a pull from its own registry left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) digest: Digest,
    /// Since the tag was last pulled.
    pub(crate) age: Duration,
}

/// containerd gave no answer; the caller goes on without it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Broken;

impl Containerd {
    /// A client for the socket at `path` that reads in `namespaces`, in this order. Does not connect yet.
    pub fn new(path: &str, namespaces: Vec<String>) -> Result<Self, SocketError> {
        let path = path.strip_prefix("unix://").unwrap_or(path);
        let endpoint = Endpoint::try_from(format!("unix://{path}"))
            .map_err(|source| SocketError {
                path: path.to_owned(),
                source,
            })?
            .connect_timeout(BUDGET)
            .timeout(BUDGET);
        let channel = endpoint.connect_lazy();
        Ok(Self {
            channel,
            namespaces,
            breaker: Breaker::new(),
            slots: Semaphore::new(MAX_CALLS),
            socket: path.to_owned(),
        })
    }

    /// The record of a tag, if a pull from its own registry left one. Side-loaded images leave
    /// records too, often of one platform under the name of many: those prove nothing.
    pub(crate) async fn record(&self, reference: &Reference) -> Option<Record> {
        for namespace in &self.namespaces {
            match self.record_in(namespace, reference).await {
                Ok(None) => {}
                Ok(record) => return record,
                Err(Broken) => return None,
            }
        }
        None
    }

    /// A whole document by digest; `None` when containerd does not hold it or is not there.
    pub(crate) async fn read(&self, digest: &Digest) -> Option<Bytes> {
        for namespace in &self.namespaces {
            match self.call(self.read_in(namespace, digest)).await {
                Ok(None) => {}
                // Broken content is no content: the registry's copy is as good.
                Ok(Some(bytes)) if digest.verify(&bytes) => return Some(bytes),
                Ok(Some(_)) => {
                    tracing::warn!(%digest, namespace, "content in containerd is corrupt");
                }
                Err(Broken) => return None,
            }
        }
        None
    }

    /// Whether calls go to containerd at all at the moment.
    pub fn is_up(&self) -> bool {
        self.breaker.is_closed()
    }

    async fn record_in(
        &self,
        namespace: &str,
        reference: &Reference,
    ) -> Result<Option<Record>, Broken> {
        let mut images = ImagesClient::new(self.channel.clone());
        let request = GetImageRequest {
            name: reference.to_string(),
        };
        let get = async { images.get(in_namespace(namespace, request)?).await };
        let Some(image) = self
            .call(get)
            .await?
            .and_then(|response| response.into_inner().image)
        else {
            return Ok(None);
        };
        let Some(digest) = image
            .target
            .and_then(|target| target.digest.parse::<Digest>().ok())
        else {
            return Ok(None);
        };
        let mut content = ContentClient::new(self.channel.clone());
        let request = InfoRequest {
            digest: digest.to_string(),
        };
        let info = async { content.info(in_namespace(namespace, request)?).await };
        let Some(info) = self
            .call(info)
            .await?
            .and_then(|response| response.into_inner().info)
        else {
            return Ok(None);
        };
        let label = format!("{DISTRIBUTION_SOURCE}{}", reference.host_name());
        let pulled = info.labels.get(&label).is_some_and(|repositories| {
            repositories.split(',').any(|r| r == reference.repository())
        });
        if !pulled {
            tracing::debug!(image = %reference, "a record without the trace of a pull is not believed");
            return Ok(None);
        }
        let age = image
            .updated_at
            .and_then(|time| SystemTime::try_from(time).ok())
            .map_or(
                Duration::MAX,
                // A record from the future (the clock was set back) is as good as new.
                |time| SystemTime::now().duration_since(time).unwrap_or_default(),
            );
        Ok(Some(Record { digest, age }))
    }

    async fn read_in(&self, namespace: &str, digest: &Digest) -> Result<Bytes, Status> {
        let mut content = ContentClient::new(self.channel.clone());
        let request = ReadContentRequest {
            digest: digest.to_string(),
            offset: 0,
            size: 0,
        };
        let mut stream = content
            .read(in_namespace(namespace, request)?)
            .await?
            .into_inner();
        let mut bytes = BytesMut::new();
        while let Some(chunk) = stream.message().await? {
            let expected = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
            if chunk.offset != expected {
                return Err(Status::not_found("content with holes"));
            }
            bytes.extend_from_slice(&chunk.data);
            if bytes.len() as u64 > MAX_DOCUMENT {
                return Err(Status::not_found("content over 4 MiB"));
            }
        }
        Ok(bytes.freeze())
    }

    /// One call under the budget and the breaker. `None`: containerd answered that it has no such thing.
    async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, Status>> + Send,
    ) -> Result<Option<T>, Broken> {
        let _slot = self.slots.acquire().await.map_err(|_| Broken)?;
        let permit = self.breaker.enter().ok_or(Broken)?;
        if permit.is_probe() {
            let mut version = VersionClient::new(self.channel.clone());
            let probe = tokio::time::timeout(BUDGET, version.version(())).await;
            if !matches!(probe, Ok(Ok(_))) {
                permit.failed();
                return Err(Broken);
            }
        }
        let status = match tokio::time::timeout(BUDGET, call).await {
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
fn in_namespace<T>(namespace: &str, message: T) -> Result<Request<T>, Status> {
    let mut request = Request::new(message);
    let value = namespace
        .parse()
        .map_err(|_| Status::not_found("not a namespace"))?;
    request.metadata_mut().insert("containerd-namespace", value);
    Ok(request)
}

/// A record is kept under the reference's own name, a digest under the digest alone.
pub(crate) fn is_recorded(reference: &Reference) -> bool {
    matches!(reference.version(), Version::Tag(_))
}
