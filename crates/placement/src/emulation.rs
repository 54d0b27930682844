//! Nodes that emulate other architectures (QEMU in `binfmt_misc`) and have a label for that.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use archaware_platform::{Architecture, Architectures, ImageArchitectures, Variants};

use super::{
    LabelSelector,
    affinity::{LABELS, on_architecture},
    author_nodes::AuthorNodes,
    demand::{Demand, Source},
    node_set::NodeSet,
    requirement::{Operator, Requirement},
    runtime_class::prefer_native,
};

/// Nodes that run images of further architectures by emulation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Emulator {
    /// Selects the emulating nodes by their labels.
    pub nodes: LabelSelector,
    /// The CPU architecture of these nodes.
    pub architecture: Architecture,
    /// The architectures that these nodes emulate.
    pub runs: Vec<Architecture>,
}

/// Where the images of a pod run with and without emulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Emulation {
    /// The architectures of nodes that run the images natively.
    pub native: Architectures,
    /// The nodes that emulate.
    pub emulators: Vec<Emulator>,
}

impl Emulator {
    /// Whether its nodes emulate one of these architectures.
    pub(super) fn emulates(&self, image: &ImageArchitectures) -> bool {
        self.runs
            .iter()
            .any(|architecture| image.contains(architecture.as_str()))
    }

    /// Whether its selector selects every node.
    pub fn has_empty_selector(&self) -> bool {
        self.nodes.requirements().is_empty()
    }

    /// The requirements that select the emulating nodes.
    fn requirements(&self) -> Vec<Requirement> {
        let architecture = on_architecture([&self.architecture]);
        std::iter::once(architecture)
            .chain(self.nodes.requirements())
            .collect()
    }
}

impl Emulation {
    /// The architectures of the native and the emulating nodes.
    pub fn architectures(&self) -> Architectures {
        let emulating = self.emulators.iter();
        let emulating = emulating.map(|emulator| (emulator.architecture.clone(), Variants::ANY));
        let native = self.native.iter();
        let native = native.map(|(name, variants)| (name.clone(), variants));
        Architectures::from_variants(native.chain(emulating))
    }

    /// Whether the author selects emulating nodes, and apart from these only native nodes. Then
    /// tolerations suffice. Otherwise the pod needs node affinity, which cannot be added to every
    /// existing pod.
    pub fn covers(&self, author: AuthorNodes<'_>) -> bool {
        let is_native = |requirement: &Requirement| {
            let mut values = requirement.values.iter();
            LABELS.contains(&requirement.key.as_str())
                && requirement.operator == Operator::In
                && values.all(|value| self.native.contains(value))
        };
        let emulates = |emulator: &Emulator, term: &[Requirement]| {
            let mut requirements = emulator.nodes.requirements().into_iter();
            requirements.all(|requirement| term.contains(&requirement))
        };
        let nodes = author.nodes();
        let mut other_terms = nodes
            .terms()
            .iter()
            .filter(|term| !term.iter().any(is_native))
            .peekable();
        let is_covered = |term: &Vec<Requirement>| {
            let mut emulators = self.emulators.iter();
            emulators.any(|emulator| emulates(emulator, term))
        };
        other_terms.peek().is_some() && other_terms.all(is_covered)
    }

    /// The demand for nodes that run the images. Nodes without emulation are preferred.
    pub fn demand(&self) -> Demand {
        let native = (!self.native.is_empty()).then(|| vec![on_architecture(self.native.names())]);
        let emulators = self.emulators.iter().map(Emulator::requirements);
        let nodes = self.emulators.iter();
        let nodes =
            nodes.map(|node| format!("{} nodes with {}", node.architecture, node.nodes.as_str()));
        let nodes: Vec<_> = nodes.collect();
        let preferred = if self.native.is_empty() {
            ""
        } else {
            "; nodes that need no emulation are preferred"
        };
        Demand {
            require: NodeSet::any_of(native.into_iter().chain(emulators)),
            prefer: prefer_native(&self.native).into_iter().collect(),
            note: Some(format!(
                "its images run by emulation on {}{preferred}",
                nodes.join(", ")
            )),
            ..Demand::from_source(Source::Emulation)
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::{PlacementPolicy, PodRuntime, affinity::Affinity, yaml};
    use archaware_platform::{NoPlatformReason, Os, Platform, PlatformSet};

    use super::*;

    /// The emulation for images; each image is given as a list of architectures.
    fn emulated(emulators: &str, schedulable: &str, images: &[&str]) -> Option<Emulation> {
        let policy = PlacementPolicy {
            emulation: yaml(emulators),
            schedulable: yaml(schedulable),
            ..PlacementPolicy::default()
        };
        let image = |names: &&str| {
            let all = names
                .split(',')
                .map(|name| Platform::new("linux", name, "").unwrap());
            PlatformSet::new(all.collect(), NoPlatformReason::NotAnImage)
        };
        let images: Vec<_> = images.iter().map(image).collect();
        let runtime = PodRuntime {
            os: &Os::linux(),
            class: None,
        };
        policy.emulation(&images, runtime)
    }

    const QEMU: &str = "[{nodes: qemu, architecture: amd64, runs: [arm64, s390x]}]";

    #[test]
    fn emulating_nodes_come_after_native_ones() {
        let on_qemu = "kubernetes.io/arch in (amd64) and qemu exists";
        for (images, schedulable, expected, nodes) in [
            (
                &["arm64"][..],
                "[]",
                "amd64,arm64",
                format!("kubernetes.io/arch in (arm64) or {on_qemu}"),
            ),
            (
                &["arm64,s390x", "arm64,amd64"],
                "[]",
                "amd64,arm64",
                format!("kubernetes.io/arch in (arm64) or {on_qemu}"),
            ),
            // No native node; one image of two needs no emulation.
            (&["arm64", "s390x"], "[]", "amd64", on_qemu.to_owned()),
            (&["arm64", "amd64"], "[]", "amd64", on_qemu.to_owned()),
            (&["arm64"], "[amd64]", "amd64", on_qemu.to_owned()),
            // Not needed, not possible, not schedulable.
            (&["amd64,arm64"], "[]", "", String::new()),
            (&["riscv64"], "[]", "", String::new()),
            (&["arm64", "riscv64"], "[]", "", String::new()),
            (&["arm64"], "[arm64]", "", String::new()),
        ] {
            let emulation = emulated(QEMU, schedulable, images);
            let set = emulation
                .as_ref()
                .map(|emulation| emulation.architectures().to_string());
            assert_eq!(
                set.unwrap_or_default(),
                expected,
                "{images:?} {schedulable}"
            );
            let required = emulation.map(|emulation| emulation.demand().require);
            let terms = required.iter().flat_map(NodeSet::terms);
            let required = terms.map(|term| {
                let requirements: Vec<_> = term.iter().map(ToString::to_string).collect();
                requirements.join(" and ")
            });
            let required: Vec<_> = required.collect();
            assert_eq!(required.join(" or "), nodes, "{images:?} {schedulable}");
        }
        assert_eq!(emulated("[]", "[]", &["arm64"]), None);
    }

    #[test]
    fn a_pod_that_exists_has_to_select_such_nodes_itself() {
        let emulation = emulated(QEMU, "[]", &["arm64"]).unwrap();
        let terms = |terms: serde_json::Value| json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        let expression = |key: &str, operator: &str, values: &[&str]| json!({"key": key, "operator": operator, "values": values});
        let arch = |values: &[&str]| json!({"matchExpressions": [expression("kubernetes.io/arch", "In", values)]});
        let qemu = json!({"matchExpressions": [
            expression("kubernetes.io/arch", "In", &["amd64", "arm64"]),
            expression("qemu", "Exists", &[]),
        ]});
        for (selector, affinity, expected) in [
            (json!({}), json!(null), false),
            (json!({"kubernetes.io/arch": "amd64"}), json!(null), false),
            // Without emulation.
            (json!({"kubernetes.io/arch": "arm64"}), json!(null), false),
            (json!({}), terms(json!([arch(&["arm64"])])), false),
            (json!({"qemu": ""}), json!(null), false),
            (json!({}), terms(json!([arch(&["amd64", "arm64"])])), false),
            (json!({}), terms(json!([arch(&["arm64"]), qemu])), true),
            (json!({}), terms(json!([qemu])), true),
            (json!({}), terms(json!([qemu, {}])), false),
        ] {
            let node_selector = serde_json::from_value(selector.clone()).unwrap();
            let author_affinity: Option<Affinity> =
                serde_json::from_value(affinity.clone()).unwrap();
            let author = AuthorNodes {
                node_selector: &node_selector,
                affinity: author_affinity.as_ref(),
            };
            assert_eq!(emulation.covers(author), expected, "{selector} {affinity}");
        }
    }
}
