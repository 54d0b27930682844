//! The command line: one file per subcommand, and the parts that they share.

// `println!` panics when the reader of stdout has exited, as `head` does: use `output::print`.
#![warn(clippy::print_stdout)]

mod clean;
mod cluster_config;
mod command_line;
mod config;
mod content_proxy;
mod explain;
mod inspect;
mod manifests;
mod output;
mod permissions;
mod plan;
mod progress;
mod report;
mod run;
mod selection;
mod shell;
mod version;

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::{ArgMatches, Args, FromArgMatches, Parser, Subcommand, parser::ValueSource};

use command_line::ProgramName;

use crate::{
    cluster::{
        self,
        api::{self, ApiClient, ApiError},
    },
    config::{Config, ConfigError, ContainerdConfig, RegistriesConfig},
    error::chain,
    image::{
        Resolver, ResolverSettings,
        containerd::{Containerd, LOOKUP_TIMEOUT},
        credentials::{DockerConfigError, OperatorCredentials, ProviderError, Providers},
    },
    metrics::Metrics,
    telemetry::{self, LogFormat, LogLevel, Recorder},
    text::printable,
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
    /// Configuration file. Without it, explain and report read the installation's ConfigMap from
    /// the cluster, and other commands use the defaults
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "ARCHAWARE_CONFIG",
        value_name = "FILE"
    )]
    config: Option<PathBuf>,
    /// Kubeconfig; otherwise KUBECONFIG, ~/.kube/config or the pod's service account
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "ARCHAWARE_KUBECONFIG",
        value_name = "FILE"
    )]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "ARCHAWARE_CONTEXT",
        value_name = "NAME"
    )]
    context: Option<String>,
    /// Namespace of archaware; default: the namespace of the pod in which it runs, else "archaware"
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "ARCHAWARE_NAMESPACE",
        value_name = "NAME"
    )]
    namespace: Option<String>,
    /// The namespace of the objects that a command is about.
    #[arg(skip)]
    namespace_of_objects: Option<String>,
    /// Docker config.json with registry credentials, instead of registries.dockerConfig
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "ARCHAWARE_DOCKER_CONFIG",
        value_name = "FILE"
    )]
    docker_config: Option<PathBuf>,
    /// error, warn, info, debug, trace, or a filter like archaware=debug,kube=info
    #[arg(
        long,
        global = true,
        hide_short_help = true,
        env = "ARCHAWARE_LOG_LEVEL",
        default_value = "info",
        value_name = "LEVEL"
    )]
    log_level: String,
    /// Format of log lines
    #[arg(
        long,
        global = true,
        hide_short_help = true,
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
    Run(run::RunCommand),
    /// Show the changes that run would make now, without making them
    Plan(plan::PlanCommand),
    /// Remove archaware's webhook, gates, taints, tolerations and Lease from the cluster
    Clean(clean::CleanCommand),
    /// Explain why pods are pending, fail, or run where they do, and what to do
    #[command(alias = "why")]
    Explain(Box<explain::ExplainCommand>),
    /// Report the architectures that could run each workload
    Report(Box<report::ReportCommand>),
    /// Show the platforms of images
    Inspect(inspect::InspectCommand),
    /// Check compatibility documents of image selection
    #[command(subcommand)]
    Selection(selection::SelectionCommand),
    /// Check or print the configuration, or print its JSON schema
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Forward to containerd only the calls that resolving images needs
    ContentProxy(content_proxy::ContentProxyCommand),
    /// Print the version
    Version(version::VersionCommand),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write man pages
    #[command(hide = true)]
    Man {
        /// The folder for them
        folder: PathBuf,
    },
    /// Complete words for kubectl
    #[command(name = "__complete", hide = true, disable_help_flag = true)]
    Complete {
        /// The words after the name of the plugin
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
}

impl Command {
    /// The recorder of events that the command prints at its end (`inspect --trace`), if the
    /// command needs it.
    fn recorder(&self) -> Option<Recorder> {
        match self {
            Self::Inspect(command) => command.recorder(),
            _ => None,
        }
    }

    /// The log format. For commands that people run, `auto` means text, because people read the log
    /// lines. For services `auto` stays, because the log lines are collected.
    fn log_format(&self, named: LogFormat) -> LogFormat {
        let is_service = matches!(self, Self::Run(_) | Self::ContentProxy(_));
        if named == LogFormat::Auto && !is_service {
            LogFormat::Text
        } else {
            named
        }
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandStatus {
    Done,
    /// A part of the work failed. The command has already printed which part.
    Failed,
    /// `plan --detailed-exitcode`: `run` would change something.
    Changes,
    /// Nothing was done because it would have been unsafe.
    Refused,
}

impl From<CommandStatus> for ExitCode {
    fn from(status: CommandStatus) -> Self {
        match status {
            CommandStatus::Done => Self::SUCCESS,
            CommandStatus::Failed => Self::from(1),
            // As with Terraform.
            CommandStatus::Changes => Self::from(2),
            CommandStatus::Refused => Self::from(3),
        }
    }
}

/// Exit status for wrong usage or configuration.
const USAGE: u8 = 2;

/// Runs the command line and returns the exit status: 0 done, 1 failed, 2 wrong usage or
/// configuration, 3 refused.
pub fn main() -> ExitCode {
    let cli = Cli::from_command_line();
    let recorder = cli.command.recorder();
    let Global {
        log_level: level,
        log_format,
        ..
    } = &cli.global;
    let format = cli.command.log_format(*log_format);
    let log_level = match telemetry::init(level, format, recorder.clone()) {
        Ok(log_level) => log_level,
        Err(error) => {
            eprintln!("error: {}", printable(&error.to_string()));
            return ExitCode::from(USAGE);
        }
    };
    telemetry::log_panics();
    // Two worker threads suffice because most tasks wait, and each thread costs an allocator arena.
    // Blocking threads are started on demand, for name resolution and files.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(64)
        .enable_all()
        .build();
    let result = match runtime {
        Ok(runtime) => {
            let result = runtime.block_on(cli.execute(log_level, recorder));
            // Does not wait for blocking threads, because a file system may hang.
            runtime.shutdown_background();
            result
        }
        Err(error) => Err(error).context("cannot start the runtime"),
    };
    match result {
        Ok(status) => status.into(),
        Err(error) => {
            eprintln!("error: {}", printable(&chain(error.as_ref())));
            let usage = error.is::<ConfigError>()
                || error.is::<DockerConfigError>()
                || error.is::<ProviderError>();
            ExitCode::from(if usage { USAGE } else { 1 })
        }
    }
}

impl Cli {
    /// Parses the command line, and ends the process if it is wrong.
    fn from_command_line() -> Self {
        let matches = command_line::command(ProgramName::current()).get_matches();
        let mut cli = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        cli.assign_namespace(&matches);
        cli
    }

    /// For commands about objects (`explain`, `report`), `--namespace` is the namespace of the
    /// objects, as for `kubectl`, and `ARCHAWARE_NAMESPACE` still sets archaware's own namespace.
    /// For other commands, `--namespace` is archaware's own namespace.
    fn assign_namespace(&mut self, matches: &ArgMatches) {
        let given = matches.value_source("namespace") == Some(ValueSource::CommandLine);
        let is_about_objects = matches!(self.command, Command::Explain(_) | Command::Report(_));
        if given && is_about_objects {
            let own_namespace = std::env::var("ARCHAWARE_NAMESPACE").ok();
            self.global.namespace_of_objects =
                std::mem::replace(&mut self.global.namespace, own_namespace);
        }
    }

    async fn execute(
        self,
        log_level: LogLevel,
        recorder: Option<Recorder>,
    ) -> anyhow::Result<CommandStatus> {
        match self.command {
            Command::Run(command) => command.execute(self.global, log_level).await,
            Command::Plan(command) => command.execute(self.global).await,
            Command::Clean(command) => command.execute(self.global).await,
            Command::Explain(command) => command.execute(self.global).await,
            Command::Report(command) => command.execute(self.global).await,
            Command::Inspect(command) => command.execute(self.global, recorder).await,
            Command::ContentProxy(command) => command.execute(self.global).await,
            Command::Selection(command) => command.execute(),
            Command::Config(action) => action.execute(&self.global),
            Command::Version(command) => command.execute(),
            Command::Completions { shell } => shell::print_completions(shell),
            Command::Man { folder } => shell::write_man_pages(&folder),
            Command::Complete { words } => shell::print_candidates(words),
        }
    }
}

impl Global {
    fn load_config(&self) -> Result<Config, ConfigError> {
        crate::config::load(self.config.as_deref())
    }

    fn namespace(&self) -> String {
        let given = self
            .namespace
            .clone()
            .or_else(namespace_of_pod)
            .filter(|name| !name.is_empty());
        given.unwrap_or_else(|| cluster::NAME.to_owned())
    }

    /// Whether this process runs in a pod in archaware's namespace, with the pod's service account.
    fn is_in_own_pod(&self, api: &ApiClient) -> bool {
        api.is_in_cluster() && namespace_of_pod().is_some_and(|name| name == self.namespace())
    }

    async fn api(&self, metrics: &Metrics) -> anyhow::Result<ApiClient> {
        let (kubeconfig, context) = (self.kubeconfig.as_deref(), self.context.as_deref());
        Ok(api::connect(kubeconfig, context, metrics.api.clone()).await?)
    }

    /// Like `api`, for commands that fail at once if the API server does not answer.
    async fn reachable_api(&self, metrics: &Metrics) -> anyhow::Result<ApiClient> {
        let api = self.api(metrics).await?;
        match api.ping().await {
            Err(error @ (ApiError::Unreachable(_) | ApiError::TimedOut(_))) => {
                let server = api.server().to_owned();
                let what = format!(
                    "no answer from the cluster at {server}; is the context the right one (--context)?"
                );
                Err(error).context(what)
            }
            // Any other result, even an error such as 403, shows that the API server is reachable.
            _ => Ok(api),
        }
    }

    /// The operator's credentials from `--docker-config` or the configuration.
    fn operator_credentials(&self, config: &Config) -> anyhow::Result<OperatorCredentials> {
        let configured = || non_empty(&config.registries.docker_config);
        let path = self
            .docker_config
            .as_deref()
            .and_then(non_empty)
            .or_else(configured);
        let plugins = &config.credential_providers;
        let providers = non_empty(&plugins.config)
            .map(|file| Providers::load(&file, &plugins.bin_directory))
            .transpose()?;
        Ok(OperatorCredentials::new(path, providers)?)
    }
}

/// The namespace of the pod that this process is in.
fn namespace_of_pod() -> Option<String> {
    const FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
    let text = std::fs::read_to_string(FILE).ok()?;
    Some(text.trim().to_owned())
}

/// The path, or `None` if it is empty, which means that it is not configured.
fn non_empty(path: &Path) -> Option<PathBuf> {
    (!path.as_os_str().is_empty()).then(|| path.to_owned())
}

/// Whether fetched documents are persisted in containerd. Commands that only print leave no trace.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Persist {
    Yes,
    No,
}

/// Builds a resolver from the configuration.
fn resolver(
    global: &Global,
    config: &Config,
    metrics: &Metrics,
    keep: Persist,
) -> anyhow::Result<Resolver> {
    let ContainerdConfig {
        socket,
        read_namespaces,
        cache_namespace,
    } = &config.containerd;
    let own_namespace = Some(cache_namespace.as_str()).filter(|name| !name.is_empty());
    let writes = (keep == Persist::Yes).then_some(&metrics.content_writes);
    let connect = |socket: PathBuf| {
        Containerd::new(
            &socket.to_string_lossy(),
            read_namespaces.clone(),
            own_namespace,
            writes,
            LOOKUP_TIMEOUT,
        )
    };
    let containerd = non_empty(socket).map(connect).transpose()?;
    let RegistriesConfig {
        ca_bundle,
        plain_http,
        hosts_directories,
        mirror_credentials,
        rewrites,
        token_endpoints,
        allow_local_addresses,
        docker_config: _,
    } = &config.registries;
    let settings = ResolverSettings {
        registry: crate::image::registry::RegistryClient {
            timeout: config.resolution.timeout,
            per_host: config.concurrency.per_registry.get().into(),
            plain_http: plain_http.clone(),
            hosts_directories: hosts_directories.clone(),
            ca_bundle: non_empty(ca_bundle),
            mirror_credentials: *mirror_credentials,
            token_endpoints: token_endpoints.clone(),
            allow_local_addresses: allow_local_addresses.clone(),
        },
        rewrites: rewrites.clone(),
        images: config.resolution.cache.images.get(),
        tag_ttl: config.resolution.cache.tag_ttl,
        latest_ttl: config.resolution.cache.latest_ttl,
        per_credential: config.resolution.cache.per_credential,
    };
    let credentials = global.operator_credentials(config)?;
    let resolutions = metrics.resolutions.clone();
    Ok(Resolver::new(
        settings,
        containerd,
        credentials,
        resolutions,
    ))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn a_namespace_is_that_of_the_objects_or_archawares_own() {
        for (arguments, own, of_objects) in [
            (&["plan", "--namespace", "a"][..], Some("a"), None),
            (&["explain", "p", "--namespace", "a"], None, Some("a")),
            (&["--namespace", "a", "explain", "p"], None, Some("a")),
            (&["explain", "p", "-n", "a"], None, Some("a")),
        ] {
            let words = std::iter::once(&"archaware").chain(arguments);
            let matches = Cli::command().get_matches_from(words);
            let mut cli = Cli::from_arg_matches(&matches).unwrap();
            cli.assign_namespace(&matches);
            let found = (
                cli.global.namespace.as_deref(),
                cli.global.namespace_of_objects.as_deref(),
            );
            assert_eq!(found, (own, of_objects), "{arguments:?}");
        }
    }
}
