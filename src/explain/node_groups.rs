//! Groups of nodes that can or cannot take a pod: a cluster has thousands of nodes, but only a few
//! kinds.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    cluster::objects::Node,
    evaluate::{Stage, lacking},
    placement::{
        NodePlatform, NodeVariant,
        affinity_change::Require,
        is_hard,
        landing::{self, Landing, LandingNode, LandingPod, Obstacle},
        record,
    },
};

use super::{Consequence, Facts, images};

/// Maximum number of names shown for a group.
const MAX_EXAMPLES: usize = 3;

/// Nodes with the same architecture and taints, and the same answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeGroup {
    /// The number of nodes.
    pub count: usize,
    /// `status.nodeInfo.architecture`.
    pub architecture: String,
    /// The CPU variant of the nodes, if it is known.
    pub variant: Option<&'static str>,
    /// Taints that keep pods away, as `key=value:effect`.
    pub taints: Vec<String>,
    /// Whether the pod can land on these nodes: `yes`, `unknown` (the variant of the nodes is not
    /// known) or `no`. Free resources are not considered.
    pub fits: &'static str,
    /// The first reason against these nodes, and the images that do not run on them.
    pub reason: Option<String>,
    /// The names of the first nodes.
    pub examples: Vec<String>,
    /// The variant of these nodes, if it is known.
    #[serde(skip)]
    pub(super) node_variant: Option<NodeVariant>,
    /// The first obstacle.
    #[serde(skip)]
    pub(super) obstacle: Option<Obstacle>,
    /// How much keeps the pod away from the closest of these nodes.
    #[serde(skip)]
    pub(super) distance: (usize, usize),
    /// Whether the scheduler would place the pod there, although its images do not run there.
    #[serde(skip)]
    pub(super) is_deadly: bool,
}

impl NodeGroup {
    pub(super) fn platform(&self) -> NodePlatform<'_> {
        NodePlatform::of_all(&self.architecture, self.node_variant)
    }

    pub(super) fn can_take_it(&self) -> bool {
        self.fits != "no"
    }
}

/// The groups of nodes: first the groups that can take the pod, then by number of nodes.
pub(super) fn groups(facts: &Facts<'_>, consequence: &Consequence) -> Option<Vec<NodeGroup>> {
    type Key = (String, Option<&'static str>, Vec<String>, Landing);
    type Group = (usize, Vec<String>, Option<NodeVariant>, (usize, usize));
    let tolerations = tolerations(facts, consequence);
    let added = consequence.change.affinity.require.as_ref();
    let added = added.filter(|_| facts.is_installed != Some(false));
    let added = added.map(Require::alternatives).unwrap_or_default();
    let pod = LandingPod {
        author: facts.subject.spec.author_nodes(),
        tolerations: &tolerations,
        demands: &facts.evaluation.demands,
        architectures: consequence.runs_on.as_ref(),
        added: &added,
    };
    let (variants, own_taint) = (&facts.policy.variants, &facts.policy.taint);
    let mut groups: BTreeMap<Key, Group> = BTreeMap::new();
    let nodes = facts.nodes?.iter();
    for node in nodes.filter(|node| node.metadata.deletion_timestamp.is_none()) {
        let view = node.view();
        let variant = variants.of_node(&view);
        let landing_node = LandingNode {
            name: node.metadata.name.as_deref().unwrap_or_default(),
            architecture: view.architecture,
            variant,
            labels: view.labels,
            taints: view.taints,
        };
        let key = (
            view.architecture.to_owned(),
            variant.map(NodeVariant::name),
            taints(node),
            landing::landing(&pod, &landing_node, own_taint),
        );
        let distance = landing::distance(&pod, &landing_node);
        let new = || (0, Vec::new(), variant, distance);
        let (count, examples, _, least) = groups.entry(key).or_insert_with(new);
        *count += 1;
        *least = distance.min(*least);
        if examples.len() < MAX_EXAMPLES {
            examples.push(landing_node.name.to_owned());
        }
    }
    let describe = |(key, (count, examples, of_group, distance)): (Key, Group)| {
        let (architecture, variant, taints, landing) = key;
        let (fits, reason) = match &landing {
            Landing::Fits => ("yes", None),
            Landing::UnknownVariant => (
                "unknown",
                Some("its images need a certain CPU variant, and the variant of these nodes is not known".to_owned()),
            ),
            Landing::Blocked(obstacle) => {
                let node = NodePlatform::of_all(&architecture, of_group);
                let lacking = lacking(facts.counting_images(), facts.policy, node);
                let lacking = images::say_lacking(&lacking);
                ("no", Some(reason(facts, obstacle, lacking)))
            }
        };
        NodeGroup {
            count,
            architecture,
            variant,
            taints,
            fits,
            reason,
            examples,
            node_variant: of_group,
            distance,
            is_deadly: landing == Landing::Blocked(Obstacle::Architecture),
            obstacle: match landing {
                Landing::Blocked(obstacle) => Some(obstacle),
                Landing::Fits | Landing::UnknownVariant => None,
            },
        }
    };
    let mut described_groups: Vec<NodeGroup> = groups.into_iter().map(describe).collect();
    described_groups.sort_by_key(|group| (!group.can_take_it(), std::cmp::Reverse(group.count)));
    Some(described_groups)
}

fn taints(node: &Node) -> Vec<String> {
    let node_taints = node.view().taints.iter();
    let hard = node_taints.filter(|taint| is_hard(taint));
    let mut hard: Vec<String> = hard.map(landing::describe_taint).collect();
    hard.sort();
    hard
}

/// The pod's tolerations, plus the additions of archaware and of the DaemonSet controller.
fn tolerations(facts: &Facts<'_>, consequence: &Consequence) -> Vec<Value> {
    let spec = facts.subject.spec;
    let mut tolerations = spec.tolerations.clone().unwrap_or_default();
    if facts.is_installed != Some(false) {
        tolerations.extend(consequence.change.tolerations.iter().cloned());
    }
    if facts.subject.stage == Stage::Template {
        let daemon_keys = DAEMON_TOLERATIONS.iter();
        tolerations.extend(
            daemon_keys.map(
                |key| json!({"key": format!("node.kubernetes.io/{key}"), "operator": "Exists"}),
            ),
        );
    }
    tolerations
}

/// Taints that the DaemonSet controller lets its pods tolerate (`AddOrUpdateDaemonPodTolerations`
/// of k8s.io/kubernetes).
const DAEMON_TOLERATIONS: [&str; 6] = [
    "not-ready",
    "unreachable",
    "disk-pressure",
    "memory-pressure",
    "pid-pressure",
    "unschedulable",
];

fn reason(facts: &Facts<'_>, obstacle: &Obstacle, lacking: Option<String>) -> String {
    let recorded = record::read(facts.subject.annotations);
    let is_own_affinity = recorded.affinity.require.is_some();
    let first = match (obstacle, &lacking) {
        (Obstacle::Architecture, lacking) => {
            let why = lacking.as_deref().unwrap_or("its images do not run there");
            return format!("nothing keeps it away, but {why}");
        }
        (Obstacle::Taint { is_own: true, .. }, Some(lacking)) => return lacking.clone(),
        (Obstacle::NodeAffinity, Some(lacking)) if is_own_affinity => return lacking.clone(),
        (Obstacle::NodeAffinity, None) if is_own_affinity => {
            "node affinity, which archaware extended".to_owned()
        }
        (Obstacle::Taint { taint, .. }, _) => format!("untolerated taint {taint}"),
        (Obstacle::NodeSelector(label), _) => format!("node selector {label}"),
        (Obstacle::NodeAffinity, _) => "node affinity".to_owned(),
        (Obstacle::Demand(source), _) => source.to_string(),
    };
    // The images would still keep the pod away if the first reason were gone.
    let also = lacking.map(|lacking| format!("; and {lacking}"));
    first + &also.unwrap_or_default()
}
