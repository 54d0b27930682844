//! The consequences of a patch that was not applied.

use std::time::Duration;

use crate::cluster::{api::ApiError, events::EventReason, writer::PatchOutcome};

use super::EventDraft;

/// How long to wait for the watch after a stale patch.
const STALE_RETRY: Duration = Duration::from_secs(2);
/// Delay before the removal of a scheduling gate is retried.
pub(crate) const GATE_RETRY: Duration = Duration::from_secs(15);

/// The consequences of a patch that was not applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FollowUp {
    /// When to reconcile again; `None` to wait for a change of the object.
    pub(crate) requeue: Option<Duration>,
    /// Whether the startup sequence counts the object as attempted. Stale patches and temporary
    /// errors do not count.
    pub(crate) is_complete: bool,
    /// An event about the object.
    pub(crate) event: Option<EventDraft>,
}

/// The consequences of a patch; `None` if it was applied. `refusals`: how many patches of the
/// object were refused in a row, including this one.
pub(crate) fn after_patch(written: &PatchOutcome, refusals: u32) -> Option<FollowUp> {
    let (requeue, is_complete, event) = match written {
        PatchOutcome::Applied => return None,
        PatchOutcome::Gone => (None, true, None),
        // The watch will deliver the change. The retry is for a watch that is interrupted.
        PatchOutcome::Stale => (Some(STALE_RETRY), false, None),
        PatchOutcome::Stopping => (None, false, None),
        PatchOutcome::Failed(error) => {
            // RBAC, validation or an admission plugin rejected the change, which the object's owner
            // should know.
            let refused = error.is_refusal();
            let hint = match error {
                ApiError::Forbidden(_) => "; apply the manifests of this version again",
                _ => "",
            };
            let note = format!("archaware cannot change this object: {error}{hint}");
            let draft = || EventDraft::new(EventReason::ChangeRefused, note);
            (error.retry(refusals), refused, refused.then(draft))
        }
    };
    Some(FollowUp {
        requeue,
        is_complete,
        event,
    })
}

/// The consequences of a patch that only removes archaware's scheduling gate. The patch is always
/// retried, because the pod must not wait for its next change. After a denial, the pauses grow as
/// for other patches.
pub(crate) fn after_gate_removal(written: &PatchOutcome, refusals: u32) -> Option<FollowUp> {
    let mut follow = after_patch(written, refusals)?;
    follow.is_complete = true;
    let is_denied = matches!(written, PatchOutcome::Failed(error) if error.is_refusal());
    if *written != PatchOutcome::Gone && !(is_denied && follow.requeue.is_some()) {
        follow.requeue = Some(GATE_RETRY);
    }
    Some(follow)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each outcome: when to retry (in whole seconds without jitter), whether the attempt
    /// counts, and whether there is an event.
    #[test]
    fn every_outcome_has_its_consequence() {
        let text = || "m".to_owned();
        let limited = |seconds| ApiError::TooManyRequests {
            message: text(),
            retry_after: Some(Duration::from_secs(seconds)),
        };
        for (written, requeue, is_complete, event) in [
            (PatchOutcome::Gone, None, true, false),
            (PatchOutcome::Stale, Some(2..=2), false, false),
            (PatchOutcome::Stopping, None, false, false),
            (
                PatchOutcome::Failed(ApiError::Invalid(text())),
                None,
                true,
                true,
            ),
            (
                PatchOutcome::Failed(ApiError::Denied(text())),
                Some(30..=30),
                true,
                true,
            ),
            (
                PatchOutcome::Failed(ApiError::Forbidden(text())),
                Some(30..=30),
                true,
                true,
            ),
            (
                PatchOutcome::Failed(limited(9)),
                Some(11..=13),
                false,
                false,
            ),
            (PatchOutcome::Failed(limited(1)), Some(3..=5), false, false),
            (
                PatchOutcome::Failed(ApiError::TimedOut(Duration::from_secs(10))),
                Some(2..=4),
                false,
                false,
            ),
            (
                PatchOutcome::Failed(ApiError::Unreachable(text())),
                Some(2..=4),
                false,
                false,
            ),
        ] {
            let follow = after_patch(&written, 1).unwrap();
            let seconds = follow.requeue.map(|time| time.as_secs());
            let fits = match (&requeue, seconds) {
                (Some(range), Some(seconds)) => range.contains(&seconds),
                (expected, found) => expected.is_none() && found.is_none(),
            };
            assert!(fits, "{written:?}: {seconds:?}");
            assert_eq!(
                (follow.is_complete, follow.event.is_some()),
                (is_complete, event),
                "{written:?}"
            );
            let release = after_gate_removal(&written, 1).unwrap();
            let retry = match &written {
                PatchOutcome::Gone => None,
                PatchOutcome::Failed(ApiError::Denied(_) | ApiError::Forbidden(_)) => {
                    follow.requeue
                }
                _ => Some(GATE_RETRY),
            };
            assert_eq!((release.requeue, release.is_complete), (retry, true));
        }
        assert_eq!(after_patch(&PatchOutcome::Applied, 0), None);
        assert_eq!(after_gate_removal(&PatchOutcome::Applied, 0), None);
    }
}
