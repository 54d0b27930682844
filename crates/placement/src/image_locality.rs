//! Nodes that hold images whose platforms are unknown (`status.images`). This is weak evidence,
//! because a node may have pulled an image that it cannot run. So archaware only prefers such
//! nodes.

use std::fmt;

use archaware_platform::Architectures;

use super::{
    affinity::{HOSTNAME, WeightedTerm, on_architecture},
    demand::{Demand, Source},
    requirement::{Operator, Requirement},
};

/// Weight of the nodes that hold the images, the highest that the API allows.
const HOST_WEIGHT: u8 = 100;
/// Weight of other nodes whose architecture is likely to run the images.
const ARCHITECTURE_WEIGHT: u8 = 50;

/// Maximum number of nodes that a pod's affinity names one by one, where no other label selects
/// them.
pub const MAX_HOSTS: usize = 64;

/// The nodes that hold the unresolved images of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageLocality {
    /// The images.
    pub images: Vec<String>,
    /// The nodes that hold all of them.
    pub nodes: HoldingNodes,
    /// The architectures of the image copies on archaware's own node. No registry confirmed them.
    /// `None` without copies.
    pub copies: Option<Architectures>,
}

/// The nodes that hold some images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HoldingNodes {
    /// How many there are.
    pub count: usize,
    /// The host names of the nodes; empty if there are more than [`MAX_HOSTS`].
    pub hosts: Vec<String>,
    /// The architectures of the nodes.
    pub architectures: Architectures,
}

impl ImageLocality {
    /// The demand for nodes that hold the images; `None` if no node is known to hold them.
    pub fn demand(&self) -> Option<Demand> {
        let prefer = self.preferred();
        (!prefer.is_empty()).then(|| Demand {
            prefer,
            note: Some(self.to_string()),
            ..Demand::from_source(Source::ImageLocality)
        })
    }

    /// The nodes to prefer: nodes that hold the images, and nodes on which the images are likely to
    /// run.
    fn preferred(&self) -> Vec<WeightedTerm> {
        let term = |weight, requirement| WeightedTerm {
            weight,
            expressions: vec![requirement],
        };
        let hosts = &self.nodes.hosts;
        let hosts =
            (!hosts.is_empty()).then(|| Requirement::new(HOSTNAME, Operator::In, hosts.clone()));
        let likely = [Some(&self.nodes.architectures), self.copies.as_ref()];
        let mut likely: Vec<_> = likely.into_iter().flatten().collect();
        likely.retain(|set| !set.is_empty());
        likely.dedup();
        let likely = likely.into_iter().map(|set| on_architecture(set.names()));
        let likely = likely.map(|architecture| term(ARCHITECTURE_WEIGHT, architecture));
        let hosts = hosts.map(|host| term(HOST_WEIGHT, host));
        hosts.into_iter().chain(likely).collect()
    }
}

/// For example `3 nodes (arm64) hold app:1`.
impl fmt::Display for ImageLocality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let images = self.images.join(", ");
        let nodes = &self.nodes;
        let set = nodes.architectures.join(", ");
        let hold = match nodes.count {
            0 => None,
            1 => Some(format!("one node ({set}) holds {images}")),
            count => Some(format!("{count} nodes ({set}) hold {images}")),
        };
        let copies = self.copies.as_ref().filter(|set| !set.is_empty());
        let copies = copies.map(|set| {
            let set = set.join(", ");
            format!("archaware's own node holds copies of {images} for {set}")
        });
        let parts: Vec<_> = hold.into_iter().chain(copies).collect();
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_hold_an_image_come_first_and_likely_ones_after_them() {
        let set = |names: &str| -> Architectures {
            if names.is_empty() {
                Architectures::default()
            } else {
                names.parse().unwrap()
            }
        };
        for (hosts, count, architectures, copies, expected, description) in [
            (&[][..], 0, "", None, "", ""),
            (&[], 0, "", Some(""), "", ""),
            (
                &["a"],
                1,
                "arm64",
                None,
                "100 kubernetes.io/hostname in (a); 50 kubernetes.io/arch in (arm64)",
                "one node (arm64) holds app:1",
            ),
            (
                &["a", "b"],
                2,
                "amd64,arm64",
                Some("amd64"),
                "100 kubernetes.io/hostname in (a, b); 50 kubernetes.io/arch in (amd64, arm64); 50 kubernetes.io/arch in (amd64)",
                "2 nodes (amd64, arm64) hold app:1; archaware's own node holds copies of app:1 for amd64",
            ),
            // Too many hosts to name, and copies for the same architectures.
            (
                &[],
                65,
                "arm64",
                Some("arm64"),
                "50 kubernetes.io/arch in (arm64)",
                "65 nodes (arm64) hold app:1; archaware's own node holds copies of app:1 for arm64",
            ),
            (
                &[],
                0,
                "",
                Some("s390x"),
                "50 kubernetes.io/arch in (s390x)",
                "archaware's own node holds copies of app:1 for s390x",
            ),
        ] {
            let locality = ImageLocality {
                images: vec!["app:1".to_owned()],
                nodes: HoldingNodes {
                    count,
                    hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
                    architectures: set(architectures),
                },
                copies: copies.map(set),
            };
            let preferred = locality.preferred().into_iter().map(|term| {
                let requirements: Vec<_> =
                    term.expressions.iter().map(ToString::to_string).collect();
                format!("{} {}", term.weight, requirements.join(" and "))
            });
            let preferred: Vec<_> = preferred.collect();
            assert_eq!(preferred.join("; "), expected);
            assert_eq!(locality.to_string(), description);
            assert_eq!(locality.demand().is_none(), expected.is_empty());
        }
    }
}
