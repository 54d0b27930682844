//! Counters of Kubernetes API requests, admission requests and panics.

use std::time::Duration;

use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use super::{Counters, LATENCY_BUCKETS};

/// Requests to the Kubernetes API by verb and result.
#[derive(Clone, Default)]
pub struct ApiRequests(Counters<2>);

/// Checks of running pods before and after their node is tainted, by result.
#[derive(Clone, Default)]
pub struct BoundPodMetrics(Counters<1>);

impl BoundPodMetrics {
    pub(super) fn register(self, registry: &mut Registry) {
        registry.register(
            "bound_pods",
            "Looks at running pods before and after their node is tainted, by result",
            self.0,
        );
    }

    /// The series that the dashboard shows.
    pub(super) fn begin_at_zero(&self) {
        for result in ["tolerated", "unchanged", "failed"] {
            drop(self.0.get_or_create(&[("result", result)]));
        }
    }

    pub fn count(&self, result: &'static str) {
        self.0.get_or_create(&[("result", result)]).inc();
    }
}

/// Evictions of pods by reason and result.
#[derive(Clone, Default)]
pub struct EvictionMetrics(Counters<2>);

impl EvictionMetrics {
    pub(super) fn register(self, registry: &mut Registry) {
        registry.register(
            "evictions",
            "Evictions of pods, by reason and result",
            self.0,
        );
    }

    /// The series that the dashboard shows.
    pub(super) fn begin_at_zero(&self) {
        for reason in ["no_affinity", "wrong_architecture"] {
            let labels = [("reason", reason), ("result", "evicted")];
            drop(self.0.get_or_create(&labels));
        }
    }

    pub fn count(&self, reason: &'static str, result: &'static str) {
        let labels = [("reason", reason), ("result", result)];
        self.0.get_or_create(&labels).inc();
    }
}

/// Admission requests by resource and result, and their durations.
#[derive(Clone)]
pub struct AdmissionMetrics {
    total: Counters<2>,
    seconds: Histogram,
    connections_refused: Counter,
    /// Without a sample while this process does not lead.
    registered: Family<super::Labels<0>, Gauge>,
    last_asked: Gauge,
    rules_left_out: Family<[(&'static str, String); 1], Counter>,
}

/// Panics that ended one reconcile or one admission request, by place.
#[derive(Clone)]
pub struct Panics(Counters<1>);

impl Default for Panics {
    fn default() -> Self {
        let counters = Counters::default();
        // Every series exists from the start: Prometheus does not see an increase when a counter
        // appears with its first count.
        for place in ["pods", "daemonsets", "nodes", "misplaced", "admission"] {
            drop(counters.get_or_create(&[("where", place)]));
        }
        Self(counters)
    }
}

impl Panics {
    pub(super) fn register(self, registry: &mut Registry) {
        registry.register(
            "panics",
            "Panics that ended one reconcile or one admission request, by place; each is a bug",
            self.0,
        );
    }

    /// Counts a caught panic.
    pub fn count(&self, place: &'static str) {
        self.0.get_or_create(&[("where", place)]).inc();
    }
}

impl Default for AdmissionMetrics {
    fn default() -> Self {
        Self {
            total: Family::default(),
            seconds: Histogram::new(LATENCY_BUCKETS),
            connections_refused: Counter::default(),
            registered: Family::default(),
            last_asked: Gauge::default(),
            rules_left_out: Family::default(),
        }
    }
}

impl AdmissionMetrics {
    pub(super) fn register(self, registry: &mut Registry) {
        registry.register(
            "admission_requests",
            "Admission requests by resource and result",
            self.total,
        );
        registry.register(
            "admission_duration_seconds",
            "Time from an admission request to its response",
            self.seconds,
        );
        registry.register(
            "admission_connections_refused",
            "Connections to the webhook closed because too many were open",
            self.connections_refused,
        );
        registry.register(
            "admission_registered",
            "On the leader: whether the webhook is registered at the API server",
            self.registered,
        );
        registry.register(
            "admission_last_request_timestamp_seconds",
            "When the API server asked this replica last, in seconds since 1970; 0 if never",
            self.last_asked,
        );
        registry.register(
            "rules_left_out",
            "New pods for which a rule of the configuration was left out, by rule",
            self.rules_left_out,
        );
    }

    /// Creates the series of the configured rules, because Prometheus sees no increase when a
    /// counter appears with its first count.
    pub fn begin_rules<'a>(&self, rules: impl IntoIterator<Item = &'a str>) {
        for rule in rules {
            drop(
                self.rules_left_out
                    .get_or_create(&[("rule", rule.to_owned())]),
            );
        }
    }

    /// Counts a rule that was left out for a new pod. The configuration limits the rules.
    pub fn rule_left_out(&self, rule: &str) {
        let labels = [("rule", rule.to_owned())];
        self.rules_left_out.get_or_create(&labels).inc();
    }

    /// Creates, before the first request, the series that an alert queries.
    pub(super) fn begin_at_zero(&self) {
        let labels = [("resource", "pods"), ("result", "changed")];
        drop(self.total.get_or_create(&labels));
    }

    /// Records whether the webhook is registered at the API server; `None` if this process does not
    /// lead.
    pub fn set_registered(&self, registered: Option<bool>) {
        match registered {
            Some(registered) => {
                self.registered.get_or_create(&[]).set(registered.into());
            }
            None => self.registered.clear(),
        }
    }

    /// How many seconds ago the API server asked this replica; `None` if it never did.
    pub fn last_asked(&self) -> Option<u64> {
        let asked_at = self.last_asked.get();
        let ago = jiff::Timestamp::now().as_second().saturating_sub(asked_at);
        (asked_at > 0).then(|| u64::try_from(ago).unwrap_or_default())
    }

    /// Counts an answered admission request.
    pub fn answered(&self, resource: &'static str, result: &'static str, time: Duration) {
        self.total
            .get_or_create(&[("resource", resource), ("result", result)])
            .inc();
        self.seconds.observe(time.as_secs_f64());
        // A refused request proves nothing: any client in the pod network can send one.
        if result != "refused" {
            self.last_asked.set(jiff::Timestamp::now().as_second());
        }
    }

    /// Counts a connection that was closed because too many are open.
    pub fn connection_refused(&self) {
        self.connections_refused.inc();
    }
}

impl ApiRequests {
    pub(super) fn register(self, registry: &mut Registry) {
        registry.register("api_requests", "Requests to the Kubernetes API", self.0);
    }

    /// Counts a request. `status` is `None` when no response arrived.
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
