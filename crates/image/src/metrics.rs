//! Prometheus metrics of image resolutions and of writes to containerd.

use std::{collections::HashSet, sync::Arc, time::Instant};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::Registry,
};

/// Seconds: from a cache hit (microseconds) to a registry request that times out.
pub const LATENCY_BUCKETS: [f64; 13] = [
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0,
];

/// Maximum number of registry hosts with their own label value. Later hosts are counted as `other`,
/// because users can name any number of hosts.
pub const MAX_HOSTS: usize = 32;

/// Image resolutions by source and result, and their durations.
#[derive(Clone)]
pub struct Resolutions {
    total: Family<[(&'static str, &'static str); 2], Counter>,
    by_registry: Family<RegistryLabels, Counter>,
    hosts: Arc<Mutex<HashSet<String>>>,
    seconds: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RegistryLabels {
    registry: String,
    result: &'static str,
}

impl Default for Resolutions {
    fn default() -> Self {
        Self {
            total: Family::default(),
            by_registry: Family::default(),
            hosts: Arc::default(),
            seconds: Histogram::new(LATENCY_BUCKETS),
        }
    }
}

impl Resolutions {
    /// Registers the metrics with their names and help texts.
    pub fn register(self, registry: &mut Registry) {
        registry.register(
            "image_resolutions",
            "Image resolutions by source and result",
            self.total,
        );
        registry.register(
            "registry_resolutions",
            "Image resolutions that asked a registry or failed, by registry and result",
            self.by_registry,
        );
        registry.register(
            "image_resolution_duration_seconds",
            "Duration of image resolutions",
            self.seconds,
        );
    }

    /// The first [`MAX_HOSTS`] hosts keep their names, so the number of label values is bounded.
    fn host(&self, name: &str) -> String {
        let mut hosts = self.hosts.lock();
        if !hosts.contains(name) {
            if hosts.len() >= MAX_HOSTS {
                return "other".to_owned();
            }
            hosts.insert(name.to_owned());
        }
        name.to_owned()
    }

    /// Records a resolution that began at `started`: its source, or the reason why it failed.
    /// `registry` is the registry that was asked, if any.
    pub fn observe(
        &self,
        started: Instant,
        registry: Option<&str>,
        result: Result<&'static str, &'static str>,
    ) {
        let (source, outcome) = match result {
            Ok(source) => (source, "Resolved"),
            Err(reason) => ("none", reason),
        };
        let labels = [("source", source), ("result", outcome)];
        self.total.get_or_create(&labels).inc();
        if let Some(registry) = registry {
            let labels = RegistryLabels {
                registry: self.host(registry),
                result: outcome,
            };
            self.by_registry.get_or_create(&labels).inc();
        }
        self.seconds.observe(started.elapsed().as_secs_f64());
    }
}

/// Writes to containerd by result.
#[derive(Clone, Default)]
pub struct ContentWrites(Family<[(&'static str, &'static str); 1], Counter>);

impl ContentWrites {
    /// Registers the metrics with their names and help texts.
    pub fn register(self, registry: &mut Registry) {
        let help = "Writes of image documents, tags and lease renewals to containerd, by result";
        registry.register("containerd_writes", help, self.0);
    }

    /// Counts one of `stored`, `dropped`, `failed`.
    pub fn count(&self, result: &'static str) {
        self.0.get_or_create(&[("result", result)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_beyond_the_first_are_one() {
        let metrics = Resolutions::default();
        let mut registry = Registry::default();
        metrics.clone().register(&mut registry);
        for n in 0..2 * MAX_HOSTS {
            let registry = format!("r{n}.example");
            metrics.observe(Instant::now(), Some(&registry), Err("Denied"));
            metrics.observe(Instant::now(), None, Ok("memory"));
        }
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let lines = text
            .lines()
            .filter(|line| line.starts_with("registry_resolutions_total"));
        assert_eq!(lines.count(), MAX_HOSTS + 1, "{text}");
        let other = format!("registry=\"other\",result=\"Denied\"}} {MAX_HOSTS}");
        assert!(text.contains(&other), "{text}");
    }
}
