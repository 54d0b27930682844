//! The `archaware` program.

use std::process::ExitCode;

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
