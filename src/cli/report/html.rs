//! A report as one HTML page that needs no network: complete without its script, which only
//! filters, sorts and changes colours.

use crate::report::{Amount, Blocker, Report, ReportedWorkload, Summary, cores};

use super::{
    markup::escape,
    table::{in_words, memory, name, parts, plural, share},
};

const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");

/// Width of diagrams, in their own units.
const WIDTH: u64 = 1000;

pub(super) fn print(report: &Report) -> String {
    let summaries: String = report.summaries.iter().map(of_summary).collect();
    let by_architecture = by_architecture(report);
    let workloads = workloads(report);
    let misplaced = misplaced(report);
    let failed = failed(report);
    let source = escape(&report.source);
    let today = jiff::Timestamp::now().strftime("%-d %B %Y");
    let incomplete = match super::table::incomplete(report) {
        none if none.is_empty() => none,
        text => format!("<p class=\"no\">{}</p>\n", escape(text.trim())),
    };
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n\
         <title>Architectures of {source}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <header><h1>Architectures of workloads</h1><button id=\"theme\" type=\"button\">Switch light/dark</button></header>\n\
         <p>Of {source}, {today}.</p>\n{incomplete}\
         <main>\n{summaries}{by_architecture}{workloads}{misplaced}{failed}</main>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    )
}

/// Classes of the parts of a summary, in the order of [`parts`].
const CLASSES: [&str; 4] = ["can-run", "one-image", "blocked", "not-known"];

fn of_summary(summary: &Summary) -> String {
    let architecture = escape(&summary.architecture);
    let shown = parts(summary).into_iter().zip(CLASSES);
    let total = summary.total;
    let figure = |((label, amount), class): ((&str, Amount), &str)| {
        let workloads = share(
            amount.workloads,
            total.workloads,
            amount.workloads.to_string(),
        );
        format!(
            "<div class=\"figure {class}\"><b>{workloads}</b>{label}<br><span>{}, CPU {}, memory {}</span></div>\n",
            plural(amount.pods, "pod", "pods"),
            share(
                amount.cpu_millicores,
                total.cpu_millicores,
                cores(amount.cpu_millicores)
            ),
            share(
                amount.memory_bytes,
                total.memory_bytes,
                memory(amount.memory_bytes)
            )
        )
    };
    let figures: String = shown.map(figure).collect();
    let bar = stacked_bar(summary);
    let blockers = blockers(summary);
    format!(
        "<section>\n<h2>How many workloads can run on {architecture}</h2>\n\
         <p><b>{}</b> {}{}, {} CPU and {} of memory in all.</p>\n{bar}\
         <div class=\"figures\">\n{figures}</div>\n{blockers}</section>\n",
        escape(&in_words(summary)),
        plural(total.pods, "pod", "pods"),
        if summary.pods_there > 0 {
            format!(
                " ({} of them on {architecture} nodes already)",
                summary.pods_there
            )
        } else {
            String::new()
        },
        cores(total.cpu_millicores),
        memory(total.memory_bytes)
    )
}

/// One bar whose parts are as wide as their share of the workloads.
fn stacked_bar(summary: &Summary) -> String {
    let total = summary.total.workloads.max(1);
    let mut start = 0;
    let mut bars = String::new();
    let mut words = Vec::new();
    for ((label, amount), class) in parts(summary).into_iter().zip(CLASSES) {
        let width = amount.workloads * WIDTH / total;
        words.push(format!("{label} {}", amount.workloads));
        bars += &format!(
            "<rect class=\"{class}\" x=\"{start}\" y=\"0\" width=\"{width}\" height=\"24\"><title>{label}: {}</title></rect>",
            amount.workloads
        );
        start += width;
    }
    format!(
        "<svg viewBox=\"0 0 {WIDTH} 24\" role=\"img\" aria-label=\"{}\">{bars}</svg>\n",
        escape(&words.join(", "))
    )
}

fn blockers(summary: &Summary) -> String {
    if summary.blockers.is_empty() {
        return String::new();
    }
    let row = |blocker: &Blocker| {
        format!(
            "<tr><td>{}</td><td>{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td><td class=\"number\">{}</td></tr>\n",
            escape(&blocker.image),
            escape(&blocker.architectures.join(", ")),
            blocker.blocks.workloads,
            blocker.blocks_alone.workloads,
            cores(blocker.blocks_alone.cpu_millicores),
            memory(blocker.blocks_alone.memory_bytes)
        )
    };
    let rows: String = summary.blockers.iter().map(row).collect();
    format!(
        "<h2>Images that keep workloads from {}</h2>\n<p>Only this, CPU and memory: workloads that only this image keeps from the architecture.</p>\n\
         <div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Images to build\"><table class=\"blockers\"><thead><tr><th>Image</th><th>Exists for</th><th class=\"number\">Workloads</th>\
         <th class=\"number\">Only this</th><th class=\"number\">CPU</th><th class=\"number\">Memory</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n",
        escape(&summary.architecture)
    )
}

/// For each architecture: the number of workloads whose images all exist for it.
fn by_architecture(report: &Report) -> String {
    let mut counts = std::collections::BTreeMap::<&str, u64>::new();
    for workload in &report.workloads {
        for architecture in workload.architectures.iter().flatten() {
            // A variant is not another architecture.
            let name = architecture
                .split_once('/')
                .map_or(architecture.as_str(), |(name, _)| name);
            *counts.entry(name).or_default() += 1;
        }
    }
    if counts.is_empty() {
        return String::new();
    }
    let total = report.workloads.len().max(1) as u64;
    let mut counts: Vec<(&str, u64)> = counts.into_iter().collect();
    counts.sort_by_key(|(name, count)| (std::cmp::Reverse(*count), *name));
    let (left, right, height) = (110, 70, 26);
    let mut bars = String::new();
    for (index, (name, count)) in counts.iter().enumerate() {
        let (y, full) = (index as u64 * height, WIDTH - left - right);
        let width = count * full / total;
        bars += &format!(
            "<text x=\"0\" y=\"{}\">{}</text><rect class=\"rest\" x=\"{left}\" y=\"{}\" width=\"{full}\" height=\"18\"/>\
             <rect class=\"bar\" x=\"{left}\" y=\"{}\" width=\"{width}\" height=\"18\"/><text x=\"{}\" y=\"{}\">{count}</text>",
            y + 16,
            escape(name),
            y + 3,
            y + 3,
            WIDTH - right + 8,
            y + 16
        );
    }
    let words: Vec<_> = counts
        .iter()
        .map(|(name, count)| format!("{name} {count}"))
        .collect();
    format!(
        "<section>\n<h2>Workloads by architecture</h2>\n<p>Number of workloads whose images all exist for the architecture. Node selectors are not considered.</p>\n\
         <svg id=\"by-architecture\" viewBox=\"0 0 {WIDTH} {}\" role=\"img\" aria-label=\"{}\">{bars}</svg>\n</section>\n",
        counts.len() as u64 * height,
        escape(&words.join(", "))
    )
}

fn workloads(report: &Report) -> String {
    let headers: String = report
        .summaries
        .iter()
        .map(|summary| header(&summary.architecture, ""))
        .collect();
    let rows: String = report.workloads.iter().map(of_workload).collect();
    let head = [
        header("Workload", ""),
        headers,
        header("Exists for", ""),
        header("On nodes", ""),
        header("Pods", "number"),
        header("CPU", "number"),
        header("Memory", "number"),
        header("Blocked by", ""),
    ];
    format!(
        "<section>\n<h2>Workloads <span id=\"count\" role=\"status\" aria-live=\"polite\"></span></h2>\n\
         <div class=\"controls\"><label>Search (press /)<input id=\"search\" type=\"search\" placeholder=\"namespace, name, image\"></label>\n\
         <label>Show<select id=\"answer\"><option value=\"\">all</option><option value=\"yes\">can run</option>\
         <option value=\"no\">cannot run</option><option value=\"unknown\">not known</option><option value=\"misplaced\">on the wrong architecture</option></select></label></div>\n\
         <div class=\"scroll tall\" tabindex=\"0\" role=\"region\" aria-label=\"Workloads\"><table id=\"workloads\"><thead><tr>{}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n</section>\n",
        head.concat()
    )
}

fn header(text: &str, class: &str) -> String {
    format!(
        "<th scope=\"col\" class=\"{class}\"><button type=\"button\">{}</button></th>",
        escape(text)
    )
}

fn of_workload(workload: &ReportedWorkload) -> String {
    let answers = workload.answers.iter();
    let mut words: Vec<&str> = answers.map(|answer| answer.can_run.as_str()).collect();
    let cells: String = words
        .iter()
        .map(|word| format!("<td class=\"{word}\">{word}</td>"))
        .collect();
    if !workload.misplaced.is_empty() {
        words.push("misplaced");
    }
    let runs_on = workload.runs_on.iter();
    let runs_on: Vec<_> = runs_on
        .map(|(name, pods)| format!("{pods} {name}"))
        .collect();
    let exists_for = workload.architectures.as_ref();
    let exists_for = exists_for.map_or_else(|| "–".to_owned(), |set| set.join(", "));
    format!(
        "<tr data-answers=\"{}\" data-images=\"{}\"><td>{}</td>{cells}<td>{}</td><td>{}</td><td class=\"number\">{}</td>\
         <td class=\"number\" data-value=\"{}\">{}</td><td class=\"number\" data-value=\"{}\">{}</td><td>{}</td></tr>\n",
        words.join(" "),
        escape(&workload.images.join(" ")),
        escape(&name(workload)),
        escape(&exists_for),
        escape(&runs_on.join(", ")),
        workload.pods,
        workload.cpu_millicores,
        cores(workload.cpu_millicores),
        workload.memory_bytes,
        memory(workload.memory_bytes),
        reasons(workload)
    )
}

/// Why a workload cannot run, or may not be able to run, on the requested architectures, as a list.
fn reasons(workload: &ReportedWorkload) -> String {
    let reasons = super::table::reasons(workload, |image| image);
    if reasons.is_empty() {
        return String::new();
    }
    let items: String = reasons
        .iter()
        .map(|reason| format!("<li>{}</li>", escape(reason)))
        .collect();
    format!("<ul>{items}</ul>")
}

fn misplaced(report: &Report) -> String {
    let rows: String = report
        .workloads
        .iter()
        .flat_map(|workload| workload.misplaced.iter().map(move |pod| (workload, pod)))
        .map(|(workload, pod)| {
            let namespace = workload.namespace.as_deref().unwrap_or_default();
            format!(
                "<tr><td>{}/{}</td><td>{} ({})</td><td>{}</td><td>{}</td></tr>\n",
                escape(namespace),
                escape(&pod.pod),
                escape(&pod.node),
                escape(&pod.architecture),
                escape(&pod.images.join(", ")),
                escape(pod.state())
            )
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "<section>\n<h2>Pods on the wrong architecture</h2>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Pods on the wrong architecture\"><table id=\"misplaced\"><thead><tr>\
         <th>Pod</th><th>Node</th><th>Images that do not run there</th><th>Failure</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n</section>\n"
    )
}

fn failed(report: &Report) -> String {
    let rows: String = report
        .images
        .iter()
        .filter_map(|image| {
            let error = image.error.as_ref()?;
            let row = format!(
                "<tr><td>{}</td><td>{}</td></tr>\n",
                escape(&image.image),
                escape(&format!("{}: {}", error.reason, error.message))
            );
            Some(row)
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "<section>\n<h2>Images that could not be checked</h2>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"Images that could not be checked\"><table id=\"failed\"><thead><tr><th>Image</th><th>Why</th></tr></thead>\n\
         <tbody>\n{rows}</tbody></table></div>\n</section>\n"
    )
}
