//! Plans the toleration of a bound pod, before its node is tainted. Without the toleration, a taint
//! with `NoExecute` evicts the pod; with `NoSchedule` the descheduler evicts it, and autoscalers
//! find no other node for it.

use crate::{
    cluster::objects::Pod,
    evaluate::{Evaluation, Verdict, lacking},
    placement::{Decision, NodePlatform, PlacementPolicy, Taint, tolerates},
    platform::Architectures,
};

/// Whether the pod has a node and does not tolerate this taint.
pub(crate) fn lacks_toleration(pod: &Pod, taint: &Taint) -> bool {
    let tolerations = pod.spec.tolerations.as_deref().unwrap_or_default();
    let tolerated = tolerations
        .iter()
        .any(|toleration| tolerates(toleration, taint));
    pod.is_in_scope() && pod.is_bound() && !tolerated
}

/// Whether one of the pod's images is known to be unable to run on its node. `stated`: the
/// architectures that the pod's author states. They are not limited to schedulable architectures,
/// because the pod is already on its node.
pub(crate) fn is_misplaced(
    evaluation: &Evaluation,
    policy: &PlacementPolicy,
    node: NodePlatform<'_>,
    stated: Option<&Architectures>,
) -> bool {
    match stated {
        Some(set) => policy.runs(node, Some(set), None) == Some(false),
        None => !lacking(&evaluation.images, policy, node).is_empty(),
    }
}

/// Whether the images, or the architectures that the author states, do not allow a toleration for
/// the taint.
pub(crate) fn is_repelled(
    evaluation: &Evaluation,
    policy: &PlacementPolicy,
    taint: &Taint,
) -> bool {
    let repels = |set: &Architectures| {
        let mut tolerated = policy.tolerated_values(set);
        !tolerated.any(|value| value == taint.value)
    };
    if let (Verdict::Decided(Decision::Architectures(set)), []) =
        (&evaluation.verdict, &*evaluation.images)
    {
        // The architectures are stated by an annotation.
        return repels(set);
    }
    let images = evaluation.images.iter();
    let mut built_for = images.filter_map(|image| image.architectures.as_ref());
    built_for.any(|image| repels(&policy.widen_with_emulation(image, None)))
}

/// The plan for a pod that does not tolerate the taint of its node. `NoExecute` evicts pods without
/// a toleration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum BoundPodPlan {
    /// The pod gets a toleration.
    Tolerated,
    /// The pod stays unchanged, because of its mode.
    Ignored,
    /// The pod stays unchanged: its images do not allow the toleration.
    #[strum(serialize = "misplaced")]
    Repelled,
}

impl BoundPodPlan {
    /// The `result` in the metrics.
    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The plan for a bound pod that does not tolerate the taint of its node. With `NoSchedule`,
/// callers pass `is_repelled: false`: that taint evicts no pod, so the images do not matter.
pub(crate) fn plan(is_ignored: bool, is_repelled: bool) -> BoundPodPlan {
    match (is_ignored, is_repelled) {
        (true, _) => BoundPodPlan::Ignored,
        (false, true) => BoundPodPlan::Repelled,
        (false, false) => BoundPodPlan::Tolerated,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use crate::{evaluate::EvaluatedImage, platform::ImageArchitectures};

    use super::*;

    fn taint() -> Taint {
        "kubernetes.io/arch=arm64:NoExecute".parse().unwrap()
    }

    #[test]
    fn pods_that_run_there_and_may_not_stay() {
        let pod = |change: serde_json::Value| {
            let mut pod = json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}});
            json_patch::merge(&mut pod, &change);
            serde_json::from_value::<Pod>(pod).unwrap()
        };
        let tolerations = |toleration| json!({"spec": {"tolerations": [toleration]}});
        for (change, expected) in [
            (json!({}), true),
            (tolerations(json!({"operator": "Exists"})), false),
            (
                tolerations(json!({"key": "kubernetes.io/arch", "value": "arm64"})),
                false,
            ),
            (
                tolerations(json!({"key": "kubernetes.io/arch", "value": "amd64"})),
                true,
            ),
            (
                tolerations(
                    json!({"key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule"}),
                ),
                true,
            ),
            (json!({"spec": {"nodeName": null}}), false),
            (json!({"status": {"phase": "Succeeded"}}), false),
            (json!({"status": {"phase": "Failed"}}), false),
            (
                json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
                false,
            ),
            (
                json!({"metadata": {"annotations": {"kubernetes.io/config.mirror": "a"}}}),
                false,
            ),
        ] {
            assert_eq!(
                lacks_toleration(&pod(change.clone()), &taint()),
                expected,
                "{change}"
            );
        }
    }

    #[test]
    fn only_what_is_known_not_to_run_there_is_misplaced() {
        let set = |names: &[&str]| -> Architectures {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let built_for = |names: &[&str]| -> ImageArchitectures { names.join(",").parse().unwrap() };
        let stated = |names| Verdict::Decided(Decision::Architectures(set(names)));
        let none = || Verdict::Decided(Decision::NoCommonArchitecture);
        let unresolved = || Verdict::Unresolved {
            failed: Vec::new(),
            known: None,
        };
        let config = crate::config::Config::default();
        let policy = PlacementPolicy::from(&config);
        for (verdict, images, architecture, expected) in [
            (
                stated(&["amd64", "arm64"]),
                vec![Some(built_for(&["amd64", "arm64"]))],
                "arm64",
                false,
            ),
            (
                stated(&["amd64"]),
                vec![Some(built_for(&["amd64"]))],
                "arm64",
                true,
            ),
            // An annotation states the architectures, and no image is resolved.
            (stated(&["amd64"]), vec![], "arm64", true),
            (stated(&["arm64"]), vec![], "arm64", false),
            // Widened by `compatibility`.
            (
                stated(&["386", "amd64"]),
                vec![Some(built_for(&["386"]))],
                "amd64",
                false,
            ),
            (
                none(),
                vec![Some(built_for(&["amd64"])), Some(built_for(&["arm64"]))],
                "arm64",
                true,
            ),
            // `schedulableArchitectures` or the author's selection excludes arm64, but the images
            // run there.
            (
                none(),
                vec![Some(built_for(&["amd64", "arm64"]))],
                "arm64",
                false,
            ),
            (
                Verdict::Decided(Decision::TolerateAll),
                vec![None],
                "arm64",
                false,
            ),
            (unresolved(), vec![], "arm64", false),
            (
                unresolved(),
                vec![Some(built_for(&["arm64"]))],
                "arm64",
                false,
            ),
            (
                unresolved(),
                vec![Some(built_for(&["amd64"]))],
                "arm64",
                true,
            ),
        ] {
            let name = format!("{verdict:?} {images:?}");
            let images = images
                .into_iter()
                .map(|set| EvaluatedImage::for_tests("i", set));
            let evaluation = Evaluation {
                images: images.collect(),
                ..Evaluation::new(verdict)
            };
            let stated = match &evaluation.verdict {
                Verdict::Decided(Decision::Architectures(set)) if evaluation.images.is_empty() => {
                    Some(set)
                }
                _ => None,
            };
            let labels = BTreeMap::new();
            let node = NodePlatform {
                architecture,
                variant: None,
                labels: Some(&labels),
            };
            assert_eq!(
                is_misplaced(&evaluation, &policy, node, stated),
                expected,
                "{name}"
            );
            let taint = policy.taint.taint(architecture);
            assert_eq!(
                is_repelled(&evaluation, &policy, &taint),
                expected,
                "{name}"
            );
        }
    }
}
