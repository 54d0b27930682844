//! The conclusion for a pod that has, or had, a node.

use std::collections::BTreeMap;

use crate::{
    evaluate::{
        lacking,
        wrong_architecture::{EXEC_FORMAT_ERROR, WrongArchitectureCause},
    },
    image::Reason,
    placement::{NodePlatform, NodeVariant},
    platform::{Architectures, ImageArchitectures, with_variant},
};

use super::{
    super::{ExistingPod, Facts, images::say_lacking},
    Conclusion, build_for,
    images::for_reason,
    replace,
};

pub(super) fn conclude(facts: &Facts<'_>, pod: &ExistingPod) -> Conclusion {
    let name = pod.node().unwrap_or_default();
    let location = if pod.phase() == "Failed" {
        "It failed on"
    } else {
        "It is bound to"
    };
    let problem = problem(pod);
    let Some(node) = pod.find_node(facts.nodes) else {
        let problem = problem.map(|problem| format!("; {problem}"));
        let sentence = format!(
            "{location} node {name}, whose architecture is not known{}.",
            problem.unwrap_or_default()
        );
        return Conclusion::new(sentence, []);
    };
    let view = node.view();
    let platform = facts.policy.node_platform(&view);
    let images = lacking(facts.counting_images(), facts.policy, platform);
    let variant = platform.variant.map(NodeVariant::name);
    let node = format!(
        "node {name} ({})",
        with_variant(platform.architecture, variant)
    );
    if let Some(lacking) = say_lacking(&images) {
        let problem = problem.unwrap_or_else(|| {
            format!("programs for another architecture die with \"{EXEC_FORMAT_ERROR}\"")
        });
        let build = build_for(&images, platform.architecture);
        let advice = [
            build.map(|build| format!("{build}.")),
            replace(
                facts,
                "Or delete the pod, so that its replacement is placed by its images.",
            ),
        ];
        let sentence = format!("{location} {node}, but {lacking}; {problem}.");
        return Conclusion::new(sentence, advice.into_iter().flatten());
    }
    let stated = facts.handling.0.stated();
    let overruled =
        stated.filter(|set| facts.policy.runs(platform, Some(set), None) == Some(false));
    if let Some(stated) = overruled {
        return against_statement(facts, &format!("{location} {node}"), stated, problem);
    }
    // Labels declare that a node emulates, so without labels emulation does not count.
    let (counting_images, no_labels) = (facts.counting_images(), BTreeMap::new());
    let without_labels = NodePlatform {
        labels: Some(&no_labels),
        ..platform
    };
    let native = lacking(counting_images, facts.policy, without_labels);
    let emulates = !native.is_empty();
    // `runs` returns `None` if an image needs a certain variant and the node's variant is unknown.
    let unsure =
        |set: &ImageArchitectures| facts.policy.runs(without_labels, None, Some(set)).is_none();
    let mut candidates = facts.counting_images().iter();
    let unsure = candidates.find(|image| image.architectures.as_ref().is_some_and(unsure));
    let why = if stated.is_some() {
        ", an architecture that its author states".to_owned()
    } else if let Some((image, error)) = facts.failed.first() {
        let why = match error.reason() {
            Reason::NotFound => "its registry has no such image".to_owned(),
            reason => reason.as_str().to_owned(),
        };
        format!("; it is not known whether {image} exists for this architecture ({why})")
    } else if let Some(image) = unsure {
        let need = image.architectures.as_ref().map(|set| set.join(", "));
        let need = need.unwrap_or_default();
        format!(
            "; it is not known whether the CPU of the node suffices for {} ({need})",
            image.name
        )
    } else if emulates {
        ", which emulates an architecture for which its images exist".to_owned()
    } else {
        ", for which its images exist".to_owned()
    };
    let has_not_started = pod.phase() == "Pending" && !facts.failed.is_empty();
    let is_stuck = has_not_started || problem.is_some();
    let advice = facts.failed.first().filter(|_| is_stuck);
    let advice = advice.map(|(image, error)| for_reason(facts, image, error));
    let Some(problem) = problem else {
        let waits = if has_not_started {
            " Its containers have not started."
        } else {
            ""
        };
        return Conclusion::new(format!("{location} {node}{why}.{waits}"), advice);
    };
    if WrongArchitectureCause::of_message(&problem) == Some(WrongArchitectureCause::ExecFormatError)
    {
        let advice = if emulates {
            "A label of the node declares an emulator, but the emulator (binfmt_misc) does not work: repair the emulator, or remove the label."
        } else {
            "An image contains programs for another architecture than its manifest lists: build it again, or state where it runs with the annotation archaware.dev/architectures."
        };
        let sentence = format!("{location} {node}{why}; {problem}.");
        return Conclusion::new(sentence, [advice.to_owned()]);
    }
    Conclusion::new(format!("{location} {node}{why}; {problem}."), advice)
}

/// The conclusion for a pod on a node whose architecture the pod's author does not state.
fn against_statement(
    facts: &Facts<'_>,
    place: &str,
    stated: &Architectures,
    problem: Option<String>,
) -> Conclusion {
    let problem = problem.map(|problem| format!("; {problem}"));
    let sentence = format!(
        "{place}, but the annotation archaware.dev/architectures lists only {}{}.",
        stated.join(", "),
        problem.unwrap_or_default()
    );
    let advice = "Delete the pod: its replacement is placed by the annotation archaware.dev/architectures. Or correct the annotation in the template.";
    Conclusion::new(sentence, replace(facts, advice))
}

/// The first container that does not run, and why.
fn problem(pod: &ExistingPod) -> Option<String> {
    let problems = pod.problems();
    let problem = problems.first()?;
    let message = problem.message.as_deref().unwrap_or_default();
    let message = message.lines().next().unwrap_or_default();
    let between = if message.is_empty() { "" } else { ": " };
    Some(format!(
        "container {} does not run: {}{between}{message}",
        problem.name, problem.reason
    ))
}
