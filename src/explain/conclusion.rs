//! The conclusion: one sentence, and advice.

mod bound;
mod images;
mod unbound;

use std::collections::BTreeMap;

use crate::{
    evaluate::{EvaluatedImage, Verdict},
    placement::{GATE, MAX_LIST},
};

use super::{Consequence, ExistingPod, Facts, NodeGroup};

#[derive(Debug, Default)]
pub(super) struct Conclusion {
    pub(super) sentence: String,
    pub(super) advice: Vec<String>,
}

impl Conclusion {
    fn new(sentence: impl Into<String>, advice: impl IntoIterator<Item = String>) -> Self {
        Self {
            sentence: sentence.into(),
            advice: advice.into_iter().collect(),
        }
    }
}

pub(super) fn conclude(
    facts: &Facts<'_>,
    consequence: &Consequence,
    groups: Option<&[NodeGroup]>,
) -> Conclusion {
    let mut conclusion = of_pod(facts, consequence, groups);
    if let Some(problem) = facts.creation_problem {
        let problem = problem.trim_end_matches('.');
        let by_pod = &conclusion.sentence;
        conclusion.sentence = format!("Kubernetes cannot create its pods: {problem}. {by_pod}");
        conclusion
            .advice
            .insert(0, for_creation(problem).to_owned());
    }
    conclusion
}

/// The advice for a message of the admission plugins of Kubernetes (`plugin/pkg/admission` of
/// k8s.io/kubernetes).
fn for_creation(problem: &str) -> &'static str {
    if problem.contains("exceeded quota") || problem.contains("must specify") {
        "Raise the ResourceQuota of the namespace, or lower the requests of the pods."
    } else if problem.contains("PriorityClass") {
        "Create the PriorityClass, or correct priorityClassName in the template."
    } else if problem.contains("RuntimeClass") {
        "Create the RuntimeClass, or correct runtimeClassName in the template."
    } else if problem.contains("violates PodSecurity") {
        "Change the template, or the Pod Security Standard of the namespace."
    } else {
        "Change what the message names: archaware can place only pods that exist."
    }
}

fn of_pod(
    facts: &Facts<'_>,
    consequence: &Consequence,
    groups: Option<&[NodeGroup]>,
) -> Conclusion {
    if let Some(pod) = facts.pod {
        if pod.pod.metadata.deletion_timestamp.is_some() {
            return Conclusion::new("It is being deleted.", []);
        }
        if pod.pod.oversized {
            return Conclusion::new(
                "archaware does not decide about it, because it is too large.",
                [format!(
                    "Shorten it: a list may have at most {MAX_LIST} entries, and the number of fields and the length of all texts are limited too."
                )],
            );
        }
        if pod.phase() == "Succeeded" {
            return Conclusion::new("It has finished (Succeeded).", []);
        }
        if pod.pod.is_bound() {
            return bound::conclude(facts, pod);
        }
        if !pod.is_pending() {
            return Conclusion::new(format!("It has ended ({}).", pod.phase()), []);
        }
    }
    match &facts.evaluation.verdict {
        Verdict::Unresolved { failed, .. } => images::unresolved(facts, failed),
        _ if consequence.verdict == "none" => images::none(facts, groups),
        _ => {
            foreign_gate(facts.pod).unwrap_or_else(|| unbound::conclude(facts, consequence, groups))
        }
    }
}

/// A scheduling gate of another tool.
fn foreign_gate(pod: Option<&ExistingPod>) -> Option<Conclusion> {
    let mut gates = pod?.pod.spec.scheduling_gates.iter().flatten();
    let gate = gates.find(|gate| gate.name != GATE)?;
    let sentence = format!(
        "It waits for its scheduling gate {}, which another tool set and has to remove.",
        gate.name
    );
    Some(Conclusion::new(sentence, []))
}

/// The advice for the replacement of a pod. `by_controller`: the advice if a controller makes a
/// new pod on any node. `None` where archaware is not installed, because the new pod would be
/// placed in the same way.
fn replace(facts: &Facts<'_>, by_controller: &str) -> Option<String> {
    if facts.is_installed == Some(false) {
        return None;
    }
    let controller = facts.pod.and_then(|pod| pod.pod.controller());
    Some(match controller.map(|owner| owner.kind.as_str()) {
        None => "No controller replaces the pod: delete it and create it again, so that archaware places it.".to_owned(),
        Some("DaemonSet") => "Its DaemonSet would make another pod on the same node: let node affinity in the template of the DaemonSet exclude such nodes.".to_owned(),
        Some(_) => by_controller.to_owned(),
    })
}

/// For example `Build app:1 for arm64`; `None` without images.
fn build_for(images: &[&EvaluatedImage], architecture: &str) -> Option<String> {
    let names: Vec<_> = images.iter().map(|image| image.name.as_str()).collect();
    let names = match names.as_slice() {
        [] => return None,
        [a, b, rest @ ..] if !rest.is_empty() => format!("{a}, {b} and {} more", rest.len()),
        names => names.join(" and "),
    };
    Some(format!("Build {names} for {architecture}"))
}

/// The number of nodes by architecture.
fn counts<'a>(groups: impl Iterator<Item = &'a NodeGroup>) -> BTreeMap<&'a str, usize> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for group in groups {
        *counts.entry(&group.architecture).or_default() += group.count;
    }
    counts
}

/// For example `3 amd64 nodes and 1 arm64 node`.
fn say_counts<'a>(groups: impl Iterator<Item = &'a NodeGroup>) -> String {
    let texts = counts(groups).into_iter().map(|(name, count)| {
        let nodes = if count == 1 { "node" } else { "nodes" };
        format!("{count} {name} {nodes}")
    });
    texts.collect::<Vec<_>>().join(" and ")
}
