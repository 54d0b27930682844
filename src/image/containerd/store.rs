//! What was fetched is kept in containerd, after answering and as well as it goes: a restart then costs no
//! request for it.

use std::{
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    time::timeout_at,
};
use tokio_util::task::AbortOnDropHandle;
use tonic::{Code, Status};

use crate::{
    image::{
        cache::{Audience, Caches, STALE_IF_ERROR},
        digest::Digest,
        tree::{Kind, Leaf},
    },
    metrics::ContentWrites,
};

use super::{
    breaker::Breaker,
    link::{BUDGET, Broken, Link},
    namespace::{Namespace, references, today},
};

/// Jobs that wait for one worker; each is small without its bytes.
const QUEUE: usize = 2048;
/// Bytes that wait to be written. What does not fit is fetched again after a restart.
const MAX_WAITING: usize = 8 * 1024 * 1024;
/// Bytes written in a day: whoever can push images must not fill the node's disk.
const MAX_PER_DAY: usize = 64 * 1024 * 1024;
/// Each writes one job at a time and waits for the disk; more would take it from the node's own pulls.
const WORKERS: u64 = 2;
/// How long an answer may wait for what an earlier process knew, once that is coming.
const RECALL: Duration = Duration::from_secs(5);
/// Between attempts to read it.
const RECALL_AGAIN: Duration = Duration::from_secs(30);

/// The way into archaware's namespace. What it is given is written in the background or dropped.
pub(crate) struct Store {
    /// One queue for each worker. Jobs of one root share a queue, so a tag is written after its tree.
    queues: Vec<mpsc::Sender<Job>>,
    waiting: Arc<Semaphore>,
    namespace: Arc<Namespace>,
    link: Arc<Link>,
    writes: ContentWrites,
    started: Instant,
    stage: watch::Sender<Stage>,
    /// Ended with this. Every write is one message, committed or not, so nothing is left half done.
    _workers: Vec<AbortOnDropHandle<()>>,
    recall: OnceLock<AbortOnDropHandle<()>>,
}

enum Job {
    Keep(Vec<Leaf>, OwnedSemaphorePermit),
    Touch(Digest),
    Tag(String, Digest),
}

/// How far the reading of what earlier processes knew has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Coming,
    Over,
}

impl Store {
    pub(super) fn start(link: Arc<Link>, namespace: &str, writes: ContentWrites) -> Self {
        let namespace = Arc::new(Namespace::new(link.channel.clone(), namespace));
        let worker = Arc::new(Worker {
            namespace: namespace.clone(),
            breaker: Breaker::default(),
            budget: parking_lot::Mutex::new((today(), MAX_PER_DAY)),
            writes: writes.clone(),
        });
        let (queues, workers): (Vec<_>, Vec<_>) = (0..WORKERS)
            .map(|_| {
                let (queue, jobs) = mpsc::channel(QUEUE);
                let running = tokio::spawn(worker.clone().run(jobs));
                (queue, AbortOnDropHandle::new(running))
            })
            .unzip();
        Self {
            queues,
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
            namespace,
            link,
            writes,
            started: Instant::now(),
            stage: watch::Sender::new(Stage::Waiting),
            _workers: workers,
            recall: OnceLock::new(),
        }
    }

    /// The day that leases are for; content that is used on a day is to be touched once.
    pub(crate) fn today() -> u32 {
        today()
    }

    /// Keeps a tree, the root first. One that is empty was too large.
    pub(crate) fn keep(&self, root: &Digest, leaves: Vec<Leaf>) {
        let size: usize = leaves.iter().map(|leaf| leaf.bytes.len()).sum();
        let place = u32::try_from(size)
            .ok()
            .filter(|size| *size > 0)
            .and_then(|size| self.waiting.clone().try_acquire_many_owned(size).ok());
        match place {
            Some(place) => self.push(root, Job::Keep(leaves, place)),
            None => self.writes.count("dropped"),
        }
    }

    /// Content is in use: it is to live on.
    pub(crate) fn touch(&self, digest: &Digest) {
        self.push(digest, Job::Touch(digest.clone()));
    }

    /// A public tag points at a root that is held.
    pub(crate) fn tag(&self, name: &str, root: &Digest) {
        self.push(root, Job::Tag(name.to_owned(), root.clone()));
    }

    fn push(&self, root: &Digest, job: Job) {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(root);
        let worker = usize::try_from(hash % WORKERS).unwrap_or_default();
        let queue = self.queues.get(worker).filter(|_| self.link.is_up());
        if queue.is_none_or(|queue| queue.try_send(job).is_err()) {
            self.writes.count("dropped");
        }
    }

    /// Reads what earlier processes knew of public tags into memory, at most so many.
    pub(crate) fn recall(&self, caches: &Arc<Caches>, images: usize) {
        let (namespace, stage, caches) =
            (self.namespace.clone(), self.stage.clone(), caches.clone());
        let reading = async move {
            loop {
                let coming = || {
                    stage.send_replace(Stage::Coming);
                };
                let read = namespace.tags(images, coming).await;
                if let Ok(tags) = &read {
                    for tag in tags.iter().filter(|tag| tag.age < STALE_IF_ERROR) {
                        if let Some(seen) = Instant::now().checked_sub(tag.age) {
                            caches.keep_tag(&tag.name, Audience::Everybody, &tag.digest, seen);
                        }
                    }
                    tracing::debug!(tags = tags.len(), "what containerd holds is known");
                }
                stage.send_replace(Stage::Over);
                if read.is_ok() {
                    return;
                }
                tokio::time::sleep(RECALL_AGAIN).await;
            }
        };
        let start = || AbortOnDropHandle::new(tokio::spawn(reading));
        self.recall.get_or_init(start);
    }

    /// Waits until it has been read: not longer than for any other word of containerd, unless it is coming.
    /// Says whether that was in vain, so that nobody waits for the same silence twice.
    pub(crate) async fn recalled(&self) -> Result<(), Broken> {
        let mut stage = self.stage.subscribe();
        let (soon, later) = (self.started + BUDGET, self.started + RECALL);
        if Instant::now() < soon {
            let waited = timeout_at(soon.into(), stage.wait_for(|s| *s != Stage::Waiting)).await;
            if waited.is_err() {
                return Err(Broken);
            }
        }
        if *stage.borrow() == Stage::Coming {
            let _ = timeout_at(later.into(), stage.wait_for(|s| *s == Stage::Over)).await;
        }
        Ok(())
    }
}

struct Worker {
    namespace: Arc<Namespace>,
    /// A full disk fails writes only; reads have a breaker of their own.
    breaker: Breaker,
    /// A day, and the bytes that may still be written in it.
    budget: parking_lot::Mutex<(u32, usize)>,
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
            Job::Keep(leaves, _place) => self.keep(&leaves).await,
            Job::Touch(digest) => self.namespace.touch(&digest).await.map(|()| true),
            Job::Tag(name, root) => self.namespace.tag(&name, &root).await.map(|()| true),
        };
        match done {
            Ok(kept) => {
                self.writes.count(if kept { "stored" } else { "dropped" });
                if permit.succeeded() {
                    tracing::info!("containerd keeps what is fetched again");
                }
            }
            // A root that only the kubelet's namespace holds carries no tag.
            Err(status) if status.code() == Code::NotFound => {
                permit.succeeded();
                self.writes.count("dropped");
            }
            Err(status) => {
                self.writes.count("failed");
                tracing::debug!(code = ?status.code(), error = status.message(), "not kept in containerd");
                if permit.failed() {
                    let error = status.message();
                    tracing::warn!(
                        error,
                        "containerd does not keep what is fetched; images are resolved all the same"
                    );
                }
            }
        }
    }

    /// Children first: a root that is there is whole.
    async fn keep(&self, leaves: &[Leaf]) -> Result<bool, Status> {
        let size = leaves.iter().map(|leaf| leaf.bytes.len()).sum();
        if !self.spend(size) {
            return Ok(false);
        }
        for leaf in leaves.iter().rev() {
            let children = leaves
                .iter()
                .filter(|child| child.parent.as_ref() == Some(&leaf.digest));
            let children = children.map(|child| (child.kind == Kind::Config, child.digest.clone()));
            self.namespace
                .write(&leaf.digest, &leaf.bytes, references(children))
                .await?;
        }
        Ok(true)
    }

    fn spend(&self, size: usize) -> bool {
        let mut budget = self.budget.lock();
        if budget.0 != today() {
            *budget = (today(), MAX_PER_DAY);
        }
        let left = budget.1.checked_sub(size);
        budget.1 = left.unwrap_or(budget.1);
        left.is_some()
    }
}
