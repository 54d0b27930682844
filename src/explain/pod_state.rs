//! An existing pod, with more of its status than the controller reads.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::Serialize;
use serde_json::Value;

use crate::{
    cluster::{
        field_managers::FIELD_MANAGER,
        objects::{ContainerStatus, Node, Pod, StateDetail},
    },
    placement::annotation,
};

/// A pod as the API server sends it.
#[derive(Clone, Debug)]
pub struct ExistingPod {
    /// The part that the controller reads.
    pub pod: Pod,
    status: Status,
    managed_fields: Vec<Value>,
}

#[derive(Clone, Debug, Deserialize, Default)]
#[serde(default)]
struct Object {
    metadata: Metadata,
    status: Status,
}

#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    managed_fields: Vec<Value>,
}

#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Condition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
    reason: Option<String>,
    message: Option<String>,
    last_transition_time: Option<Time>,
}

/// The state of the explained pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodState {
    /// Name of the pod.
    pub name: String,
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: String,
    /// The time of its creation, as RFC 3339.
    pub created: Option<String>,
    /// The node of the pod; null while it has none.
    pub node: Option<String>,
    /// The architecture of that node.
    pub node_architecture: Option<String>,
    /// The pod's scheduling gates.
    pub gates: Vec<String>,
    /// The scheduler's answer, while the pod has no node.
    pub scheduler: Option<SchedulerCondition>,
    /// Containers that do not run.
    pub containers: Vec<ContainerProblem>,
}

/// The condition `PodScheduled`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SchedulerCondition {
    /// `Unschedulable`, `SchedulingGated`, …
    pub reason: String,
    /// The scheduler's message.
    pub message: String,
    /// The time of its last change, as RFC 3339.
    pub since: Option<String>,
}

/// A container that does not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerProblem {
    /// Name of the container.
    pub name: String,
    /// `ImagePullBackOff`, `CrashLoopBackOff`, `StartError`, …
    pub reason: String,
    /// The kubelet's message.
    pub message: Option<String>,
}

/// The number of pods of a workload in a state.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodCount {
    /// The number of pods.
    pub count: usize,
    /// The phase of these pods.
    pub phase: String,
    /// The architecture of their nodes; null if they have no node.
    pub architecture: Option<String>,
}

impl ExistingPod {
    /// Reads a pod as the API server sends it.
    ///
    /// # Errors
    ///
    /// When a field has another type than in the API.
    pub fn read(object: Value) -> Result<Self, serde_json::Error> {
        let Object { metadata, status } = Object::deserialize(&object)?;
        Ok(Self {
            pod: Pod::deserialize(object)?,
            status,
            managed_fields: metadata.managed_fields,
        })
    }

    /// `status.phase` of the pod.
    pub fn phase(&self) -> &str {
        self.pod.status.phase.as_deref().unwrap_or("Pending")
    }

    /// The name of the pod's node.
    pub fn node(&self) -> Option<&str> {
        let name = self.pod.spec.node_name.as_deref();
        name.filter(|name| !name.is_empty())
    }

    /// Whether it is neither bound nor finished.
    pub fn is_pending(&self) -> bool {
        self.pod.is_in_scope() && !self.pod.is_bound()
    }

    /// Whether one of its containers does not run.
    pub fn has_problems(&self) -> bool {
        !self.problems().is_empty()
    }

    /// The scheduler's answer for a pod without a node.
    pub(super) fn scheduler(&self) -> Option<SchedulerCondition> {
        let mut conditions = self.status.conditions.iter();
        let condition = conditions
            .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
        Some(SchedulerCondition {
            reason: condition.reason.clone().unwrap_or_default(),
            message: condition.message.clone().unwrap_or_default(),
            since: text(condition.last_transition_time.as_ref()),
        })
    }

    /// Containers that do not run, and why.
    pub(super) fn problems(&self) -> Vec<ContainerProblem> {
        self.pod.status.containers().filter_map(problem).collect()
    }

    /// The state of the pod. `nodes`: all nodes.
    pub(super) fn state(&self, nodes: Option<&[Node]>) -> PodState {
        let gates = self.pod.spec.scheduling_gates.iter().flatten();
        PodState {
            name: self.pod.metadata.name.clone().unwrap_or_default(),
            phase: self.phase().to_owned(),
            created: text(self.pod.metadata.creation_timestamp.as_ref()),
            node: self.node().map(str::to_owned),
            node_architecture: self.find_node(nodes).map(architecture),
            gates: gates.map(|gate| gate.name.clone()).collect(),
            scheduler: self.scheduler().filter(|_| self.is_pending()),
            containers: self.problems(),
        }
    }

    /// The pod's node, if it is among these.
    pub(super) fn find_node<'a>(&self, nodes: Option<&'a [Node]>) -> Option<&'a Node> {
        let name = self.node()?;
        let mut nodes = nodes?.iter();
        nodes.find(|node| node.metadata.name.as_deref() == Some(name))
    }

    /// The time of the controller's last change.
    pub(super) fn patched_at(&self) -> Option<Time> {
        let times = self.own_fields().filter_map(|entry| entry.get("time"));
        times.filter_map(|time| Time::deserialize(time).ok()).max()
    }

    /// Whether the controller wrote the decision, and not the webhook. Additions of the webhook
    /// belong to the field manager that creates the pod.
    pub(super) fn is_decided_by_controller(&self) -> bool {
        let name = format!("f:{}", annotation::DECISION);
        let mut entries = self.own_fields();
        entries.any(|entry| {
            let annotations = entry.pointer("/fieldsV1/f:metadata/f:annotations");
            annotations
                .and_then(|annotations| annotations.get(&name))
                .is_some()
        })
    }

    /// The entries of `metadata.managedFields` with archaware's field manager.
    fn own_fields(&self) -> impl Iterator<Item = &Value> {
        let is_own =
            |entry: &&Value| entry.get("manager").and_then(Value::as_str) == Some(FIELD_MANAGER);
        self.managed_fields.iter().filter(is_own)
    }
}

/// Why a container does not run. A container that ended well, as init containers do, has no
/// problem.
fn problem(status: &ContainerStatus) -> Option<ContainerProblem> {
    let waiting = status.state.waiting.as_ref().filter(|waiting| {
        !matches!(
            waiting.reason.as_deref(),
            Some("ContainerCreating" | "PodInitializing") | None
        )
    });
    let failed = |ended: &&StateDetail| ended.exit_code != Some(0);
    let ended = status.state.terminated.as_ref().filter(failed);
    let detail = waiting.or(ended)?.clone();
    // The reason of the last failure explains more than the state of the restart.
    let last = status.last_state.terminated.as_ref();
    let last_failure = last.filter(failed).filter(|_| !status.ready);
    let message = last_failure.and_then(describe_end);
    let exit = describe_end(&detail);
    Some(ContainerProblem {
        name: status.name.clone(),
        reason: detail.reason.unwrap_or_default(),
        message: message.or(exit),
    })
}

/// How a container ended: by its message, or for example `OOMKilled, exit code 137`.
fn describe_end(detail: &StateDetail) -> Option<String> {
    let message = detail.message.clone().filter(|text| !text.is_empty());
    let ended = || {
        let code = detail.exit_code?;
        // The kubelet's reason for every other failure.
        let reason = detail.reason.as_deref().filter(|reason| *reason != "Error");
        let reason = reason
            .map(|reason| format!("{reason}, "))
            .unwrap_or_default();
        Some(format!("{reason}exit code {code}"))
    };
    message.or_else(ended)
}

/// The architecture of a node.
pub(super) fn architecture(node: &Node) -> String {
    node.view().architecture.to_owned()
}

/// A time as RFC 3339.
pub(super) fn text(time: Option<&Time>) -> Option<String> {
    Some(time?.0.to_string())
}
