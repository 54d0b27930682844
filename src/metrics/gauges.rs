//! Gauges that are computed at scrape time.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, gauge::ConstGauge},
};

/// Values of one gauge with their labels.
pub type Samples<const N: usize> = Vec<([(&'static str, String); N], i64)>;

/// Names and help texts of gauges that share one source.
pub type Named<const M: usize> = [(&'static str, &'static str); M];

/// A collector that reads gauges from their source.
pub(super) struct GaugeCollector<const M: usize, F> {
    pub(super) gauges: Named<M>,
    pub(super) read: F,
}

impl<const M: usize, F> std::fmt::Debug for GaugeCollector<M, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.gauges.fmt(f)
    }
}

impl<const M: usize, const N: usize, F> Collector for GaugeCollector<M, F>
where
    F: Fn() -> [Samples<N>; M] + Send + Sync + 'static,
{
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for ((name, help), samples) in self.gauges.into_iter().zip((self.read)()) {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (labels, value) in samples {
                ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
