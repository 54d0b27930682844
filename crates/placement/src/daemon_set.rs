//! Decides the tolerations of a DaemonSet's template.
//!
//! The DaemonSet controller creates no pod for a node whose taint the template does not tolerate.
//! There is then no pod to change, so the template must have the tolerations. Unlike a pod's
//! tolerations, a template's can be removed again.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use archaware_platform::Os;

use super::{
    decision::{DecidedBy, Decision},
    policy::PlacementPolicy,
    record,
};

/// The value of `archaware.dev/tolerations`: which tolerations of the template archaware added, and
/// for which images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnedTolerations {
    /// The tolerations that archaware added, in the API's form.
    pub tolerations: Vec<Value>,
    /// The images of the decision. Each change of the template causes a rollout. So while the
    /// images stay the same, archaware:
    /// - keeps a decision of the images if it can no longer resolve them;
    /// - always keeps a standing decision of the failure policy;
    /// - only narrows a provisional decision of the failure policy.
    #[serde(default)]
    pub images: BTreeSet<String>,
    /// Whether the failure policy decided, and its decision stands until the images change.
    #[serde(
        rename = "steppedAside",
        default,
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub is_by_policy: bool,
    /// Whether the failure policy made a provisional decision, which holds until the images are
    /// known.
    #[serde(
        rename = "untilKnown",
        default,
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub is_until_known: bool,
    /// The decision, as in the annotation of a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
}

/// Changes to a template, applied in one patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplateChange {
    /// Indexes in the template's tolerations, in descending order.
    pub remove: Vec<usize>,
    /// Tolerations to append.
    pub add: Vec<Value>,
    /// The new value of the annotation; `None` removes it.
    pub record: Option<OwnedTolerations>,
}

impl TemplateChange {
    /// Whether tolerations of the template change, which causes a rollout. Otherwise only the
    /// annotation changes.
    pub fn rolls(&self) -> bool {
        !(self.remove.is_empty() && self.add.is_empty())
    }
}

impl OwnedTolerations {
    /// Parses the annotation. An unreadable value owns nothing.
    pub fn parse(annotation: Option<&str>) -> Self {
        record::parse(annotation).unwrap_or_default()
    }

    /// The value of the annotation.
    pub fn to_annotation(&self) -> Option<String> {
        record::format(self)
    }

    /// Whether archaware owns tolerations of the template, and decided for exactly these images.
    pub fn is_for(&self, images: &BTreeSet<String>) -> bool {
        !self.tolerations.is_empty() && self.images == *images
    }

    /// The standing decision of the failure policy.
    pub fn decision_of_policy(&self) -> Option<Decision> {
        let decision = self.decision.as_deref().filter(|_| self.is_by_policy);
        decision.and_then(Decision::parse)
    }

    /// Limits the new decision of the failure policy to its earlier provisional decision: less may
    /// be known after a restart, and that must not cause a rollout. If the two share nothing,
    /// returns the new decision, because the images have proved the earlier decision wrong.
    pub fn narrow(&self, decision: Decision) -> Decision {
        let earlier = self.decision.as_deref().and_then(Decision::parse);
        let earlier = earlier.filter(|_| self.is_until_known);
        let (Some(Decision::Architectures(earlier)), Decision::Architectures(now)) =
            (&earlier, &decision)
        else {
            return decision;
        };
        let both = earlier.and(now);
        if both.is_empty() {
            decision
        } else {
            Decision::Architectures(both)
        }
    }

    /// The decision of the images.
    pub fn decision_of_images(&self) -> Option<Decision> {
        if self.is_by_policy || self.is_until_known {
            return None;
        }
        Decision::parse(self.decision.as_deref()?)
    }

    /// The positions of the owned tolerations in a template, in ascending order. `is_ours`: whether
    /// a toleration can be archaware's. Each owned toleration is found once: the author may have
    /// written an equal toleration.
    pub fn find(&self, existing: &[Value], is_ours: impl Fn(&Value) -> bool) -> Vec<usize> {
        let mut found: Vec<usize> = Vec::new();
        for owned in self.tolerations.iter().filter(|owned| is_ours(owned)) {
            let mut equal = existing.iter().enumerate().rev();
            let index =
                equal.find(|(index, toleration)| *toleration == owned && !found.contains(index));
            found.extend(index.map(|(index, _)| index));
        }
        found.sort_unstable();
        found
    }
}

/// The parts of a template that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct TemplateView<'a> {
    /// OS of the pods.
    pub os: &'a Os,
    /// Tolerations of the template, in the API's form.
    pub tolerations: &'a [Value],
    /// Indexes of the tolerations that archaware owns, in ascending order.
    pub owned: &'a [usize],
    /// Images of the template.
    pub images: &'a BTreeSet<String>,
    /// What the annotation records.
    pub record: &'a OwnedTolerations,
}

/// The change that makes a template match `decision`; `None` if it matches already.
pub fn decide_template(
    policy: &PlacementPolicy,
    decision: &Decision,
    template: TemplateView<'_>,
    by: DecidedBy,
) -> Option<TemplateChange> {
    let TemplateView {
        os,
        tolerations: existing,
        owned,
        images,
        record,
    } = template;
    let is_owned = |index: &usize| owned.contains(index);
    let (own, foreign): (Vec<_>, Vec<_>) = existing
        .iter()
        .enumerate()
        .partition(|(index, _)| is_owned(index));
    let foreign: Vec<Value> = foreign
        .into_iter()
        .map(|(_, toleration)| toleration.clone())
        .collect();
    let required = policy.missing_tolerations(decision, os, &[]);
    // An owned toleration that is still required stays even if the author now tolerates the taint
    // too, because its removal would cause a rollout.
    let (kept, dropped): (Vec<_>, Vec<_>) = own
        .into_iter()
        .partition(|(_, toleration)| required.contains(toleration));
    let remove: Vec<usize> = dropped.into_iter().map(|(index, _)| index).rev().collect();
    let mut add = policy.missing_tolerations(decision, os, &foreign);
    add.retain(|new| !kept.iter().any(|(_, toleration)| *toleration == new));
    let kept_tolerations = kept.into_iter().map(|(_, toleration)| toleration.clone());
    let tolerations: Vec<Value> = kept_tolerations.chain(add.iter().cloned()).collect();
    let after = if tolerations.is_empty() {
        OwnedTolerations::default()
    } else {
        OwnedTolerations {
            tolerations,
            images: images.clone(),
            is_by_policy: by == DecidedBy::StandingPolicy,
            is_until_known: by == DecidedBy::Policy,
            decision: Some(decision.annotation()),
        }
    };
    // A difference in only the annotation is corrected too, because that causes no rollout.
    let same = remove.is_empty() && add.is_empty() && after == *record;
    let record = (after != OwnedTolerations::default()).then_some(after);
    (!same).then_some(TemplateChange {
        remove,
        add,
        record,
    })
}

/// The change that `archaware clean` makes: removes the owned tolerations and the annotation.
/// `owned`: the indexes of these tolerations, in ascending order.
pub fn clean(owned: &[usize]) -> TemplateChange {
    TemplateChange {
        remove: owned.iter().rev().copied().collect(),
        add: Vec::new(),
        record: None,
    }
}

#[cfg(test)]
mod tests;
