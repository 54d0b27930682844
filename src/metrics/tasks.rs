//! How long tasks keep their threads from other tasks.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::tasks::{longest_polls_of_workers, poll_times};

/// Reads the times of polls when they are scraped.
#[derive(Debug)]
pub(super) struct TaskPolls;

impl Collector for TaskPolls {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let times = poll_times();
        let mut longest = encoder.encode_descriptor(
            "task_longest_poll_seconds",
            "Longest time since the start for which a task kept its thread from other tasks",
            None,
            MetricType::Gauge,
        )?;
        for (task, polls) in &times {
            let seconds = ConstGauge::new(polls.longest.as_secs_f64());
            seconds.encode(longest.encode_family(&[("task", *task)])?)?;
        }
        let mut long = encoder.encode_descriptor(
            "task_long_polls",
            "How often a task kept its thread from other tasks for more than 50 ms",
            None,
            MetricType::Counter,
        )?;
        for (task, polls) in &times {
            let count = ConstCounter::new(polls.long_polls);
            count.encode(long.encode_family(&[("task", *task)])?)?;
        }
        let mut workers = encoder.encode_descriptor(
            "worker_longest_poll_seconds",
            "Longest time since the start for which a worker thread served a single task",
            None,
            MetricType::Gauge,
        )?;
        for (worker, longest) in longest_polls_of_workers().into_iter().enumerate() {
            let seconds = ConstGauge::new(longest.as_secs_f64());
            seconds.encode(workers.encode_family(&[("worker", worker)])?)?;
        }
        Ok(())
    }
}
