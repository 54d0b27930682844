//! Lists pods by their nodes, and gives them the toleration that they lack.

use std::{future::pending, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::{
    FutureExt, StreamExt, TryStreamExt,
    future::join,
    stream::{self, BoxStream, FuturesUnordered},
};
use kube_runtime::reflector::{ObjectRef, Store};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        api::{ApiClient, ApiError},
        name::NamespacedName,
        namespaces::Namespaces,
        objects::{Namespace, Node, Pod},
        patch,
        writer::{PatchOutcome, Writer},
    },
    error::chain,
    evaluate::{Evaluation, Evaluator, Verdict},
    metrics::Metrics,
    placement::Effect,
    plan::{
        bound_pod::{self, BoundPodPlan},
        pod::subject,
    },
};

use super::{
    BoundPods, Shared,
    batch::{Batch, Failure},
    checks::{CheckResult, NodeCheck},
};

/// All pods that are bound and not finished. `spec.nodeName!=` selects pods that have a node.
const BOUND: &str = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed";
/// Concurrent batches: a node that joins does not wait until all other nodes are checked.
const MAX_BATCHES: usize = 4;
/// Lists of single nodes at the same time.
const CONCURRENT_LISTS: usize = 4;
/// For up to this many nodes, the pods of each node are listed separately.
const MAX_SINGLE: usize = 8;
/// If a batch has at least one tenth of all nodes (1/`SHARE_FOR_ALL`), one list of all pods costs
/// less than a list for each node.
const SHARE_FOR_ALL: usize = 10;
/// Pods that are read ahead: a page, so that patches do not wait for the next one.
const READ_AHEAD: usize = 250;
/// Pods of a batch that are checked at the same time; pods that need a patch wait for a permit of
/// `places`.
const MAX_WAITING: usize = 64;

/// If a pod's images are still unresolved after this time, other pods of its namespace wait less.
const LONG_LOOK: Duration = Duration::from_secs(5);

/// Checks the pods of nodes.
pub(in super::super) struct Worker {
    pub(in super::super) requests: BoundPods,
    pub(in super::super) api: ApiClient,
    pub(in super::super) evaluator: Evaluator,
    pub(in super::super) namespaces: Namespaces,
    pub(in super::super) writer: Writer,
    pub(in super::super) metrics: Metrics,
    pub(in super::super) nodes: Store<Node>,
    /// Permits for pods that lack their toleration, as many as the writer has slots. The writer
    /// gives its slots in the order of requests, so any other patch waits for one patch of a bound
    /// pod at most.
    pub(in super::super) places: Semaphore,
    /// Nodes that may be tainted now.
    pub(in super::super) ready: mpsc::Sender<ObjectRef<Node>>,
    pub(in super::super) stop: CancellationToken,
}

impl Worker {
    /// Runs until `stop`, and serves requests while nodes may be tainted. When nodes may no longer
    /// be tainted, all requests are forgotten, because another process may taint them.
    pub(in super::super) async fn run(self: Arc<Self>, mut may_taint: watch::Receiver<bool>) {
        loop {
            let begin = may_taint.wait_for(|may| *may);
            if !matches!(self.stop.run_until_cancelled(begin).await, Some(Ok(_))) {
                return;
            }
            tokio::select! {
                _ = may_taint.wait_for(|may| !*may) => {}
                () = self.clone().serve() => return,
            }
            self.requests.0.checks.lock().clear();
        }
    }

    /// Serves requests until `stop`, then waits only for patches in progress.
    async fn serve(self: Arc<Self>) {
        let Shared { checks, changed } = &*self.requests.0;
        let mut running = FuturesUnordered::new();
        while !self.stop.is_cancelled() {
            let due = checks.lock().due(Instant::now());
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
                    let nodes = checks.lock().take(phase, Instant::now());
                    running.push(self.clone().check(Batch::new(phase, nodes)));
                }
                () = changed.notified() => {}
                Some(()) = running.next() => {}
                () = self.stop.cancelled() => {}
            }
        }
        while running.next().await.is_some() {}
    }

    /// Checks the pods of these nodes, and sends the nodes that may be tainted to `ready`.
    async fn check(self: Arc<Self>, batch: Batch) {
        let (started, batch) = (Instant::now(), Arc::new(batch));
        let listed = tokio::select! {
            listed = self.clone().look_at_pods(batch.clone()) => listed,
            () = batch.log_progress() => Ok(()),
        };
        if self.stop.is_cancelled() {
            // Not every pod was looked at.
            return;
        }
        let nodes = batch.checks.len();
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
                "bound pods tolerate the taint of their node"
            );
        }
        for node in self.record(&batch, listed.is_ok()) {
            // The controller of nodes receives nothing after `stop`.
            let sent = self.stop.run_until_cancelled(self.ready.send(node));
            if sent.await.is_none() {
                return;
            }
        }
    }

    /// Records the results of a batch. Returns the nodes that may be tainted.
    fn record(&self, batch: &Batch, is_listed: bool) -> Vec<ObjectRef<Node>> {
        let now = Instant::now();
        let mut checks = self.requests.0.checks.lock();
        let outcome = |check| {
            if is_listed {
                batch.outcome(check)
            } else {
                CheckResult::NotListed
            }
        };
        let ready = batch
            .checks
            .iter()
            .filter(|check| checks.record(check, batch.phase, outcome(check), now));
        ready.map(|check| ObjectRef::new(&check.name)).collect()
    }

    /// Gives the pods of these nodes the toleration that they lack.
    async fn look_at_pods(self: Arc<Self>, batch: Arc<Batch>) -> Result<(), ApiError> {
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
        let stop = self.stop.clone();
        let pods = stream::poll_fn(move |context| receiver.poll_recv(context));
        let settled = pods.for_each_concurrent(MAX_WAITING, move |pod| {
            let (worker, batch) = (self.clone(), batch.clone());
            async move { worker.check_pod(&pod, &batch).await }
        });
        let (listed, ()) = join(stop.run_until_cancelled(listed), settled).await;
        listed.unwrap_or(Ok(()))
    }

    /// The pods of these nodes, and possibly of other nodes.
    fn pods(self: Arc<Self>, batch: &Batch) -> BoxStream<'static, Result<Pod, ApiError>> {
        let nodes = batch.nodes();
        if nodes.len() > MAX_SINGLE && nodes.len() * SHARE_FOR_ALL >= self.nodes.len() {
            return self.api.list(Some(BOUND)).boxed();
        }
        stream::iter(nodes)
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

    async fn check_pod(&self, pod: &Pod, batch: &Batch) {
        let node = pod.spec.node_name.as_deref().unwrap_or_default();
        let Some(check) = batch.check(node) else {
            return;
        };
        batch.count();
        let name = NamespacedName::of_object(pod);
        let tolerated = AssertUnwindSafe(self.tolerate(pod, &name, check, batch)).catch_unwind();
        let result = tolerated.await.unwrap_or_else(|_| {
            self.metrics.panics.count("nodes");
            Err(Failure::Panicked)
        });
        let result = result.unwrap_or_else(|failure| {
            batch.failed(node, name, failure);
            "failed"
        });
        if result == BoundPodPlan::Tolerated.as_str() {
            batch.tolerated(node);
        }
        self.metrics.bound_pods.count(result);
    }

    /// `None` if the images are not known in time. The images then do not prevent the toleration.
    async fn evaluate(
        &self,
        pod: &Pod,
        namespace: &Namespace,
        batch: &Batch,
    ) -> Option<Evaluation> {
        let (subject, started) = (subject(pod), Instant::now());
        let evaluation = self.evaluator.evaluate(subject, namespace);
        let evaluation = match batch.patience(subject.namespace) {
            Some(patience) => timeout(patience, evaluation).await.ok()?,
            None => evaluation.await,
        };
        let is_late = started.elapsed() >= LONG_LOOK;
        if is_late && matches!(evaluation.verdict, Verdict::Unresolved { .. }) {
            batch.mark_slow(subject.namespace);
        }
        Some(evaluation)
    }

    /// Gives the pod the toleration for the taint of its node, unless the pod already tolerates the
    /// taint, is ignored, or may not stay. Returns the result for the metrics.
    async fn tolerate(
        &self,
        pod: &Pod,
        name: &NamespacedName,
        check: &NodeCheck,
        batch: &Batch,
    ) -> Result<&'static str, Failure> {
        let taint = &check.taint;
        if !bound_pod::lacks_toleration(pod, taint) {
            return Ok("unchanged");
        }
        let namespace = self.namespaces.find(subject(pod).namespace).await;
        // With NoSchedule the images do not matter.
        let evaluation = if taint.kind.effect == Effect::NoExecute {
            let evaluation = self.evaluate(pod, &namespace, batch);
            let evaluation = self.stop.run_until_cancelled(evaluation).await;
            evaluation.ok_or(Failure::Changed)?
        } else {
            None
        };
        let _place = self.places.acquire().await;
        let is_ignored = self.evaluator.is_ignored(subject(pod), &namespace);
        let policy = &self.evaluator.policy;
        let is_repelled =
            evaluation.is_some_and(|evaluation| bound_pod::is_repelled(&evaluation, policy, taint));
        let planned = bound_pod::plan(is_ignored, is_repelled);
        if planned != BoundPodPlan::Tolerated {
            if taint.kind.effect == Effect::NoExecute {
                let (node, why) = (&check.name, planned.as_str());
                tracing::info!(pod = %name, node, %taint, why, "the taint of its node evicts the pod");
            }
            return Ok(planned.as_str());
        }
        let patch = patch::pod::tolerate(pod, taint);
        let mut outcome = self.writer.patch::<Pod>(name, patch).await;
        if let PatchOutcome::Failed(ApiError::Invalid(_)) = outcome {
            // A tenant may fill the annotations of a pod, so that the record does not fit. The pod
            // then gets its toleration without the record.
            let patch = patch::pod::tolerate_unrecorded(pod, taint);
            outcome = self.writer.patch::<Pod>(name, patch).await;
        }
        match outcome {
            PatchOutcome::Applied => Ok(planned.as_str()),
            PatchOutcome::Gone => Ok("gone"),
            PatchOutcome::Stale | PatchOutcome::Stopping => Err(Failure::Changed),
            PatchOutcome::Failed(error) => Err(Failure::Rejected(error)),
        }
    }
}
