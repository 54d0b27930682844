//! Lists pods by their nodes, and gives them the toleration that they lack.

use std::{
    collections::HashMap,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{
    StreamExt, TryStreamExt,
    future::join,
    stream::{self, BoxStream, FuturesUnordered},
};
use kube_runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{
    cluster::{
        api::{ApiClient, ApiError},
        name::NamespacedName,
        namespaces::Namespaces,
        objects::{Node, Pod},
        patch,
        writer::{PatchOutcome, Writer},
    },
    error::chain,
    evaluate::Evaluator,
    metrics::BoundPodMetrics,
    placement::Effect,
    plan,
};

use super::{
    BoundPods, Shared,
    looks::{Look, Phase},
};

/// All pods that run. `!=` with nothing selects those that are bound.
const RUNNING: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";
/// Batches at the same time: a node that joins does not wait until all others have been looked at.
const MAX_BATCHES: usize = 4;
/// Lists of single nodes at the same time.
const CONCURRENT_LISTS: usize = 4;
/// Up to this many nodes are listed one by one.
const MAX_SINGLE: usize = 8;
/// From one node in this many, one list of all pods costs less than a list for each node.
const SHARE_FOR_ALL: usize = 10;
/// Pods that are read ahead: a page, so that patches do not wait for the next one.
const READ_AHEAD: usize = 250;
/// How often progress is logged.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// After this many failures the taint comes all the same, if it evicts nobody.
const MAX_FAILURES: u32 = 3;

/// Looks at the pods of nodes.
pub(in super::super) struct Worker {
    pub(in super::super) requests: BoundPods,
    pub(in super::super) api: ApiClient,
    pub(in super::super) evaluator: Evaluator,
    pub(in super::super) namespaces: Namespaces,
    pub(in super::super) writer: Writer,
    pub(in super::super) metrics: BoundPodMetrics,
    pub(in super::super) nodes: Store<Node>,
    /// Nodes that may be tainted now.
    pub(in super::super) ready: mpsc::Sender<ObjectRef<Node>>,
}

/// Nodes whose pods are looked at together, and what became of these.
struct Batch {
    phase: Phase,
    /// By name.
    nodes: HashMap<String, Look>,
    looked_at: AtomicUsize,
    tolerated: AtomicUsize,
    /// By node: a pod that did not get its toleration, and why.
    failed: Mutex<HashMap<String, (NamespacedName, Failure)>>,
}

enum Failure {
    /// It changed meanwhile.
    Changed,
    Rejected(ApiError),
}

impl Worker {
    /// Runs while nodes may be tainted. Then everything is forgotten, because another process may taint them.
    pub(in super::super) async fn run(self: Arc<Self>, mut may_taint: watch::Receiver<bool>) {
        loop {
            if may_taint.wait_for(|may| *may).await.is_err() {
                return;
            }
            tokio::select! {
                _ = may_taint.wait_for(|may| !*may) => {}
                () = self.clone().serve() => {}
            }
            self.requests.0.looks.lock().clear();
        }
    }

    async fn serve(self: Arc<Self>) {
        let Shared { looks, changed } = &*self.requests.0;
        let mut running = FuturesUnordered::new();
        loop {
            let due = looks.lock().due(Instant::now());
            let due = due.filter(|_| running.len() < MAX_BATCHES);
            let next = async {
                let Some((phase, at)) = due else {
                    return pending().await;
                };
                tokio::time::sleep_until(at).await;
                phase
            };
            tokio::select! {
                phase = next => {
                    let nodes = looks.lock().take(phase, Instant::now());
                    running.push(self.clone().look(Batch::new(phase, nodes)));
                }
                () = changed.notified() => {}
                Some(()) = running.next() => {}
            }
        }
    }

    /// Looks at the pods of these nodes, and says which of them may be tainted.
    async fn look(self: Arc<Self>, batch: Batch) {
        let (started, batch) = (Instant::now(), Arc::new(batch));
        let listed = tokio::select! {
            listed = self.clone().look_at_pods(batch.clone()) => listed,
            () = batch.log() => Ok(()),
        };
        let nodes = batch.nodes.len();
        if let Err(error) = &listed {
            let error = chain(error);
            tracing::warn!(error, nodes, "cannot list the pods of nodes; trying again");
        }
        let (pods, tolerated) = batch.counts();
        if tolerated > 0 {
            let seconds = started.elapsed().as_secs_f64();
            tracing::info!(
                nodes,
                pods,
                tolerated,
                seconds,
                "running pods tolerate the taint of their node"
            );
        }
        for node in self.settle(&batch, listed.is_ok()) {
            // The receiver lives as long as the controller of nodes.
            let _ = self.ready.send(node).await;
        }
    }

    /// Records what became of a batch. Returns the nodes that may be tainted.
    fn settle(&self, batch: &Batch, listed: bool) -> Vec<ObjectRef<Node>> {
        let mut ready = Vec::new();
        let (mut looks, failed) = (self.requests.0.looks.lock(), batch.failed.lock());
        for look in batch.nodes.values() {
            let failure = failed.get(&look.name);
            let again = failure.is_some_and(|failure| is_repeated(look, batch.phase, failure));
            if again || !listed {
                looks.failed(look, batch.phase, Instant::now());
            } else if looks.succeeded(look, batch.phase) {
                ready.push(ObjectRef::new(&look.name));
            }
        }
        ready
    }

    /// Gives the pods of these nodes the toleration that they lack.
    async fn look_at_pods(self: Arc<Self>, batch: Arc<Batch>) -> Result<(), ApiError> {
        // The pods that wait for their first decision come first: some places are left for them.
        let writes = usize::from(self.evaluator.config.concurrency.writes.get());
        let concurrency = (writes * 3 / 4).max(1);
        let (sender, mut receiver) = mpsc::channel(READ_AHEAD);
        let mut pods = self.clone().pods(&batch);
        let listed = async move {
            while let Some(pod) = pods.try_next().await? {
                if sender.send(pod).await.is_err() {
                    break;
                }
            }
            Ok(())
        };
        let pods = stream::poll_fn(move |context| receiver.poll_recv(context));
        let settled = pods.for_each_concurrent(concurrency, move |pod| {
            let (worker, batch) = (self.clone(), batch.clone());
            async move { worker.look_at(&pod, &batch).await }
        });
        join(listed, settled).await.0
    }

    /// The pods of these nodes, and maybe of others.
    fn pods(self: Arc<Self>, batch: &Batch) -> BoxStream<'static, Result<Pod, ApiError>> {
        let nodes = &batch.nodes;
        if nodes.len() > MAX_SINGLE && nodes.len() * SHARE_FOR_ALL >= self.nodes.len() {
            return self.api.list(Some(RUNNING)).boxed();
        }
        let names: Vec<String> = nodes.keys().cloned().collect();
        stream::iter(names)
            .map(move |name| {
                let api = self.api.clone();
                async move {
                    let pods = api.pods_of_node(&name).await?;
                    Ok(stream::iter(pods.into_iter().map(Ok)))
                }
            })
            .buffer_unordered(CONCURRENT_LISTS)
            .try_flatten()
            .boxed()
    }

    async fn look_at(&self, pod: &Pod, batch: &Batch) {
        let node = pod.spec.node_name.as_deref().unwrap_or_default();
        let Some(look) = batch.nodes.get(node) else {
            return;
        };
        batch.looked_at.fetch_add(1, Ordering::Relaxed);
        let name = NamespacedName::of_object(pod);
        let result = match self.tolerate(pod, &name, look).await {
            Ok(result) => result,
            Err(failure) => {
                let mut failed = batch.failed.lock();
                failed.insert(node.to_owned(), (name, failure));
                "failed"
            }
        };
        if result == "tolerated" {
            batch.tolerated.fetch_add(1, Ordering::Relaxed);
        }
        self.metrics.count(result);
    }

    /// Gives the pod the toleration for the taint of its node, unless it has one or may not stay. Returns the result for the
    /// metrics.
    async fn tolerate(
        &self,
        pod: &Pod,
        name: &NamespacedName,
        look: &Look,
    ) -> Result<&'static str, Failure> {
        let taint = &look.taint;
        if !plan::bound_pod::lacks_toleration(pod, taint) {
            return Ok("unchanged");
        }
        let subject = plan::pod::subject(pod);
        let of_namespace = self.namespaces.annotations(subject.namespace).await;
        if self.evaluator.is_ignored(subject, &of_namespace) {
            return Ok("ignored");
        }
        if taint.kind.effect == Effect::NoExecute {
            let evaluation = self.evaluator.evaluate(subject, &of_namespace).await;
            if plan::bound_pod::is_misplaced(&evaluation.verdict, &taint.value) {
                tracing::info!(pod = %name, node = look.name, %taint, "its images cannot run on its node; the taint evicts it");
                return Ok("misplaced");
            }
        }
        let patch = patch::pod::tolerate(pod, taint);
        match self.writer.patch::<Pod>(name, patch).await {
            PatchOutcome::Applied => Ok("tolerated"),
            PatchOutcome::Gone => Ok("gone"),
            PatchOutcome::Stale | PatchOutcome::Stopping => Err(Failure::Changed),
            PatchOutcome::Failed(error) => Err(Failure::Rejected(error)),
        }
    }
}

impl Batch {
    fn new(phase: Phase, nodes: Vec<Look>) -> Self {
        Self {
            phase,
            nodes: nodes
                .into_iter()
                .map(|look| (look.name.clone(), look))
                .collect(),
            looked_at: AtomicUsize::new(0),
            tolerated: AtomicUsize::new(0),
            failed: Mutex::default(),
        }
    }

    /// The pods that were looked at, and those of them that got a toleration.
    fn counts(&self) -> (usize, usize) {
        let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        (count(&self.looked_at), count(&self.tolerated))
    }

    /// Logs the progress from time to time; does not end.
    async fn log(&self) {
        let nodes = self.nodes.len();
        loop {
            tokio::time::sleep(PROGRESS_INTERVAL).await;
            let (pods, tolerated) = self.counts();
            tracing::info!(nodes, pods, tolerated, "looking at running pods");
        }
    }
}

/// Whether the node is looked at again before its taint. Says what happens.
fn is_repeated(look: &Look, phase: Phase, (pod, failure): &(NamespacedName, Failure)) -> bool {
    let evicts = look.taint.kind.effect == Effect::NoExecute && phase == Phase::BeforeTaint;
    let (node, taint) = (&look.name, &look.taint);
    let is_last = look.failures + 1 >= MAX_FAILURES;
    match failure {
        Failure::Changed if evicts || !is_last => true,
        Failure::Changed => {
            tracing::warn!(%pod, node, %taint, "the pod changes each time it gets a toleration for the taint of its node");
            false
        }
        Failure::Rejected(error) => {
            let again = evicts || !(error.is_refusal() || is_last);
            let error = chain(error);
            if evicts {
                tracing::warn!(%pod, node, %taint, error, "the node is not tainted: its taint would evict a pod that cannot be patched");
            } else {
                tracing::warn!(%pod, node, %taint, error, again, "the pod gets no toleration for the taint of its node");
            }
            again
        }
    }
}
