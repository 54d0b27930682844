//! Decides the tolerations of a DaemonSet's template.
//!
//! The DaemonSet controller creates no pod for a node whose taint the template does not tolerate. There is then no
//! pod to change, so the template must have the tolerations. Unlike a pod's tolerations, a template's can be removed
//! again.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::platform::Os;

use super::{
    decision::{ANY, Decision},
    pod::PlacementPolicy,
};

/// The value of `archaware.dev/tolerations`: which tolerations of the template archaware added, and for which images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnedTolerations {
    /// The tolerations that archaware added, in the API's form.
    pub tolerations: Vec<Value>,
    /// The images of the decision. While they stay the same, a decision of the failure policy is kept, because each
    /// change of the template causes a rollout.
    #[serde(default)]
    pub images: BTreeSet<String>,
    /// Whether the failure policy decided, and its decision stands until the images change.
    #[serde(
        rename = "steppedAside",
        default,
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub is_by_policy: bool,
    /// That decision, as in the annotation of a pod; absent: every architecture is tolerated.
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

impl OwnedTolerations {
    /// Parses the annotation. An unreadable value owns nothing.
    pub fn parse(annotation: Option<&str>) -> Self {
        annotation
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// Whether the decision was made for exactly these images.
    pub fn is_for(&self, images: &BTreeSet<String>) -> bool {
        !self.tolerations.is_empty() && self.images == *images
    }

    /// The decision of the failure policy.
    pub fn decision_of_policy(&self) -> Option<Decision> {
        let text = self.decision.as_deref().unwrap_or(ANY);
        self.is_by_policy.then(|| Decision::parse(text)).flatten()
    }

    /// Whether another writer removed tolerations that archaware had added.
    pub fn was_reverted(&self, existing: &[Value]) -> bool {
        self.tolerations
            .iter()
            .any(|toleration| !existing.contains(toleration))
    }
}

/// The parts of a template that the decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct TemplateView<'a> {
    /// OS of the pods.
    pub os: &'a Os,
    /// Tolerations of the template, in the API's form.
    pub tolerations: &'a [Value],
    /// Images of the template.
    pub images: &'a BTreeSet<String>,
    /// The tolerations that archaware owns.
    pub record: &'a OwnedTolerations,
}

/// The change that brings a template to `decision`; `None` if it is there. `by_policy`: the failure policy decided
/// instead of the images, and its decision stands until they change.
pub fn decide_template(
    policy: &PlacementPolicy,
    decision: &Decision,
    template: TemplateView<'_>,
    by_policy: bool,
) -> Option<TemplateChange> {
    let TemplateView {
        os,
        tolerations: existing,
        images,
        record,
    } = template;
    let owned = |toleration: &&Value| record.tolerations.contains(toleration);
    let foreign: Vec<Value> = existing.iter().filter(|t| !owned(t)).cloned().collect();
    let wanted = policy.missing_tolerations(decision, os, &foreign);
    let present: Vec<&Value> = existing.iter().filter(owned).collect();
    let mut remove: Vec<usize> = existing
        .iter()
        .enumerate()
        .filter(|(_, toleration)| owned(toleration) && !wanted.contains(toleration))
        .map(|(index, _)| index)
        .collect();
    remove.reverse();
    let add: Vec<Value> = wanted
        .iter()
        .filter(|t| !present.contains(t))
        .cloned()
        .collect();
    let after = if wanted.is_empty() {
        OwnedTolerations::default()
    } else {
        OwnedTolerations {
            tolerations: wanted,
            images: images.clone(),
            is_by_policy: by_policy,
            decision: Some(decision.annotation()).filter(|text| by_policy && text != ANY),
        }
    };
    // A change of the annotation alone causes no rollout.
    let same = remove.is_empty() && add.is_empty() && after == *record;
    let record = (after != OwnedTolerations::default()).then_some(after);
    (!same).then_some(TemplateChange {
        remove,
        add,
        record,
    })
}

/// The change that `archaware clean` makes: removes owned tolerations and the annotation.
pub fn clean(existing: &[Value], record: &OwnedTolerations) -> TemplateChange {
    let owned = existing
        .iter()
        .enumerate()
        .filter(|(_, t)| record.tolerations.contains(t));
    let mut remove: Vec<usize> = owned.map(|(index, _)| index).collect();
    remove.reverse();
    TemplateChange {
        remove,
        add: Vec::new(),
        record: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn arch(name: &str) -> Value {
        json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": name, "effect": "NoSchedule"})
    }

    fn on(names: &[&str]) -> Decision {
        Decision::Architectures(names.iter().map(|name| name.parse().unwrap()).collect())
    }

    fn images(name: &str) -> BTreeSet<String> {
        BTreeSet::from([name.to_owned()])
    }

    fn view<'a>(
        tolerations: &'a [Value],
        images: &'a BTreeSet<String>,
        record: &'a OwnedTolerations,
    ) -> TemplateView<'a> {
        static LINUX: LazyLock<Os> = LazyLock::new(Os::linux);
        TemplateView {
            os: &LINUX,
            tolerations,
            images,
            record,
        }
    }

    fn record(tolerations: &[Value]) -> OwnedTolerations {
        if tolerations.is_empty() {
            return OwnedTolerations::default();
        }
        OwnedTolerations {
            tolerations: tolerations.to_vec(),
            images: images("a"),
            is_by_policy: false,
            decision: None,
        }
    }

    #[test]
    fn templates_follow_their_images_and_foreign_tolerations_stay() {
        let policy = PlacementPolicy::from(&Config::default());
        let foreign = json!({"key": "gpu", "operator": "Exists"});
        let everything = json!({"operator": "Exists"});
        let (amd, arm) = (arch("amd64"), arch("arm64"));
        for (decision, existing, owned, remove, add, left) in [
            (
                on(&["amd64"]),
                vec![],
                vec![],
                vec![],
                vec![amd.clone()],
                vec![amd.clone()],
            ),
            (
                on(&["amd64", "arm64"]),
                vec![foreign.clone(), amd.clone()],
                vec![amd.clone()],
                vec![],
                vec![arm.clone()],
                vec![amd.clone(), arm.clone()],
            ),
            (
                on(&["arm64"]),
                vec![amd.clone(), foreign.clone()],
                vec![amd.clone()],
                vec![0],
                vec![arm.clone()],
                vec![arm.clone()],
            ),
            (
                Decision::NoCommonArchitecture,
                vec![foreign.clone(), amd.clone(), arm.clone()],
                vec![amd.clone(), arm.clone()],
                vec![2, 1],
                vec![],
                vec![],
            ),
        ] {
            let change = decide_template(
                &policy,
                &decision,
                view(&existing, &images("a"), &record(&owned)),
                false,
            )
            .unwrap();
            assert_eq!((change.remove, change.add), (remove, add), "{existing:?}");
            assert_eq!(
                change.record.map(|r| r.tolerations).unwrap_or_default(),
                left
            );
        }
        for (decision, existing, owned) in [
            (on(&["amd64"]), vec![everything], vec![]),
            (on(&["amd64"]), vec![amd.clone()], vec![]),
            (on(&["amd64"]), vec![amd.clone()], vec![amd.clone()]),
            (Decision::NoCommonArchitecture, vec![foreign], vec![]),
        ] {
            assert_eq!(
                decide_template(
                    &policy,
                    &decision,
                    view(&existing, &images("a"), &record(&owned)),
                    false
                ),
                None
            );
        }
    }

    #[test]
    fn the_record_follows_the_images_without_a_rollout() {
        let policy = PlacementPolicy::from(&Config::default());
        let any = policy.taint.toleration_of_all();
        let old = OwnedTolerations {
            tolerations: vec![any.clone()],
            images: images("old"),
            is_by_policy: true,
            decision: None,
        };
        assert!(old.is_for(&images("old")) && !old.is_for(&images("new")));
        let (aside, existing) = (Decision::TolerateAll, [any]);
        let change =
            decide_template(&policy, &aside, view(&existing, &images("new"), &old), true).unwrap();
        assert!(
            change.remove.is_empty() && change.add.is_empty(),
            "no rollout"
        );
        assert_eq!(change.record.unwrap().images, images("new"));
        assert_eq!(
            decide_template(&policy, &aside, view(&existing, &images("old"), &old), true),
            None
        );
    }

    #[test]
    fn a_decision_of_the_failure_policy_is_read_back() {
        for (text, expected) in [
            (
                r#"{"tolerations": [], "steppedAside": true}"#,
                Some(Decision::TolerateAll),
            ),
            (
                r#"{"tolerations": [], "steppedAside": true, "decision": "amd64"}"#,
                Some(on(&["amd64"])),
            ),
            (
                r#"{"tolerations": [], "steppedAside": true, "decision": "Wrong!"}"#,
                None,
            ),
            (r#"{"tolerations": [], "decision": "amd64"}"#, None),
        ] {
            let record = OwnedTolerations::parse(Some(text));
            assert_eq!(record.decision_of_policy(), expected, "{text}");
        }
    }

    #[test]
    fn the_record_survives_the_annotation() {
        let record = record(&[arch("amd64")]);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(OwnedTolerations::parse(Some(&text)), record);
        assert!(record.was_reverted(&[]) && !record.was_reverted(&[arch("amd64")]));
        assert_eq!(
            OwnedTolerations::parse(Some("nonsense")),
            OwnedTolerations::default()
        );
        assert_eq!(OwnedTolerations::parse(None), OwnedTolerations::default());
    }

    #[test]
    fn clean_takes_what_is_owned() {
        let existing = [arch("amd64"), arch("arm64")];
        let change = clean(&existing, &record(&[arch("arm64")]));
        assert_eq!((change.remove, change.record), (vec![1], None));
    }
}
