//! Logging to stderr: text on a terminal, JSON otherwise.

use std::{io::IsTerminal, sync::Arc};

use parking_lot::Mutex;
use tracing_subscriber::{EnvFilter, fmt::format::FmtSpan, reload};

/// Format of log lines.
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

/// Neither a log level nor a filter.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is not a log level: use error, warn, info, debug, trace, or a filter like archaware=debug,kube=info"
)]
pub struct LevelError(String);

/// The current log filter, which can be changed while the process runs. Cheap to clone.
#[derive(Clone)]
pub struct LogLevel {
    current: Arc<Mutex<String>>,
    replace: Arc<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>,
}

impl LogLevel {
    /// The current level or filter.
    pub fn get(&self) -> String {
        let current = self.current.lock();
        current.clone()
    }

    /// Replaces the level or filter.
    ///
    /// # Errors
    ///
    /// When `level` is neither a level nor a filter.
    pub fn set(&self, level: &str) -> Result<(), LevelError> {
        let filter = filter(level)?;
        (self.replace)(filter).map_err(|_| LevelError(level.to_owned()))?;
        level.clone_into(&mut self.current.lock());
        tracing::warn!(level, "log level changed");
        Ok(())
    }
}

/// A bare level applies to archaware; libraries then log warnings and errors only. A filter applies to everything.
/// kube opens an INFO span for every reconcile, which costs nothing while its level is disabled.
fn filter(level: &str) -> Result<EnvFilter, LevelError> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let lower = level.trim().to_ascii_lowercase();
    // `EnvFilter` reads an unknown bare word as a module name and would silence everything else.
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

/// Initialises logging. `level` is a level for archaware itself or a filter for everything.
///
/// # Errors
///
/// When `level` is neither.
pub fn init(level: &str, format: LogFormat) -> Result<LogLevel, LevelError> {
    let terminal = std::io::stderr().is_terminal();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level)?)
        .with_span_events(FmtSpan::NONE)
        .with_writer(std::io::stderr)
        .with_ansi(terminal);
    let text = format == LogFormat::Text || (format == LogFormat::Auto && terminal);
    let current = Arc::new(Mutex::new(level.to_owned()));
    // Tests initialise more than once; only the first call counts.
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

/// Logs each panic as one line.
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
    fn a_misspelt_level_does_not_silence_the_log() {
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
