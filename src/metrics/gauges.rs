//! Gauges that are computed when they are scraped.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
    registry::Registry,
};

/// Values of a gauge, each with its labels.
pub type Samples<const N: usize> = Vec<([(&'static str, String); N], i64)>;

pub(super) fn register<const N: usize, F>(
    registry: &mut Registry,
    name: &'static str,
    help: &'static str,
    read: F,
) where
    F: Fn() -> Samples<N> + Send + Sync + 'static,
{
    registry.register_collector(Box::new(Computed { name, help, read }));
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
        let kind = MetricType::Gauge;
        let mut metric = encoder.encode_descriptor(self.name, self.help, None, kind)?;
        for (labels, value) in (self.read)() {
            ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
