//! The failure policy for pods whose images cannot be resolved: archaware retries, and after a
//! while it applies the configured action.

use std::{collections::BTreeSet, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use archaware_base::backoff::Backoff;
use archaware_platform::{Architecture, Architectures};

use super::{decision::Decision, policy::PlacementPolicy};

/// How long to wait for images, and what to do then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailurePolicy {
    /// Time from the first failure until the action applies.
    pub after: Duration,
    /// The action after that.
    pub action: FailureAction,
    /// The architectures for [`FailureAction::Tolerate`].
    pub architectures: BTreeSet<Architecture>,
}

/// What to do with a pod whose images could not be resolved in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FailureAction {
    /// Tolerate every architecture.
    #[default]
    TolerateAll,
    /// Tolerate the architectures in `failure.architectures`.
    Tolerate,
    /// Keep the pod waiting.
    Hold,
}

/// A failed resolution of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFailure {
    /// Delays between retries; `None` if the registry sets the delay, or if only a change of the
    /// pod can help.
    pub backoff: Option<Backoff>,
    /// The registry's `Retry-After`.
    pub retry_after: Option<Duration>,
}

/// How often and for how long the images of an object have failed in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailureHistory {
    /// Number of failures, counted from 1.
    pub failures: u32,
    /// Time since the first failure.
    pub failing_for: Duration,
}

/// What to do after a failed attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureStep {
    /// The decision that the failure policy makes instead of the images.
    pub decision: Option<Decision>,
    /// Whether the decision stands until the images change. Resolved images could only narrow it,
    /// but a pod cannot lose tolerations, and a template would need another rollout.
    pub stands: bool,
    /// When to retry; `None` if the decision stands or no retry can succeed.
    pub retry: Option<Duration>,
}

/// The next step after a failed attempt. `known`: the architectures that the resolved images share;
/// the decision stays within them. `critical` pods (with a system-critical priority class) do not
/// wait, because the cluster depends on them.
pub fn next_step(
    config: &FailurePolicy,
    policy: &PlacementPolicy,
    known: Option<&Architectures>,
    failures: &[ImageFailure],
    history: FailureHistory,
    critical: bool,
) -> FailureStep {
    let due = critical || history.failing_for >= config.after;
    let action = if critical {
        FailureAction::TolerateAll
    } else {
        config.action
    };
    let decision = match action {
        _ if !due => None,
        FailureAction::Hold => None,
        FailureAction::TolerateAll => Some(policy.decide(known.cloned())),
        FailureAction::Tolerate => {
            let allowed = &config.architectures;
            let within = known.map_or_else(
                || allowed.iter().cloned().collect(),
                |known| known.clone().within(allowed),
            );
            Some(policy.limit(within))
        }
    };
    if decision.is_some() && action == FailureAction::TolerateAll {
        return FailureStep {
            decision,
            stands: true,
            retry: None,
        };
    }
    let soonest = failures
        .iter()
        .filter_map(|failure| failure.retry(history.failures))
        .min();
    // The action applies after `config.after` even if no retry can succeed.
    let until_due = (!due).then(|| config.after.saturating_sub(history.failing_for));
    FailureStep {
        decision,
        stands: false,
        retry: soonest.into_iter().chain(until_due).min(),
    }
}

impl ImageFailure {
    /// `None` when a retry cannot succeed until the pod changes.
    fn retry(self, failures: u32) -> Option<Duration> {
        let backoff = self.backoff.map(|backoff| backoff.delay(failures));
        let retry_after = self
            .retry_after
            .map(|after| after.max(Duration::from_secs(1)));
        backoff.max(retry_after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNAVAILABLE: ImageFailure = ImageFailure {
        backoff: Some(Backoff::seconds(1, 60)),
        retry_after: None,
    };
    const NOT_FOUND: ImageFailure = ImageFailure {
        backoff: Some(Backoff::seconds(5, 600)),
        retry_after: None,
    };
    /// A failure that no retry can fix.
    const HOPELESS: ImageFailure = ImageFailure {
        backoff: None,
        retry_after: None,
    };

    fn run(
        action: FailureAction,
        failure: ImageFailure,
        failures: u32,
        seconds: u64,
        critical: bool,
        known: Option<&[&str]>,
    ) -> FailureStep {
        let config = FailurePolicy {
            after: Duration::from_mins(1),
            action,
            architectures: ["amd64".parse().unwrap()].into(),
        };
        let attempts = FailureHistory {
            failures,
            failing_for: Duration::from_secs(seconds),
        };
        let policy = PlacementPolicy::default();
        let known: Option<Architectures> =
            known.map(|names| names.iter().map(|name| name.parse().unwrap()).collect());
        next_step(
            &config,
            &policy,
            known.as_ref(),
            &[failure],
            attempts,
            critical,
        )
    }

    #[test]
    fn retries_back_off_and_the_action_comes_due() {
        use FailureAction::{Hold, Tolerate, TolerateAll};
        let tolerate_all = || Some(Decision::TolerateAll);
        let amd64 = || Some(Decision::Architectures("amd64".parse().unwrap()));
        for (action, failure, failures, seconds, critical, decision, retry) in [
            (TolerateAll, UNAVAILABLE, 1, 0, false, None, Some(1)),
            (TolerateAll, UNAVAILABLE, 4, 15, false, None, Some(8)),
            (TolerateAll, UNAVAILABLE, 7, 55, false, None, Some(5)),
            (TolerateAll, UNAVAILABLE, 7, 60, false, tolerate_all(), None),
            (TolerateAll, NOT_FOUND, 1, 0, false, None, Some(5)),
            (TolerateAll, HOPELESS, 1, 0, false, None, Some(60)),
            (TolerateAll, UNAVAILABLE, 1, 0, true, tolerate_all(), None),
            (Hold, UNAVAILABLE, 1, 0, true, tolerate_all(), None),
            (Hold, UNAVAILABLE, 9, 100, false, None, Some(60)),
            (Hold, NOT_FOUND, 40, 10_000, false, None, Some(600)),
            (Hold, HOPELESS, 2, 100, false, None, None),
            (Tolerate, NOT_FOUND, 9, 100, false, amd64(), Some(600)),
        ] {
            let expected = FailureStep {
                stands: decision == tolerate_all(),
                decision,
                retry: retry.map(Duration::from_secs),
            };
            assert_eq!(
                run(action, failure, failures, seconds, critical, None),
                expected,
                "{action:?} {failure:?}"
            );
        }
    }

    /// An amd64-only app with a sidecar that cannot be read gets amd64, never everything.
    #[test]
    fn the_action_is_within_what_the_known_images_share() {
        use FailureAction::{Hold, Tolerate, TolerateAll};
        let on = |names: &[&str]| {
            let set = names.iter().map(|name| name.parse().unwrap());
            Some(Decision::Architectures(set.collect()))
        };
        let none = Some(Decision::NoCommonArchitecture);
        for (action, critical, known, decision, stands) in [
            (TolerateAll, false, &["amd64"][..], on(&["amd64"]), true),
            (
                TolerateAll,
                false,
                &["amd64", "arm64"],
                on(&["amd64", "arm64"]),
                true,
            ),
            (TolerateAll, true, &["arm64"], on(&["arm64"]), true),
            (Hold, true, &["arm64"], on(&["arm64"]), true),
            (Hold, false, &["arm64"], None, false),
            // The configured architectures are amd64.
            (Tolerate, false, &["amd64", "arm64"], on(&["amd64"]), false),
            (Tolerate, false, &["arm64"], none, false),
            (Tolerate, true, &["arm64"], on(&["arm64"]), true),
        ] {
            let step = run(action, UNAVAILABLE, 9, 100, critical, Some(known));
            assert_eq!(
                (step.decision, step.stands),
                (decision, stands),
                "{action:?} {critical} {known:?}"
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
            let limited = ImageFailure {
                retry_after,
                ..HOPELESS
            };
            let next = run(FailureAction::Hold, limited, 1, 120, false, None);
            assert_eq!(next.retry, expected);
        }
    }
}
