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
        namespaces::Namespaces,
        objects::PodSpec,
        pull_secrets::Unusable,
    },
    config::{FailureAction, FailureConfig},
    image::ImageError,
    inspect::{Inspection, Inspector, Subject, Verdict},
    metrics::Metrics,
    placement::{
        failure::{self, Failure},
        mode::InvalidAnnotation,
        pod::{Decision, Policy},
        preference::Preferences,
    },
};

use super::attempts::Attempts;

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
    /// Nothing was decided because images could not be resolved yet.
    pub(super) waiting: bool,
    /// It is to wait no longer behind a gate: there is a decision, or the failure policy has had its say.
    pub(super) release: bool,
    /// Architectures that it prefers.
    pub(super) preferences: Preferences,
    /// When to look again, besides on each change.
    pub(super) retry: Option<Duration>,
}

/// What a judgement is about.
struct About<'a, K> {
    object: &'a K,
    uid: String,
    images: u64,
}

/// What was decided about an object before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prior {
    /// Nothing that is known.
    Nothing,
    /// Its images decided. While they cannot be resolved, that stands.
    Decided,
    /// The failure policy stepped aside, for good, as long as images are what decides.
    SteppedAside,
}

impl Judgement {
    const NOTHING: Self = Self {
        decision: None,
        by_policy: false,
        waiting: false,
        release: true,
        preferences: Preferences::new(),
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

    pub(super) fn inspector(&self) -> &Inspector {
        &self.inspector
    }

    /// Judges `object`, a pod or the owner of a template.
    pub(super) async fn judge<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        subject: Subject<'_>,
        prior: Prior,
        stop: &CancellationToken,
    ) -> Judgement {
        let Subject {
            spec, namespace, ..
        } = subject;
        let of_namespace = self.namespaces.annotations(namespace).await;
        let inspects = || self.inspector.inspects(subject, &of_namespace);
        if prior == Prior::SteppedAside && inspects() {
            return Judgement {
                decision: Some(Decision::StepAside),
                by_policy: true,
                ..Judgement::NOTHING
            };
        }
        let inspecting = self.inspector.inspect(subject, &of_namespace);
        // A registry may take its time; a process that is told to stop may not.
        let Some(inspection) = stop.run_until_cancelled(inspecting).await else {
            return Judgement {
                waiting: true,
                release: false,
                ..Judgement::NOTHING
            };
        };
        let about = About {
            object,
            uid: uid_of(object),
            images: images_of(spec),
        };
        for invalid in &inspection.invalid {
            self.tell_invalid(&about, namespace, invalid);
        }
        for unusable in &inspection.unusable {
            let Unusable { secret, why } = unusable;
            let note = format!("pull secret {secret} is passed over: {why}");
            self.tell(
                &about,
                EventReason::PullSecretUnusable,
                hash_of(unusable),
                note,
            );
        }
        let Inspection {
            verdict,
            images,
            preferences,
            ..
        } = inspection;
        match verdict {
            Verdict::Leave => {
                self.count(&about, "ignored");
                Judgement::NOTHING
            }
            Verdict::Decided(decision) => {
                self.count(&about, decision.as_str());
                self.attempts.succeeded(&about.uid, about.images);
                let none = decision == Decision::NoCommonArchitecture;
                if none {
                    let note = self.inspector.why_nowhere(&images);
                    self.tell(&about, EventReason::NoCommonArchitecture, 0, note);
                }
                let retry = none.then_some(LOOK_AGAIN);
                Judgement {
                    decision: Some(decision),
                    preferences,
                    retry,
                    ..Judgement::NOTHING
                }
            }
            Verdict::Unresolved(unresolved) => self.failed(&about, spec, prior, &unresolved),
        }
    }

    fn count<K: Resource<DynamicType = ()>>(&self, about: &About<'_, K>, result: &'static str) {
        if self.attempts.count(&about.uid, about.images, result) {
            self.metrics.decided(kind(about.object), result);
        }
    }

    /// Publishes an event, once for each thing that it is about.
    fn tell<K: Resource<DynamicType = ()>>(
        &self,
        about: &About<'_, K>,
        reason: EventReason,
        of: u64,
        note: String,
    ) {
        if self.attempts.tell(&about.uid, about.images, (reason, of)) {
            self.events.publish(about.object, reason, note);
        }
    }

    /// The event belongs on the object that carries the annotation.
    fn tell_invalid<K: Resource<DynamicType = ()>>(
        &self,
        about: &About<'_, K>,
        namespace: &str,
        invalid: &InvalidAnnotation,
    ) {
        let InvalidAnnotation {
            name,
            value,
            on_namespace,
        } = invalid;
        let (note, reason) = (invalid.to_string(), EventReason::InvalidAnnotation);
        if !on_namespace {
            self.tell(about, reason, hash_of(&(name, value)), note);
        } else if let Some(carrier) = self.namespaces.get(namespace) {
            self.events.publish(&*carrier, reason, note);
        }
    }

    fn failed<K: Resource<DynamicType = ()>>(
        &self,
        about: &About<'_, K>,
        spec: &PodSpec,
        prior: Prior,
        unresolved: &[(String, ImageError)],
    ) -> Judgement {
        self.count(about, "unresolved");
        for (image, error) in unresolved {
            let reason = error.reason();
            let note = format!("{}: {image}: {}", reason.as_str(), error.chain());
            self.tell(
                about,
                EventReason::ImageNotResolved,
                hash_of(&(reason, image)),
                note,
            );
        }
        let (attempts, tried) = self.attempts.failed(&about.uid, about.images);
        let failures: Vec<_> = unresolved
            .iter()
            .map(|(_, error)| Failure {
                reason: error.reason(),
                retry_after: error.retry_after(),
            })
            .collect();
        // A decision that its images have made is better than one that is made without them.
        let recorded = prior == Prior::Decided;
        let stands = self.attempts.stands(&about.uid, about.images, recorded);
        let config = &self.inspector.config.resolution.failure;
        let held = FailureConfig {
            action: FailureAction::Hold,
            ..config.clone()
        };
        let config = if stands { &held } else { config };
        let critical = spec.is_system_critical() && !stands;
        let next = failure::next(config, self.policy(), &failures, attempts, tried, critical);
        Judgement {
            by_policy: next.decision.is_some(),
            waiting: next.decision.is_none() && !stands,
            release: next.due,
            decision: next.decision,
            retry: next.retry,
            ..Judgement::NOTHING
        }
    }

    /// Whether a change that somebody took back has to wait before it is made again.
    pub(super) fn hold_back<K: Resource>(&self, object: &K, spec: &PodSpec) -> Option<Duration> {
        self.attempts.hold_back(&uid_of(object), images_of(spec))
    }

    /// Counts and tells that the failure policy has been carried out.
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
        self.metrics.decided(kind(object), "by_policy");
        self.events.publish(object, reason, note);
    }

    /// What was decided about the object has been done; whether that is new.
    pub(super) fn decided<K: Resource>(&self, object: &K, spec: &PodSpec) -> bool {
        self.attempts.decided(&uid_of(object), images_of(spec))
    }

    /// Whether nothing is left to be decided about the object.
    pub(super) fn is_decided<K: Resource>(&self, object: &K) -> bool {
        self.attempts.is_decided(&uid_of(object))
    }

    /// Whether `reason` has not been told about the object before.
    pub(super) fn tell_once<K: Resource>(
        &self,
        object: &K,
        spec: &PodSpec,
        reason: EventReason,
    ) -> bool {
        let uid = uid_of(object);
        self.attempts.tell(&uid, images_of(spec), (reason, 0))
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
fn images_of(spec: &PodSpec) -> u64 {
    hash_of(&spec.images())
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
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
