//! archaware's additions to a pod, and their times.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::{
    cluster::objects::annotations,
    evaluate::template::Template,
    placement::{GATE, affinity_change::Require, annotation, change::PodChange, record},
};

use super::{ExistingPod, pod_state::text};

/// archaware's additions to a pod, made or still to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Additions {
    /// The annotation `archaware.dev/decision`.
    pub decision: Option<String>,
    /// Tolerations, for example `kubernetes.io/arch=amd64:NoSchedule`.
    pub tolerations: Vec<String>,
    /// Required node affinity, for example `kubernetes.io/arch in (amd64)`. If there are several
    /// items, the node has to match one of them.
    pub required: Vec<String>,
    /// Preferred nodes, with their weights.
    pub preferred: Vec<String>,
    /// Images that were replaced: `container: from → to`.
    pub images: Vec<String>,
    /// The runtime class that the pod got because it had none.
    pub runtime_class: Option<String>,
    /// Whether the pod has archaware's scheduling gate.
    pub gate: bool,
    /// Whether the failure policy decided (`resolution.failure`), because an image could not be
    /// read in time. For an existing pod this is inferred: its decision is `any`, although its
    /// images name architectures, or cannot be read now.
    pub by_failure_policy: bool,
    /// The programs that made the additions, and the times.
    pub by: Vec<Author>,
}

/// A program that changed a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Author {
    /// `webhook` for changes when the pod was created or the DaemonSet was written, `controller`,
    /// or `archaware` if it is not known which of the two.
    pub part: &'static str,
    /// The time, as RFC 3339; null if it is not known.
    pub time: Option<String>,
}

impl Additions {
    /// The additions of a change; `None` if it adds nothing.
    pub(super) fn pending(change: &PodChange) -> Option<Self> {
        let images = change.images.iter().filter(|image| image.from != image.to);
        let images: Vec<_> = images
            .map(|image| format!("{}: {} → {}", image.container, image.from, image.to))
            .collect();
        let required = change.affinity.require.as_ref();
        let required = required.map(Require::alternatives).unwrap_or_default();
        let required = required.iter().map(|term| {
            let expressions = term.match_expressions.iter();
            expressions
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        });
        let preferred = change.affinity.preferred_terms().map(|term| {
            let expressions = term.preference.match_expressions.iter();
            let texts: Vec<_> = expressions.map(ToString::to_string).collect();
            format!("{} (weight {})", texts.join(", "), term.weight)
        });
        let additions = Self {
            tolerations: change.tolerations.iter().map(toleration).collect(),
            required: required.collect(),
            preferred: preferred.collect(),
            images,
            runtime_class: change.runtime_class.clone(),
            ..Self::default()
        };
        (additions != Self::default()).then_some(additions)
    }

    /// The additions that a pod's annotation records; `None` without a record.
    pub(super) fn recorded(pod: &ExistingPod) -> Option<Self> {
        let annotations = annotations(&pod.pod.metadata);
        let recorded = record::read(annotations);
        let decision = annotations.get(annotation::DECISION).cloned();
        let gate = pod.pod.spec.gate().is_some();
        let added = Self::pending(&recorded);
        if added.is_none() && decision.is_none() && !gate {
            return None;
        }
        let mut authors = Vec::new();
        let patched_at = pod.patched_at();
        // Changes of the controller have a field manager of their own.
        let has_decision_of_webhook = decision.is_some() && !pod.is_decided_by_controller();
        if has_decision_of_webhook || gate {
            authors.push(Author {
                part: "webhook",
                time: text(pod.pod.metadata.creation_timestamp.as_ref()),
            });
        }
        if let Some(patched_at) = patched_at {
            authors.push(Author {
                part: "controller",
                time: text(Some(&patched_at)),
            });
        }
        Some(Self {
            decision,
            gate,
            by: authors,
            ..added.unwrap_or_default()
        })
    }

    /// The additions to the template of a DaemonSet; `None` without additions.
    pub(super) fn of_template(template: &Template<'_>) -> Option<Self> {
        let owned = template.owned_tolerations();
        let additions = Self {
            tolerations: owned.iter().map(toleration).collect(),
            by: vec![match template.set.managers.recorded() {
                Some(record) => Author {
                    part: if record.is_by_controller {
                        "controller"
                    } else {
                        "webhook"
                    },
                    time: text(record.time.as_ref()),
                },
                None => Author {
                    part: "archaware",
                    time: None,
                },
            }],
            by_failure_policy: template.is_decided_by_policy(),
            ..Self::default()
        };
        (!owned.is_empty()).then_some(additions)
    }

    /// Its parts for people, one per line.
    pub fn lines(&self) -> Vec<String> {
        let list = |what: &str, entries: &[String], between: &str| {
            (!entries.is_empty()).then(|| format!("{what} {}", entries.join(between)))
        };
        let class = self.runtime_class.as_ref();
        let class = class.map(|class| format!("runtime class {class}"));
        let gate = self.gate.then(|| format!("scheduling gate {GATE}"));
        let parts = [
            list("tolerations", &self.tolerations, ", "),
            list("required node affinity", &self.required, " or "),
            list("preferred node affinity", &self.preferred, ", "),
            list("image of", &self.images, ", "),
            class,
            gate,
        ];
        parts.into_iter().flatten().collect()
    }
}

fn toleration(toleration: &Value) -> String {
    let field = |name| {
        let value = toleration.get(name).and_then(Value::as_str);
        value.unwrap_or_default()
    };
    let (key, value, effect) = (field("key"), field("value"), field("effect"));
    let value = if field("operator") == "Exists" {
        String::new()
    } else {
        format!("={value}")
    };
    let effect = if effect.is_empty() {
        String::new()
    } else {
        format!(":{effect}")
    };
    format!("{key}{value}{effect}")
}
