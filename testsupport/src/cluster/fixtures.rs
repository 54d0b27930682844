//! Creates objects and waits for changes of them.

use std::{collections::HashMap, time::Duration};

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use super::{DEADLINE, REAL_NODE, TestCluster, eventually, objects, pod, pod_spec};

impl TestCluster {
    pub async fn create_namespace(&self, name: &str, annotations: Value) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let namespace = json!({"metadata": {"name": name, "annotations": annotations}});
        let namespace = serde_json::from_value(namespace).unwrap();
        namespaces
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        // Without a ServiceAccount, pods are rejected.
        let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
            Api::namespaced(self.client.clone(), name);
        eventually("a ServiceAccount", DEADLINE, || async {
            accounts.get("default").await.ok()
        })
        .await;
    }

    /// A second namespace that is excluded from the webhook.
    pub async fn create_opted_out_namespace(&self) -> String {
        let name = format!("{}-out", self.namespace);
        self.create_namespace(&name, json!({})).await;
        self.kubectl(&[
            "label",
            "namespace",
            &name,
            "archaware.dev/admission=disabled",
        ]);
        name
    }

    /// A ready node of an architecture.
    pub async fn create_node(&self, name: &str, architecture: &str) -> Node {
        let node = serde_json::from_value(objects::node(name, architecture)).unwrap();
        self.nodes()
            .create(&PostParams::default(), &node)
            .await
            .unwrap()
    }

    /// The same with additional fields, which replace fields of the same name.
    pub async fn create_node_with(&self, name: &str, architecture: &str, more: Value) -> Node {
        let mut node = objects::node(name, architecture);
        for (part, fields) in more.as_object().into_iter().flatten() {
            for (field, value) in fields.as_object().into_iter().flatten() {
                node[part][field] = value.clone();
            }
        }
        let node = serde_json::from_value(node).unwrap();
        let (nodes, parameters) = (self.nodes(), PostParams::default());
        nodes.create(&parameters, &node).await.unwrap()
    }

    /// The same, unschedulable.
    pub async fn create_cordoned_node(&self, name: &str, architecture: &str) {
        let cordoned = json!({"spec": {"unschedulable": true}});
        self.create_node_with(name, architecture, cordoned).await;
    }

    /// The nodes of most tests: `amd64`, `arm64`, `s390x`.
    pub async fn create_three_nodes(&self) {
        for architecture in ["amd64", "arm64", "s390x"] {
            self.create_node(architecture, architecture).await;
        }
    }

    /// A pod with one container per image.
    pub async fn create_pod(&self, name: &str, images: &[&str]) -> Pod {
        let images: Vec<String> = images.iter().map(|image| self.image(image)).collect();
        self.create(pod(name, pod_spec(&images), json!({}))).await
    }

    /// A pod with a scheduling gate.
    pub async fn create_gated_pod(&self, name: &str, image: &str) -> Pod {
        let mut spec = pod_spec(&[self.image(image)]);
        spec["schedulingGates"] = json!([{"name": "test/wait"}]);
        self.create(pod(name, spec, json!({}))).await
    }

    /// Any object in the test's namespace.
    pub async fn create<K>(&self, object: Value) -> K
    where
        K: Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
            + Clone
            + serde::de::DeserializeOwned
            + serde::Serialize
            + std::fmt::Debug,
    {
        let object: K = serde_json::from_value(object).unwrap();
        self.api::<K>()
            .create(&PostParams::default(), &object)
            .await
            .unwrap()
    }

    /// Waits until every node has archaware's taint and the scheduler knows these taints.
    pub async fn wait_until_tainted(&self) {
        self.wait_until_tainted_within(DEADLINE).await;
    }

    /// The same with another deadline.
    pub async fn wait_until_tainted_within(&self, deadline: Duration) {
        let nodes = eventually("taints on all nodes", deadline, || async {
            let nodes = self.nodes().list(&ListParams::default()).await.ok()?.items;
            let is_tainted = |node: &Node| node.annotations().contains_key("archaware.dev/taint");
            nodes.iter().all(is_tainted).then_some(nodes)
        })
        .await;
        let names = nodes.iter().map(ResourceExt::name_any);
        if let Some(name) = self.emptiest(names.filter(|name| name != REAL_NODE)).await {
            self.wait_for_scheduler(&name).await;
        }
    }

    /// The node with the fewest pods. The first node of many that register beside thousands of pods
    /// is full before it has its taint.
    async fn emptiest(&self, names: impl Iterator<Item = String>) -> Option<String> {
        let pods = Api::<Pod>::all(self.client.clone());
        let pods = pods.list(&ListParams::default()).await.unwrap().items;
        let mut bound: HashMap<String, usize> = HashMap::new();
        for node in pods.into_iter().filter_map(|pod| pod.spec?.node_name) {
            *bound.entry(node).or_default() += 1;
        }
        names.min_by_key(|name| bound.get(name).copied())
    }

    /// Waits until the scheduler knows all that was written about nodes before. It watches nodes
    /// and pods apart from each other, so that it may try a new pod while it does not know an older
    /// change of a node. It learns of changes of nodes in their order, therefore it knows all of
    /// them when it uses a label that was written after them.
    async fn wait_for_scheduler(&self, node: &str) {
        const LABEL: &str = "test/scheduler-knows";
        let label = async |value: Option<&str>| {
            let change = Patch::Merge(json!({"metadata": {"labels": {LABEL: value}}}));
            let nodes = self.nodes();
            nodes
                .patch(node, &PatchParams::default(), &change)
                .await
                .unwrap();
        };
        // Not among the pods of the test.
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), "kube-system");
        // archaware does not resolve its image, and gives it no gate.
        let ignored = json!({"archaware.dev/mode": "ignore"});
        let mut spec = pod_spec(&["none".to_owned()]);
        spec["nodeSelector"] = json!({LABEL: self.namespace});
        spec["tolerations"] = json!([{"operator": "Exists"}]);
        let probe: Pod = serde_json::from_value(pod(&self.namespace, spec, ignored)).unwrap();
        label(Some(&self.namespace)).await;
        pods.create(&PostParams::default(), &probe).await.unwrap();
        // It may have thousands of other pods to try first.
        eventually("a pod that the scheduler places", 4 * DEADLINE, || async {
            pods.get(&self.namespace).await.ok()?.spec?.node_name
        })
        .await;
        let now = DeleteParams::default().grace_period(0);
        pods.delete(&self.namespace, &now).await.unwrap();
        label(None).await;
    }

    /// Waits until a pod is bound; returns the name of its node.
    pub async fn wait_until_bound(&self, name: &str) -> String {
        self.wait_until_bound_within(name, DEADLINE).await
    }

    /// The same with another deadline.
    pub async fn wait_until_bound_within(&self, name: &str, deadline: Duration) -> String {
        eventually(&format!("pod {name} bound"), deadline, || async {
            self.pods().get(name).await.ok()?.spec?.node_name
        })
        .await
    }

    /// Waits for an event with this reason about the object; returns its note.
    pub async fn wait_for_event(&self, object: &str, reason: &str) -> String {
        self.wait_for_event_with(object, reason, "").await
    }

    /// The same, with this in its note: what is said of an object can change.
    pub async fn wait_for_event_with(&self, object: &str, reason: &str, part: &str) -> String {
        let events: Api<k8s_openapi::api::events::v1::Event> = Api::all(self.client.clone());
        let selector = ListParams::default().fields(&format!("reason={reason}"));
        let what = format!("event {reason} on {object} with \"{part}\"");
        eventually(&what, DEADLINE, || async {
            let all = events.list(&selector).await.ok()?;
            all.into_iter().find_map(|event| {
                let on = event.regarding.as_ref()?;
                let here = on.namespace.as_ref().is_none_or(|n| *n == self.namespace);
                let is_about = on.name.as_deref() == Some(object) && here;
                event.note.filter(|note| is_about && note.contains(part))
            })
        })
        .await
    }
}
