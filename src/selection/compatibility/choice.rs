//! The choice among the entries of a compatibility document.

mod selected_nodes;

use crate::text::brief;

pub use selected_nodes::SelectedNodes;

use super::{Compatibility, CompatibilityDocument, Fits, NodeGroup, RuleKeys, limits::MAX_TAG};

/// Whether a pod can have the image of an entry on nodes that satisfy its rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFit {
    /// The nodes run the image.
    Runs,
    /// The image is for other architectures.
    OtherArchitecture,
    /// The pod names nodes (`matchFields`), and the entry does not fit all of them. archaware does
    /// not change terms that name nodes, so it could not exclude the other nodes.
    NotOnAllNamed,
    /// The image has to be resolved first.
    Unknown,
}

/// Whether nodes can run the image of an entry.
pub type Runs<'a> = &'a (dyn Fn(&Compatibility, &NodeGroup<'_>) -> ImageFit + Sync);

/// An entry, and the nodes that can run its image.
#[derive(Clone, Debug)]
pub struct Fit<'a> {
    pub entry: &'a Compatibility,
    /// The node groups that satisfy the rules of `entry` and can run its image; never empty.
    pub groups: Vec<NodeGroup<'a>>,
    /// For each considered group: whether it satisfies the rules of `entry`.
    pub(super) satisfying: Vec<bool>,
}

/// The entry that is chosen.
#[derive(Clone, Debug)]
pub struct Choice<'a> {
    pub best: Fit<'a>,
    /// Other entries that fit and have the same image, in order.
    pub further: Vec<Fit<'a>>,
    pub(super) keys: RuleKeys,
    /// The nodes that were considered.
    pub(super) considered: Vec<NodeGroup<'a>>,
}

/// Maximum number of entries in the message for a pod without a selected image.
const MAX_EXPLAINED: usize = 8;

/// Why no entry is chosen.
#[derive(Clone, Debug)]
pub enum NoChoice<'a> {
    /// This entry's image has to be resolved first.
    Unknown(&'a Compatibility),
    /// No entry fits: why the first entries, in the order of the document, do not fit.
    Nothing(Vec<PassedOver>),
}

/// Why an entry was not chosen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PassedOver {
    /// The image or group of the entry.
    pub tag: String,
    /// What failed. Empty if the weight is negative.
    pub failed: Vec<FailedRule>,
}

/// A rule that some nodes do not satisfy, or another reason against an entry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FailedRule {
    /// The rule by its name, or by its position from 1; the architecture; or `matchFields`.
    pub name: String,
    /// The number of nodes where it fails.
    pub nodes: usize,
    /// The first condition that fails on one of these nodes, and what the node has.
    pub example: Option<String>,
}

/// An entry of a document, and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The image or group of the entry.
    pub tag: String,
    /// Its weight; entries with a negative weight are never chosen.
    pub weight: i64,
    /// Whether the entry was chosen, and why not.
    pub outcome: CandidateOutcome,
}

/// The result for an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CandidateOutcome {
    /// The entry's image is selected.
    Chosen,
    /// The entry fits and has the selected image, so its nodes are possible, too.
    SameImage,
    /// The entry fits, but the chosen entry has a higher weight, or the same and stands before it.
    Later,
    /// The entry names no image.
    WithoutImage,
    /// Some nodes satisfy the entry, and are preferred by its weight.
    Preferred,
    /// Some nodes satisfy the entry, but are not preferred: its weight is 0, its rules hold for all
    /// nodes, or node affinity cannot express them.
    NotPreferred,
    /// No node satisfies the entry, or its weight is negative: the content of
    /// [`PassedOver::failed`].
    PassedOver(Vec<FailedRule>),
    /// A model selected the entry for the nodes with this label.
    ChosenByModel {
        /// Key of the label.
        label: String,
        value: String,
    },
    /// A model selected another of its images.
    NotByModel,
}

impl Candidate {
    /// The result for each entry, in the order of the document.
    pub fn list<'a>(
        document: &'a CompatibilityDocument,
        choice: Option<&Choice<'a>>,
        groups: &[NodeGroup<'a>],
        fits: &Fits,
        runs: Runs<'_>,
    ) -> Vec<Candidate> {
        let outcome = |entry: &Compatibility| {
            let is_of = |fit: &Fit<'_>| std::ptr::eq(fit.entry, entry);
            let fits_one = |group: &NodeGroup<'_>| {
                let may_run = || matches!(runs(entry, group), ImageFit::Runs | ImageFit::Unknown);
                fits.fits(entry, group) && may_run()
            };
            if choice.is_some_and(|choice| is_of(&choice.best)) {
                CandidateOutcome::Chosen
            } else if choice.is_some_and(|choice| choice.further.iter().any(is_of)) {
                CandidateOutcome::SameImage
            } else if document.lacks_image(entry) {
                CandidateOutcome::WithoutImage
            } else if choice.is_some() && entry.weight >= 0 && groups.iter().any(fits_one) {
                CandidateOutcome::Later
            } else {
                CandidateOutcome::PassedOver(PassedOver::explain(entry, groups, fits, runs).failed)
            }
        };
        let candidate = |entry: &Compatibility| Self {
            tag: brief(&entry.tag, MAX_TAG),
            weight: entry.weight,
            outcome: outcome(entry),
        };
        document.entries.iter().map(candidate).collect()
    }
}

impl<'a> Choice<'a> {
    /// Chooses the best entry that some nodes satisfy. `runs`: whether nodes can run the image of
    /// an entry.
    ///
    /// # Errors
    ///
    /// Why no entry is chosen.
    pub fn choose(
        document: &'a CompatibilityDocument,
        groups: &[NodeGroup<'a>],
        fits: &Fits,
        runs: Runs<'_>,
    ) -> Result<Self, NoChoice<'a>> {
        let fit = |entry: &'a Compatibility| -> Result<Option<Fit<'a>>, NoChoice<'a>> {
            let mut fitting = Vec::new();
            for group in groups.iter().filter(|group| fits.fits(entry, group)) {
                match runs(entry, group) {
                    ImageFit::Runs => fitting.push(*group),
                    ImageFit::OtherArchitecture | ImageFit::NotOnAllNamed => {}
                    ImageFit::Unknown => return Err(NoChoice::Unknown(entry)),
                }
            }
            if fitting.is_empty() {
                return Ok(None);
            }
            let satisfying = groups.iter().map(|group| fits.fits(entry, group));
            Ok(Some(Fit {
                entry,
                groups: fitting,
                satisfying: satisfying.collect(),
            }))
        };
        let mut candidates = document.candidates().into_iter();
        let mut best = None;
        for entry in candidates.by_ref() {
            best = fit(entry)?;
            if best.is_some() {
                break;
            }
        }
        let Some(best) = best else {
            let explain = |entry: &Compatibility| PassedOver::explain(entry, groups, fits, runs);
            let entries = document.entries.iter().take(MAX_EXPLAINED);
            return Err(NoChoice::Nothing(entries.map(explain).collect()));
        };
        let same_image_entries = candidates.filter(|entry| document.same_image(best.entry, entry));
        let further_fits: Result<Vec<_>, _> = same_image_entries.map(fit).collect();
        Ok(Self {
            further: further_fits?.into_iter().flatten().collect(),
            best,
            keys: document.keys,
            considered: groups.to_vec(),
        })
    }
}

impl PassedOver {
    fn explain(
        entry: &Compatibility,
        groups: &[NodeGroup<'_>],
        fits: &Fits,
        runs: Runs<'_>,
    ) -> Self {
        let count = |fails: &dyn Fn(&NodeGroup<'_>) -> bool| -> usize {
            let failing = groups.iter().filter(|group| fails(group));
            failing.map(|group| group.count).sum()
        };
        let rules = entry.rules.iter().zip(fits.failing(entry));
        let rules = rules.filter(|_| entry.weight >= 0).enumerate();
        let mut failed: Vec<_> = rules
            .map(|(index, (rule, failing))| {
                let name = Some(&rule.name).filter(|name| !name.is_empty());
                let name = name.map_or_else(|| format!("rule {}", index + 1), Clone::clone);
                let invalid = rule.invalid.as_ref();
                let name = invalid.map_or(name.clone(), |why| format!("{name} ({why})"));
                let mut groups = groups.iter().filter(|_| *failing > 0);
                FailedRule {
                    name,
                    nodes: *failing,
                    example: groups.find_map(|group| rule.failure(group.facts)),
                }
            })
            .collect();
        let excluded =
            |why: ImageFit| count(&|group| fits.fits(entry, group) && runs(entry, group) == why);
        if entry.weight >= 0 {
            for (name, why) in [
                ("the architecture of its image", ImageFit::OtherArchitecture),
                (
                    "matchFields of the pod (its rules have to hold on all nodes that it names)",
                    ImageFit::NotOnAllNamed,
                ),
            ] {
                failed.push(FailedRule {
                    name: name.to_owned(),
                    nodes: excluded(why),
                    example: None,
                });
            }
        }
        failed.retain(|failed| failed.nodes > 0);
        Self {
            tag: brief(&entry.tag, MAX_TAG),
            failed,
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
