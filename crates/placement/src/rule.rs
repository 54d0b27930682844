//! Rules for the nodes of pods (`rules` of the configuration): pods that a rule selects get node
//! affinity and tolerations, whatever their images are.

use std::collections::BTreeMap;

use archaware_base::names::QualifiedName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    LabelSelector, TolerationConfig, Weight,
    affinity::WeightedTerm,
    author_nodes::AuthorNodes,
    demand::{Demand, Demands, Source},
    node_set::{Disjoint, NodeSet},
    requirement::{Operator, Requirement},
};

/// One rule: the pods that it selects get its additions.
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
    /// Label selectors for nodes, of which at least one has to match. Empty: no requirement.
    #[serde(default)]
    pub nodes: Vec<LabelSelector>,
    /// Labels whose values must be equal on node and pod, if the pod has the label.
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
    /// Selects the nodes to prefer, by their labels.
    pub nodes: LabelSelector,
    /// From 1 to 100.
    pub weight: Weight,
}

/// The result of applying the rules to a pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AppliedRules {
    /// One demand of each rule that applies.
    pub demands: Demands,
    /// Rules that select the pod, but are not applied because they contradict the pod or earlier
    /// rules.
    pub left_out: Vec<LeftOutRule>,
}

/// A rule that is left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeftOutRule {
    /// Name of the rule.
    pub name: String,
    /// The part of the pod, or of earlier rules, that the rule contradicts.
    pub contradicts: Contradicted,
}

/// What a rule contradicts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Contradicted {
    /// The node selector or the required node affinity of the pod.
    Author(Disjoint),
    /// The runtime class of the pod.
    RuntimeClass,
    /// The pod already exists, so its missing runtime class cannot be set any more.
    Existence,
    /// Earlier rules. They require other nodes (`Some`) or another runtime class (`None`).
    EarlierRules(Option<Disjoint>),
}

/// A pod, as far as rules look at it.
#[derive(Clone, Copy, Debug)]
pub struct RuledPod<'a> {
    /// Labels of the pod.
    pub labels: &'a BTreeMap<String, String>,
    /// The labels of its namespace.
    pub namespace_labels: &'a BTreeMap<String, String>,
    /// The node selector and affinity that the author of the pod wrote.
    pub author: AuthorNodes<'a>,
    /// Its runtime class.
    pub runtime_class: Option<&'a str>,
    /// Whether it is being created: its runtime class cannot be set later.
    pub is_new: bool,
}

impl std::fmt::Display for LeftOutRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rule {} is left out: ", self.name)?;
        match &self.contradicts {
            Contradicted::Author(why) => write!(
                f,
                "its nodes contradict the pod's node selector or required node affinity: {why}"
            ),
            Contradicted::RuntimeClass => {
                f.write_str("the pod has another runtime class, which cannot be changed")
            }
            Contradicted::Existence => {
                f.write_str("a runtime class can be set only when a pod is created")
            }
            Contradicted::EarlierRules(Some(why)) => {
                write!(f, "its nodes contradict those of rules before it: {why}")
            }
            Contradicted::EarlierRules(None) => {
                f.write_str("rules before it require another runtime class")
            }
        }
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
        let preferred = self
            .preferred_nodes
            .iter()
            .map(|preference| &preference.nodes);
        let mut selectors = self.nodes.iter().chain(preferred);
        selectors.any(|selector| selector.requirements().is_empty())
    }

    fn selects(&self, pod: RuledPod<'_>) -> bool {
        self.pods.matches(pod.labels) && self.namespaces.matches(pod.namespace_labels)
    }

    /// The part of the pod, or of earlier rules, that the rule contradicts, if any.
    fn contradicts(
        &self,
        required: &NodeSet,
        pod: RuledPod<'_>,
        earlier: &Demands,
    ) -> Option<Contradicted> {
        let wants_other_than = |class: &str| {
            let wanted = self.runtime_class.as_deref();
            wanted.is_some_and(|wanted| wanted != class)
        };
        if let Some(why) = required.disjoint(&pod.author.nodes()) {
            Some(Contradicted::Author(why))
        } else if pod.runtime_class.is_some_and(wants_other_than) {
            Some(Contradicted::RuntimeClass)
        } else if pod.runtime_class.is_none() && self.runtime_class.is_some() && !pod.is_new {
            Some(Contradicted::Existence)
        } else if let Some(why) = required.disjoint(&earlier.required()) {
            Some(Contradicted::EarlierRules(Some(why)))
        } else if earlier.class().is_some_and(wants_other_than) {
            Some(Contradicted::EarlierRules(None))
        } else {
            None
        }
    }

    /// The nodes that it requires for a pod with these labels.
    fn required(&self, pod: &BTreeMap<String, String>) -> NodeSet {
        let selected = if self.nodes.is_empty() {
            NodeSet::every()
        } else {
            NodeSet::any_of(self.nodes.iter().map(LabelSelector::requirements))
        };
        let same = self.match_node_labels.iter().filter_map(|key| {
            let value = pod.get(key.as_str())?;
            let values = vec![value.clone()];
            Some(Requirement::new(key.as_str(), Operator::In, values))
        });
        selected.and(&NodeSet::all_of(same))
    }

    /// The demand of the rule on a pod that it selects. `required`: the nodes that it requires.
    fn demand(&self, required: NodeSet, pod: RuledPod<'_>) -> Demand {
        let preferred = self.preferred_nodes.iter().map(|preference| WeightedTerm {
            weight: preference.weight.get(),
            expressions: preference.nodes.requirements(),
        });
        let tolerations = self.tolerations.iter();
        let class = self.runtime_class.as_ref();
        Demand {
            require: required,
            prefer: preferred.collect(),
            tolerate: tolerations
                .map(|toleration| toleration.toleration(""))
                .collect(),
            class: class.filter(|_| pod.runtime_class.is_none()).cloned(),
            ..Demand::from_source(Source::Rule(self.name.clone()))
        }
    }
}

/// The additions of all matching rules for a pod, and the rules that are left out.
pub fn apply(rules: &[PodRule], pod: RuledPod<'_>) -> AppliedRules {
    let mut applied = AppliedRules::default();
    for rule in rules.iter().filter(|rule| rule.selects(pod)) {
        let required = rule.required(pod.labels);
        match rule.contradicts(&required, pod, &applied.demands) {
            Some(contradicts) => applied.left_out.push(LeftOutRule {
                name: rule.name.clone(),
                contradicts,
            }),
            None => applied.demands.push(rule.demand(required, pod)),
        }
    }
    applied
}

#[cfg(test)]
mod tests;
