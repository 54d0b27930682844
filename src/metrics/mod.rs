//! What archaware counts. Base units, and labels from closed sets only: a label's value never comes
//! from a user, a pod or a registry.

mod gauges;
mod requests;
mod resolutions;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

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

pub use gauges::{Named, Samples};
pub use requests::{Admissions, ApiRequests, ContentWrites, Panics};
pub use resolutions::{MAX_HOSTS, Resolutions};

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;
use parking_lot::Mutex;

/// From a warm cache (microseconds) to a registry that takes the whole time-out.
const BUCKETS: [f64; 13] = [
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0,
];

/// From at once to the failure policy and beyond.
const WAITS: [f64; 11] = [
    0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 3600.0,
];

/// All metrics of a process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    /// Of the resolver.
    pub resolutions: Resolutions,
    /// Of the Kubernetes client.
    pub api: ApiRequests,
    /// Of the store in containerd.
    pub content_writes: ContentWrites,
    /// Of the webhook.
    pub admissions: Admissions,
    decisions: Counters<2>,
    decision_seconds: Histogram,
    pod_seconds: Histogram,
    writes: Counters<2>,
    in_progress: Family<Labels<1>, Gauge>,
    events_dropped: Counter,
    /// Of everything that a panic must not end.
    pub panics: Panics,
    leader: Gauge,
    /// When this process began to lead.
    leading_since: Arc<Mutex<Option<Instant>>>,
}

/// One piece of work in progress, counted until it is dropped.
pub struct InProgress(Gauge);

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("archaware");
        let metrics = Self {
            resolutions: Resolutions::default(),
            api: ApiRequests::default(),
            content_writes: ContentWrites::default(),
            admissions: Admissions::default(),
            decisions: Family::default(),
            decision_seconds: Histogram::new(BUCKETS),
            pod_seconds: Histogram::new(WAITS),
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
            "Time from seeing a pod or DaemonSet to the end of an attempt at it",
            m.decision_seconds,
        );
        registry.register(
            "pod_creation_to_decision_seconds",
            "Time from the creation of a pod to its decision, in seconds as timestamps of objects have them",
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
        m.api.register(&mut registry);
        registry.register(
            "queue_depth",
            "Objects being worked on, by controller",
            m.in_progress,
        );
        registry.register(
            "events_dropped",
            "Events not written: the queue was full",
            m.events_dropped,
        );
        m.panics.register(&mut registry);
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
    /// What alerts watch is there from the start: a counter that appears with its first count has not increased, to
    /// Prometheus.
    fn begin_at_zero(&self) {
        for kind in ["Pod", "DaemonSet"] {
            for result in ["by_policy", "none"] {
                drop(
                    self.decisions
                        .get_or_create(&[("kind", kind), ("result", result)]),
                );
            }
        }
        for kind in ["Pod", "DaemonSet", "Node"] {
            for result in ["refused", "forbidden", "unavailable"] {
                drop(
                    self.writes
                        .get_or_create(&[("kind", kind), ("result", result)]),
                );
            }
        }
    }

    /// Registers gauges that are computed at scrape time, those of one source together: what can be derived is
    /// not kept twice.
    pub fn register_gauges<const M: usize, const N: usize, F>(&self, gauges: Named<M>, read: F)
    where
        F: Fn() -> [Samples<N>; M] + Send + Sync + 'static,
    {
        let computed = Box::new(gauges::Computed { gauges, read });
        self.registry.lock().register_collector(computed);
    }

    /// The text for a scrape (OpenMetrics).
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let registry = self.registry.lock();
        let mut body = String::new();
        text::encode(&mut body, &registry)?;
        Ok(body)
    }

    /// A decision on an object of `kind`.
    pub fn decided(&self, kind: &'static str, result: &'static str) {
        self.decisions
            .get_or_create(&[("kind", kind), ("result", result)])
            .inc();
    }

    /// How long an attempt took.
    pub fn attempt_took(&self, time: Duration) {
        self.decision_seconds.observe(time.as_secs_f64());
    }

    /// A pod that was created so long ago has been decided. Those that are older than the leadership of this
    /// process may have been decided before by another, and are not counted.
    pub fn pod_decided(&self, age: Duration) {
        let since = *self.leading_since.lock();
        // Timestamps of objects are cut to seconds.
        if since.is_some_and(|since| age < since.elapsed() + Duration::from_secs(1)) {
            self.pod_seconds.observe(age.as_secs_f64());
        }
    }

    /// A patch of an object of `kind`.
    pub fn wrote(&self, kind: &'static str, result: &'static str) {
        self.writes
            .get_or_create(&[("kind", kind), ("result", result)])
            .inc();
    }

    /// Counts one object of a controller as being worked on.
    pub fn work(&self, controller: &'static str) -> InProgress {
        let gauge = self
            .in_progress
            .get_or_create_owned(&[("controller", controller)]);
        gauge.inc();
        InProgress(gauge)
    }

    /// An event was not written.
    pub fn event_dropped(&self) {
        self.events_dropped.inc();
    }

    /// Whether this process holds the Lease.
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
