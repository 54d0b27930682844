//! Progress of a command with many objects: a bar on a terminal, otherwise one line per object.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use super::output;

pub(super) struct Progress(Option<ProgressBar>);

impl Progress {
    pub(super) fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {wide_msg}") {
            bar.set_style(style);
        }
        Self(Some(bar))
    }

    /// Adds to the number of expected objects.
    pub(super) fn expect(&self, objects: usize) {
        if let Some(bar) = &self.0 {
            bar.inc_length(objects as u64);
        }
    }

    /// Counts a finished object on a terminal; otherwise, and in a dry run, prints the object, with
    /// the reason if it failed.
    pub(super) fn report(&self, what: &str, outcome: &Result<(), String>, dry_run: bool) {
        match (&self.0, outcome) {
            (Some(bar), _) if !dry_run => {
                bar.set_message(what.to_owned());
                bar.inc(1);
            }
            // The lines of a dry run are its result and stay visible.
            (_, Ok(())) if dry_run => output::print_line(&format!("{what} (dry run)")),
            (_, Ok(())) => output::print_line(what),
            (_, Err(why)) => output::print_line(&format!("{what}: not done: {why}")),
        }
    }

    /// Counts a finished object, on a terminal only.
    pub(super) fn step(&self) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
        }
    }

    pub(super) fn finish(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
