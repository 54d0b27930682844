//! What archaware counts. Base units, and labels from closed sets only: a label's value never comes
//! from a user, a pod or a registry.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric, text},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};

use crate::image::{Reason, Source};

type Labels<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Labels<N>, Counter>;

/// From a warm cache (microseconds) to a registry that takes the whole time-out.
const BUCKETS: [f64; 12] = [
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0,
];

/// Values of a gauge, each with its labels.
pub type Samples<const N: usize> = Vec<([(&'static str, String); N], i64)>;

/// All metrics of a process. Cheap to clone.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<std::sync::Mutex<Registry>>,
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
    writes: Counters<2>,
    in_progress: Family<Labels<1>, Gauge>,
    events_dropped: Counter,
    leader: Gauge,
}

/// Image resolutions by source and result, and how long they took.
#[derive(Clone)]
pub struct Resolutions {
    total: Counters<2>,
    seconds: Histogram,
}

/// Requests to the Kubernetes API by verb and result.
#[derive(Clone, Default)]
pub struct ApiRequests(Counters<2>);

/// What was to be kept in containerd, by result.
#[derive(Clone, Default)]
pub struct ContentWrites(Counters<1>);

/// Questions of the API server by resource and result, and how long the answers took.
#[derive(Clone)]
pub struct Admissions {
    total: Counters<2>,
    seconds: Histogram,
    turned_away: Counter,
}

/// The time of one resolution.
pub struct ResolutionTimer<'a> {
    metrics: &'a Resolutions,
    started: Instant,
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
            writes: Family::default(),
            in_progress: Family::default(),
            events_dropped: Counter::default(),
            leader: Gauge::default(),
            registry: Arc::default(),
        };
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
            "image_resolutions",
            "Images resolved, by where the answer came from and the result",
            m.resolutions.total,
        );
        registry.register(
            "image_resolution_duration_seconds",
            "Time that it took to resolve an image",
            m.resolutions.seconds,
        );
        registry.register(
            "writes",
            "Guarded patches by kind of object and result",
            m.writes,
        );
        registry.register(
            "containerd_writes",
            "Trees, tags and uses of images to be kept in containerd, by result",
            m.content_writes.0,
        );
        registry.register(
            "admission_requests",
            "Questions of the API server by resource and result",
            m.admissions.total,
        );
        registry.register(
            "admission_duration_seconds",
            "Time from a question of the API server to its answer",
            m.admissions.seconds,
        );
        registry.register(
            "admission_connections_refused",
            "Connections to the webhook closed at once: there were too many",
            m.admissions.turned_away,
        );
        registry.register("api_requests", "Requests to the Kubernetes API", m.api.0);
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
        registry.register("leader", "1 while this process holds the Lease", m.leader);
        let build = Family::<Labels<1>, ConstGauge>::new_with_constructor(|| ConstGauge::new(1));
        drop(build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]));
        registry.register("build_info", "Version of this process", build);
        Self {
            registry: Arc::new(std::sync::Mutex::new(registry)),
            ..metrics
        }
    }
}

impl Metrics {
    /// Registers gauges that are computed at scrape time: what can be derived is not kept twice.
    pub fn register_gauges<const N: usize, F>(
        &self,
        name: &'static str,
        help: &'static str,
        read: F,
    ) where
        F: Fn() -> Samples<N> + Send + Sync + 'static,
    {
        let mut registry = self
            .registry
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        registry.register_collector(Box::new(Computed { name, help, read }));
    }

    /// The text for a scrape (OpenMetrics).
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let registry = self
            .registry
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
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
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Default for Resolutions {
    fn default() -> Self {
        Self {
            total: Family::default(),
            seconds: Histogram::new(BUCKETS),
        }
    }
}

impl Resolutions {
    /// Starts the time of one resolution.
    pub fn timer(&self) -> ResolutionTimer<'_> {
        ResolutionTimer {
            metrics: self,
            started: Instant::now(),
        }
    }
}

impl ResolutionTimer<'_> {
    /// Ends it.
    pub fn observe(self, result: Result<Source, Reason>) {
        let (source, result) = match result {
            Ok(source) => (source.as_str(), "Resolved"),
            Err(reason) => ("none", reason.as_str()),
        };
        self.metrics
            .total
            .get_or_create(&[("source", source), ("result", result)])
            .inc();
        self.metrics
            .seconds
            .observe(self.started.elapsed().as_secs_f64());
    }
}

impl Default for Admissions {
    fn default() -> Self {
        Self {
            total: Family::default(),
            seconds: Histogram::new(BUCKETS),
            turned_away: Counter::default(),
        }
    }
}

impl Admissions {
    /// A question about a `resource` has been answered.
    pub fn answered(&self, resource: &'static str, result: &'static str, time: Duration) {
        self.total
            .get_or_create(&[("resource", resource), ("result", result)])
            .inc();
        self.seconds.observe(time.as_secs_f64());
    }

    /// A connection was closed at once.
    pub fn turned_away(&self) {
        self.turned_away.inc();
    }
}

impl ContentWrites {
    /// One of `stored`, `dropped`, `failed`.
    pub fn count(&self, result: &'static str) {
        self.0.get_or_create(&[("result", result)]).inc();
    }
}

impl ApiRequests {
    /// A request and its outcome; no status means that there was no answer.
    pub fn count(&self, verb: &'static str, status: Option<http::StatusCode>) {
        let result = match status.map(|status| status.as_u16()) {
            None => "error",
            Some(200..=299) => "2xx",
            Some(404) => "404",
            Some(409) => "409",
            Some(422) => "422",
            Some(429) => "429",
            Some(400..=499) => "4xx",
            Some(_) => "5xx",
        };
        self.0
            .get_or_create(&[("verb", verb), ("result", result)])
            .inc();
    }
}

/// Gauges read from their source when they are scraped.
struct Computed<F> {
    name: &'static str,
    help: &'static str,
    read: F,
}

impl<F> std::fmt::Debug for Computed<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl<const N: usize, F> Collector for Computed<F>
where
    F: Fn() -> Samples<N> + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let kind = prometheus_client::metrics::MetricType::Gauge;
        let mut metric = encoder.encode_descriptor(self.name, self.help, None, kind)?;
        for (labels, value) in (self.read)() {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
