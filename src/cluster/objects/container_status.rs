//! What the kubelet reports about the containers of a pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Deserialize;

/// `status.containerStatuses[]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerStatus {
    pub name: String,
    /// The image that runs: a name with the digest that was pulled, or only the digest of its
    /// config.
    #[serde(rename = "imageID")]
    pub image_id: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Its current state.
    pub state: ContainerState,
    /// How it ended last.
    pub last_state: ContainerState,
}

/// The state of a container. At most one field is set. If none is set, the container waits.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// It waits for its start or restart.
    pub waiting: Option<StateDetail>,
    /// It runs.
    pub running: Option<Running>,
    /// It has ended.
    pub terminated: Option<StateDetail>,
}

/// A container that runs; nothing of it is read.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Running {}

/// Why a container waits, or how it ended.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StateDetail {
    /// `ImagePullBackOff`, `CrashLoopBackOff`, `Error`, `StartError`, …
    pub reason: Option<String>,
    /// The message of the runtime or of the container, or the end of the container's log
    /// (`terminationMessagePolicy`).
    pub message: Option<String>,
    /// Exit status of a container that has ended.
    pub exit_code: Option<i32>,
    /// When it started; 1970 if it never did.
    pub started_at: Option<Time>,
    /// The end of the container; `None` while it runs or waits.
    pub finished_at: Option<Time>,
}

impl ContainerStatus {
    /// Why the container waits and how it ended, from its current and its last state.
    pub fn details(&self) -> impl Iterator<Item = &StateDetail> {
        let states = [&self.state, &self.last_state].into_iter();
        states.flat_map(|state| state.waiting.iter().chain(&state.terminated))
    }

    /// The ends of the container in its current and its last state, except those with exit code 0.
    pub fn failures(&self) -> impl Iterator<Item = &StateDetail> {
        let states = [&self.state, &self.last_state].into_iter();
        let ended = states.filter_map(|state| state.terminated.as_ref());
        ended.filter(|ended| ended.exit_code != Some(0))
    }
}
