//! What happens to a pod whose images cannot be resolved: it is tried again, and after a while the
//! configured action is taken.

use std::{collections::BTreeSet, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{backoff::Backoff, platform::Architecture};

use super::{decision::Decision, pod::Policy};

/// How long pods wait whose images cannot be resolved, and what happens then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailurePolicy {
    /// How long to try.
    pub after: Duration,
    /// What to do then.
    pub action: FailureAction,
    /// For [`FailureAction::Tolerate`].
    pub architectures: BTreeSet<Architecture>,
}

/// What to do with a pod whose images could not be looked up in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FailureAction {
    /// Step aside: tolerate every architecture.
    #[default]
    TolerateAll,
    /// Tolerate the architectures in `failure.architectures`.
    Tolerate,
    /// Let it wait.
    Hold,
}

/// One image that could not be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// How soon it is worth another try; `None`: not until the pod changes.
    pub backoff: Option<Backoff>,
    /// When the registry says to come back.
    pub retry_after: Option<Duration>,
}

/// How often, and for how long, the images of an object have failed in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempts {
    /// The number of failures, counted from 1.
    pub failures: u32,
    /// The time since the first one.
    pub failing_for: Duration,
}

/// What to do now, and when to look again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    /// The decision that the failure policy takes in place of the images.
    pub decision: Option<Decision>,
    /// Whether the failure policy has had its say, if only that the pod is held.
    pub due: bool,
    /// When to try again; never after a decision that nothing can widen any more.
    pub retry: Option<Duration>,
}

/// The next step after a failed attempt. `critical` pods (a system-critical priority class) do not wait: the
/// cluster itself needs them.
pub fn next(
    config: &FailurePolicy,
    policy: &Policy,
    failures: &[Failure],
    attempts: Attempts,
    critical: bool,
) -> Next {
    let due = critical || attempts.failing_for >= config.after;
    let decision = match (due, config.action) {
        (true, _) if critical => Some(Decision::StepAside),
        (true, FailureAction::TolerateAll) => Some(Decision::StepAside),
        (true, FailureAction::Tolerate) => Some(policy.limit(config.architectures.clone())),
        (true, FailureAction::Hold) | (false, _) => None,
    };
    if decision == Some(Decision::StepAside) {
        return Next {
            decision,
            due,
            retry: None,
        };
    }
    let soonest = failures
        .iter()
        .filter_map(|failure| failure.retry(attempts.failures))
        .min();
    // Failures that no retry can mend still come due.
    let until_due = (!due).then(|| config.after.saturating_sub(attempts.failing_for));
    Next {
        decision,
        due,
        retry: soonest.into_iter().chain(until_due).min(),
    }
}

impl Failure {
    /// `None` for what stays wrong until the pod itself changes.
    fn retry(self, failures: u32) -> Option<Duration> {
        let backoff = self.backoff.map(|backoff| backoff.delay(failures));
        let asked = self
            .retry_after
            .map(|after| after.max(Duration::from_secs(1)));
        backoff.max(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const UNAVAILABLE: Failure = Failure {
        backoff: Some(Backoff::seconds(1, 60)),
        retry_after: None,
    };
    const NOT_FOUND: Failure = Failure {
        backoff: Some(Backoff::seconds(5, 600)),
        retry_after: None,
    };
    /// What no retry can mend.
    const HOPELESS: Failure = Failure {
        backoff: None,
        retry_after: None,
    };

    fn run(
        action: FailureAction,
        failure: Failure,
        failures: u32,
        seconds: u64,
        critical: bool,
    ) -> Next {
        let config = FailurePolicy {
            after: Duration::from_mins(1),
            action,
            architectures: ["amd64".parse().unwrap()].into(),
        };
        let attempts = Attempts {
            failures,
            failing_for: Duration::from_secs(seconds),
        };
        let policy = Policy::from(&Config::default());
        next(&config, &policy, &[failure], attempts, critical)
    }

    #[test]
    fn retries_back_off_and_the_action_comes_due() {
        use FailureAction::{Hold, Tolerate, TolerateAll};
        let all = || Some(Decision::StepAside);
        let amd64 = || Some(Decision::Architectures(["amd64".parse().unwrap()].into()));
        for (action, failure, failures, seconds, critical, decision, retry) in [
            (TolerateAll, UNAVAILABLE, 1, 0, false, None, Some(1)),
            (TolerateAll, UNAVAILABLE, 4, 15, false, None, Some(8)),
            (TolerateAll, UNAVAILABLE, 7, 55, false, None, Some(5)),
            (TolerateAll, UNAVAILABLE, 7, 60, false, all(), None),
            (TolerateAll, NOT_FOUND, 1, 0, false, None, Some(5)),
            (TolerateAll, HOPELESS, 1, 0, false, None, Some(60)),
            (TolerateAll, UNAVAILABLE, 1, 0, true, all(), None),
            (Hold, UNAVAILABLE, 1, 0, true, all(), None),
            (Hold, UNAVAILABLE, 9, 100, false, None, Some(60)),
            (Hold, NOT_FOUND, 40, 10_000, false, None, Some(600)),
            (Hold, HOPELESS, 2, 100, false, None, None),
            (Tolerate, NOT_FOUND, 9, 100, false, amd64(), Some(600)),
        ] {
            let expected = Next {
                decision,
                due: critical || seconds >= 60,
                retry: retry.map(Duration::from_secs),
            };
            assert_eq!(
                run(action, failure, failures, seconds, critical),
                expected,
                "{action:?} {failure:?}"
            );
        }
    }

    #[test]
    fn a_registry_that_limits_its_rate_is_obeyed() {
        let minutes = Some(Duration::from_mins(5));
        for (retry_after, expected) in [
            (minutes, minutes),
            (Some(Duration::ZERO), Some(Duration::from_secs(1))),
        ] {
            let limited = Failure {
                retry_after,
                ..HOPELESS
            };
            let next = run(FailureAction::Hold, limited, 1, 120, false);
            assert_eq!(next.retry, expected);
        }
    }
}
