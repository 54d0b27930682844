//! Cost of resolving images: requests, time, memory. Run with `hack/bench.sh`.
//!
//! Measures the resolver without a cluster; `benches/cluster` measures the whole program.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::default_trait_access,
    clippy::cast_precision_loss,
    dead_code,
    reason = "a bench that cannot go on has failed; it shares its helpers with the tests"
)]

#[path = "../../tests/resolving/mod.rs"]
mod resolving;

mod cost;
mod memory;
mod requests;
mod selection;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [child, address] = arguments.as_slice()
        && child == "child"
    {
        return memory::child(address).await;
    }
    // The helpers would otherwise print logs.
    let _ = tracing_subscriber::fmt().with_env_filter("off").try_init();
    // cargo passes flags of its own test harness.
    let only: Vec<&String> = arguments.iter().filter(|a| !a.starts_with("--")).collect();
    let wanted = |name: &str| only.is_empty() || only.iter().any(|o| *o == name);
    println!(
        "{:<58} {:>12} {:>12} {:>9}",
        "", "archaware", "floor", "target"
    );
    if wanted("cold") {
        requests::cold().await;
    }
    if wanted("restart") {
        requests::restart().await;
    }
    if wanted("warm") {
        cost::warm().await;
    }
    if wanted("cache") {
        memory::cache().await;
    }
    if wanted("selection") {
        selection::selection().await;
    }
    if wanted("hung") {
        cost::hung().await;
    }
}

/// Prints one line of the result.
fn report(what: &str, value: &str, floor: &str, target: &str) {
    println!("{what:<58} {value:>12} {floor:>12} {target:>9}");
}

/// The median.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
