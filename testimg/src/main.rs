//! `testimg list` prints names and digests; `testimg push REGISTRY` pushes the images that a real
//! registry accepts.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the name and digest of every image
    List,
    /// Push every image that a real registry accepts, as REGISTRY/PREFIX/NAME:latest, over plain
    /// http
    Push {
        /// host:port
        registry: String,
        /// Folder for all repositories
        #[arg(long, default_value = "testimg")]
        prefix: String,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match Cli::parse().command {
        Command::List => {
            for (name, image, _) in testimg::catalogue() {
                println!("{name} {}", image.root.digest);
            }
            ExitCode::SUCCESS
        }
        Command::Push { registry, prefix } => push(&registry, &prefix).await,
    }
}

async fn push(registry: &str, prefix: &str) -> ExitCode {
    // The HTTP client needs a TLS provider even for plain HTTP.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = match reqwest::Client::builder().tls_certs_only([]).build() {
        Ok(http) => http,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let (mut pushed, mut refused) = (0, Vec::new());
    for (name, image, _) in testimg::catalogue() {
        let repository = format!("{prefix}/{name}");
        match testimg::push(&http, registry, &repository, "latest", image).await {
            Ok(()) => pushed += 1,
            Err(error) if is_unreachable(&*error) => {
                eprintln!("error: {registry} cannot be used: {error}");
                return ExitCode::FAILURE;
            }
            // Malformed images are rejected on purpose.
            Err(_) => refused.push(*name),
        }
    }
    println!("pushed {pushed} images to {registry}/{prefix}/");
    println!(
        "the registry refuses {}: {}",
        refused.len(),
        refused.join(", ")
    );
    ExitCode::SUCCESS
}

fn is_unreachable(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    error
        .downcast_ref::<reqwest::Error>()
        .is_some_and(|error| error.is_connect() || error.is_timeout())
}
