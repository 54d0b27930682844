//! The features of nodes that Node Feature Discovery (NFD) found: its `NodeFeature` objects, if the
//! API server has them.
//!
//! An object has tens of kilobytes, and few documents use its features. So archaware reads objects
//! only when a document names a feature, and keeps only features that documents name.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use kube::ResourceExt;
use kube_runtime::watcher::{self, Event};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cluster::{api::ApiClient, name::NamespacedName, watch::watch_events};

use super::{compatibility::NodeFeatures, node_feature::NodeFeature};

/// Maximum number of features that are kept. NFD has about twenty.
const MAX_FEATURES: usize = 64;
/// Maximum number of features of one tenant. A feature counts for the tenant that asked first.
const MAX_PER_TENANT: usize = 8;
/// A feature that was not requested for this time may be replaced by another feature. This limits
/// how often all objects are read again: at most [`MAX_FEATURES`] times within `IDLE`.
const IDLE: Duration = Duration::from_mins(10);
/// Minimum time between two logged failures.
const LOG_INTERVAL: Duration = Duration::from_mins(10);
/// The label that names the node of an object.
const NODE_NAME: &str = "nfd.node.kubernetes.io/node-name";

/// The features of the nodes, read when documents name them. Cheap to clone.
#[derive(Clone, Default)]
pub(super) struct NodeFeatureIndex {
    /// The features that documents name.
    wanted: watch::Sender<RequestedFeatures>,
    /// The features that were read.
    read: watch::Sender<BTreeSet<String>>,
    known: Arc<Mutex<Known>>,
}

/// The requested features.
#[derive(Default)]
struct RequestedFeatures(BTreeMap<String, RequestedFeature>);

struct RequestedFeature {
    /// The tenant that asked for it first.
    tenant: String,
    /// The time of the last request.
    last: Instant,
}

impl RequestedFeatures {
    /// Adds features up to [`MAX_FEATURES`] and [`MAX_PER_TENANT`]. Removes idle features if there
    /// is no room. Returns whether a feature was added.
    fn ask(&mut self, tenant: &str, features: &BTreeSet<String>, now: Instant) -> bool {
        let mut is_new = false;
        for feature in features {
            if let Some(requested) = self.0.get_mut(feature) {
                requested.last = now;
                continue;
            }
            if self.0.len() >= MAX_FEATURES || self.count_of(tenant) >= MAX_PER_TENANT {
                self.0
                    .retain(|_, requested| now.saturating_duration_since(requested.last) < IDLE);
            }
            if self.0.len() < MAX_FEATURES && self.count_of(tenant) < MAX_PER_TENANT {
                let new = RequestedFeature {
                    tenant: tenant.to_owned(),
                    last: now,
                };
                self.0.insert(feature.clone(), new);
                is_new = true;
            }
        }
        is_new
    }

    fn count_of(&self, tenant: &str) -> usize {
        let requested = self.0.values();
        requested.filter(|feature| feature.tenant == tenant).count()
    }

    fn names(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }
}

#[derive(Default)]
struct Known {
    /// By node: its objects, and their merged features.
    nodes: HashMap<String, FeaturesOfNode>,
    /// The node of each object.
    objects: HashMap<NamespacedName, String>,
    /// Nodes with the same CPU and kernel share one allocation.
    interned: HashSet<Arc<NodeFeatures>>,
}

#[derive(Default)]
struct FeaturesOfNode {
    objects: BTreeMap<NamespacedName, Arc<NodeFeatures>>,
    merged: Arc<NodeFeatures>,
}

impl NodeFeatureIndex {
    /// Requests features for a tenant, and waits until they are read, or cannot be read.
    pub(super) async fn wait_for(&self, tenant: &str, features: &BTreeSet<String>) {
        let mut read_features = self.read.subscribe();
        let now = Instant::now();
        self.wanted
            .send_if_modified(|wanted| wanted.ask(tenant, features, now));
        let mut wanted = self.wanted.borrow().names();
        wanted.retain(|feature| features.contains(feature));
        // `self` holds the sender, so this cannot fail.
        let _ = read_features.wait_for(|read| wanted.is_subset(read)).await;
    }

    /// The features of a node; `None` without an object for it.
    pub(super) fn get(&self, node: &str) -> Option<Arc<NodeFeatures>> {
        let known = self.known.lock();
        known.nodes.get(node).map(|node| node.merged.clone())
    }

    /// Reads the requested features, as long as it is polled.
    pub(super) async fn follow(self, api: ApiClient) {
        let mut wanted = self.wanted.subscribe();
        let mut logged: Option<tokio::time::Instant> = None;
        loop {
            if wanted
                .wait_for(|requested| !requested.0.is_empty())
                .await
                .is_err()
            {
                return;
            }
            let features = wanted.borrow_and_update().names();
            let mut events = watch_events::<NodeFeature>(api.watched(), None).boxed();
            let mut list = Known::default();
            loop {
                let event = tokio::select! {
                    // Documents name more features: everything is read again.
                    _ = wanted.changed() => break,
                    event = events.next() => event,
                };
                match event {
                    None => break,
                    Some(Ok(event)) => {
                        if self.apply(event, &features, &mut list) {
                            self.read.send_replace(features.clone());
                        }
                    }
                    Some(Err(error)) => {
                        let now = tokio::time::Instant::now();
                        if logged.is_none_or(|last| now - last > LOG_INTERVAL) {
                            log(&error);
                            logged = Some(now);
                        }
                        // Rules fall back to labels. The watch goes on trying, with pauses.
                        self.read.send_replace(features.clone());
                    }
                }
            }
        }
    }

    /// Applies an event of the watch. Returns whether the event completed the list.
    fn apply(
        &self,
        event: Event<NodeFeature>,
        features: &BTreeSet<String>,
        list: &mut Known,
    ) -> bool {
        match event {
            Event::Init => *list = Known::default(),
            Event::InitApply(object) => list.insert(&object, features),
            Event::InitDone => {
                *self.known.lock() = std::mem::take(list);
                return true;
            }
            Event::Apply(object) => self.known.lock().insert(&object, features),
            Event::Delete(object) => self
                .known
                .lock()
                .remove(&NamespacedName::of_object(&object)),
        }
        false
    }
}

fn log(error: &watcher::Error) {
    let error = crate::error::chain(error);
    tracing::info!(
        error,
        "cannot read NodeFeature objects; archaware uses the labels that NFD writes to nodes instead"
    );
}

impl Known {
    fn insert(&mut self, object: &NodeFeature, features: &BTreeSet<String>) {
        let name = NamespacedName::of_object(object);
        self.remove(&name);
        // Older versions of NFD name the object after its node.
        let node = object.labels().get(NODE_NAME).cloned();
        let node = node.unwrap_or_else(|| object.name_any());
        let object_features = self.intern(object.spec.features.only(features));
        let of_node = self.nodes.entry(node.clone()).or_default();
        of_node.objects.insert(name.clone(), object_features);
        self.objects.insert(name, node.clone());
        self.merge(&node);
    }

    fn remove(&mut self, name: &NamespacedName) {
        let Some(node) = self.objects.remove(name) else {
            return;
        };
        if let Some(of_node) = self.nodes.get_mut(&node) {
            of_node.objects.remove(name);
            if of_node.objects.is_empty() {
                self.nodes.remove(&node);
            }
        }
        self.merge(&node);
        self.interned
            .retain(|features| Arc::strong_count(features) > 1);
    }

    fn merge(&mut self, node: &str) {
        let Some(of_node) = self.nodes.get(node) else {
            return;
        };
        let mut merged = NodeFeatures::default();
        for object_features in of_node.objects.values() {
            merged.merge(object_features);
        }
        let merged = self.intern(merged);
        if let Some(of_node) = self.nodes.get_mut(node) {
            of_node.merged = merged;
        }
    }

    fn intern(&mut self, features: NodeFeatures) -> Arc<NodeFeatures> {
        if let Some(known) = self.interned.get(&features) {
            return known.clone();
        }
        let features = Arc::new(features);
        self.interned.insert(features.clone());
        features
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::{
        cluster::{cluster_nodes::ClusterNodes, objects::Node},
        config::Config,
        placement::PlacementPolicy,
        selection::{
            compatibility::{CompatibilityDocument, RuleKeys},
            groups::{GroupBy, GroupedNodes},
        },
    };

    use super::*;

    fn object(name: &str, node: Option<&str>, features: &Value) -> NodeFeature {
        let labels = node.map(|node| json!({ NODE_NAME: node }));
        let object = json!({
            "metadata": {"name": name, "namespace": "nfd", "labels": labels},
            "spec": {"features": features},
        });
        serde_json::from_value(object).unwrap()
    }

    fn cpu(flags: &[&str]) -> Value {
        let elements: BTreeMap<_, _> = flags.iter().map(|flag| (*flag, json!({}))).collect();
        json!({"flags": {"cpu.cpuid": {"elements": elements}, "kernel.loadedmodule": {"elements": {"a": {}}}}})
    }

    #[test]
    fn only_what_is_wanted_is_kept_once() {
        let index = NodeFeatureIndex::default();
        let wanted = ["cpu.cpuid".to_owned(), "local.label".to_owned()].into();
        let mut list = Known::default();
        let mut apply = |event| index.apply(event, &wanted, &mut list);
        assert!(!apply(Event::Init));
        assert!(!apply(Event::InitApply(object("a", None, &cpu(&["AVX"])))));
        assert!(!apply(Event::InitApply(object(
            "b",
            Some("b"),
            &cpu(&["AVX"])
        ))));
        assert!(index.get("a").is_none(), "the list is not complete");
        assert!(apply(Event::InitDone));
        let (a, b) = (index.get("a").unwrap(), index.get("b").unwrap());
        assert!(Arc::ptr_eq(&a, &b), "equal ones share one allocation");
        let expected: NodeFeatures =
            serde_json::from_value(json!({"flags": {"cpu.cpuid": {"elements": {"AVX": {}}}}}))
                .unwrap();
        assert_eq!(
            *a, expected,
            "features that no document mentions are not kept"
        );
        // Features of further `NodeFeature` objects for the same node are merged with the features
        // of the node's own object.
        let local_label = json!({"attributes": {"local.label": {"elements": {"rack": "7"}}}});
        apply(Event::Apply(object("more", Some("b"), &local_label)));
        assert_ne!(index.get("b").unwrap(), b);
        apply(Event::Delete(object("more", Some("b"), &local_label)));
        assert!(Arc::ptr_eq(&index.get("b").unwrap(), &a));
        // An object may become another node's.
        apply(Event::Apply(object("b", Some("c"), &cpu(&["SVE"]))));
        assert!(index.get("b").is_none() && index.get("c").is_some());
        drop(b);
        apply(Event::Delete(object("b", Some("c"), &json!({}))));
        assert!(index.get("c").is_none());
        assert_eq!(index.known.lock().interned.len(), 1);
    }

    /// Kernel modules differ from node to node.
    #[test]
    fn nodes_that_differ_in_what_no_rule_reads_are_alike() {
        let names: Vec<String> = (0..100).map(|n| format!("node-{n}")).collect();
        let nodes = names.iter().map(|name| {
            let node = json!({"metadata": {"name": name}, "status": {"nodeInfo": {"architecture": "amd64"}}});
            serde_json::from_value::<Node>(node).unwrap()
        });
        let cluster = GroupedNodes::new(ClusterNodes::from_nodes(nodes));
        let wanted = ["kernel.loadedmodule".to_owned(), "pci.device".to_owned()].into();
        for (n, name) in names.iter().enumerate() {
            let mut modules = json!({format!("own-{n}"): {}});
            if n % 4 == 0 {
                modules["vfio-pci"] = json!({});
            }
            let devices = [json!({"attributes": {"vendor": "10de", "serial": name}})];
            let features = json!({
                "flags": {"kernel.loadedmodule": {"elements": modules}},
                "instances": {"pci.device": {"elements": devices}},
            });
            let event = Event::Apply(object(name, None, &features));
            cluster
                .features
                .apply(event, &wanted, &mut Known::default());
        }
        let policy = PlacementPolicy::from(&Config::default());
        let sizes = |condition: &str| {
            let text = format!("compatibilities: [{{rules: [{{matchFeatures: [{condition}]}}]}}]");
            let format = RuleKeys::Features;
            let document = CompatibilityDocument::parse(format, text.as_bytes()).unwrap();
            let groups = cluster.groups(GroupBy {
                labels: &document.labels,
                features: &document.features,
                own_taint: &policy.taint,
                variants: &policy.variants,
            });
            let mut sizes: Vec<_> = groups.iter().map(|group| group.group(0).count).collect();
            sizes.sort_unstable();
            let fitting = groups.iter().map(|group| group.group(0));
            let fitting = fitting.filter(|group| document.entries[0].fits(group.facts));
            (sizes, fitting.map(|group| group.count).sum::<usize>())
        };
        let module = "{feature: kernel.loadedmodule, matchExpressions: {vfio-pci: {op: Exists}}}";
        assert_eq!(sizes(module), (vec![25, 75], 25));
        let vendor = "{feature: pci.device, matchExpressions: {vendor: {op: In, value: 10de}}}";
        assert_eq!(sizes(vendor), (vec![100], 100));
        // A rule about the names of all elements reads them all.
        let module_name = "{feature: kernel.loadedmodule, matchName: {op: In, value: own-7}}";
        assert_eq!(sizes(module_name), (vec![1; 100], 1));
    }

    #[test]
    fn features_that_nobody_asks_for_give_their_place_away() {
        let names = |prefix: &str, count: usize| -> BTreeSet<String> {
            (0..count).map(|n| format!("{prefix}.{n}")).collect()
        };
        let (mut wanted, start) = (RequestedFeatures::default(), Instant::now());
        let (used, invented, late) = (names("used", 1), names("made-up", 100), names("late", 1));
        assert!(wanted.ask("a", &used, start) && !wanted.ask("b", &used, start));
        assert!(wanted.ask("greedy", &invented, start));
        assert_eq!(wanted.0.len(), 1 + MAX_PER_TENANT);
        assert!(
            wanted.ask("b", &late, start),
            "another tenant has its own share"
        );
        for tenant in 0..MAX_FEATURES {
            let tenant = format!("greedy-{tenant}");
            wanted.ask(&tenant, &names(&tenant, 100), start);
        }
        assert_eq!(wanted.0.len(), MAX_FEATURES);
        let later = names("later", 1);
        assert!(
            !wanted.ask("c", &later, start + IDLE / 2),
            "there is no room"
        );
        assert!(!wanted.ask("a", &used, start + IDLE / 2));
        assert!(wanted.ask("c", &later, start + IDLE));
        assert_eq!(wanted.names(), &used | &later);
    }

    #[tokio::test]
    async fn nobody_waits_for_what_cannot_be_read() {
        let index = NodeFeatureIndex::default();
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let api = ApiClient::new(kube::Client::try_from(nowhere).unwrap());
        let running = tokio::spawn(index.clone().follow(api));
        let wanted = BTreeSet::from(["cpu.cpuid".to_owned()]);
        let waiting = index.wait_for("a", &wanted);
        tokio::time::timeout(Duration::from_secs(30), waiting)
            .await
            .unwrap();
        let many = (0..100).map(|n| format!("feature.{n}")).collect();
        let waiting = index.wait_for("b", &many);
        tokio::time::timeout(Duration::from_secs(30), waiting)
            .await
            .unwrap();
        assert_eq!(index.wanted.borrow().0.len(), 1 + MAX_PER_TENANT);
        running.abort();
    }
}
