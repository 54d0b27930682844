//! Step 2 of 3 (evaluate, plan, apply): from an object, its evaluation and its stored state to a
//! patch and its consequences. Pure: no client, no clock, no store.

pub(crate) mod advice;
pub(crate) mod bound_pod;
pub(crate) mod daemon_set;
mod draft;
mod follow_up;
pub(crate) mod misplaced;
pub(crate) mod node;
pub(crate) mod pod;
pub(crate) mod repairs;
mod state;
pub(crate) mod stored_state;

use std::time::Duration;

use crate::{
    cluster::{events::EventReason, patch::JsonPatch},
    placement::{Decision, PlacementPolicy, Taint, failure::FailurePolicy},
};

pub(crate) use draft::hash;
pub(crate) use follow_up::{FollowUp, GATE_RETRY, after_gate_removal, after_patch};
pub(crate) use repairs::Written;
pub(crate) use state::ObjectState;

/// State of an object between reconciles.
#[derive(Clone, Debug, Default)]
pub(crate) struct Remembered {
    /// The state of the object's decision.
    pub(crate) state: Option<ObjectState>,
    /// The latest write to the object, for nodes and DaemonSets.
    pub(crate) written: Option<Written>,
}

/// Policies for pods and DaemonSets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policies<'a> {
    /// Tolerations and affinity of a decision.
    pub(crate) placement: &'a PlacementPolicy,
    /// The policy for images that cannot be resolved.
    pub(crate) failure: &'a FailurePolicy,
    /// Whether the webhook sets gates. Otherwise no pod waits behind one.
    pub(crate) gates: bool,
}

/// The actions for one object now.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// Events to publish, whether the patch succeeds or not.
    pub(crate) events: Vec<EventDraft>,
    /// Results to count in the metric of decisions.
    pub(crate) counts: Vec<&'static str>,
    /// The patch, if the object needs a change.
    pub(crate) patch: Option<PlannedPatch>,
    /// When to reconcile again if the object does not change.
    pub(crate) requeue: Option<Duration>,
    /// Whether nothing remains to be decided after the patch.
    pub(crate) decides: bool,
    /// The state to store; `None` removes the state.
    pub(crate) state: Option<ObjectState>,
}

/// A patch and its consequences when it is applied.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PlannedPatch {
    pub(crate) patch: JsonPatch,
    /// The kind of the change, for the log.
    pub(crate) change: PlannedChange,
    /// Events to publish when it is applied.
    pub(crate) events: Vec<EventDraft>,
    /// Results to count when it is applied.
    pub(crate) counts: Vec<&'static str>,
    /// A patch that only removes archaware's scheduling gate, used when this patch is rejected.
    pub(crate) gate_removal: Option<JsonPatch>,
    /// The write to remember when it is applied.
    pub(crate) written: Option<Written>,
}

/// What a patch changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlannedChange {
    /// A pod gets tolerations or affinity, or only its decision annotation.
    PodPlaced {
        /// The value of its decision annotation.
        decision: String,
        /// Whether the failure policy decided.
        by_policy: bool,
    },
    /// Only archaware's scheduling gate is removed.
    GateRemoved,
    /// The tolerations of a template change.
    TemplateChanged {
        /// The decision that the template now has.
        decision: String,
        /// Whether the failure policy decided.
        by_policy: bool,
    },
    /// Only the annotation on a DaemonSet changes, not its template.
    RecordChanged,
    /// A node gets its taint.
    NodeTainted {
        taint: Taint,
        /// Whether another taint is removed.
        removed: bool,
    },
    /// A node loses its taint or the annotation that records one.
    NodeUntainted {
        /// Whether a taint is removed.
        removed: bool,
    },
}

/// An event to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventDraft {
    /// Whether the event is about the object's namespace instead of the object.
    pub(crate) on_namespace: bool,
    pub(crate) reason: EventReason,
    pub(crate) note: String,
}

impl EventDraft {
    /// An event about the object.
    pub(crate) fn new(reason: EventReason, note: impl Into<String>) -> Self {
        Self {
            on_namespace: false,
            reason,
            note: note.into(),
        }
    }
}

impl Plan {
    /// A plan that does nothing until the object changes.
    pub(crate) fn nothing() -> Self {
        Self {
            events: Vec::new(),
            counts: Vec::new(),
            patch: None,
            requeue: None,
            decides: false,
            state: None,
        }
    }

    /// The taint that a node gets.
    pub(crate) fn new_taint(&self) -> Option<&Taint> {
        match &self.patch.as_ref()?.change {
            PlannedChange::NodeTainted { taint, .. } => Some(taint),
            _ => None,
        }
    }

    /// Whether a node loses its taint.
    pub(crate) fn removes_taint(&self) -> bool {
        let change = self.patch.as_ref().map(|patch| &patch.change);
        change == Some(&PlannedChange::NodeUntainted { removed: true })
    }
}

impl PlannedPatch {
    /// A patch without consequences.
    fn new(patch: JsonPatch, change: PlannedChange) -> Self {
        Self {
            patch,
            change,
            events: Vec::new(),
            counts: Vec::new(),
            gate_removal: None,
            written: None,
        }
    }

    /// Adds the event and the count for a decision of the failure policy. `locality`: the nodes
    /// that hold the images, if these nodes are preferred.
    fn report_failure_policy(&mut self, decision: &Decision, locality: Option<&str>) {
        let (reason, where_to) = match decision {
            Decision::TolerateAll => (
                EventReason::ToleratesEveryArchitecture,
                "every architecture".to_owned(),
            ),
            _ => (EventReason::ToleratedByPolicy, decision.annotation()),
        };
        let mut note = format!(
            "archaware could not read some images. The failure policy (resolution.failure) and the other images allow {where_to}"
        );
        if let Some(locality) = locality {
            note = format!("{note}. Such nodes are preferred: {locality}");
        }
        self.events.push(EventDraft::new(reason, note));
        self.counts.push("by_policy");
    }
}
