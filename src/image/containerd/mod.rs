//! What the node's containerd already knows: image records and manifests, read through its gRPC API.
//!
//! Nothing here can fail a resolution: an image that containerd does not have, and a containerd that
//! is down, absent or forbidden, both mean "ask the registry".

pub mod api;
mod breaker;
mod link;
mod namespace;
mod store;

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use api::{
    GetImageRequest, InfoRequest, ReadContentRequest, content_client::ContentClient,
    images_client::ImagesClient,
};
use bytes::{Bytes, BytesMut};
use tonic::Status;

use crate::{image::digest::Digest, metrics::ContentWrites, platform::MAX_DOCUMENT};

use super::reference::{Reference, Version};

use link::Link;

pub(crate) use link::{Broken, Patience, in_namespace};
pub use link::{SocketError, connect};
pub(crate) use store::Store;

/// The label of a root that a pull left: `….<host>: repo,repo`. Imports leave none.
const DISTRIBUTION_SOURCE: &str = "containerd.io/distribution.source.";

/// What containerd knows, and what it is to keep.
pub struct Containerd {
    link: Arc<Link>,
    /// Where content is looked for, the own namespace last.
    content: Vec<String>,
    /// Where records of images are believed: what pulls left there.
    records: Vec<String>,
    store: Option<Store>,
}

/// An image record that a pull from its own registry left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) digest: Digest,
    /// Since the tag was last pulled.
    pub(crate) age: Duration,
}

impl Containerd {
    /// A client for the socket at `path`. Records and content are looked for in `namespaces`, in this
    /// order, content in `own` after them. What is fetched from registries is kept in `own`, in the background, if
    /// its `writes` are to be counted: this needs a runtime. Does not connect yet.
    pub fn new(
        path: &str,
        namespaces: Vec<String>,
        own: Option<&str>,
        writes: Option<&ContentWrites>,
    ) -> Result<Self, SocketError> {
        let content = namespaces.iter().cloned().chain(own.map(str::to_owned));
        let content = content.collect();
        let link = Arc::new(Link::new(path)?);
        let kept = own.zip(writes);
        Ok(Self {
            store: kept.map(|(own, writes)| Store::start(link.clone(), own, writes.clone())),
            link,
            content,
            records: namespaces,
        })
    }

    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// The record of a tag, if a pull from its own registry left one. Side-loaded images leave
    /// records too, often of one platform under the name of many: those prove nothing.
    pub(crate) async fn record(&self, reference: &Reference) -> Result<Option<Record>, Broken> {
        if !matches!(reference.version(), Version::Tag(_)) {
            // A record is kept under the reference's own name, a digest under the digest alone.
            return Ok(None);
        }
        let patience = Patience::new();
        for namespace in &self.records {
            if let Some(record) = self.record_in(patience, namespace, reference).await? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// A whole document by digest; `None` when containerd does not hold it.
    pub(crate) async fn read(
        &self,
        patience: Patience,
        digest: &Digest,
    ) -> Result<Option<Bytes>, Broken> {
        for namespace in &self.content {
            match self
                .link
                .call(patience, self.read_in(namespace, digest))
                .await?
            {
                None => {}
                // Broken content is no content: the registry's copy is as good.
                Some(bytes) if digest.verify(&bytes) => return Ok(Some(bytes)),
                Some(_) => {
                    tracing::warn!(%digest, namespace, "content in containerd is corrupt");
                }
            }
        }
        Ok(None)
    }

    /// Whether calls go to containerd at all at the moment.
    pub fn is_up(&self) -> bool {
        self.link.is_up()
    }

    async fn record_in(
        &self,
        patience: Patience,
        namespace: &str,
        reference: &Reference,
    ) -> Result<Option<Record>, Broken> {
        let mut images = ImagesClient::new(self.link.channel.clone());
        let request = GetImageRequest {
            name: reference.to_string(),
        };
        let get = async { images.get(in_namespace(namespace, request)?).await };
        let Some(image) = self
            .link
            .call(patience, get)
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
        let mut content = ContentClient::new(self.link.channel.clone());
        let request = InfoRequest {
            digest: digest.to_string(),
        };
        let info = async { content.info(in_namespace(namespace, request)?).await };
        let Some(info) = self
            .link
            .call(patience, info)
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
        let mut content = ContentClient::new(self.link.channel.clone());
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
}
