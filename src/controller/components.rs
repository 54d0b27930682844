//! Builds the controllers from their shared parts, and starts their tasks.

use std::{num::NonZeroU16, sync::Arc};

use futures::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use kube::Resource;
use kube_runtime::reflector::{ObjectRef, Store};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        api::{ApiClient, ApiObject},
        evictor::Evictor,
        lease::Leadership,
        objects::{DaemonSet, Node, Pod},
        watch::{Removed, Watched, watch_objects},
    },
    config::{BoundPods as BoundPodsPolicy, Config},
    evaluate::Evaluator,
    tasks,
};

use super::{
    PendingSyncs, WATCHES, advice,
    bound_pods::{self, BoundPods},
    daemon_sets,
    initial::{InitialObjects, InitialOfKind},
    misplaced::MisplacedPods,
    nodes,
    object_state::ObjectStates,
    pods,
    reconcile::{Outputs, ReconcileSteps, Reconciler},
    recreate,
    run_controller::{ControllerSettings, Triggers, run_controller},
    startup,
    webhook_use::{AdmittedPods, WebhookUse},
};

/// Concurrent node reconciles. Few suffice: a thousand nodes take seconds, and each connection
/// costs memory.
const CONCURRENT_NODES: NonZeroU16 = NonZeroU16::MIN.saturating_add(7);

/// What the controllers are built from.
pub(super) struct Components {
    pub(super) api: ApiClient,
    pub(super) config: Arc<Config>,
    pub(super) evaluator: Evaluator,
    pub(super) leadership: Leadership,
    /// archaware's own namespace.
    pub(super) namespace: String,
    pub(super) outputs: Outputs,
    pub(super) admitted: AdmittedPods,
    pub(super) stop: CancellationToken,
    /// Tasks that run until `stop`; each returns its name.
    pub(super) tasks: JoinSet<&'static str>,
}

impl Components {
    /// Starts all tasks: watches, one controller per kind, and the startup sequence.
    pub(super) fn start(&mut self, pending: watch::Sender<PendingSyncs>) {
        let namespaces = &self.outputs.namespaces;
        let following = namespaces.watch(&self.api, self.stop.clone());
        let namespaces_ready = namespaces.ready();
        self.spawn_task("watch of namespaces", following);
        let (pods, pods_ready) = self.pods();
        let (daemon_sets, daemon_sets_ready) = self.daemon_sets();
        let (may_taint, nodes, nodes_ready) = self.nodes();
        let advice = advice::Advice {
            api: self.api.clone(),
            config: self.config.clone(),
            nodes: nodes.clone(),
            pods: pods.store.clone(),
            lists: vec![pods_ready.clone(), nodes_ready.clone()],
        };
        let advice = advice.log(self.leadership.leading.clone());
        // The advice task ends by itself. Any other task that ends stops the process.
        let advice = advice.then(|()| std::future::pending());
        self.spawn_until_stop("advice", advice);
        let evictor = self.evictor();
        self.recreation(evictor.clone(), pods.store.clone());
        let stores = (nodes.clone(), pods.store.clone());
        self.misplaced(evictor, stores, nodes_ready.clone());
        let lists = [namespaces_ready, pods_ready, daemon_sets_ready, nodes_ready];
        let startup = startup::Startup {
            pods,
            daemon_sets,
            lists: WATCHES.into_iter().zip(lists).collect(),
            timeout: self.config.startup.timeout,
        };
        let startup = startup.run(self.leadership.leading.clone(), pending, may_taint);
        self.spawn_until_stop("startup sequence", startup);
    }

    /// Spawns a task of this name, which `stop` cancels.
    fn spawn_until_stop(
        &mut self,
        name: &'static str,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let task = self.stop.clone().run_until_cancelled_owned(task);
        self.spawn_task(name, task);
    }

    /// Spawns a task that ends after `stop`.
    fn spawn_task<F>(&mut self, name: &'static str, task: F)
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.tasks
            .spawn(tasks::timed(name, task).map(move |_| name));
    }

    /// The evictor of all tasks, which have one rate limit together.
    fn evictor(&self) -> Arc<Evictor> {
        Arc::new(Evictor::new(
            self.api.clone(),
            &self.leadership,
            self.config.concurrency.evictions_per_minute,
            self.outputs.metrics.evictions.clone(),
            Some(self.outputs.events.clone()),
        ))
    }

    /// Starts the eviction of pods without affinity, if that is configured.
    fn recreation(&mut self, evictor: Arc<Evictor>, pods: Store<Pod>) {
        if !self.config.affinity.recreate_pods {
            return;
        }
        let recreation = recreate::Recreation {
            evictor,
            evaluator: self.evaluator.clone(),
            webhook: self.webhook_use(),
            pods,
        };
        let recreation = recreation.run(self.leadership.leading.clone());
        self.spawn_until_stop("eviction of pods without affinity", recreation);
    }

    fn webhook_use(&self) -> WebhookUse {
        WebhookUse {
            metrics: self.outputs.metrics.clone(),
            namespaces: self.outputs.namespaces.clone(),
            own_namespace: self.namespace.clone(),
            admitted: self.admitted.clone(),
            clock: self.api.clock(),
        }
    }

    /// Starts the search for pods that cannot run on their node.
    fn misplaced(
        &mut self,
        evictor: Arc<Evictor>,
        (nodes, pods): (Store<Node>, Store<Pod>),
        nodes_ready: watch::Receiver<bool>,
    ) {
        let outputs = &self.outputs;
        let misplaced = MisplacedPods::new(
            self.api.clone(),
            self.evaluator.clone(),
            self.webhook_use(),
            (nodes, pods),
            (outputs.events.clone(), evictor, outputs.durable.clone()),
        );
        let search = misplaced.run(self.leadership.leading.clone(), nodes_ready);
        self.spawn_until_stop("search for pods on the wrong architecture", search);
    }

    fn pods(&mut self) -> (InitialOfKind<Pod>, watch::Receiver<bool>) {
        let (states, initial) = (ObjectStates::default(), InitialObjects::new());
        let forget = self.forget(pods::PodSteps::NAME, &states, Some(&initial));
        let watched = watch_objects(&self.api, Some(pods::UNBOUND), pods::same, forget);
        let leading = self.leadership.leading.clone();
        let (store, metrics) = (watched.store.clone(), &self.outputs.metrics);
        let (gauged, clock) = ((store.clone(), states.clone()), self.api.clock());
        pods::register_gauges(metrics, gauged, leading.clone(), clock);
        let kind = pods::PodSteps {
            evaluator: self.evaluator.clone(),
            namespaces: self.outputs.namespaces.clone(),
            failure: (&self.config.resolution.failure).into(),
            metrics: metrics.clone(),
            admitted: self.admitted.clone(),
            clock: self.api.clock(),
        };
        let reconciler = self.reconciler(kind, store.clone(), states, Some(initial.clone()));
        let ready = watched.ready.clone();
        let concurrency = self.config.concurrency.pods;
        let settings = self.settings(pods::PodSteps::NAME, concurrency, leading, &ready);
        let name = "controller of pods";
        self.spawn_controller(settings, watched, self.of_namespaces(), reconciler, name);
        (
            InitialOfKind {
                objects: initial,
                store,
            },
            ready,
        )
    }

    fn daemon_sets(&mut self) -> (InitialOfKind<DaemonSet>, watch::Receiver<bool>) {
        let (states, initial) = (ObjectStates::default(), InitialObjects::new());
        let forget = self.forget(daemon_sets::DaemonSetSteps::NAME, &states, Some(&initial));
        let watched = watch_objects(&self.api, None, daemon_sets::same, forget);
        let kind = daemon_sets::DaemonSetSteps {
            evaluator: self.evaluator.clone(),
            namespaces: self.outputs.namespaces.clone(),
            failure: (&self.config.resolution.failure).into(),
        };
        let store = watched.store.clone();
        let reconciler = self.reconciler(kind, store.clone(), states, Some(initial.clone()));
        let ready = watched.ready.clone();
        let (concurrency, leading) = (
            self.config.concurrency.pods,
            self.leadership.leading.clone(),
        );
        let settings = self.settings(
            daemon_sets::DaemonSetSteps::NAME,
            concurrency,
            leading,
            &ready,
        );
        let name = "controller of DaemonSets";
        self.spawn_controller(settings, watched, self.of_namespaces(), reconciler, name);
        (
            InitialOfKind {
                objects: initial,
                store,
            },
            ready,
        )
    }

    /// Starts the node controller. The returned sender enables it.
    fn nodes(&mut self) -> (watch::Sender<bool>, Store<Node>, watch::Receiver<bool>) {
        let states = ObjectStates::default();
        let bound_pods = BoundPods::default();
        let forget = self.forget(nodes::NodeSteps::NAME, &states, None);
        let forget_node = bound_pods.clone();
        let watched = watch_objects(&self.api, None, nodes::same, move |removed| {
            forget_node.removed(&removed);
            forget(removed);
        });
        nodes::register_gauge(&self.outputs.metrics, watched.store.clone());
        let (may_taint, is_active) = watch::channel(false);
        let (store, ready) = (watched.store.clone(), watched.ready.clone());
        self.evaluator.nodes.follow(store.clone(), ready.clone());
        for (name, reading) in self.evaluator.sources.follow(&self.api) {
            self.spawn_until_stop(name, reading);
        }
        let tolerates = self.config.taint.bound_pods == BoundPodsPolicy::Tolerate;
        let kind = nodes::NodeSteps {
            policy: (&*self.config).into(),
            keys: self.evaluator.keys.clone(),
            bound_pods: tolerates.then(|| bound_pods.clone()),
        };
        let reconciler = self.reconciler(kind, store.clone(), states, None);
        let triggers = Triggers {
            reconcile_all: stream::pending().boxed(),
            reconcile_one: self.bound_pods(bound_pods, store.clone(), is_active.clone()),
        };
        let settings = self.settings(nodes::NodeSteps::NAME, CONCURRENT_NODES, is_active, &ready);
        let name = "controller of nodes";
        self.spawn_controller(settings, watched, triggers, reconciler, name);
        (may_taint, store, ready)
    }

    /// Starts the worker that gives bound pods their tolerations. Returns a stream of the nodes
    /// that may be tainted after that.
    fn bound_pods(
        &mut self,
        requests: BoundPods,
        nodes: Store<Node>,
        may_taint: watch::Receiver<bool>,
    ) -> BoxStream<'static, ObjectRef<Node>> {
        requests.register_gauge(&self.outputs.metrics);
        let (ready, mut are_ready) = mpsc::channel(CONCURRENT_NODES.get().into());
        let writes = usize::from(self.config.concurrency.writes.get());
        let worker = Arc::new(bound_pods::Worker {
            requests,
            api: self.api.clone(),
            evaluator: self.evaluator.clone(),
            namespaces: self.outputs.namespaces.clone(),
            writer: self.outputs.writer.clone(),
            metrics: self.outputs.metrics.clone(),
            nodes,
            places: Semaphore::new(writes),
            ready,
            stop: self.stop.clone(),
        });
        self.spawn_task("look at bound pods", worker.run(may_taint));
        stream::poll_fn(move |context| are_ready.poll_recv(context)).boxed()
    }

    /// Reconciles all objects when a namespace changes, because annotations of namespaces apply to
    /// the pods and templates in them.
    fn of_namespaces<K: ApiObject + 'static>(&self) -> Triggers<K> {
        Triggers {
            reconcile_all: self.outputs.namespaces.changes().boxed(),
            reconcile_one: stream::pending().boxed(),
        }
    }

    /// Removes the state of deleted objects.
    fn forget<K: Resource<DynamicType = ()> + Clone + 'static>(
        &self,
        controller: &'static str,
        states: &ObjectStates,
        initial: Option<&InitialObjects>,
    ) -> impl Fn(Removed<'_, K>) + Send + use<K> {
        let (states, initial) = (states.clone(), initial.cloned());
        let durable = self.outputs.durable.clone();
        move |removed| {
            states.removed(&removed);
            durable.removed(controller, &removed);
            if let Some(initial) = &initial {
                initial.removed(&removed);
            }
        }
    }

    fn reconciler<R: ReconcileSteps>(
        &self,
        kind: R,
        store: Store<R::Object>,
        states: ObjectStates,
        initial: Option<InitialObjects>,
    ) -> Arc<Reconciler<R>> {
        Arc::new(Reconciler {
            steps: kind,
            outputs: self.outputs.clone(),
            store,
            states,
            initial,
        })
    }

    fn settings(
        &self,
        name: &'static str,
        concurrency: NonZeroU16,
        is_active: watch::Receiver<bool>,
        listed: &watch::Receiver<bool>,
    ) -> ControllerSettings {
        ControllerSettings {
            name,
            concurrency: concurrency.get(),
            is_active,
            namespaces_listed: self.outputs.namespaces.ready(),
            metrics: self.outputs.metrics.clone(),
            listed: listed.clone(),
            stop: self.stop.clone(),
        }
    }

    /// Spawns the controller of one kind as a task of this name.
    fn spawn_controller<R: ReconcileSteps>(
        &mut self,
        settings: ControllerSettings,
        watched: Watched<R::Object>,
        triggers: Triggers<R::Object>,
        reconciler: Arc<Reconciler<R>>,
        name: &'static str,
    ) {
        let stop = self.stop.clone();
        let controller = run_controller(settings, watched, triggers, move |object| {
            reconciler.clone().reconcile(object, stop.clone())
        });
        self.spawn_task(name, controller);
    }
}
