//! Plans the toleration of a pod that runs on a node, before the node is tainted. A taint takes a running pod its right to stay:
//! one with `NoExecute` evicts it, and with `NoSchedule` the descheduler does, and autoscalers find no other node for it.

use crate::{
    cluster::objects::Pod,
    evaluate::Verdict,
    placement::{Decision, Taint, tolerates},
};

/// Whether the pod runs on a node and does not tolerate this taint.
pub(crate) fn lacks_toleration(pod: &Pod, taint: &Taint) -> bool {
    let tolerations = pod.spec.tolerations.as_deref().unwrap_or_default();
    let tolerated = tolerations.iter().any(|one| tolerates(one, taint));
    pod.is_in_scope() && pod.is_bound() && !tolerated
}

/// Whether a taint with `NoExecute` may evict the pod: its images are known not to exist for the node's architecture. A pod whose
/// images are not known keeps its place: it runs.
pub(crate) fn is_misplaced(verdict: &Verdict, architecture: &str) -> bool {
    let known = match verdict {
        Verdict::Decided(Decision::NoCommonArchitecture) => return true,
        Verdict::Decided(Decision::Architectures(set)) => Some(set),
        Verdict::Unresolved { known, .. } => known.as_ref(),
        Verdict::Decided(Decision::TolerateAll) | Verdict::Skip => None,
    };
    known.is_some_and(|set| !set.iter().any(|one| one.as_str() == architecture))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

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
        let tolerations = |one| json!({"spec": {"tolerations": [one]}});
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
        let set = |names: &[&str]| -> BTreeSet<_> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let decided = |names| Verdict::Decided(Decision::Architectures(set(names)));
        let unresolved = |known: Option<&[&str]>| Verdict::Unresolved {
            failed: Vec::new(),
            known: known.map(set),
        };
        for (verdict, expected) in [
            (decided(&["amd64", "arm64"]), false),
            (decided(&["amd64"]), true),
            (Verdict::Decided(Decision::NoCommonArchitecture), true),
            (Verdict::Decided(Decision::TolerateAll), false),
            (unresolved(None), false),
            (unresolved(Some(&["arm64"])), false),
            (unresolved(Some(&["amd64"])), true),
        ] {
            assert_eq!(is_misplaced(&verdict, "arm64"), expected, "{verdict:?}");
        }
    }
}
