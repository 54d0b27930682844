//! Logs, once after the start, what an administrator should know about the cluster.

use std::sync::Arc;

use futures::TryStreamExt;
use kube_runtime::reflector::Store;
use tokio::sync::watch;

use crate::{
    cluster::{
        access,
        api::{ApiClient, ApiError},
        objects::{Node, NodePool, Pod},
    },
    config::Config,
    plan::advice,
};

use super::permissions;

/// The parts of the cluster that are checked.
pub(super) struct Advice {
    pub(super) api: ApiClient,
    pub(super) config: Arc<Config>,
    pub(super) nodes: Store<Node>,
    pub(super) pods: Store<Pod>,
    /// Whether each initial list is complete.
    pub(super) lists: Vec<watch::Receiver<bool>>,
}

impl Advice {
    /// Waits until this process leads, so that only one replica logs the advice.
    pub(super) async fn log(self, mut leadership: watch::Receiver<bool>) {
        for mut list in self.lists {
            if list.wait_for(|ready| *ready).await.is_err() {
                return;
            }
        }
        if leadership.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        let pools = node_pools(&self.api).await;
        let (nodes, pods) = (self.nodes.state(), self.pods.state());
        let nodes = nodes.iter().map(AsRef::as_ref);
        let pods = pods.iter().map(AsRef::as_ref);
        for finding in advice::advice(&self.config, &pools, nodes, pods) {
            tracing::warn!("{finding}");
        }
    }
}

/// The consequence if pull secrets cannot be read everywhere; `None` if they can.
pub(crate) async fn without_pull_secrets(
    api: &ApiClient,
) -> Result<Option<&'static str>, ApiError> {
    let missing = access::missing(api, permissions::pull_secrets()).await?;
    Ok((!missing.is_empty()).then_some(
        "archaware can read pull secrets only in namespaces with a RoleBinding for the ClusterRole archaware-pull-secrets. In \
         other namespaces it cannot read private images, unless a node has them, and the failure policy decides about their pods",
    ))
}

/// The `NodePool`s of Karpenter; empty if they cannot be listed, for example without Karpenter or
/// without the permission.
pub(crate) async fn node_pools(api: &ApiClient) -> Vec<NodePool> {
    let listed = api.list::<NodePool>(None).try_collect().await;
    listed.unwrap_or_else(|error| {
        tracing::debug!(%error, "cannot list NodePools");
        Vec::new()
    })
}
