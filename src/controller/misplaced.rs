//! Finds pods that fail because their node has another architecture than their images. The sources
//! are events of Kubernetes about failing containers, and failed pods; running pods are not
//! watched. archaware reads each such pod, resolves its images, and publishes an event with advice.
//! With `misplaced: evict` it evicts the pod, so that its controller replaces it elsewhere.

mod hint;
mod places;
mod tracker;

use std::{collections::HashMap, panic::AssertUnwindSafe, sync::Arc, time::Duration};

use futures::{FutureExt, Stream, StreamExt, stream};
use kube_runtime::reflector::{ObjectRef, Store};
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

use crate::{
    cluster::{
        api::{ApiClient, ApiError},
        events::{EventReason, Events},
        evictor::{EvictionReason, EvictionResult, Evictor},
        objects::{Event, Node, Pod, annotations},
        watch::stream_objects,
    },
    config::Misplaced,
    evaluate::{
        AuthorPod, Evaluator, Stage, Subject, Verdict,
        wrong_architecture::{self, WrongArchitecture},
    },
    lines::SharedPlaces,
    placement::{Decision, NodeVariant, annotation, demand::Source, keeps_away, suffices},
    plan::{
        misplaced::{Eviction, GIVEN_UP_WHY, MisplacedPod, MisplacedState, NotElsewhere},
        pod::subject,
    },
    platform::{Architecture, Architectures, ImageArchitectures, with_variant},
};

use super::{
    durable::{Durable, EVICTIONS},
    webhook_use::WebhookUse,
};

use hint::Hint;
use tracker::Tracker;

/// Warning events about pods. The API server leaves out the most frequent reasons, which do not
/// matter here.
const WARNINGS: &str = "regarding.kind=Pod,type=Warning,reason!=FailedScheduling,reason!=Unhealthy,reason!=FailedMount";
/// Selects failed pods, whose containers are not restarted (`restartPolicy`), like those of Jobs.
const FAILED: &str = "status.phase=Failed,spec.nodeName!=";
/// Maximum number of concurrent checks, in total and for each namespace: images in a registry that
/// does not answer take long.
const CONCURRENT_CHECKS: usize = 8;
const CHECKS_PER_NAMESPACE: usize = 2;
/// Pauses before a pod is checked again because its status lags behind the event: the kubelet
/// publishes the event first, and updates the status afterwards. The next event may come minutes
/// later.
const STATUS_PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// Maximum number of pods in a check or waiting for another check. Further events wait in the
/// watch.
const MAX_CHECKS: usize = 256;

/// Finds misplaced pods while this process leads.
pub(super) struct MisplacedPods {
    pub(super) api: ApiClient,
    pub(super) evaluator: Evaluator,
    pub(super) webhook: WebhookUse,
    pub(super) nodes: Store<Node>,
    /// Pods without a node.
    pub(super) pods: Store<Pod>,
    pub(super) events: Events,
    pub(super) evictor: Arc<Evictor>,
    pub(super) durable: Durable,
    tracker: Arc<Mutex<Tracker>>,
    checks: SharedPlaces,
    /// One eviction at a time: the next eviction depends on the record of the previous one for the
    /// same controller.
    evicting: tokio::sync::Mutex<()>,
}

/// A misplaced pod.
struct Found {
    containers: Vec<WrongArchitecture>,
    /// The architectures of the first container's image, if they are known.
    architectures: Option<ImageArchitectures>,
    platform: String,
    /// Whether the first container's image is known not to be for the node.
    image_lacks: bool,
    /// The architectures that its author states, if the node has none of them.
    stated: Option<Architectures>,
}

/// The result of checking a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckResult {
    /// The pod is misplaced, and stays.
    Found,
    Evicted,
    /// It is gone, or fails for another reason.
    Other,
    /// An event reports the failure, but the status of the pod does not show it yet.
    Stale,
}

/// The node of a pod.
struct PodNode {
    node: Arc<Node>,
    architecture: Architecture,
    variant: Option<NodeVariant>,
}

impl PodNode {
    /// Whether the node runs images of these architectures; `None` if that is not known.
    fn runs(&self, set: &Architectures) -> Option<bool> {
        suffices(set, self.architecture.as_str(), self.variant)
    }
}

impl MisplacedPods {
    /// `pods`: pods without a node.
    pub(super) fn new(
        api: ApiClient,
        evaluator: Evaluator,
        webhook: WebhookUse,
        (nodes, pods): (Store<Node>, Store<Pod>),
        (events, evictor, durable): (Events, Arc<Evictor>, Durable),
    ) -> Self {
        let tracker = Arc::new(Mutex::new(Tracker::default()));
        let tracked = tracker.clone();
        let help =
            "Pods that cannot run on their node, because an image is for another architecture";
        webhook
            .metrics
            .register_gauges([("pods_wrong_architecture", help)], move || {
                let found = tracked.lock().found(Instant::now());
                [vec![([], i64::try_from(found).unwrap_or(i64::MAX))]]
            });
        Self {
            api,
            evaluator,
            webhook,
            nodes,
            pods,
            events,
            evictor,
            durable,
            tracker,
            checks: SharedPlaces::new(CONCURRENT_CHECKS, CHECKS_PER_NAMESPACE),
            evicting: tokio::sync::Mutex::default(),
        }
    }

    /// Runs until it is cancelled. `nodes_listed`: whether the nodes are known.
    pub(super) async fn run(
        self,
        mut leadership: watch::Receiver<bool>,
        mut nodes_listed: watch::Receiver<bool>,
    ) {
        let mut namespaces_listed = self.webhook.namespaces.ready();
        let listed = async {
            nodes_listed.wait_for(|ready| *ready).await.is_ok()
                && namespaces_listed.wait_for(|ready| *ready).await.is_ok()
        };
        if !listed.await {
            return;
        }
        while leadership.wait_for(|leading| *leading).await.is_ok() {
            let checks = self
                .hints()
                .for_each_concurrent(MAX_CHECKS, |hint| self.check_hint(hint));
            tokio::select! {
                _ = leadership.wait_for(|leading| !*leading) => {}
                () = checks => return,
            }
            self.tracker.lock().clear();
        }
    }

    /// Pods that may be on a wrong node. A pod is yielded again while events about it keep
    /// arriving.
    fn hints(&self) -> impl Stream<Item = Hint> + Send + use<> {
        let tracker = self.tracker.clone();
        let events = stream_objects::<Event>(&self.api, WARNINGS)
            .filter_map(|event| std::future::ready(Hint::of_event(event, jiff::Timestamp::now())));
        let failed = stream_objects::<Pod>(&self.api, FAILED).filter_map(|pod| {
            // A cluster may keep thousands of pods that failed for other reasons.
            let is_possible = !wrong_architecture::find(&pod, None, |_| true).is_empty();
            std::future::ready(is_possible.then(|| Hint::of_failed(pod)))
        });
        stream::select(events.boxed(), failed.boxed()).filter(move |hint| {
            let namespace = hint.name.namespace.as_deref().unwrap_or_default();
            let is_due = tracker.lock().is_due(&hint.uid, namespace, Instant::now());
            std::future::ready(is_due)
        })
    }

    /// A panic ends only this check. The panic hook has logged its location.
    async fn check_hint(&self, hint: Hint) {
        let checked = AssertUnwindSafe(self.check_until_current(&hint)).catch_unwind();
        match checked.await {
            Ok(Ok(CheckResult::Evicted)) => self.tracker.lock().remove(&hint.uid),
            Ok(Ok(result)) => {
                let found = result == CheckResult::Found;
                self.tracker.lock().record(&hint.uid, found, Instant::now());
            }
            Ok(Err(error)) => {
                tracing::debug!(pod = %hint.name, %error, "cannot read the pod");
                self.tracker.lock().end(&hint.uid);
            }
            Err(_) => {
                self.webhook.metrics.panics.count("misplaced");
                self.tracker.lock().end(&hint.uid);
            }
        }
    }

    /// Looks again while the status of the pod lags behind the event.
    async fn check_until_current(&self, hint: &Hint) -> Result<CheckResult, ApiError> {
        for pause in STATUS_PAUSES {
            let result = self.check_in_turn(hint).await?;
            if result != CheckResult::Stale {
                return Ok(result);
            }
            tracing::debug!(pod = %hint.name, ?pause, "the status lags behind the event");
            tokio::time::sleep(pause).await;
        }
        self.check_in_turn(hint).await
    }

    async fn check_in_turn(&self, hint: &Hint) -> Result<CheckResult, ApiError> {
        let namespace = hint.name.namespace.as_deref().unwrap_or_default();
        let _turn = self.checks.enter(namespace).await;
        self.check(hint).await
    }

    async fn check(&self, hint: &Hint) -> Result<CheckResult, ApiError> {
        let Some(pod) = self.api.find::<Pod>(&hint.name).await? else {
            return Ok(CheckResult::Other);
        };
        if pod.metadata.uid.as_ref() != Some(&hint.uid) || pod.metadata.deletion_timestamp.is_some()
        {
            return Ok(CheckResult::Other);
        }
        let Some(node) = self.node_of(&pod) else {
            return Ok(CheckResult::Other);
        };
        let Some(found) = self.find(&pod, &node, hint).await else {
            let is_stale = hint.is_ahead_of(&pod);
            return Ok(if is_stale {
                CheckResult::Stale
            } else {
                CheckResult::Other
            });
        };
        let evicts = self.evaluator.config.misplaced == Misplaced::Evict;
        let mut misplaced = MisplacedPod {
            pod: &pod,
            age: self.api.clock().age(&pod),
            platform: &found.platform,
            found: &found.containers,
            architectures: found.architectures.as_ref(),
            image_lacks: found.image_lacks,
            stated: found.stated.as_ref(),
            elsewhere: Err(NotElsewhere::MayRunThere),
        };
        let kept_away = self.kept_away(&pod, &node).await;
        let state = if evicts {
            misplaced.elsewhere = match &kept_away {
                Some(set) if self.has_place(&pod, set).await => Ok(()),
                Some(_) => Err(NotElsewhere::NoNode),
                None => Err(NotElsewhere::MayRunThere),
            };
            match self.evict(&misplaced).await {
                Some(state) => state,
                // Another process leads, and checks the pod.
                None => return Ok(CheckResult::Found),
            }
        } else {
            misplaced.elsewhere = kept_away.map(drop).ok_or(NotElsewhere::MayRunThere);
            MisplacedState::Reported
        };
        let note = misplaced.note(state);
        tracing::info!(pod = %hint.name, note, "a pod cannot run on its node");
        self.events
            .publish(&pod, EventReason::WrongArchitecture, note);
        Ok(match state {
            MisplacedState::Evicted => CheckResult::Evicted,
            _ => CheckResult::Found,
        })
    }

    fn node_of(&self, pod: &Pod) -> Option<PodNode> {
        let name = pod.spec.node_name.as_deref()?;
        let node = self.nodes.get(&ObjectRef::new(name))?;
        let view = node.view();
        // A node without a valid architecture cannot be compared with images.
        let architecture = view.architecture.parse().ok()?;
        let variant = self.evaluator.policy.variants.of_node(&view);
        Some(PodNode {
            node,
            architecture,
            variant,
        })
    }

    /// The containers that cannot run on the node. Images are resolved only if they can be the
    /// reason.
    async fn find(&self, pod: &Pod, node: &PodNode, hint: &Hint) -> Option<Found> {
        let proven_cause = hint.proven_cause();
        let is_proven = !wrong_architecture::find(pod, proven_cause, |_| false).is_empty();
        let mut containers = pod.status.containers();
        if !is_proven && !containers.any(wrong_architecture::may_be_wrong_architecture) {
            return None;
        }
        let sets = self.running_images(pod).await;
        let namespace = self.webhook.namespaces.find(subject(pod).namespace).await;
        let (handling, ..) = self.evaluator.handling(subject(pod), &namespace);
        let policy = &self.evaluator.policy;
        let platform = policy.node_platform(&node.node.view());
        let stated = handling.stated();
        // A container whose image is not known may fail for another reason, for example because the
        // image does not exist.
        let lacks = |stated, container: &str| {
            let image = sets.get(container);
            image.is_some() && policy.runs(platform, stated, image) == Some(false)
        };
        let containers =
            wrong_architecture::find(pod, proven_cause, |container| lacks(stated, container));
        let first = containers.first()?.container.clone();
        let architectures = sets.get(&first).cloned();
        let architecture = node.architecture.as_str();
        // The variant of the node matters only if the image has the node's architecture.
        let has_architecture = |set: &ImageArchitectures| set.contains(architecture);
        let variant = node
            .variant
            .filter(|_| architectures.as_ref().is_some_and(has_architecture));
        Some(Found {
            containers,
            architectures,
            platform: with_variant(architecture, variant.map(NodeVariant::name)),
            image_lacks: lacks(None, &first),
            stated: stated
                .filter(|set| policy.runs(platform, Some(set), None) == Some(false))
                .cloned(),
        })
    }

    /// The known architectures of the image that each container runs. Each image is resolved by its
    /// digest, because its tag may name another image by now.
    async fn running_images(&self, pod: &Pod) -> HashMap<String, ImageArchitectures> {
        let mut spec = pod.spec.clone();
        let statuses = pod.status.containers();
        let running = statuses.filter_map(|status| {
            let reference = wrong_architecture::running_reference(status)?;
            Some((status.name.as_str(), Some(reference)))
        });
        spec.set_images(running);
        let resolved = self
            .evaluator
            .resolve_all(Subject {
                spec: &spec,
                ..subject(pod)
            })
            .await;
        let sets: HashMap<String, Option<ImageArchitectures>> = resolved
            .images
            .into_iter()
            .map(|image| (image.name, image.architectures))
            .collect();
        let containers = spec.containers.iter().chain(&spec.init_containers);
        let known = containers.filter_map(|container| {
            let set = sets.get(container.image.as_deref()?)?.clone()?;
            Some((container.name.clone(), set))
        });
        known.collect()
    }

    /// The architectures that a replacement of this pod gets; `None` if the replacement may get
    /// such a node again.
    async fn kept_away(&self, pod: &Pod, node: &PodNode) -> Option<Architectures> {
        let old = subject(pod);
        let mut undecided = old.annotations.clone();
        undecided.remove(annotation::DECISION);
        let new = Subject {
            annotations: &undecided,
            stage: Stage::Creation,
            ..old
        };
        let namespace = self.webhook.namespaces.find(old.namespace).await;
        let evaluation = self.evaluator.evaluate(new, &namespace).await;
        let Verdict::Decided(Decision::Architectures(set)) = evaluation.verdict else {
            return None;
        };
        let is_kept_away = self.has_webhook(pod) || self.is_kept_away_by_taint(pod, node);
        let view = node.node.view();
        let emulation = evaluation.demands.find(&Source::Emulation);
        let runs = if emulation.is_none_or(|demand| demand.require.selects(view.labels)) {
            node.runs(&set)
        } else {
            Some(false)
        };
        (runs == Some(false) && is_kept_away).then_some(set)
    }

    /// Whether the webhook gives a new pod its node affinity.
    fn has_webhook(&self, pod: &Pod) -> bool {
        let config = &self.evaluator.config;
        config.admission.enabled && config.affinity.required && !self.webhook.is_excluded(pod)
    }

    /// Whether the taint of the node keeps away a new pod that has only its author's tolerations.
    fn is_kept_away_by_taint(&self, pod: &Pod, node: &PodNode) -> bool {
        let author = AuthorPod::new(&pod.spec, annotations(&pod.metadata));
        let tolerations = author.spec.tolerations.as_deref().unwrap_or_default();
        let mut taints = node.node.view().taints.iter();
        let kind = &self.evaluator.policy.taint;
        taints.any(|taint| kind.is_of(taint) && keeps_away(taint, tolerations))
    }

    /// Whether another pod of the same controller waits for a node, for example a replacement.
    fn has_waiting_sibling(&self, pod: &Pod) -> bool {
        let owner = |pod: &Pod| pod.controller().map(|owner| owner.uid.clone());
        let pod_owner = owner(pod);
        self.pods
            .state()
            .iter()
            .any(|other| owner(other) == pod_owner)
    }

    /// Evicts the pod if everything allows that; `None` if this process does not lead.
    async fn evict(&self, misplaced: &MisplacedPod<'_>) -> Option<MisplacedState> {
        let pod = misplaced.pod;
        let owner = pod.controller().map(|owner| owner.uid.as_str());
        let _eviction_guard = self.evicting.lock().await;
        let last = self.durable.written(EVICTIONS, owner);
        let now = Instant::now().into_std();
        let written = match misplaced.eviction(last, now) {
            Eviction::Now(written) => written,
            Eviction::Later(_) => return Some(MisplacedState::NotYet),
            Eviction::GivenUp(written) => {
                self.durable.record(EVICTIONS, owner, written);
                return Some(MisplacedState::NotEvicted(GIVEN_UP_WHY));
            }
            Eviction::Never(why) => return Some(MisplacedState::NotEvicted(why)),
        };
        if self.has_webhook(pod) && !self.webhook.seems_asked_since(pod) {
            return Some(MisplacedState::NoWebhook);
        }
        if self.has_waiting_sibling(pod) {
            return Some(MisplacedState::NotYet);
        }
        // A wait for the rate would delay checks of other pods. This check is repeated instead.
        if !self.evictor.may_evict_now() {
            return Some(MisplacedState::TooMany);
        }
        // Recorded first, because the next leader must know of the eviction.
        self.durable.record(EVICTIONS, owner, written);
        let reason = EvictionReason::WrongArchitecture;
        let result = self.evictor.evict(pod, reason).await;
        // A failed eviction counts too, because only its answer may be lost.
        if !matches!(result, EvictionResult::Evicted | EvictionResult::Failed(_)) {
            self.durable.restore(EVICTIONS, owner, last);
        }
        Some(match result {
            EvictionResult::Evicted => MisplacedState::Evicted,
            EvictionResult::Budget(_) => MisplacedState::Budget,
            EvictionResult::Gone => MisplacedState::NotEvicted("it is gone"),
            EvictionResult::NotLeading => return None,
            EvictionResult::Failed(_) => {
                MisplacedState::NotEvicted("the eviction failed; its error is in archaware's log")
            }
        })
    }
}
