//! Whether a pod can land on a node, and the first reason against it: foreign taints, node
//! selector, node affinity. Finally, checks that follow from the images: archaware's own taint, and
//! whether the images run there. Free resources are not considered.

use std::collections::BTreeMap;

use serde_json::Value;

use archaware_platform::Architectures;

use super::{
    NodeVariant, TaintKind,
    affinity::{Affinity, NodeSelectorTerm},
    author_nodes::AuthorNodes,
    demand::{Demands, Source},
    suffices,
    taint::{keeps_away, text},
};

/// What a pod asks of nodes.
#[derive(Clone, Copy, Debug)]
pub struct LandingPod<'a> {
    /// Node selector and affinity.
    pub author: AuthorNodes<'a>,
    /// Its tolerations, in the API's form.
    pub tolerations: &'a [Value],
    /// What features ask of its nodes.
    pub demands: &'a Demands,
    /// The architectures that its images share; `None` if no image limits it.
    pub architectures: Option<&'a Architectures>,
    /// Terms that archaware adds to its required node affinity; at least one has to select the
    /// node. Empty if archaware adds no terms.
    pub added: &'a [NodeSelectorTerm],
}

/// The parts of a node that decide whether a pod can land on it.
#[derive(Clone, Copy, Debug)]
pub struct LandingNode<'a> {
    /// Name of the node.
    pub name: &'a str,
    /// `status.nodeInfo.architecture`.
    pub architecture: &'a str,
    /// Its variant, if it is known.
    pub variant: Option<NodeVariant>,
    /// Labels of the node.
    pub labels: &'a BTreeMap<String, String>,
    /// Its taints, in the API's form.
    pub taints: &'a [Value],
}

/// Whether a pod can land on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Landing {
    /// It can, and its images run there.
    Fits,
    /// The pod can land there, but the node's variant is unknown, and its images need a high
    /// variant.
    UnknownVariant,
    /// It cannot.
    Blocked(Obstacle),
}

/// Why a pod cannot land on a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// It does not tolerate this taint.
    Taint {
        /// `key=value:effect`.
        taint: String,
        /// Whether it has the key and effect of archaware's taint.
        is_own: bool,
    },
    /// The node lacks this label of the pod's node selector: `key=value`.
    NodeSelector(String),
    /// Its required node affinity does not select the node.
    NodeAffinity,
    /// The scheduler would place the pod on the node, but its images do not run there.
    Architecture,
    /// A demand excludes the node.
    Demand(Source),
}

/// Whether a pod can land on a node. `taint_kind`: archaware's taint.
pub fn landing(pod: &LandingPod<'_>, node: &LandingNode<'_>, taint_kind: &TaintKind) -> Landing {
    let runs = pod.architectures.map_or(Some(true), |set| {
        suffices(set, node.architecture, node.variant)
    });
    let taints = node.taints.iter();
    let hostile = taints.filter(|taint| keeps_away(taint, pod.tolerations));
    let (own_taints, foreign_taints): (Vec<_>, Vec<_>) =
        hostile.partition(|taint| taint_kind.is_of(taint));
    let blocked = if let Some(taint) = foreign_taints.first() {
        Obstacle::Taint {
            taint: describe_taint(taint),
            is_own: false,
        }
    } else if let Some(label) = missing_label(pod.author.node_selector, node.labels) {
        Obstacle::NodeSelector(label)
    } else if !affinity_selects(pod.author.affinity, node) {
        Obstacle::NodeAffinity
    } else if let Some(selection) = pod.demands.find(&Source::ImageSelection)
        && !selection.require.selects(node.labels)
    {
        Obstacle::Demand(Source::ImageSelection)
    } else if let Some(taint) = own_taints.first() {
        Obstacle::Taint {
            taint: describe_taint(taint),
            is_own: true,
        }
    } else {
        let mut added = pod.added.iter();
        let excluded =
            !pod.added.is_empty() && !added.any(|term| term.selects(node.labels, node.name));
        return match runs {
            Some(false) => Landing::Blocked(Obstacle::Architecture),
            _ if excluded => {
                let source = pod.demands.excluding(node.labels);
                let source = source.unwrap_or(&Source::Architectures);
                Landing::Blocked(Obstacle::Demand(source.clone()))
            }
            Some(true) => Landing::Fits,
            None => Landing::UnknownVariant,
        };
    };
    Landing::Blocked(blocked)
}

/// How much keeps a pod away from a node, for comparisons of nodes: first what the author of the
/// pod selects and the node is not, then the number of its taints. Nodes that the author selects
/// are those that the pod is meant for.
pub fn distance(pod: &LandingPod<'_>, node: &LandingNode<'_>) -> (usize, usize) {
    let mut selector = pod.author.node_selector.iter();
    let is_selected = selector.all(|(key, value)| node.labels.get(key) == Some(value));
    let selects = affinity_selects(pod.author.affinity, node);
    let taints = node.taints.iter();
    let hostile = taints.filter(|taint| keeps_away(taint, pod.tolerations));
    let mismatches = usize::from(!is_selected) + usize::from(!selects);
    (mismatches, hostile.count())
}

/// A taint as `kubectl taint` writes it.
pub fn describe_taint(taint: &Value) -> String {
    let [key, value, effect] = ["key", "value", "effect"].map(|field| text(taint, field));
    let between = if value.is_empty() { "" } else { "=" };
    format!("{key}{between}{value}:{effect}")
}

fn missing_label(
    selector: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> Option<String> {
    let mut all = selector.iter();
    let (key, value) = all.find(|(key, value)| labels.get(*key) != Some(value))?;
    Some(format!("{key}={value}"))
}

fn affinity_selects(affinity: Option<&Affinity>, node: &LandingNode<'_>) -> bool {
    static NONE: BTreeMap<String, String> = BTreeMap::new();
    let terms_only = AuthorNodes {
        node_selector: &NONE,
        affinity,
    };
    terms_only.selects(node.labels, node.name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::{
        Effect,
        demand::Demand,
        node_set::NodeSet,
        requirement::{Operator, Requirement},
    };

    use super::*;

    fn taint_kind() -> TaintKind {
        TaintKind {
            key: "kubernetes.io/arch".to_owned(),
            effect: Effect::NoSchedule,
        }
    }

    fn blocked_by(taint: &str, is_own: bool) -> Landing {
        Landing::Blocked(Obstacle::Taint {
            taint: taint.to_owned(),
            is_own,
        })
    }

    /// Whether a pod with these fields can land on an arm64 node with SSDs and these taints.
    fn lands(taints: &[Value], spec: &Value, selected: Option<&str>, images: &str) -> Landing {
        let labels: BTreeMap<String, String> =
            serde_json::from_value(json!({"kubernetes.io/arch": "arm64", "disk": "ssd"})).unwrap();
        let node_selector: BTreeMap<String, String> =
            serde_json::from_value(spec["nodeSelector"].clone()).unwrap_or_default();
        let affinity: Option<Affinity> = serde_json::from_value(spec["affinity"].clone()).unwrap();
        let selected = selected.map(|disk| {
            let values = vec![disk.to_owned()];
            Demand {
                require: NodeSet::all_of([Requirement::new("disk", Operator::In, values)]),
                ..Demand::from_source(Source::ImageSelection)
            }
        });
        let architectures: Architectures = images.parse().unwrap();
        let added: Vec<NodeSelectorTerm> =
            serde_json::from_value(spec["added"].clone()).unwrap_or_default();
        let tolerations: Vec<Value> =
            serde_json::from_value(spec["tolerations"].clone()).unwrap_or_default();
        let pod = LandingPod {
            author: AuthorNodes {
                node_selector: &node_selector,
                affinity: affinity.as_ref(),
            },
            tolerations: &tolerations,
            demands: &selected.into_iter().collect(),
            architectures: Some(&architectures),
            added: &added,
        };
        let node = LandingNode {
            name: "n",
            architecture: "arm64",
            variant: None,
            labels: &labels,
            taints,
        };
        landing(&pod, &node, &taint_kind())
    }

    #[test]
    fn taints_of_others_come_first_and_its_own_last() {
        let arch = taint_kind().taint("arm64").to_json();
        let cordoned = json!({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"});
        let soft = json!({"key": "slow", "effect": "PreferNoSchedule"});
        let (plain, elsewhere, tolerating) = (
            json!({}),
            json!({"nodeSelector": {"disk": "hdd"}}),
            json!({"tolerations": [{"key": "kubernetes.io/arch", "operator": "Exists"}]}),
        );
        for (taints, spec, expected) in [
            (vec![soft], &tolerating, Landing::Fits),
            (vec![arch.clone()], &tolerating, Landing::Fits),
            (
                vec![arch.clone()],
                &plain,
                blocked_by("kubernetes.io/arch=arm64:NoSchedule", true),
            ),
            (
                vec![arch.clone()],
                &elsewhere,
                Landing::Blocked(Obstacle::NodeSelector("disk=hdd".to_owned())),
            ),
            (
                vec![arch.clone(), cordoned.clone()],
                &elsewhere,
                blocked_by("node.kubernetes.io/unschedulable:NoSchedule", false),
            ),
            (
                vec![arch, cordoned],
                &tolerating,
                blocked_by("node.kubernetes.io/unschedulable:NoSchedule", false),
            ),
        ] {
            assert_eq!(
                lands(&taints, spec, None, "arm64"),
                expected,
                "{taints:?} {spec}"
            );
        }
    }

    #[test]
    fn then_the_author_then_the_selected_image_then_the_architecture() {
        let affinity = |disk: &str| {
            json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "disk", "operator": "In", "values": [disk]}]}]}}})
        };
        let selector = Obstacle::NodeSelector("disk=hdd".to_owned());
        for (spec, selected, images, expected) in [
            (json!({}), None, "amd64,arm64", Landing::Fits),
            (
                json!({"nodeSelector": {"disk": "hdd"}, "affinity": affinity("hdd")}),
                Some("hdd"),
                "amd64",
                Landing::Blocked(selector),
            ),
            (
                json!({"nodeSelector": {"disk": "ssd"}, "affinity": affinity("hdd")}),
                Some("hdd"),
                "amd64",
                Landing::Blocked(Obstacle::NodeAffinity),
            ),
            (
                json!({"affinity": affinity("ssd")}),
                Some("hdd"),
                "amd64",
                Landing::Blocked(Obstacle::Demand(Source::ImageSelection)),
            ),
            (
                json!({}),
                Some("ssd"),
                "amd64",
                Landing::Blocked(Obstacle::Architecture),
            ),
            (json!({}), None, "arm64/v9", Landing::UnknownVariant),
            (
                json!({"added": [{"matchExpressions": [{"key": "variant", "operator": "In", "values": ["v9"]}]}]}),
                None,
                "arm64/v9",
                Landing::Blocked(Obstacle::Demand(Source::Architectures)),
            ),
        ] {
            assert_eq!(lands(&[], &spec, selected, images), expected, "{spec}");
        }
    }
}
