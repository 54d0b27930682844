//! The figures behind the README's performance claims, each beside its floor: what a minimal client
//! achieves on the same machine in the same run. Run with `hack/bench.sh`.
//!
//! The machine is shared and noisy, so compare ratios.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    dead_code,
    reason = "a bench that cannot go on has failed; it shares its helpers with the tests"
)]

mod admission;
mod autoscaling;
mod bound_pods;
mod floor;
mod process;
mod registry;
mod scale;
mod speed;

use testsupport::cluster::TestCluster;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    // cargo passes flags of its own test harness.
    let only: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    let wanted = |name: &str| only.is_empty() || only.iter().any(|o| o == name);
    println!(
        "{:<58} {:>10} {:>10} {:>8} {:>9}",
        "", "archaware", "floor", "ratio", "target"
    );
    if wanted("memory") {
        process::memory_idle(&TestCluster::take().await).await;
    }
    if wanted("latency") {
        speed::latency(&TestCluster::take().await).await;
    }
    if wanted("throughput") {
        speed::throughput(&TestCluster::take().await).await;
    }
    if wanted("hang") {
        registry::hang(&TestCluster::take().await).await;
    }
    if wanted("requests") {
        registry::requests(&TestCluster::take().await).await;
    }
    if wanted("admission") {
        admission::warm(&TestCluster::take().await).await;
        admission::cold(&TestCluster::take().await).await;
        admission::images(&TestCluster::take().await).await;
    }
    if wanted("rollout") {
        admission::rollouts(&TestCluster::take().await).await;
    }
    if wanted("memory") || wanted("heartbeats") {
        process::large_cluster(&TestCluster::take().await).await;
    }
    // Takes half an hour, so it runs only on request.
    if only.iter().any(|one| one == "autoscaling") {
        autoscaling::table().await;
        return;
    }
    // These take minutes and gigabytes, so they run only on request.
    if only.iter().any(|one| one == "bound") {
        bound_pods::bound_pods(&TestCluster::take().await).await;
        return;
    }
    if only.iter().any(|one| one == "scale") {
        scale::scale(&TestCluster::take().await).await;
        return;
    }
    TestCluster::take().await;
}

/// Prints one line of the result.
pub(crate) fn report(what: &str, value: f64, floor: Option<f64>, unit: &str, target: &str) {
    let floor_text = floor.map_or("-".to_owned(), |floor| format!("{floor:.1}{unit}"));
    let ratio = floor.map_or("-".to_owned(), |floor| format!("{:.2}x", value / floor));
    println!(
        "{what:<58} {:>10} {floor_text:>10} {ratio:>8} {target:>9}",
        format!("{value:.1}{unit}")
    );
}

/// The median.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
