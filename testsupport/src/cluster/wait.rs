//! Waits for conditions.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;

/// Long enough for a busy machine.
pub const DEADLINE: Duration = Duration::from_mins(1);

/// Polls until `check` returns something.
pub async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    deadline: Duration,
    mut ask: impl FnMut() -> F,
) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(
            Instant::now() < end,
            "{what} did not happen within {deadline:?}"
        );
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
}

/// Asserts that a condition holds until `until` completes.
pub async fn never<F: Future<Output = bool>, U: Future>(
    what: &str,
    until: U,
    mut ask: impl FnMut() -> F,
) -> U::Output {
    tokio::pin!(until);
    loop {
        tokio::select! {
            done = &mut until => return done,
            () = tokio::time::sleep(Duration::from_millis(30)) => assert!(!ask().await, "{what} happened"),
        }
    }
}

/// Whether the scheduler found no node for a pod.
pub fn is_unschedulable(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| &status.conditions);
    conditions
        .flatten()
        .any(|one| one.type_ == "PodScheduled" && one.reason.as_deref() == Some("Unschedulable"))
}
