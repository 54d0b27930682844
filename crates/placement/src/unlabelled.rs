//! Nodes without the label for their architecture. The kubelet sets the label, but the provider of
//! a virtual node chooses its labels (`node.go` of virtual-kubelet). The architecture in the status
//! of such a node decides its taint, so pods for this architecture have to be able to land there.

use std::collections::BTreeSet;

use archaware_platform::Architecture;

use super::{
    affinity::LABEL,
    node::TaintPolicy,
    node_set::NodeSet,
    node_view::NodeView,
    requirement::{Operator, Requirement},
};

/// The architectures of the nodes that lack the label.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnlabelledNodes {
    architectures: BTreeSet<Architecture>,
    /// Those of nodes that archaware does not taint: only affinity keeps pods away from them.
    untainted: BTreeSet<Architecture>,
}

impl UnlabelledNodes {
    /// The cluster has no such nodes.
    pub const fn none() -> Self {
        Self {
            architectures: BTreeSet::new(),
            untainted: BTreeSet::new(),
        }
    }

    /// The nodes of a cluster that lack the label. Nodes that are about to get their taint count as
    /// tainted, because the affinity of a pod stays as it is.
    pub fn new<'a>(nodes: impl IntoIterator<Item = NodeView<'a>>, policy: &TaintPolicy) -> Self {
        let mut found = Self::default();
        let nodes = nodes.into_iter();
        for node in nodes.filter(|node| !node.labels.contains_key(LABEL)) {
            let Ok(architecture) = node.architecture.parse::<Architecture>() else {
                continue;
            };
            if !policy.taints(&node, &architecture) {
                found.untainted.insert(architecture.clone());
            }
            found.architectures.insert(architecture);
        }
        found
    }

    /// Requirements that also select the nodes without the label, if these suit: instead of one of
    /// the required architectures they allow no other architecture.
    pub(super) fn admit_to(&self, requirements: &mut [Requirement]) {
        for requirement in requirements {
            let is_listed = |name: &Architecture| {
                requirement
                    .values
                    .iter()
                    .any(|value| *value == name.as_str())
            };
            // A node without taint and of another architecture would be selected, too.
            let admits = requirement.key == LABEL
                && requirement.operator == Operator::In
                && self.architectures.iter().any(is_listed)
                && self.untainted.iter().all(is_listed);
            if admits {
                let others = Architecture::known_names();
                let others = others.filter(|name| !requirement.values.iter().any(|v| v == name));
                let others = others.map(str::to_owned).collect();
                *requirement = Requirement::new(LABEL, Operator::NotIn, others);
            }
        }
    }

    /// The set with the nodes without the label that suit.
    pub(super) fn admitted_to(&self, set: NodeSet) -> NodeSet {
        if self.architectures.is_empty() {
            return set;
        }
        NodeSet::any_of(set.terms().iter().map(|term| {
            let mut term = term.clone();
            self.admit_to(&mut term);
            term
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{affinity::on_architecture, annotation};

    #[test]
    fn nodes_without_the_label_are_selected_by_their_architecture() {
        let labelled: BTreeMap<_, _> = [(LABEL.to_owned(), "amd64".to_owned())].into();
        let unlabelled: BTreeMap<_, _> = [("type".to_owned(), "virtual-kubelet".to_owned())].into();
        let arm: BTreeMap<_, _> = [(LABEL.to_owned(), "arm64".to_owned())].into();
        let (annotations, ignored) = (
            BTreeMap::new(),
            [(annotation::IGNORE.to_owned(), "true".to_owned())].into(),
        );
        for (nodes, required, selects_unlabelled) in [
            // Every node has the label.
            (vec![(&labelled, "amd64", &annotations)], "amd64", false),
            (vec![(&unlabelled, "amd64", &annotations)], "amd64", true),
            (vec![(&unlabelled, "amd64", &ignored)], "amd64", true),
            (vec![(&unlabelled, "amd64", &annotations)], "arm64", false),
            // The taint keeps the pod away from the second node.
            (
                vec![
                    (&unlabelled, "amd64", &annotations),
                    (&unlabelled, "arm64", &annotations),
                ],
                "amd64",
                true,
            ),
            // Nothing else would.
            (
                vec![
                    (&unlabelled, "amd64", &annotations),
                    (&unlabelled, "arm64", &ignored),
                ],
                "amd64",
                false,
            ),
            (vec![(&unlabelled, "", &ignored)], "amd64", false),
        ] {
            let views = nodes
                .iter()
                .map(|(labels, architecture, annotations)| NodeView {
                    architecture,
                    labels,
                    annotations,
                    taints: &[],
                });
            let found = UnlabelledNodes::new(views, &TaintPolicy::default());
            let required: Architecture = required.parse().unwrap();
            let set = NodeSet::all_of([on_architecture([&required])]);
            let set = found.admitted_to(set);
            assert_eq!(set.selects(&unlabelled), selects_unlabelled, "{nodes:?}");
            // Nodes with the label are selected as before.
            assert_eq!(set.selects(&labelled), required.as_str() == "amd64");
            assert_eq!(set.selects(&arm), required.as_str() == "arm64");
        }
    }
}
