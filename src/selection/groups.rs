//! The nodes of the cluster in groups of equal nodes, so that a few groups are compared instead of
//! thousands of nodes.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use crate::{
    cluster::{cluster_nodes::ClusterNodes, objects::Node},
    placement::{
        NodeVariant, TaintKind, VariantPolicy, affinity::HOSTNAME, image_locality::MAX_HOSTS,
    },
};

use super::{
    compatibility::{FeatureKeys, LabelKeys, NodeFacts, NodeFeatures, NodeGroup},
    features::NodeFeatureIndex,
};

/// Lifetime of cached groups: long enough for the pods of a rollout, which are created at once, and
/// short enough that new nodes are soon seen.
const TTL: Duration = Duration::from_secs(1);
/// Maximum number of cached groupings: one for each set of labels that documents and pods name.
const MAX_GROUPINGS: usize = 16;
/// Maximum number of groups of a cached grouping, about a KiB each. A grouping with more groups is
/// not cached.
const MAX_GROUPS: usize = 256;

/// The nodes of the cluster, with the features that Node Feature Discovery found. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct GroupedNodes {
    pub nodes: ClusterNodes,
    /// The features that Node Feature Discovery found.
    pub features: NodeFeatureIndex,
    groupings: Arc<Mutex<HashMap<GroupKey, Grouping>>>,
}

/// Labels and NFD features that distinguish groups.
type GroupKey = (LabelKeys, FeatureKeys);

struct Grouping {
    made: Instant,
    groups: Arc<[AlikeNodes]>,
}

/// Nodes with the same taints, architecture and variant, and the same values of the compared
/// labels and features.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AlikeNodes {
    /// The compared labels.
    pub labels: BTreeMap<String, String>,
    /// All taints of the nodes, except archaware's own taint.
    pub taints: Vec<serde_json::Value>,
    /// `status.nodeInfo.architecture`.
    architecture: String,
    variant: Option<NodeVariant>,
    features: Option<Arc<NodeFeatures>>,
    hosts: Vec<String>,
    count: usize,
}

impl AlikeNodes {
    /// The group in the form that rules of compatibility documents read. `index`: the position of
    /// this group among all groups.
    pub(super) fn group(&self, index: usize) -> NodeGroup<'_> {
        NodeGroup {
            index,
            facts: NodeFacts {
                labels: &self.labels,
                features: self.features.as_deref(),
            },
            architecture: &self.architecture,
            variant: self.variant,
            hosts: &self.hosts,
            count: self.count,
        }
    }
}

/// How nodes are grouped.
#[derive(Clone, Copy)]
pub(super) struct GroupBy<'a> {
    pub labels: &'a LabelKeys,
    /// These features of NFD, for nodes that have `NodeFeature` objects.
    pub features: &'a FeatureKeys,
    /// archaware's own taint, which is ignored because pods get tolerations for it.
    pub own_taint: &'a TaintKind,
    /// Reads the CPU variant of nodes.
    pub variants: &'a VariantPolicy,
}

impl GroupedNodes {
    pub(super) fn new(nodes: ClusterNodes) -> Self {
        Self {
            nodes,
            ..Self::default()
        }
    }

    /// The nodes in groups, cached for [`TTL`]. While one caller renews them, other callers get
    /// the older groups.
    pub(super) fn groups(&self, criteria: GroupBy<'_>) -> Arc<[AlikeNodes]> {
        let now = Instant::now();
        let key = (criteria.labels.clone(), criteria.features.clone());
        if let Some(grouping) = self.groupings.lock().get_mut(&key) {
            let age = now.saturating_duration_since(grouping.made);
            if age < TTL {
                return grouping.groups.clone();
            }
            if age < 2 * TTL {
                // One caller renews the groups; other callers use the existing groups.
                grouping.made = now;
            }
        }
        let groups: Arc<[AlikeNodes]> = criteria.group(self, |_| true).into();
        if groups.len() > MAX_GROUPS {
            return groups;
        }
        let grouping = Grouping {
            made: now,
            groups: groups.clone(),
        };
        let mut groupings = self.groupings.lock();
        if groupings.len() >= MAX_GROUPINGS && !groupings.contains_key(&key) {
            let oldest = groupings.iter().min_by_key(|(_, grouping)| grouping.made);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                groupings.remove(&oldest);
            }
        }
        groupings.insert(key, grouping);
        groups
    }

    /// Groups only the nodes that `is_included` accepts.
    pub(super) fn groups_of(
        &self,
        criteria: GroupBy<'_>,
        is_included: impl Fn(&Node) -> bool,
    ) -> Arc<[AlikeNodes]> {
        criteria.group(self, is_included).into()
    }
}

/// Keeps only the features that rules read. Nodes may differ in many other features, like the
/// modules of their kernels.
struct ReadFeatures<'a> {
    keys: &'a FeatureKeys,
    /// Key: address of the full features. The value keeps them alive, so that the address is not
    /// reused.
    parts: HashMap<*const NodeFeatures, (Arc<NodeFeatures>, Arc<NodeFeatures>)>,
    /// All reduced feature sets, so that equal sets share one allocation.
    interned: HashSet<Arc<NodeFeatures>>,
}

impl<'a> ReadFeatures<'a> {
    fn new(keys: &'a FeatureKeys) -> Self {
        Self {
            keys,
            parts: HashMap::new(),
            interned: HashSet::new(),
        }
    }

    fn of_node(&mut self, index: &NodeFeatureIndex, node: &Node) -> Option<Arc<NodeFeatures>> {
        if self.keys.is_empty() {
            return None;
        }
        let full_features = index.get(node.metadata.name.as_deref()?)?;
        if let Some((_, part)) = self.parts.get(&Arc::as_ptr(&full_features)) {
            return Some(part.clone());
        }
        let part = Arc::new(full_features.read_by(|feature| self.keys.elements(feature)));
        let interned_part = self.interned.get(&part).cloned();
        let part = interned_part.unwrap_or(part);
        self.interned.insert(part.clone());
        self.parts
            .insert(Arc::as_ptr(&full_features), (full_features, part.clone()));
        Some(part)
    }
}

impl GroupBy<'_> {
    fn group(self, cluster: &GroupedNodes, is_included: impl Fn(&Node) -> bool) -> Vec<AlikeNodes> {
        type Key<'a> = (
            Vec<(&'a str, &'a str)>,
            Vec<&'a serde_json::Value>,
            &'a str,
            Option<NodeVariant>,
            // Equal features share one allocation, so comparing addresses is enough.
            Option<*const NodeFeatures>,
        );
        let mut groups: HashMap<Key<'_>, (Option<Arc<NodeFeatures>>, Vec<&Node>)> = HashMap::new();
        let mut read_features = ReadFeatures::new(self.features);
        let cluster_nodes = cluster.nodes.all();
        let nodes = cluster_nodes.iter().map(Arc::as_ref);
        for node in
            nodes.filter(|node| node.metadata.deletion_timestamp.is_none() && is_included(node))
        {
            let view = node.view();
            let features = read_features.of_node(&cluster.features, node);
            let mut taints: Vec<_> = view.taints.iter().collect();
            taints.retain(|taint| !self.own_taint.is_of(taint));
            let key = (
                self.labels_of(view.labels),
                taints,
                view.architecture,
                self.variants.of_node(&view),
                features.as_ref().map(Arc::as_ptr),
            );
            let group = groups.entry(key).or_insert((features, Vec::new()));
            group.1.push(node);
        }
        let alike = |(key, (features, nodes)): (Key<'_>, (_, Vec<&Node>))| {
            let (labels, taints, architecture, variant, _) = key;
            let owned = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
            let host = |node: &&Node| node.view().labels.get(HOSTNAME).cloned();
            let hosts = nodes.iter().filter_map(host).take(MAX_HOSTS + 1);
            let hosts: Vec<String> = hosts.collect();
            AlikeNodes {
                labels: labels.into_iter().map(owned).collect(),
                taints: taints.into_iter().cloned().collect(),
                architecture: architecture.to_owned(),
                variant,
                features,
                hosts: Some(hosts)
                    .filter(|hosts| hosts.len() == nodes.len())
                    .unwrap_or_default(),
                count: nodes.len(),
            }
        };
        groups.into_iter().map(alike).collect()
    }

    /// The compared labels of a node, sorted by key.
    fn labels_of<'a>(&self, labels: &'a BTreeMap<String, String>) -> Vec<(&'a str, &'a str)> {
        // Iterates over the smaller set: the author of a document may name thousands of labels.
        if self.labels.prefixes.is_empty() && self.labels.keys.len() <= labels.len() {
            let keys = self.labels.keys.iter();
            return keys
                .filter_map(|key| labels.get_key_value(key))
                .map(|(key, value)| (key.as_str(), value.as_str()))
                .collect();
        }
        let compared_labels = labels.iter().filter(|(key, _)| self.labels.contains(key));
        compared_labels
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect()
    }
}
