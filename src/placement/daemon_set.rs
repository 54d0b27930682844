//! What to do about the tolerations in a DaemonSet's template.
//!
//! The DaemonSet controller creates no pod on a node whose taint the template does not tolerate, so
//! there is no pod to look at: the template itself has to be right. Unlike a pod's, its tolerations
//! can be taken away again.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::platform::Os;

use super::{decision::Decision, pod::Policy};

/// The value of `archaware.dev/tolerations`: what in the template is archaware's, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The tolerations that archaware added, as the API holds them.
    pub tolerations: Vec<Value>,
    /// The images that the decision was made for. Until they change, it is not made anew without them:
    /// each change rolls the DaemonSet.
    #[serde(default)]
    pub images: BTreeSet<String>,
    /// Whether the failure policy decided instead of the images.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stepped_aside: bool,
}

/// What to change in a template. All of it goes into one patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Indexes in the template's tolerations, descending.
    pub remove: Vec<usize>,
    /// Tolerations to append.
    pub add: Vec<Value>,
    /// What archaware owns from now on; `None` drops the annotation.
    pub record: Option<Record>,
}

impl Record {
    /// Reads the annotation; what is not readable owns nothing.
    pub fn parse(annotation: Option<&str>) -> Self {
        annotation
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// Whether it was made for exactly these images.
    pub fn is_for(&self, images: &BTreeSet<String>) -> bool {
        !self.tolerations.is_empty() && self.images == *images
    }

    /// Whether somebody has taken out of the template what archaware had put there.
    pub fn was_reverted(&self, existing: &[Value]) -> bool {
        self.tolerations
            .iter()
            .any(|toleration| !existing.contains(toleration))
    }
}

/// A template, as far as what it gets depends on what it has.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Its pods' OS.
    pub os: &'a Os,
    /// Its tolerations, as the API holds them.
    pub tolerations: &'a [Value],
    /// Its images.
    pub images: &'a BTreeSet<String>,
    /// What of it is archaware's.
    pub record: &'a Record,
}

/// The change that brings a template to `decision`, if it is not there yet. `by_policy`: the failure policy
/// decided instead of the images.
pub fn decide(
    policy: &Policy,
    decision: &Decision,
    template: View<'_>,
    by_policy: bool,
) -> Option<Change> {
    let View {
        os,
        tolerations: existing,
        images,
        record,
    } = template;
    // Only this is kept until the images change; what the policy limits may be widened by the images.
    let stepped_aside = by_policy && *decision == Decision::StepAside;
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
        Record::default()
    } else {
        Record {
            tolerations: wanted,
            images: images.clone(),
            stepped_aside,
        }
    };
    // The record alone may change: that rolls nothing.
    let same = remove.is_empty() && add.is_empty() && after == *record;
    let record = (after != Record::default()).then_some(after);
    (!same).then_some(Change {
        remove,
        add,
        record,
    })
}

/// What `clean` takes away: every owned toleration, and the record.
pub fn clean(existing: &[Value], record: &Record) -> Change {
    let owned = existing
        .iter()
        .enumerate()
        .filter(|(_, t)| record.tolerations.contains(t));
    let mut remove: Vec<usize> = owned.map(|(index, _)| index).collect();
    remove.reverse();
    Change {
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
        record: &'a Record,
    ) -> View<'a> {
        static LINUX: LazyLock<Os> = LazyLock::new(Os::linux);
        View {
            os: &LINUX,
            tolerations,
            images,
            record,
        }
    }

    fn record(tolerations: &[Value]) -> Record {
        if tolerations.is_empty() {
            return Record::default();
        }
        Record {
            tolerations: tolerations.to_vec(),
            images: images("a"),
            stepped_aside: false,
        }
    }

    #[test]
    fn templates_follow_their_images_and_foreign_tolerations_stay() {
        let policy = Policy::from(&Config::default());
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
            let change = decide(
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
                decide(
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
        let policy = Policy::from(&Config::default());
        let any = policy.taint.toleration_of_all();
        let old = Record {
            tolerations: vec![any.clone()],
            images: images("old"),
            stepped_aside: true,
        };
        assert!(old.is_for(&images("old")) && !old.is_for(&images("new")));
        let (aside, existing) = (Decision::StepAside, [any]);
        let change = decide(&policy, &aside, view(&existing, &images("new"), &old), true).unwrap();
        assert!(
            change.remove.is_empty() && change.add.is_empty(),
            "no rollout"
        );
        assert_eq!(change.record.unwrap().images, images("new"));
        assert_eq!(
            decide(&policy, &aside, view(&existing, &images("old"), &old), true),
            None
        );
    }

    #[test]
    fn the_record_survives_the_annotation() {
        let record = record(&[arch("amd64")]);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(Record::parse(Some(&text)), record);
        assert!(record.was_reverted(&[]) && !record.was_reverted(&[arch("amd64")]));
        assert_eq!(Record::parse(Some("nonsense")), Record::default());
        assert_eq!(Record::parse(None), Record::default());
    }

    #[test]
    fn clean_takes_what_is_owned() {
        let existing = [arch("amd64"), arch("arm64")];
        let change = clean(&existing, &record(&[arch("arm64")]));
        assert_eq!((change.remove, change.record), (vec![1], None));
    }
}
