//! Logs: text on a terminal, JSON otherwise, always on stderr.

use std::io::IsTerminal;

use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise.
    #[default]
    Auto,
    /// Text.
    Text,
    /// One JSON object per line.
    Json,
}

/// The level is neither a level nor a filter.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no log level: use error, warn, info, debug, trace, or a filter like archaware=debug,kube=info"
)]
pub struct LevelError(String);

/// Starts logging. `level` is a level for archaware itself, or a filter for everything.
pub fn init(level: &str, format: LogFormat) -> Result<(), LevelError> {
    // Libraries are heard when something is wrong. kube's spans are made at INFO for every single
    // reconciliation: below that they cost nothing.
    let directives = match level {
        "error" | "warn" | "info" | "debug" | "trace" => format!("warn,archaware={level}"),
        filter => filter.to_owned(),
    };
    let filter = EnvFilter::try_new(&directives).map_err(|_| LevelError(level.to_owned()))?;
    let terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_span_events(FmtSpan::NONE)
        .with_writer(std::io::stderr)
        .with_ansi(terminal);
    let text = format == LogFormat::Text || (format == LogFormat::Auto && terminal);
    // A second initialisation (in tests) changes nothing.
    let _ = if text {
        builder.with_target(false).try_init()
    } else {
        builder.json().flatten_event(true).try_init()
    };
    Ok(())
}
