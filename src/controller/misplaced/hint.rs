//! Hints that a pod may be on a node of the wrong architecture.

use jiff::{SignedDuration, Timestamp};

use crate::{
    cluster::{
        name::NamespacedName,
        objects::{Event, Pod},
    },
    evaluate::wrong_architecture::{self, WrongArchitectureCause},
};

/// The kubelet's events about containers that do not start, and about those that end again and
/// again.
const REASONS: [&str; 2] = ["Failed", "BackOff"];
/// Maximum age of a fresh event. The kubelet updates the status of a pod within seconds.
const FRESH: SignedDuration = SignedDuration::from_secs(30);

/// A pod that may be misplaced.
pub(super) struct Hint {
    pub(super) name: NamespacedName,
    pub(super) uid: String,
    /// The container that fails, if an event names one.
    container: Option<String>,
    /// What the event proves.
    cause: Option<WrongArchitectureCause>,
    /// Whether the event is so new that the status may lag behind it. When a watch begins, the API
    /// server sends all events of the last hour: the containers that they name may have recovered.
    is_fresh: bool,
}

impl Hint {
    pub(super) fn of_failed(pod: Pod) -> Self {
        Self {
            name: NamespacedName::of_object(&pod),
            uid: pod.metadata.uid.unwrap_or_default(),
            container: None,
            cause: None,
            is_fresh: false,
        }
    }

    /// `None` if the event is not about a failing container of a pod.
    pub(super) fn of_event(event: Event, now: Timestamp) -> Option<Self> {
        let reason = event.reason.as_deref()?;
        if !REASONS.contains(&reason) || event.regarding.name.is_empty() {
            return None;
        }
        let cause = event
            .note
            .as_deref()
            .and_then(WrongArchitectureCause::of_message);
        let age = event.last_time().map(|time| now.duration_since(time));
        Some(Self {
            is_fresh: age.is_some_and(|age| age < FRESH),
            name: NamespacedName::new(&event.regarding.namespace, &event.regarding.name),
            container: event.regarding.container().map(str::to_owned),
            cause,
            uid: event.regarding.uid,
        })
    }

    /// The failing container and the cause that an event proves for it.
    pub(super) fn proven_cause(&self) -> Option<(&str, WrongArchitectureCause)> {
        self.container.as_deref().zip(self.cause)
    }

    /// Whether the status of the pod does not say yet that the container fails.
    pub(super) fn is_ahead_of(&self, pod: &Pod) -> bool {
        let Some(container) = self.container.as_deref().filter(|_| self.is_fresh) else {
            return false;
        };
        let mut statuses = pod.status.containers();
        let status = statuses.find(|status| status.name == container);
        !status.is_some_and(wrong_architecture::says_failure)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use testsupport::mutated;

    use super::*;

    const NOW: &str = "2026-01-01T00:01:00Z";

    fn event(reason: &str, note: &str) -> Option<Hint> {
        event_at(reason, note, &json!(NOW))
    }

    fn event_at(reason: &str, note: &str, last: &Value) -> Option<Hint> {
        let event = json!({
            "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "deprecatedLastTimestamp": last,
            "regarding": {"namespace": "a", "name": "p", "uid": "u", "fieldPath": "spec.containers{c}"},
            "reason": reason, "note": note,
        });
        Hint::of_event(serde_json::from_value(event).unwrap(), NOW.parse().unwrap())
    }

    #[test]
    fn the_kubelet_s_events_name_pods() {
        let hint_of = |reason: &str, note: &str| {
            let hint = event(reason, note)?;
            let proven_cause = hint
                .proven_cause()
                .map(|(container, cause)| (container.to_owned(), cause));
            Some((hint.name.to_string(), proven_cause))
        };
        let name = "a/p".to_owned();
        let proven_cause = Some(("c".to_owned(), WrongArchitectureCause::ExecFormatError));
        assert_eq!(
            hint_of("BackOff", "Back-off restarting failed container"),
            Some((name.clone(), None))
        );
        assert_eq!(
            hint_of("Failed", "Error: exec /app: exec format error"),
            Some((name, proven_cause))
        );
        assert_eq!(hint_of("FailedMount", ""), None);
    }

    #[test]
    fn a_status_may_lag_behind_an_event() {
        let pod = |containers: Value| -> Pod {
            let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]},
                "status": {"containerStatuses": containers}});
            serde_json::from_value(pod).unwrap()
        };
        let hint = event("BackOff", "Back-off restarting failed container").unwrap();
        let ended = json!({"exitCode": 1});
        for (state, is_stale) in [
            (json!({}), true),
            (json!({"running": {}}), true),
            (json!({"waiting": {"reason": "ContainerCreating"}}), true),
            (json!({"waiting": {"reason": "PodInitializing"}}), true),
            (json!({"waiting": {"reason": "CrashLoopBackOff"}}), false),
            (json!({"waiting": {"reason": "ImagePullBackOff"}}), false),
            (json!({"terminated": ended}), false),
        ] {
            // The result of the previous run does not describe the current failure.
            let status = json!({"name": "c", "state": state, "lastState": {"terminated": ended}});
            assert_eq!(hint.is_ahead_of(&pod(json!([status]))), is_stale, "{state}");
        }
        assert!(hint.is_ahead_of(&pod(json!([]))));
        // The container of an older event may have recovered.
        for (last, is_stale) in [
            (json!("2026-01-01T00:00:40Z"), true),
            (json!("2026-01-01T00:00:20Z"), false),
            (json!(null), false),
        ] {
            let hint = event_at("BackOff", "", &last).unwrap();
            assert_eq!(hint.is_ahead_of(&pod(json!([]))), is_stale, "{last}");
        }
        assert!(!Hint::of_failed(pod(json!([]))).is_ahead_of(&pod(json!([]))));
    }

    proptest! {
        #[test]
        fn any_event_is_a_hint_or_none(event in mutated(json!({
            "metadata": {"name": "e", "namespace": "ns", "creationTimestamp": NOW},
            "regarding": {"kind": "Pod", "namespace": "ns", "name": "p", "uid": "u",
                "fieldPath": "spec.containers{c}"},
            "reason": "Failed", "note": "exec format error", "type": "Warning",
            "eventTime": "2026-01-01T00:00:00.000000Z", "deprecatedLastTimestamp": NOW,
            "series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:00.000000Z"},
        }))) {
            if let Ok(event) = serde_json::from_value::<Event>(event)
                && let Some(hint) = Hint::of_event(event, NOW.parse().unwrap())
            {
                prop_assert!(!hint.name.name.is_empty());
                prop_assert!(hint.proven_cause().is_none_or(|(container, _)| !container.is_empty()));
            }
        }
    }
}
