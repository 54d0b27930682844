//! What an attack must not touch: health checks, the Lease, and the memory of the container.

use std::{
    io::{Read, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use k8s_openapi::api::coordination::v1::Lease;

use super::*;

/// The kubelet restarts a container that does not answer its probe in time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Watches archaware from before an attack until its end.
pub(super) struct Vitals {
    stop: Arc<AtomicBool>,
    health: JoinHandle<Duration>,
    /// Since when archaware holds its Lease.
    acquired: Option<Value>,
}

impl Vitals {
    pub(super) async fn watch(cluster: &TestCluster, archaware: &Controller) -> Self {
        let stop = Arc::<AtomicBool>::default();
        Self {
            health: watch_health(&archaware.address().await, &stop),
            acquired: acquired(cluster).await,
            stop,
        }
    }

    /// Asserts that the attack did no harm so far.
    pub(super) async fn end(self, cluster: &TestCluster, archaware: &Controller) {
        self.stop.store(true, Ordering::Relaxed);
        let (peak, longest) = (archaware.peak_memory(), self.health.join().unwrap());
        let poll = longest_poll(archaware).await;
        println!("/healthz within {longest:.0?}; longest poll {poll:.0?}; at most {peak:.0} MiB");
        assert!(peak < MEMORY_LIMIT, "{peak} MiB");
        assert!(longest < PROBE_TIMEOUT, "{longest:?}");
        // Of a debug build: in a poll, the system may run other programs for a while.
        assert!(poll < 3 * PROBE_TIMEOUT, "{poll:?}");
        assert_eq!(acquired(cluster).await, self.acquired, "the Lease was lost");
    }
}

/// Asks /healthz until `stop`. Returns the longest time of an answer. On a thread of its own,
/// because the attack keeps the test's runtime busy.
fn watch_health(address: &str, stop: &Arc<AtomicBool>) -> JoinHandle<Duration> {
    let (address, stop) = (address.to_owned(), stop.clone());
    std::thread::spawn(move || {
        let mut longest = Duration::ZERO;
        while !stop.load(Ordering::Relaxed) {
            let asked = Instant::now();
            let mut stream = std::net::TcpStream::connect(&address).unwrap();
            let request = "GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            longest = longest.max(asked.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
        longest
    })
}

/// The longest time for which a worker thread served a single task.
async fn longest_poll(archaware: &Controller) -> Duration {
    let (_, metrics) = archaware.http("/metrics").await;
    let polls = metrics
        .lines()
        .filter(|line| line.starts_with("archaware_worker_longest_poll_seconds{"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    let longest = polls.fold(0.0, f64::max);
    assert!(longest > 0.0, "no poll took a millisecond: {metrics}");
    Duration::from_secs_f64(longest)
}

/// Since when archaware holds its Lease.
async fn acquired(cluster: &TestCluster) -> Option<Value> {
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), "archaware");
    let spec = leases.get("archaware").await.unwrap().spec.unwrap();
    assert!(spec.holder_identity.is_some());
    spec.acquire_time.map(|time| json!(time))
}
