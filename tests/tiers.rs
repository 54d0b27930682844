//! Prints after the tests of the program which tests did not run, and how to run them. With
//! `ARCHAWARE_TEST_TIERS=all`, which `hack/test.sh` sets when it runs everything, that is an error.

use std::{env, process::ExitCode};

/// The tests that need more than Rust, and the variable that shows that their servers are there.
const TIERS: [(&str, &str, &str); 3] = [
    (
        "cluster",
        "ARCHAWARE_TEST_BEDS",
        "control planes and a real node",
    ),
    (
        "servers",
        "ARCHAWARE_TEST_CONTAINERDS",
        "registries and containerds",
    ),
    (
        "installed",
        "ARCHAWARE_TEST_IMAGE",
        "archaware's own image, as installed",
    ),
];

fn main() -> ExitCode {
    let is_there = |variable: &str| env::var_os(variable).is_some_and(|value| !value.is_empty());
    let left_out: Vec<String> = TIERS
        .iter()
        .filter(|(_, variable, _)| !cfg!(feature = "system-tests") || !is_there(variable))
        .map(|(name, _, what)| format!("{name} ({what})"))
        .collect();
    if left_out.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!(
        "\nNOT RUN: {}. `hack/test.sh` runs them: it needs Linux, Go, Python and root.",
        left_out.join(", ")
    );
    ExitCode::from(u8::from(
        env::var("ARCHAWARE_TEST_TIERS").is_ok_and(|tiers| tiers == "all"),
    ))
}
