//! Tables and JSON on stdout.

use std::io::Write;

use anyhow::Context;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use crate::text::printable;

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs; stable.
    Json,
}

/// The width: `COLUMNS` if it is set, else the width of the terminal. `None` without a terminal, so
/// that a program that reads the output finds each row in one line.
fn width() -> Option<u16> {
    let named = std::env::var("COLUMNS")
        .ok()
        .and_then(|text| text.parse().ok());
    named.filter(|columns| *columns > 0).or_else(|| {
        let size = console::Term::stdout().size_checked();
        size.map(|(_, columns)| columns)
    })
}

/// Prints a result to stdout. It is no error if the reader has closed the pipe, as `head` does.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to stdout"),
    }
}

/// Prints a progress line. Write errors are ignored, because the work continues even if stdout is
/// closed.
pub(super) fn print_line(line: &str) {
    let _ = print(&format!("{line}\n"));
}

/// A table as wide as [`width`].
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    match width() {
        Some(width) => table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width),
        None => table.set_content_arrangement(ContentArrangement::Disabled),
    };
    table.load_style(presets::NOTHING).set_header(
        header
            .iter()
            .map(|name| (*name).to_owned())
            .collect::<Vec<_>>(),
    );
    for row in rows {
        table.add_row(row.iter().map(|cell| printable(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines: Vec<String> = table
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    lines.join(
        "
",
    ) + "
"
}

/// Labels and texts, the texts wrapped beside their labels to [`width`].
pub(super) fn fields(fields: &[(&str, String)]) -> String {
    let rows = fields.iter();
    let rows = rows.map(|(label, text)| vec![(*label).to_owned(), text.clone()]);
    let mut table = table(&["", ""], rows);
    // The empty header.
    table.drain(..=table.find('\n').unwrap_or_default());
    table
}

/// Whether results on stdout are coloured: on a terminal, or with `CLICOLOR_FORCE`; never if
/// `NO_COLOR` is set.
pub(super) fn is_coloured() -> bool {
    console::colors_enabled() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// YAML with a final newline.
pub(super) fn yaml(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_saphyr::to_string(value)?)
}

/// Indented JSON with a final newline.
pub(super) fn json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_command_the_terminal() {
        let row = vec![
            "\u{1b}[2Japp".to_owned(),
            "a\tb\r\u{9b}c\u{202e}d".to_owned(),
        ];
        let text = table(&["A", "B"], [row]);
        assert!(
            !text.chars().any(|c| c.is_control() && c != '\n'),
            "{text:?}"
        );
        assert!(
            text.contains("\u{fffd}[2Japp") && !text.contains('\u{202e}'),
            "{text:?}"
        );
    }
}
