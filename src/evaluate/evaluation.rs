//! The result of an evaluation, and its messages.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    image::{ImageError, Resolved},
    placement::{
        DecidedBy, Decision, PlacementPolicy, UnlabelledNodes, demand::Demands, node_set::Disjoint,
        preference::Preferences, rule::LeftOutRule,
    },
    platform::{Architectures, ImageArchitectures, PlatformSet},
};

use super::{ImageAlternatives, Notice, pull_secrets::UnusablePullSecret};

/// The result of an evaluation.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// No change: the mode is `ignore`, or the pod tolerates every architecture already.
    Skip,
    Decided(Decision),
    /// Some images could not be resolved; the evaluation is to be retried.
    Unresolved {
        failed: Vec<(String, ImageError)>,
        /// The architectures that the other images share; `None` if the other images do not limit
        /// the pod.
        known: Option<Architectures>,
    },
}

impl Verdict {
    /// The verdict if these images or documents could not be read either.
    pub(super) fn without(self, more: Vec<(String, ImageError)>) -> Self {
        let (mut failed, known) = match self {
            // Unknown images could only leave fewer architectures.
            Self::Decided(Decision::NoCommonArchitecture) => return self,
            Self::Decided(Decision::Architectures(set)) => (Vec::new(), Some(set)),
            Self::Decided(Decision::TolerateAll) | Self::Skip => (Vec::new(), None),
            Self::Unresolved { failed, known } => (failed, known),
        };
        failed.extend(more);
        Self::Unresolved { failed, known }
    }
}

/// A verdict with its reasons.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// The verdict.
    pub verdict: Verdict,
    /// Whether the failure policy decided earlier, for the same images.
    pub by_policy: bool,
    /// Preferred architectures.
    pub preferences: Preferences,
    /// Why no architecture fits, if none does.
    pub conflict: Option<Conflict>,
    /// The resolved images.
    pub images: Vec<EvaluatedImage>,
    /// Pull secrets that were skipped.
    pub unusable: BTreeSet<UnusablePullSecret>,
    /// The demands of all sources.
    pub demands: Demands,
    /// The nodes without the label for their architecture.
    pub unlabelled: Arc<UnlabelledNodes>,
    /// Messages of the sources.
    pub raised: Vec<Notice>,
    /// The candidates of image selection for each container. Empty without [`Evaluator::explains`].
    ///
    /// [`Evaluator::explains`]: super::Evaluator::explains
    pub alternatives: Vec<ImageAlternatives>,
    /// The runtime class that would run the images. Only a pod that is being created can get it.
    pub lacking_class: Option<String>,
}

/// An image of a pod that was resolved.
#[derive(Clone, Debug)]
pub struct EvaluatedImage {
    /// The name of the image in the pod.
    pub name: String,
    /// The architectures of the image for the OS of the pod; `None` if the image does not limit its
    /// pod.
    pub architectures: Option<ImageArchitectures>,
    /// Its platforms as far as they limit the pod, of every OS.
    pub platforms: PlatformSet,
    /// The resolved image; `None` if it is never pulled, so that no registry was asked.
    pub resolved: Option<Resolved>,
}

/// All images of a pod or template.
#[derive(Clone, Debug)]
pub struct ResolvedImages {
    /// The resolved images.
    pub images: Vec<EvaluatedImage>,
    /// The failed images, with the errors.
    pub failed: Vec<(String, ImageError)>,
    /// Pull secrets that were skipped.
    pub unusable: BTreeSet<UnusablePullSecret>,
}

/// Why no node can run a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// No architecture is in all of these sets: the sets of single images or of the pod's
    /// annotation, and `schedulableArchitectures`.
    Disjoint(Vec<Architectures>),
    /// The images allow these architectures, but the pod's author selects only other nodes, and the
    /// pod does not tolerate their taints.
    Excluded(Architectures),
    /// The images allow these architectures, but archaware required other architectures when the
    /// pod had other images.
    Outdated(Architectures),
    /// The images allow some architectures, and a rule requires nodes of other architectures.
    Ruled {
        /// Name of the rule.
        rule: String,
        /// The requirement of the rule and that of the images.
        why: Disjoint,
        /// The architectures of the images, and an empty set: no node may match the pod, so that
        /// autoscalers make none for it.
        sets: [Architectures; 2],
    },
}

impl Conflict {
    /// The conflicting sets. archaware's node affinity requires all of them, so no node matches the
    /// pod.
    pub(super) fn sets(&self) -> &[Architectures] {
        match self {
            Self::Disjoint(sets) => sets,
            Self::Ruled { sets, .. } => sets,
            Self::Excluded(set) | Self::Outdated(set) => std::slice::from_ref(set),
        }
    }
}

impl Evaluation {
    /// An evaluation with only a verdict.
    pub(crate) fn new(verdict: Verdict) -> Self {
        Self {
            verdict,
            by_policy: false,
            preferences: Preferences::new(),
            conflict: None,
            images: Vec::new(),
            unusable: BTreeSet::new(),
            demands: Demands::default(),
            unlabelled: Arc::default(),
            raised: Vec::new(),
            alternatives: Vec::new(),
            lacking_class: None,
        }
    }

    /// All messages about the pod or template.
    pub fn notices(&self, policy: &PlacementPolicy) -> Vec<Notice> {
        let unusable = self.unusable.iter().cloned();
        let raised = self.raised.iter().cloned();
        raised
            .chain(unusable.map(Notice::UnusablePullSecret))
            .chain(self.conflict_notice(policy))
            .collect()
    }

    fn conflict_notice(&self, policy: &PlacementPolicy) -> Option<Notice> {
        // An earlier decision of the failure policy was reported when it was made.
        if self.by_policy {
            return None;
        }
        match (&self.verdict, &self.conflict) {
            (
                Verdict::Decided(Decision::NoCommonArchitecture),
                Some(Conflict::Excluded(_) | Conflict::Outdated(_)),
            ) => Some(Notice::ArchitectureExcluded(
                self.explain_no_common_architecture(policy),
            )),
            (Verdict::Decided(Decision::NoCommonArchitecture), _) => Some(
                Notice::NoCommonArchitecture(self.explain_no_common_architecture(policy)),
            ),
            _ => None,
        }
    }

    /// The source of the decision, for its annotation.
    pub(crate) fn decided_by(&self) -> DecidedBy {
        if self.by_policy {
            DecidedBy::StandingPolicy
        } else {
            DecidedBy::Images
        }
    }

    /// Rules that select the pod, but are left out.
    pub fn left_out_rules(&self) -> impl Iterator<Item = &LeftOutRule> {
        self.raised.iter().filter_map(|notice| match notice {
            Notice::RuleLeftOut(rule) => Some(rule),
            _ => None,
        })
    }

    /// The message if the pod's author selects only architectures outside of this set, and no taint
    /// keeps the pod away from the selected nodes.
    pub(crate) fn explain_overruled(&self, set: &Architectures) -> String {
        format!(
            "{}. No taint keeps the pod away from the nodes that it selects, so the scheduler places it there, and it probably fails",
            self.explain_selection(set)
        )
    }

    fn explain_selection(&self, set: &Architectures) -> String {
        format!(
            "the node selector or node affinity of the pod selects none of the architectures that run its images: {}{}",
            set.join(", "),
            self.images_in_brackets()
        )
    }

    fn images_in_brackets(&self) -> String {
        match self.images.as_slice() {
            [] => String::new(),
            _ => format!(" (images: {})", self.list_images()),
        }
    }

    /// The message for a pod that no architecture can run.
    pub fn explain_no_common_architecture(&self, policy: &PlacementPolicy) -> String {
        match &self.conflict {
            Some(Conflict::Excluded(set)) => {
                return format!("{}; no node can run it", self.explain_selection(set));
            }
            Some(Conflict::Outdated(set)) => {
                return format!(
                    "the node affinity of the pod was set for other images and cannot be changed. Its images now run on {}{}. Delete the pod, so that its replacement gets another affinity",
                    set.join(", "),
                    self.images_in_brackets()
                );
            }
            Some(Conflict::Ruled { rule, why, .. }) => {
                return format!(
                    "rule {rule} of the configuration and the images of the pod contradict: {why}{}; no node can run it",
                    self.images_in_brackets()
                );
            }
            _ => {}
        }
        let mut why = if self.images.is_empty() {
            "the annotation archaware.dev/architectures lists no architecture of schedulableArchitectures"
                .to_owned()
        } else {
            format!(
                "the images of the pod share no architecture: {}",
                self.list_images()
            )
        };
        if !policy.schedulable.is_empty() {
            let names: Architectures = policy.schedulable.iter().cloned().collect();
            let names = names.join(", ");
            why = format!("{why}; schedulableArchitectures are {names}");
        }
        if let Some(class) = &self.lacking_class {
            why = format!(
                "{why}. The RuntimeClass {class} runs all of these images, but a pod can get it only when it is created: set \
                 runtimeClassName in the template, or delete the pod, so that its replacement gets the class"
            );
        }
        why
    }

    /// The images with their architectures, for example `a (amd64, arm64), b (s390x)`.
    pub fn list_images(&self) -> String {
        let describe_image = |image: &EvaluatedImage| {
            let architectures = match &image.architectures {
                None => "any".to_owned(),
                Some(set) if set.is_empty() => image.other_platforms(),
                Some(set) => set.join(", "),
            };
            format!("{} ({architectures})", image.name)
        };
        self.images
            .iter()
            .map(describe_image)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl EvaluatedImage {
    /// The platforms of an image that has no platform for the pod's OS, in words.
    fn other_platforms(&self) -> String {
        let platforms = self.platforms.platforms().iter();
        let platforms: Vec<String> = platforms.map(ToString::to_string).collect();
        match platforms.as_slice() {
            [] => "none for this OS".to_owned(),
            names => format!("only {}, none for this OS", names.join(", ")),
        }
    }
}

#[cfg(test)]
impl EvaluatedImage {
    /// An image for these architectures.
    pub(crate) fn for_tests(name: &str, architectures: Option<ImageArchitectures>) -> Self {
        Self {
            name: name.to_owned(),
            architectures,
            platforms: PlatformSet::None(crate::platform::NoPlatformReason::NoArchitecture),
            resolved: None,
        }
    }
}
