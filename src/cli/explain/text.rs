//! An explanation as text, like `kubectl describe`.

use console::Style;
use jiff::Timestamp;

use crate::{
    explain::{Additions, ExplainedImage, Explanation, NodeGroup, PodState},
    platform::with_variant,
    text::printable,
};

use super::output;

/// Groups of nodes that are shown; `-o json` has all.
const MAX_GROUPS: usize = 20;

/// Explanations, one below the other.
pub(super) fn pages(explanations: &[Explanation]) -> String {
    let texts = explanations.iter().map(page);
    texts.collect::<Vec<_>>().join("\n")
}

fn page(explanation: &Explanation) -> String {
    let mut text = heading(explanation);
    let mut fields = vec![("Applies:", applies(explanation))];
    let rules = &explanation.applies.rules;
    if !rules.is_empty() {
        fields.push(("Rules:", rules.join("\n")));
    }
    if let Some(set) = &explanation.architectures {
        let set = if set.is_empty() {
            "no architecture: see the conclusion".to_owned()
        } else {
            set.join(", ")
        };
        fields.push(("Can run on:", set));
    }
    fields.extend(added(explanation.added.as_ref()).map(|text| ("Added:", text)));
    let pending = explanation.pending.as_ref();
    fields.extend(pending.map(|pending| ("To be added:", pending.lines().join("\n"))));
    if let Some(pod) = &explanation.pod {
        fields.extend(of_pod(pod));
    }
    text += &output::fields(&fields);
    if !explanation.images.is_empty() {
        text += &section("Images", &images(explanation));
    }
    for selection in &explanation.selections {
        let (title, chosen) = if selection.selects_image {
            ("Images for container", "SELECTED")
        } else {
            ("Preferences of container", "PREFERRED")
        };
        let title = format!(
            "{title} {}, from {}",
            selection.container, selection.document
        );
        let rows = selection.candidates.iter().map(|candidate| {
            let is_chosen = if candidate.chosen { "yes" } else { "no" };
            vec![
                is_chosen.to_owned(),
                candidate.tag.clone(),
                candidate
                    .weight
                    .map_or("-".to_owned(), |weight| weight.to_string()),
                candidate.outcome.clone(),
            ]
        });
        let table = output::table(&[chosen, "IMAGE", "WEIGHT", "OUTCOME"], rows);
        text += &section(&title, &colour_answers(&table));
    }
    if let Some(groups) = explanation
        .nodes
        .as_ref()
        .filter(|groups| !groups.is_empty())
    {
        text += &section("Nodes", &nodes(groups));
    }
    if !explanation.missing_permissions.is_empty() {
        let list = explanation.missing_permissions.join("\n");
        text += &section("Permissions that are missing here", &format!("{list}\n"));
    }
    if !explanation.notes.is_empty() {
        let rows = explanation.notes.iter();
        let notes: Vec<_> = rows.map(|note| ("-", note.clone())).collect();
        text += &section("Notes", &output::fields(&notes));
    }
    // Two spaces align the conclusion with the `->` of the advice.
    let mut conclusion = vec![("  ", explanation.conclusion.clone())];
    conclusion.extend(
        explanation
            .advice
            .iter()
            .map(|advice| ("->", advice.clone())),
    );
    let lines = output::fields(&conclusion);
    text + &section("Conclusion", &lines)
}

fn section(title: &str, body: &str) -> String {
    format!("\n{}\n{body}", bold(&printable(title)))
}

fn bold(text: &str) -> String {
    painted(&Style::new().bold(), text)
}

fn painted(style: &Style, text: &str) -> String {
    style
        .clone()
        .force_styling(output::is_coloured())
        .apply_to(text)
        .to_string()
}

fn heading(explanation: &Explanation) -> String {
    let name = match &explanation.namespace {
        Some(namespace) => format!("{namespace}/{}", explanation.name),
        None => explanation.name.clone(),
    };
    let counts = explanation.pods.iter().map(|pods| {
        let on = pods.architecture.as_ref().map(|name| format!(" on {name}"));
        format!("{} {}{}", pods.count, pods.phase, on.unwrap_or_default())
    });
    let counts: Vec<_> = counts.collect();
    let pods = match explanation.kind.as_str() {
        _ if counts.is_empty() => String::new(),
        "Pod" => format!(
            ": pods of its controller that need attention: {}",
            counts.join(", ")
        ),
        _ => format!(": pods: {}", counts.join(", ")),
    };
    let title = printable(&format!("{} {name}{pods}", explanation.kind));
    let title = bold(&title);
    let state = explanation.pod.as_ref().map(|pod| match state(pod) {
        state if explanation.kind == "Pod" => format!("{state}\n"),
        state => format!("Its pod {}: {state}\n", pod.name),
    });
    format!("{title}\n{}\n", state.unwrap_or_default())
}

fn state(pod: &PodState) -> String {
    let age = pod.created.as_deref().and_then(age);
    let age = age.map(|age| format!(", {age} old")).unwrap_or_default();
    let node = pod.node.as_ref().map(|node| {
        let architecture = pod.node_architecture.as_ref();
        let architecture = architecture
            .map(|name| format!(" ({name})"))
            .unwrap_or_default();
        format!(" on node {node}{architecture}")
    });
    format!("{}{}{age}", pod.phase, node.unwrap_or_default())
}

/// The age of something in its largest unit, as `kubectl get` shows it.
fn age(created: &str) -> Option<String> {
    let created: Timestamp = created.parse().ok()?;
    let seconds = Timestamp::now().duration_since(created).as_secs().max(0);
    Some(match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    })
}

fn applies(explanation: &Explanation) -> String {
    let applies = &explanation.applies;
    let meaning = match applies.rule.as_str() {
        "inspect" => "its images decide where it runs",
        "any" => "it may run everywhere",
        "ignore" => "archaware leaves it alone",
        _ => "its author decides where it runs",
    };
    format!("{meaning} ({}: {})", applies.rule, applies.source)
}

fn added(added: Option<&Additions>) -> Option<String> {
    let added = added?;
    let by = added.by.iter().map(|author| {
        let part = match author.part {
            "archaware" => "archaware".to_owned(),
            part => format!("the {part}"),
        };
        let time = author.time.as_ref().map(|time| format!(" at {time}"));
        format!("by {part}{}", time.unwrap_or_default())
    });
    let decision = added.decision.as_ref();
    let decision = decision.map(|decision| format!("decision {decision}"));
    let by_policy = added.by_failure_policy;
    let policy =
        by_policy.then(|| "probably of the failure policy (resolution.failure)".to_owned());
    let first: Vec<_> = decision.into_iter().chain(policy).chain(by).collect();
    let mut lines = added.lines();
    if lines.is_empty() {
        lines.push("nothing".to_owned());
    }
    lines.push(first.join(", "));
    let lines: Vec<_> = lines.into_iter().filter(|line| !line.is_empty()).collect();
    Some(lines.join("\n"))
}

fn of_pod(pod: &PodState) -> Vec<(&'static str, String)> {
    let mut fields = Vec::new();
    if !pod.gates.is_empty() {
        fields.push(("Gates:", pod.gates.join(", ")));
    }
    if let Some(scheduler) = &pod.scheduler {
        let text = format!("{}: {}", scheduler.reason, scheduler.message);
        fields.push(("Scheduler:", text));
    }
    for container in &pod.containers {
        let message = container.message.as_ref();
        let message = message
            .map(|message| format!(": {message}"))
            .unwrap_or_default();
        let text = format!("{}: {}{message}", container.name, container.reason);
        fields.push(("Container:", text));
    }
    fields
}

fn images(explanation: &Explanation) -> String {
    let describe = |image: &ExplainedImage| {
        let mut lines = Vec::new();
        match (&image.error, image.note) {
            (Some(error), _) => {
                lines.push(format!("{}: {}", error.reason, error.message));
                if !error.tried.is_empty() {
                    lines.push(format!("credentials tried: {}", error.tried.join(", ")));
                }
                let next = error.next_try.as_ref();
                lines.extend(next.map(|next| format!("tried again {next}")));
            }
            (None, Some(note)) => lines.push(format!("any architecture ({note})")),
            (None, None) => lines.push(image.platforms.join(", ")),
        }
        let digest = image.digest.as_ref();
        let digest = digest.filter(|digest| !image.image.contains(digest.as_str()));
        lines.extend(digest.cloned());
        let source = image.source.map(|source| format!("from {source}"));
        let credential = image.credential.as_ref();
        let credential = credential.map(|name| format!("with {name}"));
        let containers = Some(&image.containers).filter(|names| !names.is_empty());
        let containers = containers.map(|names| format!("for {}", names.join(", ")));
        let origin = [source, credential, containers];
        let origin: Vec<_> = origin.into_iter().flatten().collect();
        lines.push(origin.join(", "));
        format!(
            "{}\n{}",
            printable(&image.image),
            output::fields(&[("  ", lines.join("\n"))])
        )
    };
    explanation.images.iter().map(describe).collect()
}

fn nodes(groups: &[NodeGroup]) -> String {
    let rows = groups.iter().take(MAX_GROUPS).map(|group| {
        let names = group.examples.join(", ");
        let hidden = group.count.saturating_sub(group.examples.len());
        let names = match hidden {
            0 => names,
            hidden => format!("{names} and {hidden} more"),
        };
        let mut lines = vec![group.reason.clone().unwrap_or(names)];
        if !group.taints.is_empty() {
            let what = if group.fits == "no" {
                "taints"
            } else {
                "tolerated taints"
            };
            lines.push(format!("{what}: {}", group.taints.join(", ")));
        }
        vec![
            group.fits.to_owned(),
            group.count.to_string(),
            with_variant(&group.architecture, group.variant),
            lines.join("\n"),
        ]
    });
    let table = output::table(
        &["FITS", "NODES", "ARCHITECTURE", "NAMES, OR WHY NOT"],
        rows,
    );
    let hidden = groups.len().saturating_sub(MAX_GROUPS);
    let more = if hidden > 0 {
        format!("… and {hidden} more groups (-o json has all)\n")
    } else {
        String::new()
    };
    colour_answers(&table) + &more
}

/// Colours the answers in the first column.
fn colour_answers(table: &str) -> String {
    let colour = |line: &str| {
        let colours = [
            ("yes ", Style::new().green()),
            ("no ", Style::new().red()),
            ("unknown ", Style::new().yellow()),
        ];
        for (word, style) in colours {
            if let Some(rest) = line.strip_prefix(word) {
                return format!("{}{rest}\n", painted(&style, word));
            }
        }
        format!("{line}\n")
    };
    table.lines().map(colour).collect()
}
