//! archaware's own namespace in containerd. Content is held by leases that expire, so nothing stays
//! forever if archaware is gone (containerd 1.6 and later).

use std::{
    collections::HashMap,
    future::Future,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use containerd_client::services::v1::{
    AddResourceRequest, CreateRequest, Info, InfoRequest, ListContentRequest, Resource,
    UpdateRequest, WriteAction, WriteContentRequest, content_client::ContentClient,
    leases_client::LeasesClient,
};
use tonic::{Code, Request, Status, transport::Channel};

use crate::{cache::STALE_IF_ERROR, digest::Digest};

use super::connection::{Rpc, in_namespace};

/// Content that is not used for this long is deleted.
const CONTENT_LEASE_DURATION: Duration = Duration::from_hours(8 * 24);
/// Timeout of one call. For writes, containerd syncs to disk, which takes about 10 ms when idle.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Label with the time when containerd may delete a lease (RFC 3339).
const EXPIRE: &str = "containerd.io/gc.expire";
/// Label of root documents that have tag labels, so that they can be listed.
const TAGGED: &str = "archaware.dev/tagged";
/// Prefix of the labels `<prefix><hash of the name>: <unix time> <name>`. A label means that the
/// tag `<name>` pointed at this document at that time.
const TAG: &str = "archaware.dev/tag.";
/// Maximum number of tags per root document, because every user who can push can create any number.
const MAX_TAGS: usize = 64;

/// A client for one namespace.
pub(super) struct ContentNamespace {
    channel: Channel,
    name: String,
    /// The day whose lease is known to exist.
    leased: AtomicU32,
    writes: AtomicU64,
    /// Distinguishes processes: in containers the process id is always 1.
    process: u64,
}

/// A tag that was read back from containerd.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PersistedTag {
    pub(super) name: String,
    pub(super) digest: Digest,
    pub(super) age: Duration,
}

/// Days since 1970 in UTC. Each day has its own lease.
pub(super) fn today() -> u32 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u32::try_from(since.unwrap_or_default().as_secs() / 86_400).unwrap_or(u32::MAX)
}

impl ContentNamespace {
    pub(super) fn new(channel: Channel, name: &str) -> Self {
        Self {
            channel,
            name: name.to_owned(),
            leased: AtomicU32::new(0),
            writes: AtomicU64::new(0),
            process: rand::random(),
        }
    }

    /// Writes a document with its labels. If it already exists, its lease is renewed.
    pub(super) async fn write(
        &self,
        digest: &Digest,
        bytes: &Bytes,
        labels: HashMap<String, String>,
    ) -> Result<(), Status> {
        // A unique ingest reference: concurrent writers with the same reference lock each other
        // out.
        let number = self.writes.fetch_add(1, Ordering::Relaxed);
        let size = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
        let message = WriteContentRequest {
            action: WriteAction::Commit.into(),
            r#ref: format!("archaware-{:x}-{number}-{digest}", self.process),
            total: size,
            expected: digest.to_string(),
            offset: 0,
            data: bytes.to_vec(),
            labels,
        };
        self.with_lease("Content/Write", digest, |lease| {
            let message = message.clone();
            async move {
                let mut content = ContentClient::new(self.channel.clone());
                let stream = futures::stream::once(std::future::ready(message));
                let mut answers = content
                    .write(self.request(stream, Some(lease))?)
                    .await?
                    .into_inner();
                while answers.message().await?.is_some() {}
                Ok(())
            }
        })
        .await
    }

    /// Extends the life of a document, and of the documents that it refers to, until today's lease
    /// expires.
    pub(super) async fn touch(&self, digest: &Digest) -> Result<(), Status> {
        self.with_lease("Leases/AddResource", digest, |lease| async {
            let request = AddResourceRequest {
                id: lease,
                resource: Some(Resource {
                    id: digest.to_string(),
                    r#type: "content".to_owned(),
                }),
            };
            let mut leases = LeasesClient::new(self.channel.clone());
            leases.add_resource(self.request(request, None)?).await
        })
        .await
    }

    /// Adds a label to a root document: the tag `name` points at the document now.
    pub(super) async fn write_tag(&self, name: &str, digest: &Digest) -> Result<(), Status> {
        let mut content = ContentClient::new(self.channel.clone());
        let request = InfoRequest {
            digest: digest.to_string(),
        };
        let call = content.info(self.request(request, None)?);
        let info = self.call("Content/Info", name, call).await?.into_inner();
        let held = info.info.unwrap_or_default().labels;
        let (key, value) = tag_label(name);
        let other_labels = held
            .iter()
            .filter(|(label, _)| label.starts_with(TAG) && **label != key);
        // Labels that are too old to be used are removed: containerd treats an empty value as
        // removal.
        let (fresh, old): (Vec<_>, Vec<_>) = other_labels
            .partition(|(_, value)| seen_tag(value).is_some_and(|(_, age)| age < STALE_IF_ERROR));
        if fresh.len() >= MAX_TAGS {
            return Ok(());
        }
        let old: Vec<String> = old.into_iter().map(|(label, _)| label.clone()).collect();
        let labels = HashMap::from([(key, value), (TAGGED.to_owned(), "true".to_owned())]);
        let paths = labels.keys().chain(&old);
        let paths = paths.map(|key| format!("labels.{key}")).collect();
        let request = UpdateRequest {
            info: Some(Info {
                digest: digest.to_string(),
                labels,
                ..Info::default()
            }),
            update_mask: Some(prost_types::FieldMask { paths }),
        };
        let call = content.update(self.request(request, None)?);
        self.call("Content/Update", name, call).await?;
        Ok(())
    }

    /// All tags with their age, at most `limit`. Calls `started` when the first response arrives.
    pub(super) async fn list_tags(
        &self,
        limit: usize,
        started: impl FnOnce(),
    ) -> Result<Vec<PersistedTag>, Status> {
        // Over tonic's default of 4 MiB: a response holds up to a hundred documents with their
        // labels.
        let content = ContentClient::new(self.channel.clone());
        let mut content = content.max_decoding_message_size(16 * 1024 * 1024);
        let filters = vec![format!("labels.\"{TAGGED}\"")];
        let request = self.request(ListContentRequest { filters }, None)?;
        let call = content.list(request);
        let mut parts = self.call("Content/List", "", call).await?.into_inner();
        let mut first = Some(started);
        let mut tags = Vec::new();
        loop {
            let part = with_timeout(parts.message()).await?;
            if let Some(started) = first.take() {
                started();
            }
            let Some(part) = part else { return Ok(tags) };
            let seen = part.info.iter().flat_map(seen_tags);
            tags.extend(seen.take(limit.saturating_sub(tags.len())));
        }
    }

    /// Runs `call` with today's lease, which is created if it does not exist. Without a lease, the
    /// garbage collector would delete the written content.
    async fn with_lease<T, F>(
        &self,
        method: &'static str,
        digest: &Digest,
        call: impl Fn(String) -> F,
    ) -> Result<(), Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let day = today();
        for _ in 0..2 {
            if self.leased.load(Ordering::Relaxed) != day {
                self.create_lease(day).await?;
                self.leased.store(day, Ordering::Relaxed);
            }
            let call = call(lease_name(day));
            match self.call(method, &digest.to_string(), call).await {
                Ok(_) => return Ok(()),
                Err(status) if status.code() == Code::AlreadyExists => return Ok(()),
                // The lease was deleted, or containerd's data was wiped.
                Err(status) if status.code() == Code::NotFound => {
                    self.leased.store(0, Ordering::Relaxed);
                }
                Err(status) => return Err(status),
            }
        }
        Err(Status::not_found("today's lease does not stay"))
    }

    async fn create_lease(&self, day: u32) -> Result<(), Status> {
        let expires = jiff::Timestamp::try_from(SystemTime::now() + CONTENT_LEASE_DURATION)
            .map_err(|_| Status::internal("the clock is out of range"))?;
        let labels = HashMap::from([(EXPIRE.to_owned(), expires.strftime("%FT%TZ").to_string())]);
        let request = CreateRequest {
            id: lease_name(day),
            labels,
        };
        let mut leases = LeasesClient::new(self.channel.clone());
        let (name, call) = (lease_name(day), leases.create(self.request(request, None)?));
        match self.call("Leases/Create", &name, call).await {
            Err(status) if status.code() != Code::AlreadyExists => Err(status),
            _ => Ok(()),
        }
    }

    /// Limits the time of one call, and reports its end. `subject` is an image, a digest or a
    /// lease.
    async fn call<T>(
        &self,
        method: &'static str,
        subject: &str,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let rpc = Rpc {
            method,
            namespace: &self.name,
            subject,
        };
        let started = Instant::now();
        let answer = with_timeout(call).await;
        let code = answer.as_ref().err().map_or(Code::Ok, Status::code);
        rpc.ended(started, code);
        answer
    }

    fn request<T>(&self, message: T, lease: Option<String>) -> Result<Request<T>, Status> {
        let mut request = in_namespace(&self.name, message)?;
        if let Some(lease) = lease {
            let lease = lease.parse().map_err(|_| Status::internal("not a lease"))?;
            request.metadata_mut().insert("containerd-lease", lease);
        }
        Ok(request)
    }
}

async fn with_timeout<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = || Status::deadline_exceeded("no answer in 5 s");
    tokio::time::timeout(TIMEOUT, call)
        .await
        .unwrap_or_else(|_| Err(late()))
}

/// For example `archaware-20261121`.
fn lease_name(day: u32) -> String {
    let date = jiff::Timestamp::from_second(i64::from(day) * 86_400).unwrap_or_default();
    date.strftime("archaware-%Y%m%d").to_string()
}

fn tag_label(name: &str) -> (String, String) {
    let hash = Digest::sha256(name.as_bytes()).to_string();
    let short: String = hash.chars().skip("sha256:".len()).take(16).collect();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    (
        format!("{TAG}{short}"),
        format!("{} {name}", now.unwrap_or_default().as_secs()),
    )
}

fn seen_tags(info: &Info) -> Vec<PersistedTag> {
    let Ok(digest) = info.digest.parse::<Digest>() else {
        return Vec::new();
    };
    let labels = info.labels.iter().filter(|(key, _)| key.starts_with(TAG));
    let seen = labels.filter_map(|(_, value)| seen_tag(value));
    seen.map(|(name, age)| PersistedTag {
        name: name.to_owned(),
        digest: digest.clone(),
        age,
    })
    .collect()
}

/// The name in a label and the age of the label.
fn seen_tag(value: &str) -> Option<(&str, Duration)> {
    let (seconds, name) = value.split_once(' ')?;
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.parse().ok()?))?;
    // A label from the future (the clock was set back) is ignored.
    let age = SystemTime::now().duration_since(at).ok()?;
    Some((name, age))
}

/// Labels that tell containerd's garbage collector which documents a document refers to.
pub(super) fn references(
    children: impl Iterator<Item = (bool, Digest)>,
) -> HashMap<String, String> {
    children
        .enumerate()
        .map(|(index, (is_config, child))| {
            let name = if is_config {
                "config".to_owned()
            } else {
                format!("m.{index}")
            };
            (
                format!("containerd.io/gc.ref.content.{name}"),
                child.to_string(),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_survive_being_written_down() {
        let digest = Digest::sha256(b"x");
        let (key, value) = tag_label("docker.io/library/nginx:latest");
        let label = |value: &str| Info {
            digest: digest.to_string(),
            labels: HashMap::from([
                (key.clone(), value.to_owned()),
                ("other".to_owned(), "1 x".to_owned()),
            ]),
            ..Info::default()
        };
        let seen = seen_tags(&label(&value));
        assert_eq!(seen.len(), 1);
        assert_eq!(
            (seen[0].name.as_str(), &seen[0].digest),
            ("docker.io/library/nginx:latest", &digest)
        );
        assert!(seen[0].age < Duration::from_secs(10));
        for odd in ["", "x y", "1", "99999999999 future", "-1 x"] {
            assert!(seen_tags(&label(odd)).is_empty(), "{odd}");
        }
        assert!(seen_tags(&Info::default()).is_empty());
    }

    #[test]
    fn one_lease_a_day() {
        assert_eq!(lease_name(0), "archaware-19700101");
        assert_eq!(lease_name(20_778), "archaware-20261121");
    }
}
