//! Kubernetes types with only the fields that archaware reads. Other fields are not parsed, so that
//! a watched pod needs about one kilobyte instead of seventy.
//!
//! The types cannot be serialised, so a truncated object can never be written back. Every field has
//! a default, so parsing never fails because of an unusual object.

mod container_status;
mod event;
mod node_images;
mod node_pool;
mod pod_images;
mod runtime_class;
pub(crate) mod stored;
mod volume;

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{
    ClusterResourceScope, NamespaceResourceScope,
    api::core::v1::LocalObjectReference,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::Resource;
use serde::Deserialize;
use serde_json::Value;

pub use container_status::{ContainerState, ContainerStatus, Running, StateDetail};
pub use event::Event;
pub use node_images::{ImageKey, NodeImages};
pub use node_pool::NodePool;
pub use pod_images::ImageUse;
pub use runtime_class::{RuntimeClass, Scheduling};
pub use volume::{PersistentVolume, PersistentVolumeClaim};

use crate::placement::{
    GATE, MAX_LIST, affinity::Affinity, author_nodes::AuthorNodes, node_view::NodeView,
};

use super::field_managers::FieldManagers;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pod {
    /// The metadata that archaware reads.
    pub metadata: ObjectMeta,
    /// Desired state.
    pub spec: PodSpec,
    /// Observed state.
    pub status: PodStatus,
    /// Whether the pod is larger than archaware's limits. Then archaware keeps only its identity
    /// and its node, and does not decide about it.
    pub oversized: bool,
}

/// Spec of a pod or of a pod template.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// Set when the pod is bound to a node.
    pub node_name: Option<String>,
    pub containers: Vec<Container>,
    /// Init containers, including sidecars.
    pub init_containers: Vec<Container>,
    pub ephemeral_containers: Vec<Container>,
    /// Volumes; only images and claims are read.
    pub volumes: Vec<Volume>,
    /// In the API's form: a typed round trip would drop unknown fields, and the guard of a patch
    /// would then never match.
    pub tolerations: Option<Vec<Value>>,
    /// Required node labels.
    pub node_selector: BTreeMap<String, String>,
    /// Affinity; only node affinity is read.
    pub affinity: Option<Affinity>,
    /// Gates that keep the pod from being scheduled.
    pub scheduling_gates: Option<Vec<SchedulingGate>>,
    pub os: Option<PodOs>,
    pub runtime_class_name: Option<String>,
    pub priority_class_name: Option<String>,
    /// Secrets with registry credentials.
    pub image_pull_secrets: Vec<LocalObjectReference>,
    /// ServiceAccount of the pod.
    pub service_account_name: Option<String>,
    /// How its pods are spread.
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
}

/// `spec.topologySpreadConstraints[]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TopologySpreadConstraint {
    /// `DoNotSchedule` or `ScheduleAnyway`.
    pub when_unsatisfiable: String,
    /// `Honor` or `Ignore`, the default.
    pub node_taints_policy: String,
}

/// `spec.os`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PodOs {
    /// `linux` or `windows`.
    pub name: String,
}

/// A container of any kind.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// Its name, unique in the pod.
    pub name: String,
    pub image: Option<String>,
    /// `Always`, `IfNotPresent` or `Never`.
    pub image_pull_policy: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// Set for image volumes.
    pub image: Option<ImageVolume>,
    /// Set for volumes that outlive the pod.
    pub persistent_volume_claim: Option<ClaimVolume>,
}

/// `volumes[].persistentVolumeClaim`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClaimVolume {
    /// The claim, in the namespace of the pod.
    pub claim_name: String,
}

/// `volumes[].image`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImageVolume {
    pub reference: Option<String>,
    /// `Always`, `IfNotPresent` or `Never`.
    pub pull_policy: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct SchedulingGate {
    pub name: String,
}

/// A pod's status.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: Option<String>,
    /// Init containers and sidecars.
    pub init_container_statuses: Vec<ContainerStatus>,
    pub container_statuses: Vec<ContainerStatus>,
}

impl PodStatus {
    /// The statuses of init containers and of containers. Statuses of ephemeral containers are not
    /// read.
    pub fn containers(&self) -> impl Iterator<Item = &ContainerStatus> {
        self.init_container_statuses
            .iter()
            .chain(&self.container_statuses)
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Node {
    /// The metadata that archaware reads.
    pub metadata: ObjectMeta,
    /// Who manages its taints.
    pub managers: FieldManagers,
    /// Desired state.
    pub spec: NodeSpec,
    /// Observed state.
    pub status: NodeStatus,
}

/// A node's spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// In the API's form.
    pub taints: Option<Vec<Value>>,
}

/// A node's status.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// What the kubelet reports about its machine.
    pub node_info: NodeInfo,
    /// The images that it holds.
    pub images: NodeImages,
}

/// `status.nodeInfo`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NodeInfo {
    /// GOARCH of the kubelet.
    pub architecture: String,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DaemonSet {
    /// The metadata that archaware reads.
    pub metadata: ObjectMeta,
    /// Who manages the tolerations of its template.
    pub managers: FieldManagers,
    /// The template's tolerations in the manifest that `kubectl apply` stored last.
    pub applied_tolerations: Vec<Value>,
    /// Desired state.
    pub spec: DaemonSetSpec,
    /// Whether the DaemonSet is larger than archaware's limits. Then archaware keeps only its
    /// identity, and does not decide about it.
    pub oversized: bool,
}

/// A DaemonSet's spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct DaemonSetSpec {
    pub template: PodTemplate,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PodTemplate {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    pub spec: PodSpec,
}

/// A Deployment; only its number of replicas is read. `k8s-openapi`'s type would add half a MiB to
/// the program.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Deployment {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    /// Desired state.
    pub spec: DeploymentSpec,
}

/// A Deployment's spec.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct DeploymentSpec {
    /// Wanted number of pods; the API server sets the default of 1.
    pub replicas: Option<i32>,
}

/// A namespace; only its metadata is read.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Namespace {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
}

/// A webhook configuration. Its webhooks are in the API's form, because a typed round trip would
/// drop unknown fields.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct MutatingWebhookConfiguration {
    /// The metadata that archaware reads.
    #[serde(deserialize_with = "stored::metadata")]
    pub metadata: ObjectMeta,
    pub webhooks: Option<Vec<Value>>,
}

/// The annotations of an object; empty if there are none.
pub fn annotations(metadata: &ObjectMeta) -> &BTreeMap<String, String> {
    static EMPTY: BTreeMap<String, String> = BTreeMap::new();
    metadata.annotations.as_ref().unwrap_or(&EMPTY)
}

/// The labels of an object; empty if there are none.
pub fn labels(metadata: &ObjectMeta) -> &BTreeMap<String, String> {
    static EMPTY: BTreeMap<String, String> = BTreeMap::new();
    metadata.labels.as_ref().unwrap_or(&EMPTY)
}

/// The annotation that the kubelet sets on mirror pods of static pods.
const MIRROR: &str = "kubernetes.io/config.mirror";

impl Pod {
    /// Whether archaware decides about the pod. Pods that are being deleted, have finished, or
    /// mirror a static pod are not scheduled. Oversized pods are not read.
    pub fn is_in_scope(&self) -> bool {
        let finished = matches!(self.status.phase.as_deref(), Some("Succeeded" | "Failed"));
        self.metadata.deletion_timestamp.is_none()
            && !finished
            && !self.is_mirror()
            && !self.oversized
    }

    /// Whether it is the mirror pod of a static pod, which is not scheduled.
    pub fn is_mirror(&self) -> bool {
        let annotations = self.metadata.annotations.as_ref();
        annotations.is_some_and(|annotations| annotations.contains_key(MIRROR))
    }

    /// The controller that replaces the pod when it is gone.
    pub fn controller(&self) -> Option<&OwnerReference> {
        let owners = self.metadata.owner_references.as_deref();
        let mut owners = owners.unwrap_or_default().iter();
        owners.find(|owner| owner.controller == Some(true))
    }

    /// Whether a DaemonSet created the pod. Such a pod belongs to one existing node, so no
    /// autoscaler creates a node for it.
    pub fn is_daemon(&self) -> bool {
        self.controller()
            .is_some_and(|owner| owner.kind == "DaemonSet")
    }

    /// Whether the pod is bound to a node.
    pub fn is_bound(&self) -> bool {
        self.spec
            .node_name
            .as_ref()
            .is_some_and(|name| !name.is_empty())
    }
}

impl PodSpec {
    /// Whether a list in the spec is longer than [`MAX_LIST`]. Kubernetes does not limit these
    /// lists, except by etcd's limit of 1.5 MiB for the whole object.
    fn has_long_list(&self) -> bool {
        let lists = [
            self.containers.len(),
            self.init_containers.len(),
            self.ephemeral_containers.len(),
            self.volumes.len(),
            self.image_pull_secrets.len(),
            self.tolerations.as_ref().map_or(0, Vec::len),
            self.scheduling_gates.as_ref().map_or(0, Vec::len),
            self.affinity.as_ref().map_or(0, Affinity::size),
        ];
        lists.into_iter().any(|len| len > MAX_LIST)
    }

    /// The containers whose images archaware can select, each with its JSON pointer in the pod.
    pub fn selectable(&self) -> impl Iterator<Item = (String, &Container)> {
        let pointers = |list: &'static str, containers: &'_ Vec<Container>| {
            let indexes = 0..containers.len();
            indexes.map(move |index| format!("/spec/{list}/{index}"))
        };
        let paths = pointers("containers", &self.containers)
            .chain(pointers("initContainers", &self.init_containers));
        paths.zip(self.containers.iter().chain(&self.init_containers))
    }

    /// Gives containers other images.
    pub fn set_images<'a>(&mut self, images: impl IntoIterator<Item = (&'a str, Option<&'a str>)>) {
        for (name, image) in images {
            let mut containers = self.containers.iter_mut().chain(&mut self.init_containers);
            if let Some(container) = containers.find(|container| container.name == name) {
                container.image = image.map(str::to_owned);
            }
        }
    }

    /// The node selector and the affinity of the pod, which select its nodes.
    pub fn author_nodes(&self) -> AuthorNodes<'_> {
        AuthorNodes {
            node_selector: &self.node_selector,
            affinity: self.affinity.as_ref(),
        }
    }

    /// The index of archaware's scheduling gate.
    pub fn gate(&self) -> Option<usize> {
        let gates = self.scheduling_gates.as_deref()?;
        gates.iter().position(|gate| gate.name == GATE)
    }

    /// Whether the pod has a scheduling gate of any kind, so that affinity can still be set.
    pub fn is_gated(&self) -> bool {
        self.scheduling_gates
            .as_ref()
            .is_some_and(|gates| !gates.is_empty())
    }

    /// Whether the pod has a built-in system-critical priority class (`scheduling.k8s.io/v1`).
    pub fn is_system_critical(&self) -> bool {
        let class = self.priority_class_name.as_deref();
        matches!(
            class,
            Some("system-cluster-critical" | "system-node-critical")
        )
    }
}

impl Node {
    /// The parts that the decision depends on.
    pub fn view(&self) -> NodeView<'_> {
        NodeView {
            architecture: &self.status.node_info.architecture,
            labels: labels(&self.metadata),
            annotations: annotations(&self.metadata),
            taints: self.spec.taints.as_deref().unwrap_or_default(),
        }
    }
}

macro_rules! resource {
    ($type:ident, $scope:ty, $group:literal, $plural:literal) => {
        impl Resource for $type {
            type DynamicType = ();
            type Scope = $scope;

            fn kind((): &()) -> Cow<'_, str> {
                stringify!($type).into()
            }

            fn group((): &()) -> Cow<'_, str> {
                $group.into()
            }

            fn version((): &()) -> Cow<'_, str> {
                "v1".into()
            }

            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }

            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }

            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

resource!(Pod, NamespaceResourceScope, "", "pods");
resource!(Node, ClusterResourceScope, "", "nodes");
resource!(DaemonSet, NamespaceResourceScope, "apps", "daemonsets");
resource!(Deployment, NamespaceResourceScope, "apps", "deployments");
resource!(Namespace, ClusterResourceScope, "", "namespaces");
resource!(
    RuntimeClass,
    ClusterResourceScope,
    "node.k8s.io",
    "runtimeclasses"
);
resource!(NodePool, ClusterResourceScope, "karpenter.sh", "nodepools");
resource!(
    PersistentVolumeClaim,
    NamespaceResourceScope,
    "",
    "persistentvolumeclaims"
);
resource!(
    PersistentVolume,
    ClusterResourceScope,
    "",
    "persistentvolumes"
);
resource!(Event, NamespaceResourceScope, "events.k8s.io", "events");
resource!(
    MutatingWebhookConfiguration,
    ClusterResourceScope,
    "admissionregistration.k8s.io",
    "mutatingwebhookconfigurations"
);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_is_read_is_kept() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {
                "name": "p", "uid": "u",
                "annotations": {"archaware.dev/mode": "any", "other": "dropped"},
                "managedFields": [{"fieldsV1": {}}],
            },
            "spec": {
                "containers": [{"name": "c", "image": "a", "unknown": 1}],
                "volumes": [{"name": "v", "image": {"reference": "b"}}, {"name": "w", "emptyDir": {}}],
                "tolerations": [{"key": "k", "unknown": true}],
            },
        }))
        .unwrap();
        let annotations = pod.metadata.annotations.unwrap();
        assert_eq!(annotations.len(), 1);
        assert!(pod.metadata.managed_fields.is_none());
        assert_eq!(
            pod.spec.tolerations,
            Some(vec![json!({"key": "k", "unknown": true})])
        );
        assert_eq!(pod.spec.volumes.len(), 2);
    }

    /// `kubectl apply` stores the manifest in an annotation, but without this annotation, so stored
    /// manifests are not nested.
    #[test]
    fn the_tolerations_that_kubectl_applied_are_read() {
        let mut set = json!({
            "metadata": { "name": "d" },
            "spec": { "template": { "spec": { "tolerations": [{ "key": "a" }] }}},
        });
        let applied = set.to_string();
        set["metadata"]["annotations"] = json!({
            "kubectl.kubernetes.io/last-applied-configuration": applied
        });
        set["spec"]["template"]["spec"]["tolerations"] = json!([]);
        let set: DaemonSet = serde_json::from_value(set).unwrap();
        assert_eq!(set.applied_tolerations, [json!({ "key": "a" })]);
        assert_eq!(set.metadata.annotations, Some(BTreeMap::new()));
    }

    #[test]
    fn anything_can_be_read() {
        for odd in [
            json!({}),
            json!({"metadata": {}}),
            json!({"metadata": null, "spec": {}}),
        ] {
            assert!(serde_json::from_value::<Pod>(odd.clone()).is_ok(), "{odd}");
        }
    }
}
