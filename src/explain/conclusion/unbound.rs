//! The conclusion for a pod that has no node yet, or does not exist, and whose images are known or
//! do not matter.

use std::{cmp::Reverse, collections::BTreeMap};

use crate::{
    evaluate::{EvaluatedImage, Stage, lacking},
    placement::{GATE, Mode, landing::Obstacle, mode::Handling, suffices},
};

use super::{
    super::{Consequence, ExistingPod, Facts, NodeGroup, images::say_lacking, scheduler},
    Conclusion, build_for, counts, say_counts,
};

pub(super) fn conclude(
    facts: &Facts<'_>,
    consequence: &Consequence,
    groups: Option<&[NodeGroup]>,
) -> Conclusion {
    let Some(groups) = groups else {
        let sentence = match &consequence.runs_on {
            Some(set) => format!(
                "It can run on {}. archaware cannot list the nodes, so it is not known whether there are such nodes.",
                set.join(", ")
            ),
            None => "No image limits where it runs. archaware cannot list the nodes.".to_owned(),
        };
        let scheduler = facts.pod.and_then(ExistingPod::scheduler);
        let says = scheduler.map(|answer| format!("The scheduler says: {}", answer.message));
        return Conclusion::new(sentence, says);
    };
    if groups.is_empty() {
        return Conclusion::new("The cluster has no nodes.", []);
    }
    let placement = Placement {
        facts,
        consequence,
        groups,
        fitting: groups.iter().filter(|group| group.can_take_it()).collect(),
        limiting: limiting(facts, groups),
    };
    let mut conclusion = match facts.pod {
        _ if placement.fitting.is_empty() => placement.nowhere(),
        None => placement.not_created(),
        Some(pod) => placement.waiting(pod),
    };
    let deadly = groups.iter().filter(|group| group.is_deadly);
    let deadly = say_counts(deadly);
    if !deadly.is_empty() {
        conclusion.advice.push(format!(
            "Nothing keeps it away from {deadly}, where it dies with \"exec format error\"."
        ));
    }
    conclusion
}

/// The images that keep it away from some nodes.
fn limiting<'a>(facts: &Facts<'a>, groups: &[NodeGroup]) -> Vec<&'a EvaluatedImage> {
    let lacks = |image: &&EvaluatedImage| {
        let only_image = std::slice::from_ref(*image);
        let mut groups = groups.iter();
        groups.any(|group| !lacking(only_image, facts.policy, group.platform()).is_empty())
    };
    facts.counting_images().iter().filter(lacks).collect()
}

/// The nodes from the view of one pod.
struct Placement<'a> {
    facts: &'a Facts<'a>,
    consequence: &'a Consequence,
    groups: &'a [NodeGroup],
    fitting: Vec<&'a NodeGroup>,
    /// The images that keep it away from other nodes.
    limiting: Vec<&'a EvaluatedImage>,
}

impl Placement<'_> {
    fn where_to(&self) -> String {
        say_counts(self.fitting.iter().copied())
    }

    /// The architectures of the nodes that could take the pod.
    fn fitting_architectures(&self) -> String {
        let counts = counts(self.fitting.iter().copied());
        counts.into_keys().collect::<Vec<_>>().join(" or ")
    }

    fn not_created(&self) -> Conclusion {
        let by_image = say_lacking(&self.limiting).map(|lacking| format!(": {lacking}"));
        let what = if self.facts.subject.stage == Stage::Template {
            "Its pods can run on"
        } else {
            "A pod of it can run on"
        };
        let sentence = format!(
            "{what} {}{}.",
            self.where_to(),
            by_image.unwrap_or_default()
        );
        Conclusion::new(sentence, [])
    }

    fn waiting(&self, pod: &ExistingPod) -> Conclusion {
        let (facts, where_to) = (self.facts, self.where_to());
        if pod.pod.spec.gate().is_some() {
            let sentence =
                format!("It can run on {where_to}, and waits behind archaware's scheduling gate.");
            let advice = format!(
                "archaware removes the gate when it next reconciles the pod. If the gate stays, archaware does not run: start it, or remove the gate {GATE} from the pod."
            );
            return Conclusion::new(sentence, [advice]);
        }
        // If it is not known whether archaware is installed, prefer the scheduler's message.
        let is_expected = match facts.is_installed {
            Some(is_installed) => is_installed,
            None => pod.scheduler().is_none(),
        };
        if !self.consequence.change.tolerations.is_empty() && is_expected {
            let sentence = format!(
                "It can run on {where_to} as soon as archaware has given it its tolerations."
            );
            let advice = format!(
                "If that takes longer than a second, see whether archaware runs (`kubectl -n {} get pods`), and its events and logs.",
                facts.own_namespace
            );
            return Conclusion::new(sentence, [advice]);
        }
        match pod.scheduler() {
            Some(condition) => self.unschedulable(&condition.message),
            None => Conclusion::new(
                format!("It can run on {where_to}; the scheduler has not placed it yet."),
                [],
            ),
        }
    }

    /// The scheduler reported that the pod fits on none of the nodes with a suitable architecture.
    fn unschedulable(&self, message: &str) -> Conclusion {
        let where_to = self.where_to();
        let reasons = scheduler::further_reasons(message);
        let needs_room = reasons.iter().any(scheduler::Reason::is_about_room);
        let why: Vec<_> = reasons.iter().map(scheduler::Reason::say).collect();
        let why = if why.is_empty() {
            message.trim_end_matches('.').to_owned()
        } else {
            why.join(", ")
        };
        let names = self.fitting_architectures();
        // Advise to build images only if images keep the pod away from other nodes.
        let other_groups = self.groups.iter().filter(|group| !group.can_take_it());
        let other_group = other_groups.max_by_key(|group| (self.is_limited(group), group.count));
        let build = other_group.filter(|group| self.is_limited(group));
        let build = build.and_then(|group| build_for(&self.limiting, &group.architecture));
        let advice = match build {
            _ if !needs_room => None,
            Some(build) => Some(format!("{build}, or add {names} nodes.")),
            None => Some(format!("Make room on these nodes, or add {names} nodes.")),
        };
        let sentence = match say_lacking(&self.limiting).filter(|_| needs_room) {
            Some(lacking) => format!(
                "Image {lacking}. The scheduler cannot place the pod on the other nodes ({where_to}): {why}."
            ),
            None => format!(
                "Its images run on {where_to}, but the scheduler cannot place it on any of them: {why}."
            ),
        };
        Conclusion::new(sentence, advice)
    }

    /// Whether images keep the pod away from these nodes.
    fn is_limited(&self, group: &NodeGroup) -> bool {
        let facts = self.facts;
        let lacking = || lacking(facts.counting_images(), facts.policy, group.platform());
        !group.can_take_it() && !lacking().is_empty()
    }

    /// The conclusion if no node can take the pod.
    fn nowhere(&self) -> Conclusion {
        let mut by_reason: BTreeMap<&str, Vec<&NodeGroup>> = BTreeMap::new();
        for group in self.groups {
            let reason = group.reason.as_deref().unwrap_or_default();
            by_reason.entry(reason).or_default().push(group);
        }
        let mut reasons: Vec<_> = by_reason.into_iter().collect();
        reasons.sort_by_key(|(_, groups)| {
            Reverse(groups.iter().map(|group| group.count).sum::<usize>())
        });
        let shown = reasons.iter().take(3);
        let shown = shown
            .map(|(reason, groups)| format!("{} ({reason})", say_counts(groups.iter().copied())));
        let mut shown: Vec<_> = shown.collect();
        if reasons.len() > 3 {
            shown.push("and others".to_owned());
        }
        let sentence = format!("No node can take it: {}.", shown.join("; "));
        Conclusion::new(sentence, self.how_to_find_a_place())
    }

    fn how_to_find_a_place(&self) -> Vec<String> {
        let runs = |group: &&NodeGroup| {
            let set = self.consequence.runs_on.as_ref();
            set.is_none_or(|set| {
                suffices(set, &group.architecture, group.node_variant) != Some(false)
            })
        };
        let suitable = self.groups.iter().filter(runs);
        let Some(group) = suitable.min_by_key(|group| group.distance) else {
            let set = self.consequence.runs_on.as_ref();
            let names = set.map(|set| set.join(" or ")).unwrap_or_default();
            let most = self.groups.first().map(|group| group.architecture.as_str());
            let build = build_for(&self.limiting, most.unwrap_or_default());
            return vec![match build {
                Some(build) => format!("{build}, or add {names} nodes."),
                None => format!("Add {names} nodes."),
            }];
        };
        let reason = group.reason.as_deref().unwrap_or_default();
        let what_to_do = match &group.obstacle {
            Some(Obstacle::NodeSelector(label)) => {
                format!("Label one of them {label}, or change the node selector.")
            }
            Some(Obstacle::NodeAffinity) => {
                "Change its node affinity, or label nodes as it asks.".to_owned()
            }
            Some(Obstacle::Taint { is_own: false, .. }) => {
                "Let it tolerate that taint, or add nodes without it.".to_owned()
            }
            _ => String::new(),
        };
        let where_to = format!(
            "Its images run on the {} nodes, but it cannot land there ({reason}). {what_to_do}",
            group.architecture
        );
        let mut advice = vec![where_to.trim_end().to_owned()];
        let taint_prefix = format!("{}=", self.facts.policy.taint.key);
        let ignored = matches!(self.facts.handling.0, Handling::Mode(Mode::Ignore));
        if ignored
            && group
                .taints
                .iter()
                .any(|taint| taint.starts_with(&taint_prefix))
        {
            advice.push("archaware leaves it alone (mode ignore), so it has to tolerate archaware's taint itself.".to_owned());
        }
        advice
    }
}
