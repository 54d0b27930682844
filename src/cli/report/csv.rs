//! A report as CSV (RFC 4180): one line for each workload and architecture that is asked about.

use crate::{report::Report, text::one_line};

/// The columns.
const HEADER: [&str; 15] = [
    "namespace",
    "kind",
    "name",
    "pods",
    "cpu_millicores",
    "memory_bytes",
    "exists_for",
    "architecture",
    "can_run",
    "blocked_by",
    "unknown",
    "excluded",
    "misplaced_pods",
    "pinned_to",
    "unread",
];

pub(super) fn print(report: &Report) -> String {
    let mut text = line(HEADER.map(str::to_owned).as_slice());
    for workload in &report.workloads {
        for answer in &workload.answers {
            text += &line(&[
                workload.namespace.clone().unwrap_or_default(),
                workload.kind.clone(),
                workload.name.clone(),
                workload.pods.to_string(),
                workload.cpu_millicores.to_string(),
                workload.memory_bytes.to_string(),
                workload.architectures.clone().unwrap_or_default().join(" "),
                answer.architecture.clone(),
                answer.can_run.as_str().to_owned(),
                answer.blocked_by.join(" "),
                answer.unknown.join(" "),
                answer.excluded.to_string(),
                workload.misplaced.len().to_string(),
                answer.pinned_to.join(" "),
                workload.unread.join("; "),
            ]);
        }
    }
    text
}

fn line(fields: &[String]) -> String {
    let fields: Vec<_> = fields.iter().map(|field| escape(field)).collect();
    fields.join(",") + "\r\n"
}

/// A spreadsheet reads a cell that begins with one of these as a formula, also in full-width form.
const FORMULA: [char; 8] = ['=', '+', '-', '@', '＝', '＋', '－', '＠'];

/// Escapes a field. In many locales a spreadsheet separates cells at semicolons, and ignores quotes
/// in the middle of a cell. So each part between semicolons is guarded like a cell of its own.
fn escape(field: &str) -> String {
    let field = one_line(field);
    let parts = field.split(';').map(|part| {
        let is_formula = part
            .trim_start()
            .trim_start_matches('"')
            .starts_with(FORMULA);
        let guard = if is_formula { "'" } else { "" };
        format!("{guard}{part}")
    });
    let guarded = parts.collect::<Vec<_>>().join(";");
    if guarded == field && !field.contains([',', ';', '"']) {
        return field;
    }
    format!("\"{}\"", guarded.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        process::{Command, Stdio},
    };

    use super::*;

    #[test]
    fn fields_are_quoted_where_they_have_to_be() {
        let fields = ["a", "b,c", "say \"x\"", "=1+1", ""].map(str::to_owned);
        assert_eq!(line(&fields), "a,\"b,c\",\"say \"\"x\"\"\",\"'=1+1\",\r\n");
    }

    /// Python's reader stands for spreadsheets.
    #[test]
    fn no_cell_is_a_formula_for_any_separator() {
        let fields = [
            "=1",
            "a;=1",
            "a; =1",
            "a;\"=1\"",
            "\u{ff1d}1",
            ";@x",
            "\t+1",
            "b,=1",
            "x\r\n-1",
            "\"=1\"",
        ];
        let text = line(&fields.map(str::to_owned));
        let read = r#"
import csv, io, sys, unicodedata
text = sys.stdin.buffer.read().decode()
assert len(next(csv.reader(io.StringIO(text)))) == 10, text
for delimiter in ",;\t":
    for row in csv.reader(io.StringIO(text), delimiter=delimiter):
        for cell in row:
            begin = unicodedata.normalize("NFKC", cell).strip(' "')[:1]
            assert begin not in tuple("=+-@"), (delimiter, cell)
"#;
        let mut python = Command::new("python3")
            .args(["-c", read])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = python.stdin.take().unwrap();
        input.write_all(text.as_bytes()).unwrap();
        drop(input);
        let read = python.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&read.stderr);
        assert!(read.status.success(), "{errors}");
    }
}
