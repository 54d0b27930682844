//! Rules from pods to nodes (`rules` of the configuration): pods that a rule selects get node affinity and tolerations, whatever their
//! images are.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::names::QualifiedName;

use super::{
    LabelSelector, TolerationConfig, Weight,
    affinity::{Requirement, WeightedTerm},
    author_selection::AuthorSelection,
    selection::{SelectedNodes, product},
};

/// One rule: pods that it selects get what it says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodRule {
    /// Its name, for events and `explain`.
    pub name: String,
    /// A label selector for pods; empty: all.
    #[serde(default)]
    pub pods: LabelSelector,
    /// A label selector for namespaces; empty: all.
    #[serde(default)]
    pub namespaces: LabelSelector,
    /// Label selectors for nodes, of which one has to hold. Empty: nothing is required.
    #[serde(default)]
    pub nodes: Vec<LabelSelector>,
    /// Labels of which the node has to have the same value as the pod, if the pod has the label.
    #[serde(default)]
    pub match_node_labels: Vec<QualifiedName>,
    /// Nodes to prefer.
    #[serde(default)]
    pub preferred_nodes: Vec<PreferredNodes>,
    /// Tolerations to add.
    #[serde(default)]
    pub tolerations: Vec<TolerationConfig>,
    /// The runtime class of pods that have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime_class: Option<String>,
}

/// Nodes that a rule prefers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PreferredNodes {
    /// A label selector for nodes.
    pub nodes: LabelSelector,
    /// From 1 to 100.
    pub weight: Weight,
}

/// What the rules say of a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AppliedRules {
    /// The names of the rules that apply.
    pub names: Vec<String>,
    /// Nodes that they require and prefer.
    pub nodes: SelectedNodes,
    /// Tolerations, in the API's form.
    pub tolerations: Vec<Value>,
    /// The runtime class that they ask for.
    pub runtime_class: Option<String>,
    /// Rules that select the pod and are left out, because no node could satisfy them and what the pod has already.
    pub left_out: Vec<LeftOutRule>,
}

/// A rule that is left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeftOutRule {
    /// Its name.
    pub name: String,
    /// What it contradicts.
    pub contradicts: Contradicted,
}

/// What a rule contradicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Contradicted {
    /// The node selector or the required node affinity of the pod.
    Author,
    /// The runtime class of the pod.
    RuntimeClass,
    /// That the pod exists: the runtime class that it lacks cannot be set any more.
    Existence,
    /// Rules before it.
    EarlierRules,
}

/// A pod, as far as rules look at it.
#[derive(Clone, Copy, Debug)]
pub struct RuledPod<'a> {
    /// Its labels.
    pub labels: &'a BTreeMap<String, String>,
    /// The labels of its namespace.
    pub namespace_labels: &'a BTreeMap<String, String>,
    /// What selects its nodes.
    pub author: AuthorSelection<'a>,
    /// Its runtime class.
    pub runtime_class: Option<&'a str>,
    /// Whether it is being created: its runtime class cannot be set later.
    pub is_new: bool,
}

impl std::fmt::Display for LeftOutRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let why = match self.contradicts {
            Contradicted::Author => {
                "its nodes contradict the pod's node selector or required node affinity"
            }
            Contradicted::RuntimeClass => {
                "the pod has another runtime class, which cannot be changed"
            }
            Contradicted::Existence => "a runtime class can be set only when a pod is created",
            Contradicted::EarlierRules => "it contradicts rules before it",
        };
        write!(f, "rule {} is left out: {why}", self.name)
    }
}

impl PodRule {
    /// Whether it adds nothing.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
            && self.match_node_labels.is_empty()
            && self.preferred_nodes.is_empty()
            && self.tolerations.is_empty()
            && self.runtime_class.is_none()
    }

    /// Whether a selector for nodes selects every node.
    pub fn has_empty_selector(&self) -> bool {
        let preferred = self.preferred_nodes.iter().map(|one| &one.nodes);
        let mut all = self.nodes.iter().chain(preferred);
        all.any(|selector| selector.requirements().is_empty())
    }

    fn selects(&self, pod: RuledPod<'_>) -> bool {
        self.pods.matches(pod.labels) && self.namespaces.matches(pod.namespace_labels)
    }

    /// What it contradicts.
    fn contradicts(
        &self,
        required: &[Vec<Requirement>],
        pod: RuledPod<'_>,
        earlier: &AppliedRules,
    ) -> Option<Contradicted> {
        let wants_other_than = |class: &str| {
            let wanted = self.runtime_class.as_deref();
            wanted.is_some_and(|wanted| wanted != class)
        };
        if contradicts(required, &pod.author.alternatives()) {
            Some(Contradicted::Author)
        } else if pod.runtime_class.is_some_and(wants_other_than) {
            Some(Contradicted::RuntimeClass)
        } else if pod.runtime_class.is_none() && self.runtime_class.is_some() && !pod.is_new {
            Some(Contradicted::Existence)
        } else if contradicts(required, &earlier.nodes.required)
            || earlier
                .runtime_class
                .as_deref()
                .is_some_and(wants_other_than)
        {
            Some(Contradicted::EarlierRules)
        } else {
            None
        }
    }

    /// What nodes have to be for a pod with these labels: one of these, each a list of requirements. Empty: nothing.
    fn required(&self, pod: &BTreeMap<String, String>) -> Vec<Vec<Requirement>> {
        let nodes: Vec<_> = self.nodes.iter().map(LabelSelector::requirements).collect();
        let same = self.match_node_labels.iter().filter_map(|key| {
            let value = pod.get(key.as_str())?;
            Some(Requirement::new(key.as_str(), "In", vec![value.clone()]))
        });
        let same: Vec<Requirement> = same.collect();
        let same = if same.is_empty() {
            Vec::new()
        } else {
            vec![same]
        };
        product(&nodes, &same)
    }
}

/// What rules say of a pod.
pub fn apply(rules: &[PodRule], pod: RuledPod<'_>) -> AppliedRules {
    let mut applied = AppliedRules::default();
    for rule in rules.iter().filter(|rule| rule.selects(pod)) {
        let required = rule.required(pod.labels);
        if let Some(contradicts) = rule.contradicts(&required, pod, &applied) {
            applied.left_out.push(LeftOutRule {
                name: rule.name.clone(),
                contradicts,
            });
            continue;
        }
        applied.names.push(rule.name.clone());
        if pod.runtime_class.is_none() && rule.runtime_class.is_some() {
            applied.runtime_class.clone_from(&rule.runtime_class);
        }
        let preferred = rule.preferred_nodes.iter().map(|one| WeightedTerm {
            weight: one.weight.get(),
            expressions: one.nodes.requirements(),
        });
        applied.nodes = std::mem::take(&mut applied.nodes).and(SelectedNodes {
            required,
            preferred: preferred.collect(),
        });
        for toleration in &rule.tolerations {
            let toleration = toleration.toleration("");
            if !applied.tolerations.contains(&toleration) {
                applied.tolerations.push(toleration);
            }
        }
    }
    applied
}

/// Whether no node can satisfy one of these and one of those. Empty: nothing is required.
fn contradicts(one: &[Vec<Requirement>], other: &[Vec<Requirement>]) -> bool {
    let exclude = |first: &[Requirement], second: &[Requirement]| {
        let mut pairs = first
            .iter()
            .flat_map(|a| second.iter().map(move |b| (a, b)));
        pairs.any(|(a, b)| excludes(a, b) || excludes(b, a))
    };
    let mut pairs = one
        .iter()
        .flat_map(|first| other.iter().map(move |second| (first, second)));
    !one.is_empty() && !other.is_empty() && pairs.all(|(first, second)| exclude(first, second))
}

/// Whether no label satisfies both, as far as operators without order tell.
fn excludes(one: &Requirement, other: &Requirement) -> bool {
    let is_in = |values: &[String]| one.values.iter().all(|value| values.contains(value));
    let is_out = |values: &[String]| !one.values.iter().any(|value| values.contains(value));
    one.key == other.key
        && match (one.operator.as_str(), other.operator.as_str()) {
            ("In", "In") => is_out(&other.values),
            ("In", "NotIn") => is_in(&other.values),
            ("In" | "Exists", "DoesNotExist") => true,
            _ => false,
        }
}

#[cfg(test)]
mod tests;
