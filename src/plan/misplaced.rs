//! Plans for a pod that cannot run on its node: an event, and its eviction, so that its controller
//! creates a replacement on a node of another architecture.

use std::time::{Duration, Instant};

use crate::{
    cluster::objects::Pod,
    evaluate::wrong_architecture::{WrongArchitecture, WrongArchitectureCause},
    platform::{Architectures, ImageArchitectures},
};

use super::{
    hash,
    repairs::{self, Written},
};

/// Marks a controller whose pods are not evicted again: a replacement failed like the pod before
/// it.
const GIVEN_UP: u32 = u32::MAX;

/// A pod that cannot run on its node.
#[derive(Debug)]
pub(crate) struct MisplacedPod<'a> {
    pub(crate) pod: &'a Pod,
    /// Time since the creation of the pod.
    pub(crate) age: Duration,
    /// The platform of its node.
    pub(crate) platform: &'a str,
    /// The containers that cannot run there; never empty.
    pub(crate) found: &'a [WrongArchitecture],
    /// The architectures of the first container's image, if they are known.
    pub(crate) architectures: Option<&'a ImageArchitectures>,
    /// Whether the image of the first container is known not to be for the node.
    pub(crate) image_lacks: bool,
    /// The architectures that the author states, if the node has none of them.
    pub(crate) stated: Option<&'a Architectures>,
    /// Whether a replacement would be placed elsewhere; if not, why.
    pub(crate) elsewhere: Result<(), NotElsewhere>,
}

/// Why a replacement would not be placed elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotElsewhere {
    /// Nothing would keep the replacement away from such nodes: its mode or images allow them, or
    /// neither the webhook nor a taint excludes them.
    MayRunThere,
    /// No node that runs its images can take the replacement, because of node selector, node
    /// affinity, taints, or volumes.
    NoNode,
}

impl NotElsewhere {
    fn as_str(self) -> &'static str {
        match self {
            Self::MayRunThere => "nothing would keep the new pod away from such nodes",
            Self::NoNode => "no node that its images run on can take it",
        }
    }
}

/// Whether a pod is evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Eviction {
    /// The pod is evicted now. The write is to be recorded for its controller.
    Now(Written),
    /// The pause after the last eviction of this controller is not over.
    Later(Duration),
    /// Replacements by this controller fail in the same way. The write is to be recorded for the
    /// controller.
    GivenUp(Written),
    /// The pod is not evicted, for this reason.
    Never(&'static str),
}

/// The state of a misplaced pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MisplacedState {
    /// Pods are only reported (`misplaced: report`).
    Reported,
    Evicted,
    /// The pause after the last eviction of this controller is not over, or another of its pods
    /// still waits for a node.
    NotYet,
    /// It is not known yet whether the API server calls the webhook, which places the replacement.
    NoWebhook,
    /// A disruption budget does not allow the eviction now.
    Budget,
    /// The rate of evictions does not allow the eviction now.
    TooMany,
    /// The pod is not evicted, for this reason.
    NotEvicted(&'static str),
}

/// Why the pods of a controller are not evicted any more.
pub(crate) const GIVEN_UP_WHY: &str = "a new pod of its controller failed in the same way";

impl MisplacedPod<'_> {
    /// Whether the pod may be evicted. `last`: the recorded eviction for its controller.
    pub(crate) fn eviction(&self, last: Option<Written>, now: Instant) -> Eviction {
        let wanted = hash(&self.pod.spec.images().into_keys().collect::<Vec<_>>());
        if !self.pod.is_in_scope() {
            return Eviction::Never("it has ended");
        }
        if let Err(why) = self.is_replaced() {
            return Eviction::Never(why);
        }
        if let Err(why) = self.elsewhere {
            return Eviction::Never(why.as_str());
        }
        // If the images changed since the last eviction, the new images may run, so pods of this
        // controller may be evicted again.
        if let Some(last) = last.filter(|last| last.wanted == wanted) {
            // A pod that is older than the last eviction is no replacement. One second is added,
            // because `creationTimestamp` has whole seconds.
            let since = now.saturating_duration_since(last.at);
            let is_replacement = self.age < since + Duration::from_secs(1);
            if last.repairs == GIVEN_UP || is_replacement {
                // The record is renewed while such pods are seen, so that it is not forgotten.
                return Eviction::GivenUp(Written {
                    repairs: GIVEN_UP,
                    at: now,
                    ..last
                });
            }
        }
        match repairs::OF_EVICTIONS.next(last, true, wanted, now) {
            Ok(written) => Eviction::Now(written),
            Err(wait) => Eviction::Later(wait),
        }
    }

    /// Whether the controller creates a replacement that may get another node; if not, why.
    fn is_replaced(&self) -> Result<(), &'static str> {
        let Some(owner) = self.pod.controller() else {
            return Err("no controller would replace it");
        };
        match (owner.api_version.as_str(), owner.kind.as_str()) {
            ("apps/v1", "ReplicaSet" | "StatefulSet") | ("v1", "ReplicationController") => Ok(()),
            ("batch/v1", "Job") => Err("its Job would count it as failed"),
            (_, "DaemonSet") => Err("its DaemonSet would replace it on the same node"),
            _ => Err("it is not known whether its controller would replace it"),
        }
    }

    /// The text of the event: container, node, image, reason, advice.
    pub(crate) fn note(&self, state: MisplacedState) -> String {
        let Some(first) = self.found.first() else {
            return String::new();
        };
        let node = self.pod.spec.node_name.as_deref().unwrap_or_default();
        let WrongArchitecture {
            container, image, ..
        } = first;
        let more = match self.found.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        let platform = self.platform;
        let cause = first.cause.as_str();
        let why = match self.architectures {
            _ if self.is_only_stated(first) => {
                let stated = self.stated.map(|set| set.join(", ")).unwrap_or_default();
                format!("the annotation archaware.dev/architectures lists only {stated}")
            }
            Some(set) if first.cause == WrongArchitectureCause::ImageLacksArchitecture => {
                format!("image {image} is for {}", set.join(", "))
            }
            Some(set) if self.is_lied_about(first) => {
                let set = set.join(", ");
                format!("{cause}, although image {image} claims to be for {set}")
            }
            Some(set) => {
                let set = set.join(", ");
                format!("{cause}, and image {image} is for {set}")
            }
            None => format!("{cause}; image {image}"),
        };
        let advice = self.advice(first, state);
        format!(
            "container {container}{more} cannot run on node {node} ({platform}): {why}. {advice}"
        )
    }

    /// Whether the image claims to be for the node, but contains a program that is not.
    fn is_lied_about(&self, first: &WrongArchitecture) -> bool {
        first.cause == WrongArchitectureCause::ExecFormatError
            && self.architectures.is_some()
            && !self.image_lacks
    }

    /// Whether the image is for the node, and only the annotation of the author excludes the node.
    fn is_only_stated(&self, first: &WrongArchitecture) -> bool {
        first.cause == WrongArchitectureCause::ImageLacksArchitecture
            && self.stated.is_some()
            && !self.image_lacks
    }

    fn advice(&self, first: &WrongArchitecture, state: MisplacedState) -> String {
        if self.is_lied_about(first) {
            return format!(
                "Build the image for {} again, or list the architectures on which it runs in the annotation archaware.dev/architectures",
                self.platform
            );
        }
        let build = if self.is_only_stated(first) {
            "Correct the annotation archaware.dev/architectures".to_owned()
        } else {
            format!("Build the image for {}", self.platform)
        };
        match state {
            MisplacedState::Evicted => {
                "archaware evicts the pod, so that its replacement gets a node that its images run on".to_owned()
            }
            MisplacedState::NotYet => {
                "archaware evicts the pod later: pods of a controller are evicted one after the other"
                    .to_owned()
            }
            MisplacedState::NoWebhook => {
                "archaware evicts the pod when the API server has called the webhook, because only the webhook keeps the new \
                 pod away from such nodes"
                    .to_owned()
            }
            MisplacedState::TooMany => {
                "archaware evicts the pod when concurrency.evictionsPerMinute allows it".to_owned()
            }
            MisplacedState::Budget => {
                "A PodDisruptionBudget does not allow the eviction of the pod now".to_owned()
            }
            MisplacedState::NotEvicted(why) => {
                format!("{build}. archaware does not evict the pod: {why}")
            }
            MisplacedState::Reported if self.is_replaced().is_ok() && self.elsewhere.is_ok() => {
                format!(
                    "{build}, or delete the pod, so that its replacement is placed by its images"
                )
            }
            MisplacedState::Reported => format!("{build}, or keep the pod away from such nodes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pod(change: &Value) -> Pod {
        let mut pod = json!({
            "metadata": {"name": "p", "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "app:1"}]},
            "status": {"phase": "Running"},
        });
        json_patch::merge(&mut pod, change);
        serde_json::from_value(pod).unwrap()
    }

    fn owned_by(version: &str, kind: &str) -> Value {
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": version, "kind": kind, "name": "o", "uid": "o", "controller": true}]}})
    }

    fn found(cause: WrongArchitectureCause) -> Vec<WrongArchitecture> {
        vec![WrongArchitecture {
            container: "c".to_owned(),
            image: "app:1".to_owned(),
            cause,
        }]
    }

    fn misplaced<'a>(
        pod: &'a Pod,
        found: &'a [WrongArchitecture],
        set: Option<&'a ImageArchitectures>,
    ) -> MisplacedPod<'a> {
        MisplacedPod {
            pod,
            age: 600 * SECOND,
            platform: "arm64",
            found,
            architectures: set,
            image_lacks: set.is_some_and(|set| !set.contains("arm64")),
            stated: None,
            elsewhere: if set.is_some_and(|set| !set.contains("arm64")) {
                Ok(())
            } else {
                Err(NotElsewhere::MayRunThere)
            },
        }
    }

    #[test]
    fn only_pods_that_are_made_anew_elsewhere_are_evicted() {
        let amd64: ImageArchitectures = "amd64".parse().unwrap();
        let arm64: ImageArchitectures = "arm64".parse().unwrap();
        let wrong = found(WrongArchitectureCause::ImageLacksArchitecture);
        let elsewhere = Some(&amd64);
        for (change, set, expected) in [
            (json!({}), elsewhere, "now"),
            (owned_by("apps/v1", "StatefulSet"), elsewhere, "now"),
            (
                owned_by("batch/v1", "Job"),
                elsewhere,
                "its Job would count it as failed",
            ),
            (owned_by("v1", "ReplicationController"), elsewhere, "now"),
            (
                owned_by("apps/v1", "DaemonSet"),
                elsewhere,
                "its DaemonSet would replace it on the same node",
            ),
            (
                owned_by("tekton.dev/v1", "TaskRun"),
                elsewhere,
                "it is not known whether its controller would replace it",
            ),
            (
                json!({"metadata": {"ownerReferences": null}}),
                elsewhere,
                "no controller would replace it",
            ),
            (
                json!({"status": {"phase": "Failed"}}),
                elsewhere,
                "it has ended",
            ),
            (
                json!({}),
                Some(&arm64),
                "nothing would keep the new pod away from such nodes",
            ),
            (
                json!({}),
                None,
                "nothing would keep the new pod away from such nodes",
            ),
        ] {
            let pod = pod(&change);
            let found = match misplaced(&pod, &wrong, set).eviction(None, Instant::now()) {
                Eviction::Now(_) => "now",
                Eviction::Never(why) => why,
                other => panic!("{other:?}"),
            };
            assert_eq!(found, expected, "{change}");
        }
    }

    #[test]
    fn a_controller_s_pods_go_one_after_the_other_and_never_twice() {
        let amd64: ImageArchitectures = "amd64".parse().unwrap();
        let wrong = found(WrongArchitectureCause::ImageLacksArchitecture);
        let pod = pod(&json!({}));
        let of_age = |seconds| MisplacedPod {
            age: seconds * SECOND,
            ..misplaced(&pod, &wrong, Some(&amd64))
        };
        let start = Instant::now();
        let Eviction::Now(first) = of_age(600).eviction(None, start) else {
            panic!("not evicted");
        };
        let next = |age, last, seconds| of_age(age).eviction(Some(last), start + seconds * SECOND);
        assert_eq!(next(610, first, 10), Eviction::Later(50 * SECOND));
        let Eviction::Now(second) = next(660, first, 60) else {
            panic!("not evicted");
        };
        assert_eq!(next(670, second, 70), Eviction::Later(110 * SECOND));
        // Created since the last eviction, and it fails again.
        let Eviction::GivenUp(last) = next(20, second, 90) else {
            panic!("evicted again");
        };
        assert!(matches!(next(900, last, 300), Eviction::GivenUp(_)));
        // With another image, pods of this controller are evicted again.
        let with_other_image = Written { wanted: 1, ..last };
        assert!(matches!(next(20, with_other_image, 90), Eviction::Now(_)));
    }

    #[test]
    fn events_say_what_to_do() {
        use WrongArchitectureCause as Cause;
        let set = |name: &str| -> ImageArchitectures { name.parse().unwrap() };
        let (amd64, arm64) = (set("amd64"), set("arm64"));
        let pod = pod(&json!({}));
        for (cause, set, state, expected) in [
            (
                Cause::ImageLacksArchitecture,
                Some(&amd64),
                MisplacedState::Reported,
                "container c cannot run on node n (arm64): image app:1 is for amd64. Build the image for arm64, or delete the pod, so that its replacement is placed by its images",
            ),
            // A new pod could get there again.
            (
                Cause::ExecFormatError,
                None,
                MisplacedState::Reported,
                "container c cannot run on node n (arm64): exec format error; image app:1. Build the image for arm64, or keep the pod away from such nodes",
            ),
            (
                Cause::NoMatchingPlatform,
                Some(&amd64),
                MisplacedState::NotEvicted("it has ended"),
                "container c cannot run on node n (arm64): no match for the platform of the node, and image app:1 is for amd64. Build the image for arm64. archaware does not evict the pod: it has ended",
            ),
            (
                Cause::NoMatchingPlatform,
                Some(&amd64),
                MisplacedState::TooMany,
                "container c cannot run on node n (arm64): no match for the platform of the node, and image app:1 is for amd64. archaware evicts the pod when concurrency.evictionsPerMinute allows it",
            ),
            (
                Cause::ExecFormatError,
                Some(&arm64),
                MisplacedState::Reported,
                "container c cannot run on node n (arm64): exec format error, although image app:1 claims to be for arm64. Build the image for arm64 again, or list the architectures on which it runs in the annotation archaware.dev/architectures",
            ),
        ] {
            let wrong = found(cause);
            let note = misplaced(&pod, &wrong, set).note(state);
            assert_eq!(note, expected);
        }
    }

    #[test]
    fn a_statement_of_the_author_is_named() {
        let pod = pod(&json!({}));
        let both: ImageArchitectures = "amd64,arm64".parse().unwrap();
        let stated: Architectures = "amd64".parse().unwrap();
        let wrong = found(WrongArchitectureCause::ImageLacksArchitecture);
        let misplaced = MisplacedPod {
            stated: Some(&stated),
            elsewhere: Ok(()),
            ..misplaced(&pod, &wrong, Some(&both))
        };
        assert_eq!(
            misplaced.note(MisplacedState::Reported),
            "container c cannot run on node n (arm64): the annotation archaware.dev/architectures lists only amd64. \
             Correct the annotation archaware.dev/architectures, or delete the pod, so that its replacement is placed by its images"
        );
    }
}
