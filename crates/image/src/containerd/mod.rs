//! Reads image records and manifests from the node's containerd through its gRPC API, and persists
//! fetched documents there.
//!
//! Nothing here makes a resolution fail: if containerd lacks an image, denies access or does not
//! run, archaware asks the registry.

mod breaker;
mod connection;
mod namespace;
mod store;

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::{Bytes, BytesMut};
use containerd_client::services::v1::{
    GetImageRequest, InfoRequest, ReadContentRequest, content_client::ContentClient,
    images_client::ImagesClient,
};
use tonic::Status;

use crate::{digest::Digest, metrics::ContentWrites};
use archaware_platform::MAX_DOCUMENT;

use super::reference::{Reference, Version};

use connection::{Connection, Rpc};

pub use connection::in_namespace;
pub(crate) use connection::{ContainerdUnavailable, Deadline};
pub use connection::{LOOKUP_TIMEOUT, SocketError, connect};
pub(crate) use store::Store;

/// Prefix of the label `….<host>: repo,repo`. A pull sets the label on the root document; an import
/// does not.
const DISTRIBUTION_SOURCE: &str = "containerd.io/distribution.source.";

/// The node's containerd.
pub struct Containerd {
    connection: Arc<Connection>,
    /// Namespaces where content is read, archaware's own last.
    content: Vec<String>,
    /// Namespaces whose image records are used.
    records: Vec<String>,
    store: Option<Store>,
}

/// An image record that was created by a pull from the image's own registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageRecord {
    pub(crate) digest: Digest,
    /// Time since the tag was last pulled.
    pub(crate) age: Duration,
}

impl Containerd {
    /// A client for the socket at `path`. Image records and content are read from `namespaces` in
    /// this order, content also from `own`. With `writes`, fetched documents are persisted in `own`
    /// in the background, which needs a Tokio runtime. A lookup that takes longer than
    /// `lookup_timeout` is given up. Does not connect yet.
    ///
    /// # Errors
    ///
    /// When `path` is not usable as a socket path.
    pub fn new(
        path: &str,
        namespaces: Vec<String>,
        own: Option<&str>,
        writes: Option<&ContentWrites>,
        lookup_timeout: Duration,
    ) -> Result<Self, SocketError> {
        let content = namespaces.iter().cloned().chain(own.map(str::to_owned));
        let content = content.collect();
        let link = Arc::new(Connection::new(path, lookup_timeout)?);
        let store_settings = own.zip(writes);
        Ok(Self {
            store: store_settings
                .map(|(namespace, writes)| Store::start(link.clone(), namespace, writes.clone())),
            connection: link,
            content,
            records: namespaces,
        })
    }

    /// The deadline of a lookup that starts now.
    pub(crate) fn deadline(&self) -> Deadline {
        self.connection.deadline()
    }

    pub(crate) fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// The record of a tag, if a pull from its own registry created it. Imported images have
    /// records too, often of a single platform under the name of a multi-platform image; those are
    /// not used.
    pub(crate) async fn record(
        &self,
        reference: &Reference,
    ) -> Result<Option<ImageRecord>, ContainerdUnavailable> {
        if !matches!(reference.version(), Version::Tag(_)) {
            // A digest needs no record: its content is read directly.
            return Ok(None);
        }
        let deadline = self.deadline();
        for namespace in &self.records {
            if let Some(record) = self.record_in(deadline, namespace, reference).await? {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// The digest in any record of a tag or digest, including records of imported images.
    pub(crate) async fn any_record(
        &self,
        reference: &Reference,
    ) -> Result<Option<Digest>, ContainerdUnavailable> {
        let deadline = self.deadline();
        for namespace in &self.records {
            if let Some((digest, _)) = self.target_in(deadline, namespace, reference).await? {
                return Ok(Some(digest));
            }
        }
        Ok(None)
    }

    /// Reads a whole document by digest; `None` if containerd does not have it.
    pub(crate) async fn read(
        &self,
        deadline: Deadline,
        digest: &Digest,
    ) -> Result<Option<Bytes>, ContainerdUnavailable> {
        let subject = digest.to_string();
        for namespace in &self.content {
            let rpc = Rpc {
                method: "Content/Read",
                namespace,
                subject: &subject,
            };
            let reading = self.read_in(namespace, digest);
            match self.connection.call(deadline, rpc, reading).await? {
                None => {}
                // Corrupt content is treated as missing: the registry's copy is used.
                Some(bytes) if digest.verify(&bytes) => return Ok(Some(bytes)),
                Some(_) => {
                    tracing::warn!(%digest, namespace, "content in containerd is corrupt; asking the registry instead");
                }
            }
        }
        Ok(None)
    }

    /// Whether calls are sent to containerd: false while the breaker is open.
    pub fn is_up(&self) -> bool {
        self.connection.is_up()
    }

    /// The digest in an image's record, and when the record was last updated.
    async fn target_in(
        &self,
        deadline: Deadline,
        namespace: &str,
        reference: &Reference,
    ) -> Result<Option<(Digest, Option<SystemTime>)>, ContainerdUnavailable> {
        let mut images = ImagesClient::new(self.connection.channel.clone());
        let name = reference.to_string();
        let rpc = Rpc {
            method: "Images/Get",
            namespace,
            subject: &name,
        };
        let request = GetImageRequest { name: name.clone() };
        let get = async { images.get(in_namespace(namespace, request)?).await };
        let answer = self.connection.call(deadline, rpc, get).await?;
        let image = answer.and_then(|response| response.into_inner().image);
        Ok(image.and_then(|image| {
            let digest = image.target?.digest.parse().ok()?;
            let updated = image.updated_at;
            Some((digest, updated.and_then(|time| time.try_into().ok())))
        }))
    }

    async fn record_in(
        &self,
        deadline: Deadline,
        namespace: &str,
        reference: &Reference,
    ) -> Result<Option<ImageRecord>, ContainerdUnavailable> {
        let Some((digest, updated)) = self.target_in(deadline, namespace, reference).await? else {
            return Ok(None);
        };
        let mut content = ContentClient::new(self.connection.channel.clone());
        let request = InfoRequest {
            digest: digest.to_string(),
        };
        let rpc = Rpc {
            method: "Content/Info",
            namespace,
            subject: &digest.to_string(),
        };
        let info = async { content.info(in_namespace(namespace, request)?).await };
        let Some(info) = self
            .connection
            .call(deadline, rpc, info)
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
            tracing::debug!(image = %reference, "image record ignored: it has no distribution source label, so it was imported");
            return Ok(None);
        }
        // A record from the future (the clock was set back) counts as new.
        let since = |time| SystemTime::now().duration_since(time).unwrap_or_default();
        let age = updated.map_or(Duration::MAX, since);
        Ok(Some(ImageRecord { digest, age }))
    }

    async fn read_in(&self, namespace: &str, digest: &Digest) -> Result<Bytes, Status> {
        let mut content = ContentClient::new(self.connection.channel.clone());
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
                return Err(Status::not_found("content chunks are not contiguous"));
            }
            bytes.extend_from_slice(&chunk.data);
            if bytes.len() as u64 > MAX_DOCUMENT {
                return Err(Status::not_found("content over 4 MiB"));
            }
        }
        Ok(bytes.freeze())
    }
}
