//! Whether a node runs the images of a pod: one answer for the controller, `plan`, `report` and
//! `explain`.

use std::collections::BTreeMap;

use archaware_platform::{Architectures, ImageArchitectures};

use super::PlacementPolicy;
use crate::{NodeVariant, node_view::NodeView, suffices};

/// The properties of a node that decide which images it runs.
#[derive(Clone, Copy, Debug)]
pub struct NodePlatform<'a> {
    /// `status.nodeInfo.architecture`.
    pub architecture: &'a str,
    /// Its variant, if it is known.
    pub variant: Option<NodeVariant>,
    /// Its labels, which decide whether it emulates another architecture. `None` stands for all
    /// nodes of the architecture: if some of them emulate amd64, nodes of this architecture count
    /// as able to run amd64 images.
    pub labels: Option<&'a BTreeMap<String, String>>,
}

impl<'a> NodePlatform<'a> {
    /// The platform of all nodes of an architecture and variant.
    pub fn of_all(architecture: &'a str, variant: Option<NodeVariant>) -> Self {
        Self {
            architecture,
            variant,
            labels: None,
        }
    }
}

impl PlacementPolicy {
    /// What decides which images a node runs.
    pub fn node_platform<'a>(&self, node: &NodeView<'a>) -> NodePlatform<'a> {
        NodePlatform {
            architecture: node.architecture,
            variant: self.variants.of_node(node),
            labels: Some(node.labels),
        }
    }

    /// Whether a node runs an image, natively or by emulation; `None` if that depends on the
    /// unknown variant of the node. `stated`: the architectures that the author of the pod states,
    /// which count instead of its images. `image` is `None` if the image does not limit its pod.
    pub fn runs(
        &self,
        node: NodePlatform<'_>,
        stated: Option<&Architectures>,
        image: Option<&ImageArchitectures>,
    ) -> Option<bool> {
        let suffices = |set: &Architectures| suffices(set, node.architecture, node.variant);
        match (stated, image) {
            (Some(set), _) => suffices(set),
            (None, Some(image)) => suffices(&self.widen_with_emulation(image, node.labels)),
            (None, None) => Some(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_runs() {
        let policy = PlacementPolicy {
            emulation: crate::yaml("[{nodes: qemu, architecture: arm64, runs: [amd64]}]"),
            ..PlacementPolicy::default()
        };
        let (emulating, plain) = (
            BTreeMap::from([("qemu".to_owned(), String::new())]),
            BTreeMap::new(),
        );
        for (architecture, labels, stated, image, expected) in [
            ("arm64", Some(&plain), None, Some("arm64"), true),
            ("arm64", Some(&plain), None, Some("amd64"), false),
            ("arm64", Some(&emulating), None, Some("amd64"), true),
            ("arm64", None, None, Some("amd64"), true),
            // amd64 nodes run 386 images, but nodes that emulate amd64 do not.
            ("amd64", Some(&plain), None, Some("386"), true),
            ("arm64", Some(&emulating), None, Some("386"), false),
            ("arm64", Some(&plain), None, None, true),
            // Architectures that the author states count instead of those of the image.
            ("arm64", Some(&plain), Some("arm64"), Some("amd64"), true),
            ("arm64", Some(&plain), Some("amd64"), Some("arm64"), false),
            (
                "arm64",
                Some(&emulating),
                Some("amd64"),
                Some("arm64"),
                false,
            ),
            ("arm64", Some(&plain), Some("amd64"), None, false),
        ] {
            let node = NodePlatform {
                architecture,
                variant: None,
                labels,
            };
            let stated: Option<Architectures> = stated.map(|set| set.parse().unwrap());
            let built_for: Option<ImageArchitectures> = image.map(|set| set.parse().unwrap());
            assert_eq!(
                policy.runs(node, stated.as_ref(), built_for.as_ref()),
                Some(expected),
                "{image:?} on {architecture} {labels:?}, stated: {stated:?}"
            );
        }
    }
}
