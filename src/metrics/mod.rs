//! Prometheus metrics. Values are in base units. Label values come from fixed sets, except
//! `registry` (the first 32 hosts, then `other`) and `architecture` (of nodes).

mod gauges;
mod requests;
mod tasks;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::text,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};

use crate::image::metrics::{ContentWrites, LATENCY_BUCKETS, Resolutions};

pub use gauges::{Named, Samples};
pub use requests::{AdmissionMetrics, ApiRequests, BoundPodMetrics, EvictionMetrics, Panics};

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;

/// Buckets in seconds, from an immediate decision to a late decision by the failure policy.
const WAIT_BUCKETS: [f64; 11] = [
    0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0,
];

/// All metrics of the process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    /// Image resolutions.
    pub resolutions: Resolutions,
    /// Requests to the Kubernetes API.
    pub api: ApiRequests,
    /// Writes to containerd.
    pub content_writes: ContentWrites,
    /// Admission requests.
    pub admissions: AdmissionMetrics,
    /// Checks of running pods before and after their node is tainted.
    pub bound_pods: BoundPodMetrics,
    pub evictions: EvictionMetrics,
    decisions: Counters<2>,
    decision_seconds: Histogram,
    pod_seconds: Histogram,
    writes: Counters<2>,
    in_progress: Family<Labels<1>, Gauge>,
    events_dropped: Counter,
    /// Panics that were caught.
    pub panics: Panics,
    leader: Gauge,
    /// When this process became leader.
    leading_since: Arc<Mutex<Option<Instant>>>,
}

/// One reconcile in progress; the gauge decreases on drop.
pub struct InProgress(Gauge);

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("archaware");
        let metrics = Self {
            resolutions: Resolutions::default(),
            api: ApiRequests::default(),
            content_writes: ContentWrites::default(),
            admissions: AdmissionMetrics::default(),
            bound_pods: BoundPodMetrics::default(),
            evictions: EvictionMetrics::default(),
            decisions: Family::default(),
            decision_seconds: Histogram::new(LATENCY_BUCKETS),
            pod_seconds: Histogram::new(WAIT_BUCKETS),
            writes: Family::default(),
            in_progress: Family::default(),
            events_dropped: Counter::default(),
            panics: Panics::default(),
            leader: Gauge::default(),
            leading_since: Arc::default(),
            registry: Arc::default(),
        };
        metrics.begin_at_zero();
        let m = metrics.clone();
        registry.register(
            "decisions",
            "Decisions on pods and DaemonSets by result",
            m.decisions,
        );
        registry.register(
            "decision_duration_seconds",
            "Duration of one attempt to decide about a pod or DaemonSet",
            m.decision_seconds,
        );
        registry.register(
            "pod_creation_to_decision_seconds",
            "Time from the creation of a pod to its decision, with a resolution of one second",
            m.pod_seconds,
        );
        m.resolutions.register(&mut registry);
        registry.register(
            "writes",
            "Guarded patches by kind of object and result",
            m.writes,
        );
        m.content_writes.register(&mut registry);
        m.admissions.register(&mut registry);
        m.bound_pods.register(&mut registry);
        m.evictions.register(&mut registry);
        m.api.register(&mut registry);
        registry.register(
            "queue_depth",
            "Reconciles in progress, by controller",
            m.in_progress,
        );
        registry.register(
            "events_dropped",
            "Events dropped because the queue was full",
            m.events_dropped,
        );
        m.panics.register(&mut registry);
        registry.register_collector(Box::new(tasks::TaskPolls));
        registry.register("leader", "1 while this process holds the Lease", m.leader);
        let build = Family::<Labels<1>, ConstGauge>::new_with_constructor(|| ConstGauge::new(1));
        drop(build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]));
        registry.register("build_info", "Version of this process", build);
        Self {
            registry: Arc::new(Mutex::new(registry)),
            ..metrics
        }
    }
}

impl Metrics {
    /// Creates the series that alerts query: Prometheus does not see an increase when a counter
    /// appears with its first count.
    fn begin_at_zero(&self) {
        for kind in ["Pod", "DaemonSet"] {
            for result in ["by_policy", "none"] {
                drop(
                    self.decisions
                        .get_or_create(&[("kind", kind), ("result", result)]),
                );
            }
        }
        self.admissions.begin_at_zero();
        self.bound_pods.begin_at_zero();
        self.evictions.begin_at_zero();
        for kind in ["Pod", "DaemonSet", "Node"] {
            for result in ["refused", "forbidden", "unavailable"] {
                drop(
                    self.writes
                        .get_or_create(&[("kind", kind), ("result", result)]),
                );
            }
        }
    }

    /// Registers gauges that are computed at scrape time from one source.
    pub fn register_gauges<const M: usize, const N: usize, F>(&self, gauges: Named<M>, read: F)
    where
        F: Fn() -> [Samples<N>; M] + Send + Sync + 'static,
    {
        let computed = Box::new(gauges::GaugeCollector { gauges, read });
        self.registry.lock().register_collector(computed);
    }

    /// The metrics in OpenMetrics text format.
    ///
    /// # Errors
    ///
    /// When a collector fails to format its values.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let registry = self.registry.lock();
        let mut body = String::new();
        text::encode(&mut body, &registry)?;
        Ok(body)
    }

    /// Counts a decision about an object of `kind`.
    pub fn decided(&self, kind: &'static str, result: &'static str) {
        self.decisions
            .get_or_create(&[("kind", kind), ("result", result)])
            .inc();
    }

    /// Records the duration of an attempt.
    pub fn attempt_took(&self, time: Duration) {
        self.decision_seconds.observe(time.as_secs_f64());
    }

    /// Records the time from a pod's creation to its decision. Pods older than this process's
    /// leadership may have been decided by the previous leader and are not counted.
    pub fn pod_decided(&self, age: Duration) {
        let since = *self.leading_since.lock();
        // Object timestamps have a resolution of one second.
        if since.is_some_and(|since| age < since.elapsed() + Duration::from_secs(1)) {
            self.pod_seconds.observe(age.as_secs_f64());
        }
    }

    /// Counts a patch of an object of `kind`.
    pub fn patch_finished(&self, kind: &'static str, result: &'static str) {
        self.writes
            .get_or_create(&[("kind", kind), ("result", result)])
            .inc();
    }

    /// Counts one object of a controller as in progress.
    pub fn reconcile_started(&self, controller: &'static str) -> InProgress {
        let gauge = self
            .in_progress
            .get_or_create_owned(&[("controller", controller)]);
        gauge.inc();
        InProgress(gauge)
    }

    /// Counts an event that was dropped because the queue was full.
    pub fn event_dropped(&self) {
        self.events_dropped.inc();
    }

    /// Records whether this process holds the Lease.
    pub fn set_leader(&self, leader: bool) {
        self.leader.set(i64::from(leader));
        *self.leading_since.lock() = leader.then(Instant::now);
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.dec();
    }
}
