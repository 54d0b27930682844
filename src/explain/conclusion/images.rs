//! The conclusion for images that cannot be read, or that have no architecture in common.

use crate::{
    evaluate::{Conflict, EvaluatedImage, lacking},
    image::{ImageError, Reason},
    placement::{NodePlatform, affinity::LABELS, failure::FailureAction},
    platform::Architectures,
};

use super::{
    super::{ExistingPod, Facts, NodeGroup},
    Conclusion, build_for, counts, replace,
};

/// Images that cannot be read.
pub(super) fn unresolved(facts: &Facts<'_>, failed: &[(String, ImageError)]) -> Conclusion {
    let Some((image, error)) = failed.first() else {
        return Conclusion::default();
    };
    let more = match failed.len() {
        1 => String::new(),
        2 => " and of another image".to_owned(),
        count => format!(" and of {} other images", count - 1),
    };
    let sentence = format!(
        "The platforms of {image}{more} cannot be read: {}: {}.",
        error.reason().as_str(),
        error.chain()
    );
    let mut advice = vec![for_reason(facts, image, error)];
    if facts.is_installed != Some(false) && facts.pod.is_none_or(ExistingPod::is_pending) {
        advice.push(by_failure_policy(facts));
    }
    Conclusion::new(sentence, advice)
}

pub(super) fn for_reason(facts: &Facts<'_>, image: &str, error: &ImageError) -> String {
    let tried = facts
        .tried
        .get(image)
        .map(Vec::as_slice)
        .unwrap_or_default();
    match error.reason() {
        Reason::InvalidReference => "Correct the name of the image.".to_owned(),
        Reason::NotFound => {
            "Correct the name or the tag of the image, or push it. Some registries also answer 404 if a credential is missing.".to_owned()
        }
        Reason::Denied if tried.is_empty() && !facts.evaluation.unusable.is_empty() => {
            "Its pull secrets could not be used: see the notes.".to_owned()
        }
        Reason::Denied if tried.is_empty() => {
            "Give the pod or its ServiceAccount a pull secret for this registry (imagePullSecrets).".to_owned()
        }
        Reason::Denied => {
            let tried: Vec<_> = tried.iter().map(ToString::to_string).collect();
            format!("The registry does not accept the credential that was found: {}.", tried.join(", "))
        }
        Reason::RateLimited => {
            "Wait, or give the pod a pull secret for this registry: registries allow fewer anonymous requests.".to_owned()
        }
        Reason::Unavailable => {
            "See whether the registry can be reached from here, and from archaware's pods; `archaware inspect --trace` shows each request.".to_owned()
        }
        Reason::TooLarge | Reason::Corrupt | Reason::Unsupported => {
            "Push the image again with a current tool.".to_owned()
        }
    }
}

fn by_failure_policy(facts: &Facts<'_>) -> String {
    let failure = &facts.config.resolution.failure;
    let after = failure.after.as_secs();
    if facts.subject.spec.is_system_critical() {
        return "Its priority class is critical for the system: archaware lets it tolerate every architecture after the first failure.".to_owned();
    }
    match failure.action {
        FailureAction::TolerateAll => format!(
            "If the image stays unreadable for {after} s, archaware lets the pod run on every architecture that its other images allow (resolution.failure). The pod may then die on a node whose architecture the image lacks."
        ),
        FailureAction::Tolerate => {
            let set: Architectures = failure.architectures.iter().cloned().collect();
            format!(
                "If the image stays unreadable for {after} s, archaware lets the pod run on {} (resolution.failure).",
                set.join(", ")
            )
        }
        FailureAction::Hold => {
            "archaware holds the pod back until the image can be read (resolution.failure.action: hold).".to_owned()
        }
    }
}

/// The conclusion if no architecture can run the pod.
pub(super) fn none(facts: &Facts<'_>, groups: Option<&[NodeGroup]>) -> Conclusion {
    let evaluation = facts.evaluation;
    let why = evaluation.explain_no_common_architecture(facts.policy);
    let advice = match &evaluation.conflict {
        Some(Conflict::Excluded(_)) => excluded(facts),
        Some(Conflict::Ruled { rule, .. }) => format!(
            "Change the rule {rule} in the configuration, exempt the pod from it, or build the images for its nodes."
        ),
        Some(Conflict::Outdated(_)) => {
            let advice = "Delete the pod: archaware decides about its replacement.";
            return Conclusion::new(capitalised(&why), replace(facts, advice));
        }
        _ => fewest_builds(facts, groups.unwrap_or_default()).unwrap_or_else(|| {
            "Build its images for one architecture, or state where they run with the annotation archaware.dev/architectures.".to_owned()
        }),
    };
    Conclusion::new(capitalised(&why), [advice])
}

/// A text as a sentence.
fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|first| first.to_uppercase().to_string());
    format!("{}{}.", first.unwrap_or_default(), chars.as_str())
}

/// The advice if the author selects only architectures that the images lack.
fn excluded(facts: &Facts<'_>) -> String {
    let selector = &facts.subject.spec.node_selector;
    let mut selected = selector
        .iter()
        .filter(|(key, _)| LABELS.contains(&key.as_str()));
    let Some((key, value)) = selected.next() else {
        return "Change its node affinity, or build its images for the architectures that it selects."
            .to_owned();
    };
    let lacking = lacking(
        facts.counting_images(),
        facts.policy,
        NodePlatform::of_all(value, None),
    );
    let build = build_for(&lacking, value);
    let build = build.map(|build| format!(" {build}, or remove the node selector {key}={value}."));
    let build = build.unwrap_or_else(|| format!(" Remove the node selector {key}={value}."));
    build.trim_start().to_owned()
}

/// The advice for the architecture that needs the fewest image builds.
fn fewest_builds(facts: &Facts<'_>, groups: &[NodeGroup]) -> Option<String> {
    let policy = facts.policy;
    let sets = facts.images.iter().map(|image| {
        let architectures = image.architectures.as_ref();
        (
            image,
            architectures.map(|set| policy.widen_with_emulation(set, None)),
        )
    });
    let sets: Vec<(&EvaluatedImage, Option<Architectures>)> = sets.collect();
    let lacking = |name: &str| -> Vec<&EvaluatedImage> {
        let lacks = |set: &Architectures| !set.contains(name);
        let pairs = sets.iter();
        let lacking = pairs.filter(|(_, set)| set.as_ref().is_some_and(lacks));
        lacking.map(|(image, _)| *image).collect()
    };
    let schedulable = |name: &&str| {
        let mut architectures = policy.schedulable.iter();
        policy.schedulable.is_empty()
            || architectures.any(|architecture| architecture.as_str() == *name)
    };
    let nodes = counts(groups.iter());
    let candidates = nodes.keys().copied().filter(schedulable);
    let best = candidates.min_by_key(|name| {
        let count = nodes.get(name).copied().unwrap_or_default();
        (lacking(name).len(), std::cmp::Reverse(count))
    })?;
    Some(format!("{}.", build_for(&lacking(best), best)?))
}
