//! Images and OS of a pod's spec.

use std::collections::BTreeMap;

use crate::{
    image::PullPolicy,
    placement::{PodRuntime, affinity::NodeSelectorTerm, requirement::Operator},
    platform::Os,
};

use super::PodSpec;

/// How a pod uses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImageUse {
    /// The strictest pull policy.
    pub policy: PullPolicy,
    /// Whether every use has the pull policy `Never`: the nodes' own copies are used, whatever the
    /// registry has under this name.
    pub never_pulled: bool,
    /// Whether it is only mounted, as a volume.
    pub only_mounted: bool,
}

impl ImageUse {
    fn new(policy: Option<&str>, only_mounted: bool) -> Self {
        Self {
            policy: match policy {
                Some("Always") => PullPolicy::Always,
                _ => PullPolicy::IfNotPresent,
            },
            never_pulled: policy == Some("Never"),
            only_mounted,
        }
    }

    /// Both uses.
    fn and(self, other: Self) -> Self {
        Self {
            policy: self.policy.max(other.policy),
            never_pulled: self.never_pulled && other.never_pulled,
            only_mounted: self.only_mounted && other.only_mounted,
        }
    }
}

const OS_LABELS: [&str; 2] = ["kubernetes.io/os", "beta.kubernetes.io/os"];

impl PodSpec {
    /// The images of the pod's containers and volumes, without duplicates.
    pub fn images(&self) -> BTreeMap<&str, ImageUse> {
        let containers = [
            &self.containers,
            &self.init_containers,
            &self.ephemeral_containers,
        ]
        .into_iter()
        .flatten()
        .map(|container| (&container.image, &container.image_pull_policy, false));
        let volumes = self
            .volumes
            .iter()
            .filter_map(|volume| volume.image.as_ref());
        let volumes = volumes.map(|volume| (&volume.reference, &volume.pull_policy, true));
        let mut images: BTreeMap<&str, ImageUse> = BTreeMap::new();
        for (image, policy, only_mounted) in containers.chain(volumes) {
            // A container without an image gets one from a higher-level controller later, or is
            // rejected.
            let Some(image) = image.as_deref().filter(|image| !image.is_empty()) else {
                continue;
            };
            let this = ImageUse::new(policy.as_deref(), only_mounted);
            let uses = images.entry(image).or_insert(this);
            *uses = uses.and(this);
        }
        images
    }

    /// The OS that the pod states, otherwise linux.
    pub fn os(&self) -> Os {
        self.stated_os().unwrap_or_else(Os::linux)
    }

    /// OS and runtime class of the pod. `os`: the result of [`Self::os`].
    pub fn runtime<'a>(&'a self, os: &'a Os) -> PodRuntime<'a> {
        PodRuntime {
            os,
            class: self.runtime_class_name.as_deref(),
        }
    }

    /// The OS of `spec.os`, of the node selector or of every required affinity term.
    pub fn stated_os(&self) -> Option<Os> {
        let named = self
            .os
            .as_ref()
            .map(|os| os.name.as_str())
            .filter(|name| !name.is_empty());
        let selected = || {
            OS_LABELS
                .iter()
                .find_map(|label| self.node_selector.get(*label))
        };
        named
            .or_else(|| selected().map(String::as_str))
            .or_else(|| self.required_os())
            .and_then(|name| name.parse().ok())
    }

    /// The OS that every required term names. Terms are `ORed`, so one term without OS leaves the
    /// OS open.
    fn required_os(&self) -> Option<&str> {
        let affinity = self.affinity.as_ref()?.node_affinity.as_ref()?;
        let required = affinity.required.as_ref()?;
        let mut terms = required.node_selector_terms.iter().map(os_of);
        let first = terms.next()??;
        terms.all(|other| other == Some(first)).then_some(first)
    }
}

fn os_of(term: &NodeSelectorTerm) -> Option<&str> {
    term.match_expressions.iter().find_map(|requirement| {
        let asks =
            OS_LABELS.contains(&requirement.key.as_str()) && requirement.operator == Operator::In;
        match requirement.values.as_slice() {
            [only] if asks => Some(only.as_str()),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn spec(value: Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn every_kind_of_image_counts_once() {
        let spec = spec(json!({
            "containers": [{"image": "a"}, {"image": "a", "imagePullPolicy": "Always"}, {}],
            "initContainers": [{"image": "b", "restartPolicy": "Always"}],
            "ephemeralContainers": [
                {"image": "c", "imagePullPolicy": "Never"},
                {"image": "e", "imagePullPolicy": "Never"},
            ],
            "volumes": [
                {"image": {"reference": "c"}},
                {"image": {"reference": "d", "pullPolicy": "Always"}},
                {"emptyDir": {}},
            ],
        }));
        let images: Vec<_> = spec.images().into_iter().collect();
        let run = |policy| ImageUse::new(Some(policy), false);
        let mounted = ImageUse::new(Some("Always"), true);
        let expected = [
            ("a", run("Always")),
            ("b", run("IfNotPresent")),
            ("c", run("IfNotPresent")),
            ("d", mounted),
            ("e", run("Never")),
        ];
        assert_eq!(images, expected);
    }

    #[test]
    fn the_os_comes_from_the_most_specific_field() {
        let term = |os: &str| json!({"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": [os]}]});
        let affinity = |terms: Vec<Value>| json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
        for (value, expected) in [
            (json!({}), "linux"),
            (json!({"os": {"name": "windows"}}), "windows"),
            (
                json!({"os": {"name": "linux"}, "nodeSelector": {"kubernetes.io/os": "windows"}}),
                "linux",
            ),
            (
                json!({"nodeSelector": {"beta.kubernetes.io/os": "windows"}}),
                "windows",
            ),
            (affinity(vec![term("windows"), term("windows")]), "windows"),
            (affinity(vec![term("windows"), term("linux")]), "linux"),
            (affinity(vec![term("windows"), json!({})]), "linux"),
            (affinity(vec![]), "linux"),
            (
                affinity(vec![
                    json!({"matchExpressions": [{"key": "kubernetes.io/os", "operator": "In", "values": ["windows", "linux"]}]}),
                ]),
                "linux",
            ),
        ] {
            assert_eq!(spec(value.clone()).os().as_str(), expected, "{value}");
        }
    }
}
