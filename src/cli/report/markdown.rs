//! A report as Markdown, in the dialect that code hosts render.

use crate::{
    report::{Report, cores},
    text::one_line,
};

use super::table::{architectures, in_words, incomplete, memory, name, parts, reasons};

pub(super) fn print(report: &Report) -> String {
    let mut text = format!(
        "# Architectures of workloads\n\nOf {}.\n",
        escape(&report.source)
    );
    for summary in &report.summaries {
        text += &format!(
            "\n## How many workloads can run on {}\n\n{}\n\n",
            summary.architecture,
            in_words(summary)
        );
        let rows = parts(summary).into_iter().map(|(name, amount)| {
            vec![
                name.to_owned(),
                amount.workloads.to_string(),
                amount.pods.to_string(),
                cores(amount.cpu_millicores),
                memory(amount.memory_bytes),
            ]
        });
        text += &table(&["", "Workloads", "Pods", "CPU", "Memory"], rows);
        if !summary.blockers.is_empty() {
            text += &format!(
                "\nImages that keep workloads from {}:\n\n",
                summary.architecture
            );
            let rows = summary.blockers.iter().map(|blocker| {
                vec![
                    blocker.image.clone(),
                    blocker.architectures.join(", "),
                    blocker.blocks.workloads.to_string(),
                    blocker.blocks_alone.workloads.to_string(),
                ]
            });
            text += &table(&["Image", "Exists for", "Workloads", "Only this"], rows);
        }
    }
    text += "\n## Workloads\n\n";
    let columns: Vec<&str> = report
        .summaries
        .iter()
        .map(|summary| summary.architecture.as_str())
        .collect();
    let mut header = vec!["Workload", "Exists for"];
    header.extend(columns);
    header.push("Blocked by");
    let rows = report.workloads.iter().map(|workload| {
        let mut row = vec![name(workload), architectures(workload)];
        row.extend(
            workload
                .answers
                .iter()
                .map(|answer| answer.can_run.as_str().to_owned()),
        );
        row.push(reasons(workload, |image| image).join(", "));
        row
    });
    text += &table(&header, rows);
    let misplaced = report.workloads.iter().flat_map(|workload| {
        workload.misplaced.iter().map(move |pod| {
            let namespace = workload.namespace.as_deref().unwrap_or_default();
            vec![
                format!("{namespace}/{}", pod.pod),
                format!("{} ({})", pod.node, pod.architecture),
                pod.images.join(", "),
                pod.state().to_owned(),
            ]
        })
    });
    let misplaced: Vec<_> = misplaced.collect();
    if !misplaced.is_empty() {
        text += "\n## Pods on the wrong architecture\n\n";
        let header = ["Pod", "Node", "Images that do not run there", "Failure"];
        text += &table(&header, misplaced.into_iter());
    }
    let failed = report.images.iter().filter_map(|image| {
        let error = image.error.as_ref()?;
        let why = format!("{}: {}", error.reason, error.message);
        Some(vec![image.image.clone(), why])
    });
    let failed: Vec<_> = failed.collect();
    if !failed.is_empty() {
        text += "\n## Images that could not be checked\n\n";
        text += &table(&["Image", "Why"], failed.into_iter());
    }
    text + &incomplete(report)
}

fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(header.iter().map(|cell| escape(cell)).collect());
    text += &line(header.iter().map(|_| "---".to_owned()).collect());
    for row in rows {
        text += &line(row.iter().map(|cell| escape(cell)).collect());
    }
    text
}

/// An HTML comment: it splits a word for the renderer and is not shown (`CommonMark`, "Raw HTML").
const NOTHING: &str = "<!-- -->";

/// Names come from users: they must not end a cell, or become a link, a mention of a team or HTML.
fn escape(text: &str) -> String {
    let text = one_line(text);
    let mut escaped = String::new();
    for (index, c) in text.char_indices() {
        let (before, rest) = text.split_at(index);
        match c {
            // Code hosts read `$` as the delimiter of a formula.
            '|' | '\\' | '`' | '*' | '_' | '~' | '$' | '[' | ']' | '<' | '>' | '&' => {
                escaped.push('\\');
                escaped.push(c);
            }
            // A digest is no mention.
            '@' if !rest.starts_with("@sha") => {
                escaped.push(c);
                escaped += NOTHING;
            }
            // Renderers make links of bare addresses (GitHub Flavored Markdown, "Autolinks").
            ':' if rest.starts_with("://") => {
                escaped += NOTHING;
                escaped.push(c);
            }
            '.' if ends_with_www(before) => {
                escaped += NOTHING;
                escaped.push(c);
            }
            c => escaped.push(c),
        }
    }
    escaped
}

fn ends_with_www(text: &str) -> bool {
    let end = text.get(text.len().saturating_sub(3)..);
    end.is_some_and(|end| end.eq_ignore_ascii_case("www"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_a_cell() {
        let row = vec!["a|b".to_owned(), "<script>\n[x](y)".to_owned()];
        let text = table(&["A", "B"], std::iter::once(row));
        assert_eq!(
            text,
            "| A | B |\n| --- | --- |\n| a\\|b | \\<script\\> \\[x\\](y) |\n"
        );
        for (name, expected) in [
            ("@team", "@<!-- -->team"),
            ("app@sha256:1", "app@sha256:1"),
            ("https://a.test", "https<!-- -->://a.test"),
            ("WWW.a.test", "WWW<!-- -->.a.test"),
            ("a\u{202e}b", "a\u{fffd}b"),
            ("&#64;team", "\\&#64;team"),
        ] {
            assert_eq!(escape(name), expected);
        }
    }
}
