//! A report as tables.

use crate::{
    report::{Amount, Report, ReportedWorkload, Summary, cores},
    text::printable,
};

use super::output;

/// Blockers that are shown; `-o json` has all.
const MAX_BLOCKERS: usize = 20;

pub(super) fn print(report: &Report) -> String {
    let mut text = format!("Of {}\n\n", printable(&report.source));
    for summary in &report.summaries {
        text += &of_summary(summary);
    }
    text += &of_workloads(report);
    text += &incomplete(report);
    text += &misplaced(report);
    let failed = report.images.iter().filter_map(|image| {
        let error = image.error.as_ref()?;
        Some(vec![
            image.image.clone(),
            format!("{}: {}", error.reason, error.message),
        ])
    });
    let failed: Vec<_> = failed.collect();
    if !failed.is_empty() {
        text += "\nImages that could not be checked\n";
        text += &output::table(&["IMAGE", "WHY"], failed);
    }
    text
}

/// A line with the missing permissions; empty if none is missing.
pub(super) fn incomplete(report: &Report) -> String {
    if report.missing_permissions.is_empty() {
        return String::new();
    }
    let permissions = report.missing_permissions.join(", ");
    format!("\nIncomplete, for lack of permissions: {permissions}\n")
}

/// The parts of a summary, with their names.
pub(super) fn parts(summary: &Summary) -> [(&'static str, Amount); 5] {
    [
        ("can run today", summary.can_run),
        ("one image to build", summary.blocked_by_one_image),
        ("more to change", summary.blocked_otherwise),
        ("not known", summary.unknown),
        ("all", summary.total),
    ]
}

/// For example `12 (60%)`.
pub(super) fn share(part: u64, total: u64, text: String) -> String {
    match (part * 100 + total / 2).checked_div(total) {
        Some(percent) => format!("{text} ({percent}%)"),
        None => text,
    }
}

/// For example `1 pod` or `3 pods`.
pub(super) fn plural(count: u64, one: &str, many: &str) -> String {
    let noun = if count == 1 { one } else { many };
    format!("{count} {noun}")
}

/// What a summary says in a sentence or two.
pub(super) fn in_words(summary: &Summary) -> String {
    let (total, architecture) = (summary.total.workloads, &summary.architecture);
    let can_run = summary.can_run.workloads;
    let verb = if total == 1 { "workload" } else { "workloads" };
    let mut text = format!("{can_run} of {total} {verb} can run on {architecture} today.");
    let one_image = summary.blocked_by_one_image.workloads;
    if one_image > 0 {
        let blockers = summary.blockers.iter();
        let alone = blockers.filter(|blocker| blocker.blocks_alone.workloads > 0);
        let images = plural(alone.count() as u64, "image", "images");
        text += &format!(" {one_image} more could if {images} were built for it.");
    }
    text
}

/// Bytes in the largest unit, up to Pi, that makes the number at least 1: `1.5Ki`.
pub(super) fn memory(bytes: u64) -> String {
    let units = ["", "Ki", "Mi", "Gi", "Ti", "Pi"];
    let (mut value, mut unit) = (bytes, 0);
    let mut rest = 0;
    while value >= 1024 && unit + 1 < units.len() {
        (rest, value, unit) = (value % 1024, value / 1024, unit + 1);
    }
    let suffix = units.get(unit).copied().unwrap_or_default();
    let hundredths = rest * 100 / 1024;
    if value < 10 && hundredths > 0 {
        let digits = format!("{hundredths:02}");
        format!("{value}.{}{suffix}", digits.trim_end_matches('0'))
    } else {
        format!("{value}{suffix}")
    }
}

fn of_summary(summary: &Summary) -> String {
    let total = summary.total;
    let rows = parts(summary).into_iter().map(|(name, amount)| {
        let cpu = cores(amount.cpu_millicores);
        let is_all = name == "all";
        let with_share = |part, whole, text| {
            if is_all {
                text
            } else {
                share(part, whole, text)
            }
        };
        vec![
            name.to_owned(),
            with_share(
                amount.workloads,
                total.workloads,
                amount.workloads.to_string(),
            ),
            with_share(amount.pods, total.pods, amount.pods.to_string()),
            with_share(amount.cpu_millicores, total.cpu_millicores, cpu),
            with_share(
                amount.memory_bytes,
                total.memory_bytes,
                memory(amount.memory_bytes),
            ),
        ]
    });
    let mut text = format!("How many workloads can run on {}\n", summary.architecture);
    text += &output::table(&["", "WORKLOADS", "PODS", "CPU", "MEMORY"], rows);
    if summary.pods_there > 0 {
        let pods = plural(summary.pods_there, "pod is", "pods are");
        text += &format!("{pods} on {} nodes already.\n", summary.architecture);
    }
    if !summary.blockers.is_empty() {
        let rows = summary.blockers.iter().take(MAX_BLOCKERS).map(|blocker| {
            vec![
                blocker.image.clone(),
                blocker.architectures.join(", "),
                blocker.blocks.workloads.to_string(),
                blocker.blocks_alone.workloads.to_string(),
                cores(blocker.blocks_alone.cpu_millicores),
                memory(blocker.blocks_alone.memory_bytes),
            ]
        });
        let header = [
            "IMAGE",
            "EXISTS FOR",
            "WORKLOADS",
            "ONLY THIS",
            "CPU",
            "MEMORY",
        ];
        let table = output::table(&header, rows);
        let hidden = summary.blockers.len().saturating_sub(MAX_BLOCKERS);
        let more = match hidden {
            0 => String::new(),
            hidden => format!("… and {hidden} more (-o json has all)\n"),
        };
        text += &format!(
            "\nImages that keep workloads from {0}\n(ONLY THIS, CPU, MEMORY: workloads that nothing else keeps from {0})\n{table}{more}",
            summary.architecture
        );
    }
    text + "\n"
}

/// The name of a workload.
pub(super) fn name(workload: &ReportedWorkload) -> String {
    let namespace = workload.namespace.as_ref();
    let namespace = namespace.map(|name| format!("{name}/")).unwrap_or_default();
    if workload.kind == "Image" {
        workload.name.clone()
    } else {
        format!(
            "{namespace}{}/{}",
            workload.kind.to_lowercase(),
            workload.name
        )
    }
}

/// The architectures that can run the workload.
pub(super) fn architectures(workload: &ReportedWorkload) -> String {
    match &workload.architectures {
        Some(set) if set.is_empty() => "none in common".to_owned(),
        Some(set) => set.join(", "),
        None => "-".to_owned(),
    }
}

fn of_workloads(report: &Report) -> String {
    let summaries = report.summaries.iter();
    let columns: Vec<String> = summaries
        .map(|summary| summary.architecture.to_uppercase())
        .collect();
    let is_about_images = is_about_images(report);
    let first = if is_about_images { "IMAGE" } else { "WORKLOAD" };
    let mut header = vec![first];
    header.extend(columns.iter().map(String::as_str));
    header.push("EXISTS FOR");
    if !is_about_images {
        header.push("ON NODES");
    }
    let rows = report.workloads.iter().map(|workload| {
        let reasons = reasons(workload, short).into_iter();
        let reasons = reasons.filter(|_| !is_about_images);
        // The reasons stand under the name, because both are long.
        let lines = std::iter::once(name(workload)).chain(reasons.map(|why| format!("- {why}")));
        let mut row = vec![lines.collect::<Vec<_>>().join("\n")];
        let answers = workload.answers.iter();
        row.extend(answers.map(|answer| answer.can_run.as_str().to_owned()));
        row.push(architectures(workload));
        if !is_about_images {
            let runs_on = workload.runs_on.iter();
            let runs_on: Vec<_> = runs_on
                .map(|(name, pods)| format!("{pods} {name}"))
                .collect();
            let none = || "-".to_owned();
            row.push(if runs_on.is_empty() {
                none()
            } else {
                runs_on.join(", ")
            });
        }
        row
    });
    let names = report
        .summaries
        .iter()
        .map(|summary| summary.architecture.as_str());
    let names = names.collect::<Vec<_>>().join(" and ");
    let what = if is_about_images {
        "Images".to_owned()
    } else {
        format!("Workloads, and why they cannot run on {names}")
    };
    format!("{what}\n{}", output::table(&header, rows))
}

/// Whether it is about a list of images.
pub(super) fn is_about_images(report: &Report) -> bool {
    report
        .workloads
        .iter()
        .all(|workload| workload.kind == "Image")
}

/// The last component of an image name, short enough for this table. The other tables print the
/// full name.
fn short(image: &str) -> &str {
    image.rsplit_once('/').map_or(image, |(_, name)| name)
}

/// Why a workload cannot run, or may not be able to run, on the requested architectures.
pub(super) fn reasons(workload: &ReportedWorkload, name_of: impl Fn(&str) -> &str) -> Vec<String> {
    let mut reasons: Vec<String> = Vec::new();
    for answer in &workload.answers {
        let architecture = &answer.architecture;
        let blocking = answer.blocked_by.iter();
        reasons.extend(
            blocking.map(|image| format!("image {} is not for {architecture}", name_of(image))),
        );
        if answer.excluded {
            reasons.push(format!(
                "its node selector, affinity or annotation excludes {architecture}"
            ));
        }
        if !answer.pinned_to.is_empty() {
            reasons.push(format!(
                "pinned to {} nodes",
                answer.pinned_to.join(" and ")
            ));
        }
        for image in &answer.unknown {
            let reason = format!("image {} could not be checked", name_of(image));
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
        }
    }
    reasons.extend(workload.unread.iter().cloned());
    reasons
}

fn misplaced(report: &Report) -> String {
    let rows = report.workloads.iter().flat_map(|workload| {
        workload.misplaced.iter().map(move |pod| {
            let namespace = workload.namespace.as_ref();
            let namespace = namespace.map(|name| format!("{name}/")).unwrap_or_default();
            vec![
                format!("{namespace}{}", pod.pod),
                format!("{} ({})", pod.node, pod.architecture),
                pod.images.join("\n"),
                pod.state().to_owned(),
            ]
        })
    });
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let header = ["POD", "NODE", "IMAGES THAT DO NOT RUN THERE", "FAILURE"];
    let table = output::table(&header, rows);
    format!("\nPods on the wrong architecture\n{table}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let text = [0, 1023, 1024, 1536, 10 << 20, 5 << 30, u64::MAX].map(memory);
        assert_eq!(
            text,
            ["0", "1023", "1Ki", "1.5Ki", "10Mi", "5Gi", "16383Pi"]
        );
        assert_eq!(share(1, 3, "1".to_owned()), "1 (33%)");
        assert_eq!(share(2, 3, "2".to_owned()), "2 (67%)");
        assert_eq!(share(0, 0, "0".to_owned()), "0");
    }
}
