//! The second step of three (evaluate, plan, apply): from an object, what was read about it and what is
//! remembered of it to a patch and everything that follows. Pure: no client, no clock, no store.

pub(crate) mod daemon_set;
mod images;
pub(crate) mod node;
pub(crate) mod pod;
mod state;
mod written;

use std::time::Duration;

use crate::{
    cluster::{events::EventReason, patch::JsonPatch},
    placement::{Decision, Policy, failure::FailurePolicy},
};

pub(crate) use state::ObjectState;
pub(crate) use written::{Follow, after_release, after_write};

/// What applies to every pod and DaemonSet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policies<'a> {
    /// Which tolerations and affinity a decision means.
    pub(crate) placement: &'a Policy,
    /// What happens while images cannot be resolved.
    pub(crate) failure: &'a FailurePolicy,
}

/// What is to be done about one object now.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// Events to publish, whatever becomes of the patch.
    pub(crate) events: Vec<EventDraft>,
    /// Results to count in the metric of decisions.
    pub(crate) counts: Vec<&'static str>,
    /// The patch; `None`: the object is as it should be.
    pub(crate) write: Option<Write>,
    /// When to look again, besides on each change.
    pub(crate) requeue: Option<Duration>,
    /// Whether this counts as an attempt at the object: nodes are tainted after one at each.
    pub(crate) is_complete: bool,
    /// Whether nothing is left to be decided about the object once the patch, if any, is applied.
    pub(crate) decides: bool,
    /// What to remember of the object; `None`: nothing.
    pub(crate) state: Option<ObjectState>,
}

/// A patch and what follows when it is applied.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Write {
    /// The patch.
    pub(crate) patch: JsonPatch,
    /// What it does, for the log.
    pub(crate) change: Change,
    /// Events to publish when it is applied.
    pub(crate) events: Vec<EventDraft>,
    /// Results to count when it is applied.
    pub(crate) counts: Vec<&'static str>,
    /// The patch that only removes archaware's scheduling gate, for a pod whose change is refused.
    pub(crate) release: Option<JsonPatch>,
}

/// What a patch does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A pod gets tolerations or affinity.
    PodPlaced {
        /// The value of its annotation.
        decision: String,
        /// The failure policy decided.
        by_policy: bool,
    },
    /// Archaware's scheduling gate is removed, and nothing else.
    GateRemoved,
    /// The tolerations of a template change.
    TemplateChanged {
        /// What it tolerates from now on.
        decision: String,
        /// The failure policy decided.
        by_policy: bool,
    },
    /// The record on a DaemonSet changes, and not its template.
    RecordChanged,
    /// A node gets its taint.
    NodeTainted {
        /// The taint.
        taint: String,
        /// Whether another one is removed.
        removed: bool,
    },
    /// A node loses its taint, or the record of one.
    NodeReleased {
        /// Whether a taint is removed.
        removed: bool,
    },
}

/// An event to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventDraft {
    /// Whether it is about the object's namespace instead of the object.
    pub(crate) on_namespace: bool,
    pub(crate) reason: EventReason,
    pub(crate) note: String,
}

impl EventDraft {
    /// An event about the object itself.
    pub(crate) fn new(reason: EventReason, note: impl Into<String>) -> Self {
        Self {
            on_namespace: false,
            reason,
            note: note.into(),
        }
    }
}

impl Plan {
    /// Nothing to do until the object changes.
    pub(crate) fn nothing() -> Self {
        Self {
            events: Vec::new(),
            counts: Vec::new(),
            write: None,
            requeue: None,
            is_complete: true,
            decides: false,
            state: None,
        }
    }
}

impl Write {
    /// A patch that nothing follows.
    fn new(patch: JsonPatch, change: Change) -> Self {
        Self {
            patch,
            change,
            events: Vec::new(),
            counts: Vec::new(),
            release: None,
        }
    }

    /// Says and counts that the failure policy has been carried out.
    fn by_policy(&mut self, decision: &Decision) {
        let (reason, where_to) = match decision {
            Decision::StepAside => (EventReason::SteppedAside, "every architecture".to_owned()),
            _ => (EventReason::ToleratedByPolicy, decision.annotation()),
        };
        let note = format!("its images could not be resolved; it may run on {where_to}");
        self.events.push(EventDraft::new(reason, note));
        self.counts.push("by_policy");
    }
}
