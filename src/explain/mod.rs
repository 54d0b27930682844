//! Explains why a pod runs, or does not run, on the expected nodes: its mode, its images,
//! archaware's additions, suitable nodes, and advice. Pure: facts in, an explanation out.

mod additions;
mod conclusion;
mod images;
mod node_groups;
mod pod_state;
mod scheduler;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    cluster::{name::NamespacedName, objects::Node},
    config::Config,
    evaluate::{
        EvaluatedImage, Evaluation, ImageAlternatives, Notice, Subject, Verdict, template::Template,
    },
    image::{ImageError, credentials::CredentialSource},
    placement::{
        Decision, Mode, PlacementPolicy,
        change::PodChange,
        demand::Source,
        mode::{Handling, HandlingSource},
    },
    platform::Architectures,
};

pub use additions::Additions;
pub use images::ExplainedImage;
pub use node_groups::NodeGroup;
pub use pod_state::{ExistingPod, PodCount, PodState};

/// Facts about an object.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Kind of the object.
    pub kind: &'a str,
    /// Name of the object.
    pub name: &'a NamespacedName,
    /// The explained pod: the object itself, or one of its pods. `None` for a DaemonSet, and for an
    /// object without pods: then a pod of its template is explained.
    pub pod: Option<&'a ExistingPod>,
    /// Pods by phase and node architecture: all pods of a workload, or the pods of the pod's
    /// controller that wait or fail.
    pub pods: &'a [PodCount],
    /// The evaluated pod or template.
    pub subject: Subject<'a>,
    /// The template of a DaemonSet.
    pub template: Option<&'a Template<'a>>,
    /// The mode or the stated architectures, and where they are set.
    pub handling: (&'a Handling, HandlingSource),
    /// The result of its evaluation.
    pub evaluation: &'a Evaluation,
    /// The resolved images, whether they count or not.
    pub images: &'a [EvaluatedImage],
    /// The images that could not be resolved.
    pub failed: &'a [(String, ImageError)],
    /// The places of credentials for images that could not be resolved.
    pub tried: &'a BTreeMap<String, Vec<CredentialSource>>,
    /// All nodes; `None` if they could not be read.
    pub nodes: Option<&'a [Node]>,
    /// Whether archaware is installed: a node has its taint, or its Lease exists; `None` if the
    /// Lease cannot be read, or if it is missing although the pod has traces of archaware.
    pub is_installed: Option<bool>,
    /// The namespace in which the Lease was looked up.
    pub own_namespace: &'a str,
    /// Why archaware only reports a change of the template, and does not make it.
    pub withheld: Option<&'a str>,
    /// Why Kubernetes rejects a new pod because of its runtime class.
    pub class_problem: Option<&'a str>,
    /// Why Kubernetes cannot create the object's pods, in the words of its controller.
    pub creation_problem: Option<&'a str>,
    /// Permissions that are missing.
    pub missing_permissions: &'a [String],
    /// Settings of placement.
    pub policy: &'a PlacementPolicy,
    /// The configuration.
    pub config: &'a Config,
}

impl<'a> Facts<'a> {
    /// The images that limit the pod; none if its author states its architectures.
    fn counting_images(&self) -> &'a [EvaluatedImage] {
        match self.handling.0 {
            Handling::Architectures(_) => &[],
            Handling::Mode(_) => self.images,
        }
    }

    /// Whether a decision `any` came from the failure policy: the mode is `inspect`, and the images
    /// name architectures, or cannot be read.
    fn is_decided_by_policy(&self) -> bool {
        let is_inspected = *self.handling.0 == Handling::Mode(Mode::Inspect);
        let mut images = self.counting_images().iter();
        is_inspected
            && (!self.failed.is_empty() || images.any(|image| image.architectures.is_some()))
    }

    /// The node architectures that run all known images; `None` if no image limits the pod.
    fn shared_by_images(&self) -> Option<Architectures> {
        let sets = self.counting_images().iter();
        let sets = sets.filter_map(|image| image.architectures.as_ref());
        let sets = sets.map(|set| self.policy.widen_with_emulation(set, None));
        sets.reduce(|shared, set| shared.and(&set))
    }
}

/// One element of `archaware explain -o json`. Unknown values are null.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// Kind of the object.
    pub kind: String,
    /// Namespace of the object; null for cluster-scoped objects.
    pub namespace: Option<String>,
    /// Name of the object.
    pub name: String,
    /// Pods by phase and node architecture: all pods of a workload, or the pods of the pod's
    /// controller that wait or fail.
    pub pods: Vec<PodCount>,
    /// The explained pod: the object itself, or one of its pods, preferably a pod that waits. Null
    /// if there is no pod.
    pub pod: Option<PodState>,
    /// The settings that apply, and where they are set.
    pub applies: Applies,
    /// The images of the pod or template.
    pub images: Vec<ExplainedImage>,
    /// Candidates of containers that ask for image selection. For an existing pod without a
    /// scheduling gate: the candidates as if the pod were recreated, because its images are not
    /// replaced any more.
    pub selections: Vec<ImageAlternatives>,
    /// The verdict from its images: `architectures`, `any`, `none`, `ignored` or `unresolved`.
    pub verdict: &'static str,
    /// The node architectures that run all known images, or the architectures that the author
    /// states. Null if nothing limits the pod.
    pub architectures: Option<Vec<String>>,
    /// archaware's additions to the pod.
    pub added: Option<Additions>,
    /// The additions that archaware will make when it decides about the pod; null if it makes
    /// none.
    pub pending: Option<Additions>,
    /// Groups of nodes with the same architecture, taints and answer. Null if the nodes cannot be
    /// read.
    pub nodes: Option<Vec<NodeGroup>>,
    /// Further facts about the object.
    pub notes: Vec<String>,
    /// The conclusion in one sentence.
    pub conclusion: String,
    /// The advice.
    pub advice: Vec<String>,
    /// Permissions that are missing for a complete answer.
    pub missing_permissions: Vec<String>,
}

/// The settings that apply to an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Applies {
    /// `inspect`, `any`, `ignore`, or the architectures that its author states.
    pub rule: String,
    /// Where the mode or the architectures are set.
    pub source: String,
    /// The names of the matching rules of the configuration, and why other rules are left out.
    pub rules: Vec<String>,
}

impl Applies {
    fn from_facts(facts: &Facts<'_>) -> Self {
        let (handling, source) = facts.handling;
        let rule = match handling {
            Handling::Mode(Mode::Inspect) => "inspect".to_owned(),
            Handling::Mode(Mode::Any) => "any".to_owned(),
            Handling::Mode(Mode::Ignore) => "ignore".to_owned(),
            Handling::Architectures(set) => format!("architectures {}", set.join(", ")),
        };
        let exempt = &facts.config.pods.exempt_namespaces;
        let source = match source {
            HandlingSource::Pod(annotation) => format!("annotation {annotation}"),
            HandlingSource::Namespace => {
                "annotation archaware.dev/mode of its namespace".to_owned()
            }
            HandlingSource::Configuration if exempt.contains(facts.subject.namespace) => {
                "pods.exemptNamespaces in the configuration".to_owned()
            }
            HandlingSource::Configuration => "pods.mode in the configuration".to_owned(),
        };
        let names = facts.evaluation.demands.rules().map(str::to_owned);
        let left_out = facts.evaluation.left_out_rules();
        let rules = names.chain(left_out.map(ToString::to_string)).collect();
        Self {
            rule,
            source,
            rules,
        }
    }
}

/// The effect of the verdict on placement.
struct Consequence {
    /// The name of the verdict.
    verdict: &'static str,
    /// The node architectures that the pod's images, or its author's annotation, allow, in every
    /// mode; `None` if nothing limits the pod.
    runs_on: Option<Architectures>,
    /// archaware's additions.
    change: PodChange,
}

impl Consequence {
    fn from_facts(facts: &Facts<'_>) -> Self {
        let evaluation = facts.evaluation;
        let change = |decision| facts.subject.change(facts.policy, decision, evaluation);
        let (verdict, runs_on, change) = match &evaluation.verdict {
            Verdict::Skip => {
                let ignored = *facts.handling.0 == Handling::Mode(Mode::Ignore);
                let verdict = if ignored { "ignored" } else { "any" };
                (verdict, facts.shared_by_images(), PodChange::default())
            }
            Verdict::Unresolved { known, .. } => {
                ("unresolved", known.clone(), PodChange::default())
            }
            Verdict::Decided(decision) => {
                let runs_on = match decision {
                    Decision::Architectures(set) => Some(set.clone()),
                    Decision::TolerateAll => facts.shared_by_images(),
                    Decision::NoCommonArchitecture => Some(Architectures::default()),
                };
                (decision.as_str(), runs_on, change(decision))
            }
        };
        let change = if facts.withheld.is_some() {
            PodChange::default()
        } else {
            change
        };
        Self {
            verdict,
            runs_on,
            change,
        }
    }
}

/// Explains an object.
pub fn explain(facts: &Facts<'_>) -> Explanation {
    let consequence = Consequence::from_facts(facts);
    let nodes = node_groups::groups(facts, &consequence);
    let conclusion = conclusion::conclude(facts, &consequence, nodes.as_deref());
    let is_pending = facts.pod.is_none_or(ExistingPod::is_pending);
    // The controller only reports that no node can run an existing pod.
    let is_only_reported = consequence.verdict == "none" && facts.pod.is_some();
    let adds = is_pending && facts.is_installed != Some(false) && !is_only_reported;
    let mut change = consequence.change.clone();
    if let Some(template) = facts.template {
        let owned = template.owned_tolerations();
        change
            .tolerations
            .retain(|toleration| !owned.contains(toleration));
    }
    let added = match facts.template {
        Some(template) => Additions::of_template(template),
        None => facts
            .pod
            .and_then(Additions::recorded)
            .map(|added| Additions {
                by_failure_policy: added.decision.as_deref() == Some("any")
                    && facts.is_decided_by_policy(),
                ..added
            }),
    };
    Explanation {
        kind: facts.kind.to_owned(),
        namespace: facts.name.namespace.clone(),
        name: facts.name.name.clone(),
        pods: facts.pods.to_vec(),
        pod: facts.pod.map(|pod| pod.state(facts.nodes)),
        applies: Applies::from_facts(facts),
        images: images::explain_images(facts),
        selections: facts.evaluation.alternatives.clone(),
        verdict: consequence.verdict,
        architectures: consequence.runs_on.as_ref().map(Architectures::to_strings),
        added,
        pending: Additions::pending(&change).filter(|_| adds),
        nodes,
        notes: notes(facts),
        conclusion: conclusion.sentence,
        advice: conclusion.advice,
        missing_permissions: facts.missing_permissions.to_vec(),
    }
}

fn notes(facts: &Facts<'_>) -> Vec<String> {
    let evaluation = facts.evaluation;
    let mut notes = Vec::new();
    if facts.is_installed == Some(false) {
        notes.push(format!(
            "archaware seems not to be installed: there is no Lease archaware in namespace {} (set ARCHAWARE_NAMESPACE if it runs in another namespace)",
            facts.own_namespace
        ));
    }
    let notices = evaluation.notices(facts.policy).into_iter();
    // Skip notices that other parts of the explanation show:
    // - why no node can run the pod: the conclusion,
    // - rules that are left out: the list of rules,
    // - Secrets that cannot be read: the missing permissions.
    let notices = notices.filter(|notice| {
        let is_rule = matches!(notice, Notice::RuleLeftOut(_));
        !is_rule && !notice.is_conflict() && !notice.is_for_administrators()
    });
    notes.extend(notices.map(|notice| notice.to_string()));
    notes.extend(facts.withheld.map(str::to_owned));
    notes.extend(facts.class_problem.map(str::to_owned));
    notes.extend(evaluation.demands.iter().filter_map(|demand| {
        let note = demand.note.clone()?;
        if demand.source != Source::ImageLocality {
            return Some(note);
        }
        let use_of_it = match facts.pod {
            Some(pod) if pod.pod.spec.gate().is_none() => "archaware cannot make the pod prefer them, because affinity can be set only behind the scheduling gate",
            _ => {
                "if the failure policy decides before the gate is removed, archaware makes the pod prefer these nodes"
            }
        };
        Some(format!("{note}; {use_of_it}"))
    }));
    notes
}

#[cfg(test)]
mod tests;
