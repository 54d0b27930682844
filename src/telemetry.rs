//! Logs: text on a terminal, JSON otherwise, always on stderr.

use std::{io::IsTerminal, sync::Arc};

use parking_lot::Mutex;
use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan, reload};

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

/// What is logged, which can be changed while the process runs. Cheap to clone.
#[derive(Clone)]
pub struct LogLevel {
    current: Arc<Mutex<String>>,
    replace: Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>,
}

impl LogLevel {
    /// The level or filter that holds now.
    pub fn get(&self) -> String {
        let current = self.current.lock();
        current.clone()
    }

    /// Another one from now on.
    pub fn set(&self, level: &str) -> Result<(), LevelError> {
        let filter = filter(level)?;
        (self.replace)(filter).map_err(|_| LevelError(level.to_owned()))?;
        level.clone_into(&mut self.current.lock());
        tracing::warn!(level, "log level changed");
        Ok(())
    }
}

/// A level is for archaware itself, a filter for everything. Libraries are heard when something is wrong.
/// kube's spans are made at INFO for every single reconciliation: below that they cost nothing.
fn filter(level: &str) -> Result<EnvFilter, LevelError> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let lower = level.trim().to_ascii_lowercase();
    // A word alone would be the name of a module, and silence everything else.
    let known = |part: &str| part.contains('=') || LEVELS.contains(&part);
    if !lower.split(',').all(known) {
        return Err(LevelError(level.to_owned()));
    }
    let directives = if LEVELS.contains(&lower.as_str()) {
        format!(
            "{},archaware={lower}",
            if lower == "off" { "off" } else { "warn" }
        )
    } else {
        lower
    };
    EnvFilter::try_new(&directives).map_err(|_| LevelError(level.to_owned()))
}

/// Starts logging. `level` is a level for archaware itself, or a filter for everything.
pub fn init(level: &str, format: LogFormat) -> Result<LogLevel, LevelError> {
    let terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level)?)
        .with_span_events(FmtSpan::NONE)
        .with_writer(std::io::stderr)
        .with_ansi(terminal);
    let text = format == LogFormat::Text || (format == LogFormat::Auto && terminal);
    let current = Arc::new(Mutex::new(level.to_owned()));
    // A second initialisation (in tests) changes nothing.
    Ok(if text {
        let builder = builder.with_target(false).with_filter_reloading();
        let handle = builder.reload_handle();
        let _ = builder.try_init();
        let replace = Arc::new(move |filter| handle.reload(filter));
        LogLevel { current, replace }
    } else {
        let builder = builder.json().flatten_event(true).with_filter_reloading();
        let handle = builder.reload_handle();
        let _ = builder.try_init();
        let replace = Arc::new(move |filter| handle.reload(filter));
        LogLevel { current, replace }
    })
}

/// Logs panics like everything else, one line for each.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let location = panic.location().map(ToString::to_string);
        let message = panic.payload_as_str().unwrap_or_default();
        tracing::error!(location, message, "panic: a bug in archaware");
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_pen_does_not_silence_the_log() {
        for good in [
            "info",
            "INFO",
            "off",
            "archaware::image=trace,warn",
            "archaware=debug",
        ] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "debgu",
            "debgu,kube=info",
            "very=loud=indeed",
            "archaware=noisy",
        ] {
            assert!(filter(bad).is_err(), "{bad}");
        }
        assert_eq!(filter("Debug").unwrap().to_string(), "archaware=debug,warn");
    }
}
