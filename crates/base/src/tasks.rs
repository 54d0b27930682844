//! Tasks whose polls are timed. While a task is polled, its worker thread serves no other task: a
//! long poll delays health checks, admission requests and the renewal of the Lease.

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::task::JoinHandle;

/// A poll that takes longer counts as long, and is logged.
pub const LONG_POLL: Duration = Duration::from_millis(50);
/// Shorter polls are not recorded, so that they cost no more than reading the clock.
const RECORDED: Duration = Duration::from_millis(1);
/// A long poll of the same task is logged at most this often.
const LOG_PERIOD: Duration = Duration::from_mins(1);

/// Poll times by task name. Global like the log, because all parts of the process spawn tasks.
static TASKS: Mutex<BTreeMap<&'static str, RecordedPolls>> = Mutex::new(BTreeMap::new());
/// The longest poll of each worker thread, by the runtime's index of the thread.
static WORKERS: Mutex<Vec<Duration>> = Mutex::new(Vec::new());

struct RecordedPolls {
    times: PollTimes,
    logged: Option<Instant>,
}

/// Poll times of all tasks with the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollTimes {
    /// The longest poll since the process began.
    pub longest: Duration,
    /// How many polls took longer than [`LONG_POLL`].
    pub long_polls: u64,
}

/// Spawns a task whose polls are timed. `task` is its name in logs and metrics, from a fixed set.
pub fn spawn<F>(task: &'static str, work: F) -> JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    tokio::spawn(timed(task, work))
}

/// `work` with timed polls, to be spawned as a task of this name.
pub fn timed<F: Future>(task: &'static str, work: F) -> impl Future<Output = F::Output> {
    // On the heap, so that the future is not twice as large.
    let mut work = Box::pin(work);
    poll_fn(move |context| {
        let started = Instant::now();
        let progress = work.as_mut().poll(context);
        let took = started.elapsed();
        if took >= RECORDED {
            record(task, took);
        }
        progress
    })
}

/// The times of all tasks so far.
pub fn poll_times() -> Vec<(&'static str, PollTimes)> {
    let tasks = TASKS.lock();
    tasks
        .iter()
        .map(|(task, polls)| (*task, polls.times))
        .collect()
}

/// The longest poll of each worker thread of the runtime since the process began: for that time the
/// thread served no other task.
pub fn longest_polls_of_workers() -> Vec<Duration> {
    WORKERS.lock().clone()
}

fn record(task: &'static str, took: Duration) {
    if let Some(worker) = tokio::runtime::worker_index() {
        let mut workers = WORKERS.lock();
        let known = workers.len().max(worker + 1);
        workers.resize(known, Duration::ZERO);
        if let Some(longest) = workers.get_mut(worker) {
            *longest = took.max(*longest);
        }
    }
    let is_logged = {
        let mut tasks = TASKS.lock();
        let polls = tasks.entry(task).or_insert(RecordedPolls {
            times: PollTimes::default(),
            logged: None,
        });
        polls.times.longest = polls.times.longest.max(took);
        let is_long = took > LONG_POLL;
        polls.times.long_polls += u64::from(is_long);
        let is_logged = is_long && polls.logged.is_none_or(|at| at.elapsed() >= LOG_PERIOD);
        if is_logged {
            polls.logged = Some(Instant::now());
        }
        is_logged
    };
    if is_logged {
        let milliseconds = took.as_secs_f64() * 1000.0;
        tracing::warn!(
            task,
            milliseconds,
            "a task blocked its thread: its input was large, or the container has too little CPU"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times_of(task: &str) -> Option<PollTimes> {
        let times = poll_times();
        times
            .iter()
            .find(|(name, _)| *name == task)
            .map(|(_, times)| *times)
    }

    #[tokio::test]
    async fn only_polls_count_and_not_waits() {
        spawn("waits", tokio::time::sleep(2 * LONG_POLL))
            .await
            .unwrap();
        assert_eq!(times_of("waits").unwrap_or_default().long_polls, 0);
        let work = async {
            tokio::task::yield_now().await;
            std::thread::sleep(2 * LONG_POLL);
            tokio::task::yield_now().await;
            7
        };
        assert_eq!(spawn("works", work).await.unwrap(), 7);
        let times = times_of("works").unwrap();
        assert_eq!(times.long_polls, 1);
        assert!(times.longest >= 2 * LONG_POLL);
        // A runtime of one thread has the worker 0.
        assert!(longest_polls_of_workers()[0] >= 2 * LONG_POLL);
    }
}
