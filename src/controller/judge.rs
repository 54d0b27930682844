//! Inspection with memory: what could not be resolved is tried again, then the failure policy decides;
//! what users should know becomes an event, once.

use std::{
    collections::hash_map::DefaultHasher,
    hash::{Hash, Hasher},
    time::Duration,
};

use kube::Resource;
use kube_runtime::reflector::Store;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster::{
        events::{EventReason, Events},
        objects::PodSpec,
    },
    image::ImageError,
    metrics::Metrics,
    placement::{
        failure::{self, Failure},
        mode::InvalidAnnotation,
        pod::{Decision, Policy},
    },
};

use super::{
    attempts::Attempts,
    inspect::{Inspection, Inspector, Verdict, describe},
    namespaces::Namespaces,
};

/// How long until a pod without a common architecture is looked at again: an image may have been
/// pushed anew.
const LOOK_AGAIN: Duration = Duration::from_mins(10);

/// Judges pods and DaemonSets.
pub(super) struct Judge {
    inspector: Inspector,
    namespaces: Namespaces,
    attempts: Attempts,
    events: Events,
    metrics: Metrics,
}

/// What is to be done about an object now, and when it is to be looked at again.
#[derive(Debug)]
pub(super) struct Judgement {
    /// `None`: nothing.
    pub(super) decision: Option<Decision>,
    /// The images did not decide, the failure policy did.
    pub(super) by_policy: bool,
    /// When to look again, besides on each change.
    pub(super) retry: Option<Duration>,
}

impl Judgement {
    const NOTHING: Self = Self {
        decision: None,
        by_policy: false,
        retry: None,
    };
}

impl Judge {
    pub(super) fn new(
        inspector: Inspector,
        namespaces: Namespaces,
        events: Events,
        metrics: Metrics,
    ) -> Self {
        Self {
            inspector,
            namespaces,
            attempts: Attempts::default(),
            events,
            metrics,
        }
    }

    pub(super) fn policy(&self) -> &Policy {
        &self.inspector.policy
    }

    /// Judges `object`, a pod or the owner of a template with this spec and these annotations.
    pub(super) async fn judge<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        spec: &PodSpec,
        annotations: &std::collections::BTreeMap<String, String>,
        stop: &CancellationToken,
    ) -> Judgement {
        let namespace = object.meta().namespace.clone().unwrap_or_default();
        let uid = uid_of(object);
        let subject = subject(spec);
        self.attempts.begin(&uid, subject);
        let of_namespace = self.namespaces.annotations(&namespace).await;
        let inspecting = self
            .inspector
            .inspect(spec, annotations, &namespace, &of_namespace);
        // A registry may take its time; a process that is told to stop may not.
        let Some(inspection) = stop.run_until_cancelled(inspecting).await else {
            return Judgement::NOTHING;
        };
        for invalid in &inspection.invalid {
            self.tell_invalid(object, &uid, subject, &namespace, invalid);
        }
        let Inspection {
            verdict, images, ..
        } = inspection;
        match verdict {
            Verdict::Leave => {
                self.metrics.decided(kind(object), "ignored");
                Judgement::NOTHING
            }
            Verdict::Decided(decision) => {
                self.metrics.decided(kind(object), decision.as_str());
                let none = decision == Decision::NoCommonArchitecture;
                if none
                    && self
                        .attempts
                        .tell(&uid, subject, (EventReason::NoCommonArchitecture, None))
                {
                    let note = format!("its images share no architecture: {}", describe(&images));
                    self.events
                        .publish(object, EventReason::NoCommonArchitecture, note);
                }
                let retry = none.then_some(LOOK_AGAIN);
                Judgement {
                    decision: Some(decision),
                    by_policy: false,
                    retry,
                }
            }
            Verdict::Unresolved(unresolved) => {
                self.failed(object, spec, &uid, subject, &unresolved)
            }
        }
    }

    /// The event belongs on the object that carries the annotation.
    fn tell_invalid<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        uid: &str,
        subject: u64,
        namespace: &str,
        invalid: &InvalidAnnotation,
    ) {
        let InvalidAnnotation {
            name,
            value,
            on_namespace,
        } = invalid;
        let note = format!("annotation {name} means nothing and is taken as absent: {value:?}");
        let told = (EventReason::InvalidAnnotation, None);
        if !on_namespace {
            if self.attempts.tell(uid, subject, told) {
                self.events
                    .publish(object, EventReason::InvalidAnnotation, note);
            }
        } else if let Some(carrier) = self.namespaces.get(namespace) {
            let uid = uid_of(&*carrier);
            if self.attempts.tell(&uid, 0, told) {
                self.events
                    .publish(&*carrier, EventReason::InvalidAnnotation, note);
            }
        }
    }

    fn failed<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        spec: &PodSpec,
        uid: &str,
        subject: u64,
        unresolved: &[(String, ImageError)],
    ) -> Judgement {
        self.metrics.decided(kind(object), "unresolved");
        for (image, error) in unresolved {
            let reason = error.reason();
            if self
                .attempts
                .tell(uid, subject, (EventReason::ImageNotResolved, Some(reason)))
            {
                let note = format!("{}: {image}: {}", reason.as_str(), error.chain());
                self.events
                    .publish(object, EventReason::ImageNotResolved, note);
            }
        }
        let (attempts, tried) = self.attempts.failed(uid, subject);
        let failures: Vec<_> = unresolved
            .iter()
            .map(|(_, error)| Failure {
                reason: error.reason(),
                retry_after: error.retry_after(),
            })
            .collect();
        let config = &self.inspector.config.resolution.failure;
        let critical = spec.is_system_critical();
        let next = failure::next(config, self.policy(), &failures, attempts, tried, critical);
        Judgement {
            by_policy: next.decision.is_some(),
            decision: next.decision,
            retry: next.retry,
        }
    }

    /// Tells that the failure policy has been carried out.
    pub(super) fn told_policy<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        decision: &Decision,
    ) {
        let (reason, note) = match decision {
            Decision::StepAside => (
                EventReason::SteppedAside,
                "its images could not be resolved; it may run on every architecture".to_owned(),
            ),
            _ => (
                EventReason::ToleratedByPolicy,
                format!(
                    "its images could not be resolved; it may run on {}",
                    decision.annotation()
                ),
            ),
        };
        self.events.publish(object, reason, note);
    }

    /// Whether `reason` has not been told about the object before.
    pub(super) fn tell_once<K: Resource>(
        &self,
        object: &K,
        spec: &PodSpec,
        reason: EventReason,
    ) -> bool {
        let uid = uid_of(object);
        self.attempts.tell(&uid, subject(spec), (reason, None))
    }

    /// Forgets what was remembered of an object that is done, and of many that are gone.
    pub(super) fn forget<K: Resource>(&self, object: &K) {
        if let Some(uid) = &object.meta().uid {
            self.attempts.forget(uid);
        }
    }

    /// Forgets objects that are in no store any more, once there are many of them.
    pub(super) fn sweep<K>(&self, store: &Store<K>)
    where
        K: Resource<DynamicType = ()> + Clone + 'static,
    {
        self.attempts.sweep(store.len(), || {
            store
                .state()
                .iter()
                .filter_map(|object| object.meta().uid.clone())
                .collect()
        });
    }
}

/// What an attempt is about: the same pod with other images is another matter.
fn subject(spec: &PodSpec) -> u64 {
    let mut hasher = DefaultHasher::new();
    spec.images().hash(&mut hasher);
    hasher.finish()
}

fn uid_of<K: Resource>(object: &K) -> String {
    object.meta().uid.clone().unwrap_or_default()
}

fn kind<K: Resource<DynamicType = ()>>(_: &K) -> &'static str {
    if K::kind(&()) == "Pod" {
        "Pod"
    } else {
        "DaemonSet"
    }
}
