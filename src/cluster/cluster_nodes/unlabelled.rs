//! Which nodes lack the label for their architecture.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    config::Config,
    placement::{UnlabelledNodes, node::TaintPolicy},
};

use super::ClusterNodes;

/// How long a cached answer is used. Reading the labels of 5,000 nodes takes about a millisecond,
/// and archaware decides about hundreds of pods a second.
const TTL: Duration = Duration::from_secs(1);

/// An answer, and when it was found.
pub(super) type Answer = (Instant, Arc<UnlabelledNodes>);

impl ClusterNodes {
    /// The nodes without the label for their architecture; the answer may be a second old.
    /// `config`: always the same.
    pub fn unlabelled(&self, config: &Config) -> Arc<UnlabelledNodes> {
        let now = Instant::now();
        let mut answer = self.unlabelled.lock();
        if let Some((found, nodes)) = &*answer
            && now.saturating_duration_since(*found) < TTL
        {
            return nodes.clone();
        }
        let nodes = self.all();
        let views = nodes.iter().map(|node| node.view());
        let nodes = Arc::new(UnlabelledNodes::new(views, &TaintPolicy::from(config)));
        *answer = Some((now, nodes.clone()));
        nodes
    }
}
