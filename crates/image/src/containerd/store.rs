//! Persists fetched documents in containerd, in the background and best effort. After a restart no
//! registry request is needed for them.

use std::{
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use futures::future::join_all;
use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    time::timeout_at,
};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status};

use archaware_base::tasks;

use crate::{
    cache::{CacheScope, Caches, STALE_IF_ERROR},
    digest::Digest,
    metrics::ContentWrites,
    summary::{DocumentKind, FetchedDocument},
};

use super::{
    breaker::Breaker,
    connection::{Connection, ContainerdUnavailable},
    namespace::{ContentNamespace, references, today},
};

/// Maximum number of queued jobs per worker. The bytes of documents are bounded separately.
const QUEUE_LENGTH: usize = 2048;
/// Maximum bytes that wait to be written. Documents beyond it are fetched again after a restart.
const MAX_WAITING: usize = 8 * 1024 * 1024;
/// Maximum bytes written per day, so that users who push images cannot fill the node's disk.
const MAX_PER_DAY: usize = 64 * 1024 * 1024;
/// Number of workers. Each writes one job at a time and waits for the disk. More workers would
/// compete with the node's own image pulls.
const WORKERS: u64 = 2;
/// How long after the start of the store resolutions wait for persisted tags, if containerd has
/// begun to send the tags.
const LOAD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long pending writes may take when the process ends.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// Delay between attempts to load persisted tags.
const LOAD_RETRY: Duration = Duration::from_secs(30);

/// Writes to archaware's namespace in the background; jobs beyond the limits are dropped.
pub(crate) struct Store {
    /// One queue per worker. Jobs of one root document share a queue, so its tags are written after
    /// its documents. Empty after [`Self::finish`].
    queues: Mutex<Vec<mpsc::Sender<Job>>>,
    queued_bytes: Arc<Semaphore>,
    namespace: Arc<ContentNamespace>,
    connection: Arc<Connection>,
    writes: ContentWrites,
    started: Instant,
    load_state: watch::Sender<LoadState>,
    /// Aborted when the store is dropped. One message writes a whole document, so no document is
    /// left half written.
    workers: Mutex<Vec<AbortOnDropHandle<()>>>,
    loader: OnceLock<AbortOnDropHandle<()>>,
}

enum Job {
    Documents(Vec<FetchedDocument>, OwnedSemaphorePermit),
    Touch(Digest),
    Tag(String, Digest),
}

/// Progress of loading persisted tags.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoadState {
    Waiting,
    Receiving,
    Finished,
}

impl Store {
    pub(super) fn start(
        connection: Arc<Connection>,
        namespace: &str,
        writes: ContentWrites,
    ) -> Self {
        let namespace = Arc::new(ContentNamespace::new(connection.channel.clone(), namespace));
        let worker = Arc::new(Worker {
            namespace: namespace.clone(),
            breaker: Breaker::default(),
            budget: Mutex::new((today(), MAX_PER_DAY)),
            writes: writes.clone(),
        });
        let (queues, workers): (Vec<_>, Vec<_>) = (0..WORKERS)
            .map(|_| {
                let (queue, jobs) = mpsc::channel(QUEUE_LENGTH);
                let running = tasks::spawn("writes to containerd", worker.clone().run(jobs));
                (queue, AbortOnDropHandle::new(running))
            })
            .unzip();
        Self {
            queues: Mutex::new(queues),
            queued_bytes: Arc::new(Semaphore::new(MAX_WAITING)),
            namespace,
            connection,
            writes,
            started: Instant::now(),
            load_state: watch::Sender::new(LoadState::Waiting),
            workers: Mutex::new(workers),
            loader: OnceLock::new(),
        }
    }

    /// Number of the current day; each day has its own lease. Content in use is touched once a day.
    pub(crate) fn today() -> u32 {
        today()
    }

    /// Persists the documents of an image. The list begins with the root; an empty list means that
    /// the documents were too large.
    pub(crate) fn store_documents(&self, root: &Digest, documents: Vec<FetchedDocument>) {
        let size: usize = documents.iter().map(|document| document.bytes.len()).sum();
        let place = u32::try_from(size)
            .ok()
            .filter(|size| *size > 0)
            .and_then(|size| self.queued_bytes.clone().try_acquire_many_owned(size).ok());
        match place {
            Some(place) => self.enqueue(root, Job::Documents(documents, place)),
            None => self.writes.count("dropped"),
        }
    }

    /// Extends the life of content that is in use.
    pub(crate) fn touch(&self, digest: &Digest) {
        self.enqueue(digest, Job::Touch(digest.clone()));
    }

    /// Persists the digest of a public tag.
    pub(crate) fn store_tag(&self, name: &str, root: &Digest) {
        self.enqueue(root, Job::Tag(name.to_owned(), root.clone()));
    }

    fn enqueue(&self, root: &Digest, job: Job) {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(root);
        let worker = usize::try_from(hash % WORKERS).unwrap_or_default();
        let queues = self.queues.lock();
        let queue = queues.get(worker).filter(|_| self.connection.is_up());
        if queue.is_none_or(|queue| queue.try_send(job).is_err()) {
            self.writes.count("dropped");
        }
    }

    /// Writes all queued content and ends the workers, within [`FINISH_TIMEOUT`].
    pub(crate) async fn finish(&self) {
        self.queues.lock().clear();
        let workers = std::mem::take(&mut *self.workers.lock());
        let ended = tokio::time::timeout(FINISH_TIMEOUT, join_all(workers)).await;
        if ended.is_err() {
            tracing::info!("stopping before all image documents are persisted in containerd");
        }
    }

    /// Loads persisted public tags into the caches, at most `images`.
    pub(crate) fn load_persisted(&self, caches: &Arc<Caches>, images: usize) {
        let (namespace, load_state, caches) = (
            self.namespace.clone(),
            self.load_state.clone(),
            caches.clone(),
        );
        let reading = async move {
            loop {
                let on_first_response = || {
                    load_state.send_replace(LoadState::Receiving);
                };
                let read = namespace.list_tags(images, on_first_response).await;
                if let Ok(tags) = &read {
                    for tag in tags.iter().filter(|tag| tag.age < STALE_IF_ERROR) {
                        if let Some(seen) = Instant::now().checked_sub(tag.age) {
                            caches.store_tag(&tag.name, CacheScope::Public, &tag.digest, seen);
                        }
                    }
                    tracing::debug!(tags = tags.len(), "persisted tags loaded");
                }
                load_state.send_replace(LoadState::Finished);
                if read.is_ok() {
                    return;
                }
                tokio::time::sleep(LOAD_RETRY).await;
            }
        };
        let start = || AbortOnDropHandle::new(tasks::spawn("kept tags", reading));
        self.loader.get_or_init(start);
    }

    /// Waits until persisted tags are loaded. The limits count from the start of the store: the
    /// lookup timeout for the first response, [`LOAD_TIMEOUT`] for the rest.
    ///
    /// # Errors
    ///
    /// When containerd did not respond, so that the caller does not wait for it a second time.
    pub(crate) async fn wait_until_loaded(&self) -> Result<(), ContainerdUnavailable> {
        let mut load_state = self.load_state.subscribe();
        let (soon, later) = (
            self.started + self.connection.lookup_timeout,
            self.started + LOAD_TIMEOUT,
        );
        if Instant::now() < soon {
            let waited = timeout_at(
                soon.into(),
                load_state.wait_for(|s| *s != LoadState::Waiting),
            )
            .await;
            if waited.is_err() {
                return Err(ContainerdUnavailable);
            }
        }
        if *load_state.borrow() == LoadState::Receiving {
            let _ = timeout_at(
                later.into(),
                load_state.wait_for(|s| *s == LoadState::Finished),
            )
            .await;
        }
        Ok(())
    }
}

struct Worker {
    namespace: Arc<ContentNamespace>,
    /// Separate from the breaker of reads: a full disk fails only writes.
    breaker: Breaker,
    /// The day and the bytes that may still be written on it.
    budget: Mutex<(u32, usize)>,
    writes: ContentWrites,
}

impl Worker {
    async fn run(self: Arc<Self>, mut jobs: mpsc::Receiver<Job>) {
        while let Some(job) = jobs.recv().await {
            self.work(job).await;
        }
    }

    async fn work(&self, job: Job) {
        let Some(permit) = self.breaker.enter() else {
            return self.writes.count("dropped");
        };
        let done = match job {
            Job::Documents(documents, _place) => self.write_documents(&documents).await,
            Job::Touch(digest) => self.namespace.touch(&digest).await.map(|()| true),
            Job::Tag(name, root) => self.namespace.write_tag(&name, &root).await.map(|()| true),
        };
        match done {
            Ok(kept) => {
                self.writes.count(if kept { "stored" } else { "dropped" });
                if permit.succeeded() {
                    tracing::info!("image documents are persisted in containerd again");
                }
            }
            // The root is not in archaware's namespace, for example because only the kubelet's
            // namespace has it.
            Err(status) if status.code() == Code::NotFound => {
                permit.succeeded();
                self.writes.count("dropped");
            }
            Err(status) => {
                self.writes.count("failed");
                tracing::debug!(code = ?status.code(), error = status.message(), "cannot write to containerd");
                if permit.failed() {
                    let error = status.message();
                    tracing::warn!(
                        error,
                        "cannot persist image documents in containerd; after a restart, archaware may ask registries for them again"
                    );
                }
            }
        }
    }

    /// Writes children first, so that an existing root is always complete.
    async fn write_documents(&self, documents: &[FetchedDocument]) -> Result<bool, Status> {
        let size = documents.iter().map(|document| document.bytes.len()).sum();
        if !self.reserve_daily_bytes(size) {
            return Ok(false);
        }
        for document in documents.iter().rev() {
            let children = documents
                .iter()
                .filter(|child| child.parent.as_ref() == Some(&document.digest));
            let children =
                children.map(|child| (child.kind == DocumentKind::Config, child.digest.clone()));
            self.namespace
                .write(&document.digest, &document.bytes, references(children))
                .await?;
        }
        Ok(true)
    }

    fn reserve_daily_bytes(&self, size: usize) -> bool {
        let mut budget = self.budget.lock();
        if budget.0 != today() {
            *budget = (today(), MAX_PER_DAY);
        }
        let left = budget.1.checked_sub(size);
        budget.1 = left.unwrap_or(budget.1);
        left.is_some()
    }
}
