//! How one attempt at an object ended.

use kube::{Resource, ResourceExt};
use kube_runtime::controller::Action;

use crate::{
    cluster::{
        events::{EventReason, Events},
        writer::{Outcome, STALE_RETRY, WriteError},
    },
    image::chain,
};

/// When to look at the object again, and whether this attempt counts as one: a patch that did not get
/// through has decided nothing, and the start waits for its repetition.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) action: Action,
    pub(super) complete: bool,
}

impl Attempt {
    pub(super) fn complete(action: Action) -> Self {
        Self {
            action,
            complete: true,
        }
    }

    /// What follows from a patch that was not applied; `None` when it was.
    pub(super) fn unless_applied<K: Resource<DynamicType = ()>>(
        object: &K,
        written: &Result<Outcome, WriteError>,
        events: &Events,
    ) -> Option<Self> {
        let error = match written {
            Ok(Outcome::Applied) => return None,
            Ok(Outcome::Gone) => return Some(Self::complete(Action::await_change())),
            // The watch brings what changed; the retry is for a watch that is down just now.
            Ok(Outcome::Stale) => {
                return Some(Self {
                    action: Action::requeue(STALE_RETRY),
                    complete: false,
                });
            }
            Err(error) => error,
        };
        let name = object.name_any();
        let name = object
            .namespace()
            .map_or(name.clone(), |namespace| format!("{namespace}/{name}"));
        tracing::warn!(kind = %K::kind(&()), name, error = %chain(error), "not patched");
        // RBAC or an admission plugin: its owner should know, too.
        let refused = matches!(error, WriteError::Refused(_) | WriteError::Forbidden(_));
        if refused {
            events.publish(object, EventReason::ChangeRefused, chain(error));
        }
        let action = error
            .retry()
            .map_or_else(Action::await_change, Action::requeue);
        Some(Self {
            action,
            complete: refused,
        })
    }
}
