//! The `archaware` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    // rustls takes the process's provider; without one, a client that finds two compiled in panics.
    if rustls::crypto::ring::default_provider()
        .install_default()
        .is_err()
    {
        eprintln!("error: another TLS provider is installed already");
        return ExitCode::FAILURE;
    }
    archaware::cli::main()
}
