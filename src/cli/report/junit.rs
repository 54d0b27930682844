//! A report as `JUnit` XML, which CI systems show: one test case for each workload and architecture
//! that is asked about.

use crate::report::{Answer, CanRun, Report, ReportedWorkload};

use super::{markup::escape, table::name};

/// `fails`: whether the command ends with an error for an answer. `fails_unread`: whether it ends
/// with an error for what lacks a permission.
pub(super) fn print(
    report: &Report,
    fails: impl Fn(&Answer) -> bool,
    fails_unread: bool,
) -> String {
    let mut text = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n".to_owned();
    for (index, summary) in report.summaries.iter().enumerate() {
        let answers = report.workloads.iter().filter_map(|workload| {
            let answer = workload.answers.get(index)?;
            Some((workload, answer))
        });
        let answers: Vec<_> = answers.collect();
        let failures = answers.iter().filter(|(_, answer)| fails(answer)).count();
        let bad = answers
            .iter()
            .filter(|(_, answer)| answer.can_run != CanRun::Yes);
        text += &format!(
            "  <testsuite name=\"can run on {}\" tests=\"{}\" failures=\"{failures}\" errors=\"0\" skipped=\"{}\">\n",
            escape(&summary.architecture),
            answers.len(),
            bad.count() - failures
        );
        for (workload, answer) in answers {
            text += &case(workload, answer, fails(answer));
        }
        text += "  </testsuite>\n";
    }
    text + &unread(report, fails_unread) + "</testsuites>\n"
}

/// A suite with a test case for each missing permission.
fn unread(report: &Report, is_failure: bool) -> String {
    let permissions = report.missing_permissions.iter();
    let permissions = permissions.map(|permission| format!("permission to {permission}"));
    let names: Vec<String> = permissions.collect();
    if names.is_empty() {
        return String::new();
    }
    let count = names.len();
    let (failures, skipped) = if is_failure { (count, 0) } else { (0, count) };
    let mut text = format!(
        "  <testsuite name=\"can be read\" tests=\"{count}\" failures=\"{failures}\" errors=\"0\" skipped=\"{skipped}\">\n"
    );
    let result = if is_failure {
        "<failure type=\"unknown\" message=\"it could not be read, so its images are not known\"/>"
    } else {
        "<skipped message=\"it could not be read, so its images are not known\"/>"
    };
    for name in names {
        text += &format!(
            "    <testcase classname=\"archaware\" name=\"{}\">\n      {result}\n    </testcase>\n",
            escape(&name)
        );
    }
    text + "  </testsuite>\n"
}

fn case(workload: &ReportedWorkload, answer: &Answer, is_failure: bool) -> String {
    let class = format!("archaware.{}", answer.architecture);
    let head = format!(
        "    <testcase classname=\"{}\" name=\"{}\"",
        escape(&class),
        escape(&name(workload))
    );
    if answer.can_run == CanRun::Yes {
        return format!("{head}/>\n");
    }
    let architecture = &answer.architecture;
    let mut why = Vec::new();
    if !answer.blocked_by.is_empty() {
        let images = answer.blocked_by.join(", ");
        why.push(format!("no {architecture} in {images}"));
    }
    if answer.excluded {
        why.push(format!(
            "its node selector, affinity or annotation excludes {architecture}"
        ));
    }
    if !answer.unknown.is_empty() {
        why.push(format!(
            "could not be checked: {}",
            answer.unknown.join(", ")
        ));
    }
    if !answer.pinned_to.is_empty() {
        why.push(format!(
            "pinned to {} nodes",
            answer.pinned_to.join(" and ")
        ));
    }
    why.extend(workload.unread.iter().cloned());
    let why = escape(&why.join("; "));
    let result = match (is_failure, answer.can_run) {
        (true, CanRun::Unknown) => format!("<failure type=\"unknown\" message=\"{why}\"/>"),
        (true, _) => format!("<failure type=\"missing\" message=\"{why}\"/>"),
        (false, _) => format!("<skipped message=\"{why}\"/>"),
    };
    format!("{head}>\n      {result}\n    </testcase>\n")
}
