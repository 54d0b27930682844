//! Tables and JSON on stdout.

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

/// Width of tables that are not written to a terminal.
const DEFAULT_WIDTH: u16 = 80;

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs; stable.
    Json,
}

/// The columns that `COLUMNS` names, those of the terminal, or 80 without either.
fn width() -> u16 {
    let named = std::env::var("COLUMNS")
        .ok()
        .and_then(|text| text.parse().ok());
    let terminal = || {
        let terminals = [console::Term::stdout(), console::Term::stderr()];
        terminals.iter().find_map(console::Term::size_checked)
    };
    named
        .filter(|columns| *columns > 0)
        .or_else(|| terminal().map(|(_, columns)| columns))
        .unwrap_or(DEFAULT_WIDTH)
}

/// A table as wide as [`width`].
pub(super) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width())
        .set_header(
            header
                .iter()
                .map(|name| (*name).to_owned())
                .collect::<Vec<_>>(),
        );
    for row in rows {
        table.add_row(row);
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

/// Indented JSON with a final newline.
pub(super) fn json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}
