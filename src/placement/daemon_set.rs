//! What to do about the tolerations in a DaemonSet's template.
//!
//! The DaemonSet controller creates no pod on a node whose taint the template does not tolerate, so
//! there is no pod to look at: the template itself has to be right. Unlike a pod's, its tolerations
//! can be taken away again.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::pod::{Decision, Policy};

/// The value of `archaware.dev/tolerations`: what in the template is archaware's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The tolerations that archaware added, as the API holds them.
    pub tolerations: Vec<Value>,
    /// The images for which archaware stepped aside, if it did: until they change it stays that way,
    /// because each change rolls the DaemonSet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stepped_aside_for: Option<BTreeSet<String>>,
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

    /// Whether archaware stepped aside for exactly these images.
    pub fn stepped_aside_for(&self, images: &BTreeSet<String>) -> bool {
        self.stepped_aside_for.as_ref() == Some(images)
    }
}

/// The change that brings a template to `decision`, if it is not there yet. `stepped_aside_for`: the
/// images, when the decision is the failure policy's and not theirs.
pub fn decide(
    policy: &Policy,
    decision: &Decision,
    existing: &[Value],
    record: &Record,
    stepped_aside_for: Option<&BTreeSet<String>>,
) -> Option<Change> {
    let owned = |toleration: &&Value| record.tolerations.contains(toleration);
    let foreign: Vec<Value> = existing.iter().filter(|t| !owned(t)).cloned().collect();
    let wanted = policy.missing_tolerations(decision, &foreign);
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
    let after = Record {
        tolerations: wanted,
        stepped_aside_for: stepped_aside_for.cloned(),
    };
    let after = if after.tolerations.is_empty() {
        Record::default()
    } else {
        after
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
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn arch(name: &str) -> Value {
        json!({"key": "kubernetes.io/arch", "operator": "Equal", "value": name, "effect": "NoSchedule"})
    }

    fn on(names: &[&str]) -> Decision {
        Decision::Architectures(names.iter().map(|name| name.parse().unwrap()).collect())
    }

    fn record(tolerations: &[Value]) -> Record {
        Record {
            tolerations: tolerations.to_vec(),
            stepped_aside_for: None,
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
            let change = decide(&policy, &decision, &existing, &record(&owned), None).unwrap();
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
                decide(&policy, &decision, &existing, &record(&owned), None),
                None
            );
        }
    }

    #[test]
    fn the_record_follows_the_images_that_were_stepped_aside_for() {
        let policy = Policy::from(&Config::default());
        let any = policy.taint.toleration_of_all();
        let images = |name: &str| Some(BTreeSet::from([name.to_owned()]));
        let old = Record {
            tolerations: vec![any.clone()],
            stepped_aside_for: images("old"),
        };
        let aside = Decision::StepAside;
        let new = images("new");
        let change = decide(
            &policy,
            &aside,
            std::slice::from_ref(&any),
            &old,
            new.as_ref(),
        )
        .unwrap();
        assert!(
            change.remove.is_empty() && change.add.is_empty(),
            "no rollout"
        );
        assert_eq!(change.record.unwrap().stepped_aside_for, new);
        assert_eq!(
            decide(&policy, &aside, &[any], &old, images("old").as_ref()),
            None
        );
    }

    #[test]
    fn the_record_survives_the_annotation() {
        let images: BTreeSet<String> = ["a".to_owned()].into();
        let record = Record {
            tolerations: vec![arch("amd64")],
            stepped_aside_for: Some(images.clone()),
        };
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(Record::parse(Some(&text)), record);
        assert!(record.stepped_aside_for(&images));
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
