//! Logging to stderr, as text or JSON.

use std::{
    fmt,
    io::IsTerminal,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::Targets, fmt::layer, layer::SubscriberExt, reload,
    util::SubscriberInitExt,
};

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// JSON for run and content-proxy where stderr is no terminal, text otherwise.
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

/// A bare level applies to archaware; libraries then log warnings and errors only. A filter applies
/// to everything. kube opens an INFO span for every reconcile, which costs nothing while its level
/// is disabled.
fn filter(level: &str) -> Result<EnvFilter, LevelError> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let lower = level.trim().to_ascii_lowercase();
    // `EnvFilter` reads an unknown bare word as a module name and would silence everything else.
    let known = |part: &str| part.contains('=') || LEVELS.contains(&part);
    if !lower.split(',').all(known) {
        return Err(LevelError(level.to_owned()));
    }
    let directives = if LEVELS.contains(&lower.as_str()) {
        // kube's client logs failed connections as errors. archaware reports them itself, with the
        // operation that failed.
        format!(
            "{},kube_client::client::builder=off,archaware={lower}",
            if lower == "off" { "off" } else { "warn" }
        )
    } else {
        lower
    };
    EnvFilter::try_new(&directives).map_err(|_| LevelError(level.to_owned()))
}

/// Initialises logging. `level` is a level for archaware itself or a filter for everything.
/// `recorder` gets the events of its target, whatever the level.
///
/// # Errors
///
/// When `level` is neither.
pub fn init(
    level: &str,
    format: LogFormat,
    recorder: Option<Recorder>,
) -> Result<LogLevel, LevelError> {
    let terminal = std::io::stderr().is_terminal();
    let (filter, handle) = reload::Layer::new(filter(level)?);
    let lines = layer().with_writer(std::io::stderr).with_ansi(terminal);
    let text = format == LogFormat::Text || (format == LogFormat::Auto && terminal);
    let lines = if text {
        lines.with_target(false).with_filter(filter).boxed()
    } else {
        lines.json().flatten_event(true).with_filter(filter).boxed()
    };
    let recorder = recorder.map(|recorder| {
        let filter = Targets::new().with_target(recorder.target, tracing::Level::TRACE);
        recorder.with_filter(filter)
    });
    // Tests initialise more than once; only the first call counts.
    let _ = Registry::default().with(lines).with(recorder).try_init();
    Ok(LogLevel {
        current: Arc::new(Mutex::new(level.to_owned())),
        replace: Arc::new(move |filter| handle.reload(filter)),
    })
}

/// Maximum number of recorded events.
const MAX_RECORDED: usize = 10_000;

/// Records the events of one target, for commands that print them. Cheap to clone.
#[derive(Clone)]
pub struct Recorder {
    target: &'static str,
    started: Instant,
    events: Arc<Mutex<Vec<RecordedEvent>>>,
}

#[derive(Clone, Debug)]
pub struct RecordedEvent {
    /// Time since the recorder was made.
    pub at: Duration,
    /// Fields with their values, in their order.
    pub fields: Vec<(&'static str, String)>,
}

impl RecordedEvent {
    /// The value of a field; empty if there is none.
    pub fn field(&self, name: &str) -> &str {
        let found = self.fields.iter().find(|(field, _)| *field == name);
        found.map_or("", |(_, value)| value)
    }
}

impl Recorder {
    /// Records the events of `target`.
    pub fn new(target: &'static str) -> Self {
        Self {
            target,
            started: Instant::now(),
            events: Arc::default(),
        }
    }

    /// The events so far, at most ten thousand.
    pub fn events(&self) -> Vec<RecordedEvent> {
        self.events.lock().clone()
    }
}

impl<S: Subscriber> Layer<S> for Recorder {
    fn on_event(&self, event: &Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        let at = self.started.elapsed();
        let mut fields = Fields(Vec::new());
        event.record(&mut fields);
        let mut events = self.events.lock();
        if events.len() < MAX_RECORDED {
            let fields = fields.0;
            events.push(RecordedEvent { at, fields });
        }
    }
}

struct Fields(Vec<(&'static str, String)>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.push((field.name(), value.to_owned()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.push((field.name(), format!("{value:?}")));
    }
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
            "archaware_image=trace,warn",
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
        let directives = filter("Debug").unwrap().to_string();
        assert!(directives.ends_with("archaware=debug,warn"), "{directives}");
    }

    /// The names of archaware's libraries begin with the name of the program.
    #[test]
    fn the_level_counts_for_the_libraries_too() {
        let subscriber = Registry::default().with(filter("debug").unwrap());
        tracing::subscriber::with_default(subscriber, || {
            assert!(tracing::enabled!(target: "archaware_image::registry", tracing::Level::DEBUG));
            assert!(!tracing::enabled!(target: "kube_client", tracing::Level::DEBUG));
        });
    }
}
