//! A report as CSV (RFC 4180): one line for each workload and architecture that is asked about.

use crate::report::Report;

/// The columns.
const HEADER: [&str; 13] = [
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
            ]);
        }
    }
    text
}

fn line(fields: &[String]) -> String {
    let fields: Vec<_> = fields.iter().map(|field| escape(field)).collect();
    fields.join(",") + "\r\n"
}

/// A spreadsheet takes a field that begins with one of these for a formula.
const FORMULA: [char; 4] = ['=', '+', '-', '@'];

fn escape(field: &str) -> String {
    let field: String = field
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let guard = if field.starts_with(FORMULA) { "'" } else { "" };
    if guard.is_empty() && !field.contains([',', '"']) {
        return field;
    }
    format!("\"{guard}{}\"", field.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_quoted_where_they_have_to_be() {
        let fields = ["a", "b,c", "say \"x\"", "=1+1", ""].map(str::to_owned);
        assert_eq!(line(&fields), "a,\"b,c\",\"say \"\"x\"\"\",\"'=1+1\",\r\n");
    }
}
