//! What happens to a pod whose images cannot be resolved: it is tried again, and after a while the
//! configured action is taken.

use std::time::Duration;

use crate::{
    config::{FailureAction, FailureConfig},
    image::Reason,
};

use super::pod::{Decision, Policy};

/// One image that could not be resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub reason: Reason,
    /// When the registry says to come back.
    pub retry_after: Option<Duration>,
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

/// The next step after attempt number `attempts` (from 1) failed, `tried` after the first one.
/// `critical` pods (a system-critical priority class) do not wait: the cluster itself needs them.
pub fn next(
    config: &FailureConfig,
    policy: &Policy,
    failures: &[Failure],
    attempts: u32,
    tried: Duration,
    critical: bool,
) -> Next {
    let due = critical || tried >= config.after;
    let decision = match (due, config.action) {
        (true, _) if critical => Some(Decision::StepAside),
        (true, FailureAction::TolerateAll) => Some(Decision::StepAside),
        (true, FailureAction::Tolerate) => {
            Some(policy.limit(config.architectures.iter().cloned().collect()))
        }
        (true, FailureAction::Hold) | (false, _) => None,
    };
    if decision == Some(Decision::StepAside) {
        return Next {
            decision,
            due,
            retry: None,
        };
    }
    let back_off = failures
        .iter()
        .filter_map(|failure| back_off(*failure, attempts))
        .min();
    // Failures that no retry can mend still come due.
    let until_due = (!due).then(|| config.after.saturating_sub(tried));
    Next {
        decision,
        due,
        retry: back_off.into_iter().chain(until_due).min(),
    }
}

/// `None` for what stays wrong until the pod itself changes.
fn back_off(failure: Failure, attempts: u32) -> Option<Duration> {
    let seconds = Duration::from_secs;
    let growing = |first: Duration, most: Duration| {
        first
            .saturating_mul(1 << attempts.saturating_sub(1).min(16))
            .min(most)
    };
    match failure.reason {
        Reason::RateLimited => Some(failure.retry_after.unwrap_or(seconds(30)).max(seconds(1))),
        Reason::Unavailable => Some(
            failure
                .retry_after
                .unwrap_or_default()
                .max(growing(seconds(1), seconds(60))),
        ),
        Reason::NotFound | Reason::Denied => Some(growing(seconds(5), seconds(600))),
        // A tag may be pushed again with better content; a reference does not get better.
        Reason::TooLarge | Reason::Corrupt | Reason::Unsupported => {
            Some(growing(seconds(60), seconds(600)))
        }
        Reason::InvalidReference => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn run(
        action: FailureAction,
        reason: Reason,
        attempts: u32,
        tried: u64,
        critical: bool,
    ) -> Next {
        let config = FailureConfig {
            action,
            architectures: vec!["amd64".parse().unwrap()],
            ..FailureConfig::default()
        };
        let failure = Failure {
            reason,
            retry_after: None,
        };
        let policy = Policy::from(&Config::default());
        next(
            &config,
            &policy,
            &[failure],
            attempts,
            Duration::from_secs(tried),
            critical,
        )
    }

    #[test]
    fn retries_back_off_and_the_action_comes_due() {
        use FailureAction::{Hold, Tolerate, TolerateAll};
        let amd64 = || Some(Decision::Architectures(["amd64".parse().unwrap()].into()));
        for (action, reason, attempts, tried, critical, decision, retry) in [
            (TolerateAll, Reason::Unavailable, 1, 0, false, None, Some(1)),
            (
                TolerateAll,
                Reason::Unavailable,
                4,
                15,
                false,
                None,
                Some(8),
            ),
            (
                TolerateAll,
                Reason::Unavailable,
                7,
                55,
                false,
                None,
                Some(5),
            ),
            (
                TolerateAll,
                Reason::Unavailable,
                7,
                60,
                false,
                Some(Decision::StepAside),
                None,
            ),
            (TolerateAll, Reason::NotFound, 1, 0, false, None, Some(5)),
            (TolerateAll, Reason::Corrupt, 1, 0, false, None, Some(60)),
            (
                TolerateAll,
                Reason::Unavailable,
                1,
                0,
                true,
                Some(Decision::StepAside),
                None,
            ),
            (
                Hold,
                Reason::Unavailable,
                1,
                0,
                true,
                Some(Decision::StepAside),
                None,
            ),
            (Hold, Reason::Unavailable, 9, 100, false, None, Some(60)),
            (Hold, Reason::NotFound, 40, 10_000, false, None, Some(600)),
            (Hold, Reason::Corrupt, 2, 100, false, None, Some(120)),
            (Hold, Reason::InvalidReference, 2, 100, false, None, None),
            (Tolerate, Reason::Denied, 9, 100, false, amd64(), Some(600)),
        ] {
            let expected = Next {
                decision,
                due: critical || tried >= 60,
                retry: retry.map(Duration::from_secs),
            };
            assert_eq!(
                run(action, reason, attempts, tried, critical),
                expected,
                "{action:?} {reason:?}"
            );
        }
    }

    #[test]
    fn a_registry_that_limits_its_rate_is_obeyed() {
        let config = FailureConfig {
            action: FailureAction::Hold,
            ..FailureConfig::default()
        };
        let policy = Policy::from(&Config::default());
        let minute = Some(Duration::from_mins(5));
        let failure = Failure {
            reason: Reason::RateLimited,
            retry_after: minute,
        };
        let tried = Duration::from_mins(2);
        assert_eq!(
            next(&config, &policy, &[failure], 1, tried, false).retry,
            minute
        );
    }
}
