//! The `archaware` program.

use std::process::ExitCode;

/// musl's own allocator serves one thread at a time. Builds for other C libraries use mimalloc too,
/// so that they behave like the container image, which uses musl.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // rustls panics when a client finds two compiled-in providers and no process default.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("error: another TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    archaware::cli::main()
}
