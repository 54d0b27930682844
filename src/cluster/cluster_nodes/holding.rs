//! Which nodes hold the images of a pod.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::placement::{
    affinity::HOSTNAME, image_locality::HoldingNodes, image_locality::MAX_HOSTS,
};

use super::{super::objects::ImageKey, ClusterNodes};

/// How long a cached answer is used. While a registry is down, archaware needs the nodes for many
/// pods with the same images, and kubelets report images only every few minutes.
const TTL: Duration = Duration::from_secs(10);
/// Maximum number of answers that are kept, about 4 KiB each.
const MAX_ANSWERS: usize = 256;

/// An answer, and when it was found.
pub(super) type Answer = (Instant, Arc<HoldingNodes>);

impl ClusterNodes {
    /// The nodes that hold all of these images; the answer may be ten seconds old.
    pub fn holding(&self, images: &[ImageKey]) -> Arc<HoldingNodes> {
        let now = Instant::now();
        if let Some((found, nodes)) = self.holding.lock().get(images)
            && now.saturating_duration_since(*found) < TTL
        {
            return nodes.clone();
        }
        let nodes = Arc::new(self.find_holding(images));
        let mut answers = self.holding.lock();
        if answers.len() >= MAX_ANSWERS {
            answers.clear();
        }
        answers.insert(images.into(), (now, nodes.clone()));
        nodes
    }

    fn find_holding(&self, images: &[ImageKey]) -> HoldingNodes {
        let nodes = self.all();
        let held = nodes.iter().filter(|node| {
            let is_held = |image: &ImageKey| node.status.images.contains(*image);
            node.metadata.deletion_timestamp.is_none() && images.iter().all(is_held)
        });
        let (mut count, mut hosts, mut architectures) = (0, Vec::new(), Vec::new());
        for node in held {
            count += 1;
            let view = node.view();
            if hosts.len() <= MAX_HOSTS {
                hosts.extend(view.labels.get(HOSTNAME).cloned());
            }
            architectures.extend(view.architecture.parse());
        }
        if hosts.len() > MAX_HOSTS {
            hosts.clear();
        }
        hosts.sort_unstable();
        HoldingNodes {
            count,
            hosts,
            architectures: architectures.into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::cluster::objects::Node;

    use super::*;

    fn node(name: &str, architecture: &str, images: &[&str]) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": {HOSTNAME: name}},
            "status": {"nodeInfo": {"architecture": architecture}, "images": [{"names": images}]},
        }))
        .unwrap()
    }

    #[test]
    fn nodes_hold_all_of_the_images_or_do_not_count() {
        let nodes = ClusterNodes::from_nodes([
            node("c", "arm64", &["a:1", "b:1"]),
            node("b", "arm64", &["a:1"]),
            node("a", "amd64", &["b:1"]),
        ]);
        for (images, hosts, architectures) in [
            (&["a:1"][..], &["b", "c"][..], "arm64"),
            (&["b:1"], &["a", "c"], "amd64, arm64"),
            (&["a:1", "b:1"], &["c"], "arm64"),
            (&["a:2"], &[], ""),
        ] {
            let keys: Vec<_> = images
                .iter()
                .map(|name| ImageKey::from_name(name))
                .collect();
            let holding = nodes.holding(&keys);
            assert_eq!(holding.hosts, hosts, "{images:?}");
            assert_eq!(holding.count, hosts.len(), "{images:?}");
            assert_eq!(
                holding.architectures.join(", "),
                architectures,
                "{images:?}"
            );
            assert!(Arc::ptr_eq(&holding, &nodes.holding(&keys)));
        }
    }

    #[test]
    fn too_many_nodes_are_not_named() {
        let nodes = (0..=MAX_HOSTS).map(|n| node(&n.to_string(), "arm64", &["a:1"]));
        let holding = ClusterNodes::from_nodes(nodes).holding(&[ImageKey::from_name("a:1")]);
        assert_eq!((holding.count, holding.hosts.len()), (MAX_HOSTS + 1, 0));
        assert_eq!(holding.architectures.join(","), "arm64");
    }
}
