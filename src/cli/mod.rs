//! The command line: one file per subcommand, thin.

mod clean;
mod config;
mod inspect;
mod output;
mod plan;
mod progress;
mod run;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use kube::Client;

use crate::{
    cluster::{self, client},
    config::{Config, ConfigError},
    image::{Resolver, Settings, chain, containerd::Containerd, credentials, credentials::Keyring},
    metrics::Metrics,
    telemetry::{self, LogFormat},
};

/// Keeps pods off nodes whose CPU architecture their images cannot run on
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
struct Global {
    /// Configuration file; without one the defaults hold
    #[arg(long, global = true, env = "ARCHAWARE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Kubeconfig; otherwise KUBECONFIG, ~/.kube/config or the pod's service account
    #[arg(long, global = true, env = "ARCHAWARE_KUBECONFIG", value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(long, global = true, env = "ARCHAWARE_CONTEXT", value_name = "NAME")]
    context: Option<String>,
    /// archaware's own namespace; otherwise the pod's, else "archaware"
    #[arg(long, global = true, env = "ARCHAWARE_NAMESPACE", value_name = "NAME")]
    namespace: Option<String>,
    /// Docker config.json with registry credentials, instead of registries.dockerConfig
    #[arg(
        long,
        global = true,
        env = "ARCHAWARE_DOCKER_CONFIG",
        value_name = "FILE"
    )]
    docker_config: Option<PathBuf>,
    /// error, warn, info, debug, trace, or a filter like archaware=debug,kube=info
    #[arg(
        long,
        global = true,
        env = "ARCHAWARE_LOG_LEVEL",
        default_value = "info",
        value_name = "LEVEL"
    )]
    log_level: String,
    /// Format of log lines
    #[arg(
        long,
        global = true,
        env = "ARCHAWARE_LOG_FORMAT",
        value_enum,
        default_value_t,
        value_name = "FORMAT"
    )]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the controller
    Run(run::Run),
    /// Show what run would change now, without changing it
    Plan(plan::Plan),
    /// Undo: remove archaware's taints, tolerations and Lease from the cluster
    Clean(clean::Clean),
    /// Show the platforms of images
    Inspect(inspect::Inspect),
    /// Check or print the configuration, or print its JSON schema
    #[command(subcommand)]
    Config(config::Action),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// How a command ended, when it did what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Done,
    /// Part of it could not be done; it has been said which.
    Failed,
    /// It would have been unsafe.
    Refused,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        match status {
            Status::Done => Self::SUCCESS,
            Status::Failed => Self::from(1),
            Status::Refused => Self::from(3),
        }
    }
}

/// Wrong usage or configuration.
const USAGE: u8 = 2;

/// Runs the command line and gives the exit status: 0 done, 1 failed, 2 wrong usage or configuration,
/// 3 refused.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(error) = telemetry::init(&cli.global.log_level, cli.global.log_format) {
        eprintln!("error: {error}");
        return ExitCode::from(USAGE);
    }
    // Two threads are enough: the work is waiting, and each thread costs an arena of memory.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .enable_all()
        .build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(cli.execute()),
        Err(error) => Err(error).context("cannot start the runtime"),
    };
    match result {
        Ok(status) => status.into(),
        Err(error) => {
            eprintln!("error: {}", chain(error.as_ref()));
            let usage = error.is::<ConfigError>() || error.is::<credentials::DockerConfigError>();
            ExitCode::from(if usage { USAGE } else { 1 })
        }
    }
}

impl Cli {
    async fn execute(self) -> anyhow::Result<Status> {
        match self.command {
            Command::Run(command) => command.execute(self.global).await,
            Command::Plan(command) => command.execute(self.global).await,
            Command::Clean(command) => command.execute(self.global).await,
            Command::Inspect(command) => command.execute(self.global).await,
            Command::Config(action) => action.execute(&self.global),
            Command::Completions { shell } => {
                let mut command = Self::command();
                clap_complete::generate(shell, &mut command, "archaware", &mut std::io::stdout());
                Ok(Status::Done)
            }
        }
    }
}

impl Global {
    fn load_config(&self) -> Result<Config, ConfigError> {
        crate::config::load(self.config.as_deref())
    }

    fn namespace(&self) -> String {
        const OF_POD: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
        let of_pod = || {
            std::fs::read_to_string(OF_POD)
                .ok()
                .map(|text| text.trim().to_owned())
        };
        let given = self
            .namespace
            .clone()
            .or_else(of_pod)
            .filter(|name| !name.is_empty());
        given.unwrap_or_else(|| cluster::NAME.to_owned())
    }

    async fn client(&self, metrics: &Metrics) -> anyhow::Result<Client> {
        let (kubeconfig, context) = (self.kubeconfig.as_deref(), self.context.as_deref());
        Ok(client::connect(kubeconfig, context, metrics.api.clone()).await?)
    }

    fn keyring(&self, config: &Config) -> Result<Keyring, credentials::DockerConfigError> {
        let configured = Some(&config.registries.docker_config);
        let path = self.docker_config.as_ref().or(configured);
        match path.filter(|path| !path.as_os_str().is_empty()) {
            Some(path) => credentials::load(path),
            None => Ok(Keyring::default()),
        }
    }
}

/// A resolver by the configuration.
fn resolver(config: &Config, metrics: &Metrics) -> anyhow::Result<Resolver> {
    let socket = &config.containerd.socket;
    let containerd = if socket.as_os_str().is_empty() {
        None
    } else {
        let namespaces = config.containerd.read_namespaces.clone();
        Some(Containerd::new(&socket.to_string_lossy(), namespaces)?)
    };
    let settings = Settings {
        registry: crate::image::registry::Settings {
            timeout: config.resolution.timeout,
            per_host: config.concurrency.per_registry.get().into(),
            plain_http: config.registries.plain_http.clone(),
        },
        images: config.resolution.cache.images.get(),
        tag_ttl: config.resolution.cache.tag_ttl,
        latest_ttl: config.resolution.cache.latest_ttl,
    };
    let resolver = Resolver::new(settings, containerd, metrics.resolutions.clone());
    if !socket.as_os_str().is_empty() {
        let watched = resolver.clone();
        metrics.register_gauges("containerd_up", "1 while containerd answers", move || {
            watched
                .containerd_is_up()
                .map(|up| ([], i64::from(up)))
                .into_iter()
                .collect()
        });
    }
    Ok(resolver)
}

/// What decides about pods, for commands that only look.
fn inspector(
    global: &Global,
    config: &Arc<Config>,
    metrics: &Metrics,
) -> anyhow::Result<crate::controller::inspect::Inspector> {
    Ok(crate::controller::inspect::Inspector {
        resolver: resolver(config, metrics)?,
        keyring: Arc::new(global.keyring(config)?),
        policy: Arc::new((&**config).into()),
        config: config.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
