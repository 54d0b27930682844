//! The nodes of the cluster, as far as decisions about pods need them.

mod holding;
mod unlabelled;

use std::{collections::HashMap, sync::Arc};

use kube_runtime::reflector::Store;
use parking_lot::Mutex;
use tokio::sync::watch;

use super::objects::{ImageKey, Node};

/// The nodes of the cluster. Cheap to clone.
#[derive(Clone)]
pub struct ClusterNodes {
    inventory: watch::Sender<Inventory>,
    /// Cache of [`Self::holding`], by the keys of the images.
    holding: Arc<Mutex<HashMap<Box<[ImageKey]>, holding::Answer>>>,
    /// Cache of [`Self::unlabelled`].
    unlabelled: Arc<Mutex<Option<unlabelled::Answer>>>,
}

#[derive(Clone, Default)]
enum Inventory {
    /// Not known yet.
    #[default]
    None,
    /// Watched, and whether the initial list is complete.
    Watched(Store<Node>, watch::Receiver<bool>),
    /// Read once.
    List(Arc<[Arc<Node>]>),
}

impl Default for ClusterNodes {
    fn default() -> Self {
        Self {
            inventory: watch::Sender::new(Inventory::None),
            holding: Arc::default(),
            unlabelled: Arc::default(),
        }
    }
}

impl ClusterNodes {
    pub fn from_nodes(nodes: impl IntoIterator<Item = Node>) -> Self {
        let list = nodes.into_iter().map(Arc::new).collect();
        Self {
            inventory: watch::Sender::new(Inventory::List(list)),
            ..Self::default()
        }
    }

    /// Uses the nodes of a watch. `ready`: whether its initial list is complete.
    pub fn follow(&self, store: Store<Node>, ready: watch::Receiver<bool>) {
        self.inventory
            .send_replace(Inventory::Watched(store, ready));
    }

    /// Waits until the nodes are known.
    pub async fn wait_until_known(&self) {
        let mut inventory = self.inventory.subscribe();
        let known = inventory.wait_for(|inventory| !matches!(inventory, Inventory::None));
        let ready = match known.await.as_deref() {
            Ok(Inventory::Watched(_, ready)) => Some(ready.clone()),
            _ => None,
        };
        if let Some(mut ready) = ready {
            // An error means that the watch has ended, at shutdown.
            let _ = ready.wait_for(|ready| *ready).await;
        }
    }

    /// All known nodes; none before the first list is complete.
    pub(crate) fn all(&self) -> Vec<Arc<Node>> {
        match &*self.inventory.borrow() {
            Inventory::None => Vec::new(),
            Inventory::Watched(store, _) => store.state(),
            Inventory::List(nodes) => nodes.to_vec(),
        }
    }
}
