//! Advice for the administrator of a cluster: settings that keep pods pending, or let an autoscaler
//! make nodes that the pods cannot use.

use std::collections::{BTreeMap, BTreeSet};

use kube::ResourceExt;

use crate::{
    cluster::objects::{Node, NodePool, Pod, annotations, labels},
    config::{Config, OnMiss},
    placement::node,
    selection::compatibility,
};

/// Maximum number of names in one sentence.
const MAX_NAMES: usize = 5;

/// The findings, one sentence for each.
pub(crate) fn advice<'a>(
    config: &Config,
    pools: &[NodePool],
    nodes: impl IntoIterator<Item = &'a Node>,
    pods: impl IntoIterator<Item = &'a Pod> + Clone,
) -> Vec<String> {
    let found = [
        unselected_pods(config, pods.clone()),
        open_pools(config, pools),
        foreign_taints(config, nodes),
        spread_pods(config, pods),
    ];
    found.into_iter().flatten().collect()
}

/// Whether pods get required node affinity for their architectures.
fn requires_affinity(config: &Config) -> bool {
    config.affinity.required && config.admission.enabled
}

fn open_pools(config: &Config, pools: &[NodePool]) -> Option<String> {
    let key = String::from(config.taint.key.clone());
    let open = pools.iter().filter(|pool| !pool.declares_taint(&key));
    // Karpenter also chooses the architecture if there are several pools, each for another
    // architecture.
    let architectures: BTreeSet<Option<&str>> = pools.iter().map(NodePool::architecture).collect();
    if !config.taint.manage || (architectures.len() < 2 && !architectures.contains(&None)) {
        return None;
    }
    let names: BTreeSet<String> = open.map(ResourceExt::name_any).collect();
    let why = if !requires_affinity(config) {
        "pods get tolerations, but no node affinity"
    } else if config.admission.on_miss != OnMiss::Gate {
        "pods whose images are not known in time get no node affinity"
    } else {
        return None;
    };
    let what = some(&names)?;
    Some(format!(
        "NodePools without the taint {key}: {what}. Karpenter chooses the architecture by node affinity, but {why}. So Karpenter \
         can create nodes whose taint the pods do not tolerate, again and again. Set affinity.required, admission.enabled and \
         admission.onMiss: gate, or declare the taint in one NodePool for each architecture"
    ))
}

/// Pods that ask for image selection, but get no image: images are selected when a pod is created.
fn unselected_pods<'a>(config: &Config, pods: impl IntoIterator<Item = &'a Pod>) -> Option<String> {
    // The controller selects images for pods behind a scheduling gate, also without the webhook.
    let asking = pods.into_iter().filter(|pod| {
        let gates = pod.spec.scheduling_gates.as_deref().unwrap_or_default();
        gates.is_empty()
            && compatibility::is_requested(annotations(&pod.metadata), labels(&pod.metadata))
    });
    let names: BTreeSet<String> = asking.map(full_name).collect();
    let what = some(&names).filter(|_| !config.admission.enabled)?;
    Some(format!(
        "these pods ask for image selection, but keep their images, because only the webhook selects images: {what}. Set \
         admission.enabled"
    ))
}

/// Foreign taints with archaware's key and effect. archaware leaves these taints alone.
fn foreign_taints<'a>(
    config: &Config,
    nodes: impl IntoIterator<Item = &'a Node>,
) -> Option<String> {
    let kind = node::TaintPolicy::from(config).kind?;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for node in nodes {
        if let Some(taint) = node::foreign_taint(&node.view(), &kind) {
            *counts.entry(taint.to_string()).or_default() += 1;
        }
    }
    let found = counts
        .iter()
        .map(|(taint, n)| format!("{taint} (nodes: {n})"));
    let what = some(&found.collect())?;
    Some(format!(
        "nodes have taints with the key taint.key that another tool set: {what}. archaware does not change these taints, and \
         archaware clean does not remove them"
    ))
}

fn spread_pods<'a>(config: &Config, pods: impl IntoIterator<Item = &'a Pod>) -> Option<String> {
    let spread = pods.into_iter().filter(|pod| {
        let spec = &pod.spec;
        let mut constraints = spec.topology_spread_constraints.iter();
        constraints.any(|constraint| {
            constraint.when_unsatisfiable == "DoNotSchedule"
                && constraint.node_taints_policy != "Honor"
        }) && !spec.author_nodes().names_architecture()
    });
    let names: BTreeSet<String> = spread.map(full_name).collect();
    let what = some(&names).filter(|_| !requires_affinity(config))?;
    Some(format!(
        "pending pods with topologySpreadConstraints and whenUnsatisfiable: DoNotSchedule, but without node affinity for \
         architectures: {what}. Topology spread also counts nodes whose taints the pods do not tolerate, so the pods can stay \
         pending. Set affinity.required and admission.enabled, or nodeTaintsPolicy: Honor in the constraint"
    ))
}

fn full_name(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
}

/// The first names, and the number of further names; `None` without names.
fn some(names: &BTreeSet<String>) -> Option<String> {
    let first: Vec<&str> = names.iter().take(MAX_NAMES).map(String::as_str).collect();
    let more = names.len().saturating_sub(MAX_NAMES);
    match (first.is_empty(), more) {
        (true, _) => None,
        (_, 0) => Some(first.join(", ")),
        _ => Some(format!("{} and {more} more", first.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn config(yaml: &str) -> Config {
        let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
        crate::config::parse("c", &format!("{head}{yaml}\n")).unwrap()
    }

    fn pool(requirements: Value, taints: Value) -> NodePool {
        let spec = json!({"requirements": requirements, "taints": taints});
        let pool = json!({"metadata": {"name": "p"}, "spec": {"template": {"spec": spec}}});
        serde_json::from_value(pool).unwrap()
    }

    fn pools(config: &Config, requirements: Value, taints: Value) -> usize {
        let pools = [pool(requirements, taints)];
        advice(config, &pools, [], []).len()
    }

    #[test]
    fn open_pools_need_affinity() {
        let arch = |operator: &str, values: &[&str]| json!([{"key": "kubernetes.io/arch", "operator": operator, "values": values}]);
        let bare = config("");
        let tainted =
            json!([{"key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule"}]);
        for (requirements, taints, found) in [
            (json!(null), json!(null), 1),
            (arch("In", &["amd64", "arm64"]), json!([]), 1),
            (arch("NotIn", &["amd64"]), json!([]), 1),
            (arch("In", &["arm64"]), json!([]), 0),
            (arch("In", &["amd64", "arm64"]), tainted, 0),
        ] {
            assert_eq!(
                pools(&bare, requirements.clone(), taints),
                found,
                "{requirements}"
            );
        }
        for (yaml, found) in [
            ("admission: {enabled: true, onMiss: gate}", 0),
            ("admission: {enabled: true}", 1),
            (
                "admission: {enabled: true, onMiss: gate}\naffinity: {required: false}",
                1,
            ),
        ] {
            assert_eq!(pools(&config(yaml), json!([]), json!([])), found, "{yaml}");
        }
    }

    #[test]
    fn pools_for_one_architecture_each_are_open_together() {
        let requirement =
            |name: &str| json!([{"key": "kubernetes.io/arch", "operator": "In", "values": [name]}]);
        let (amd, arm) = (
            pool(requirement("amd64"), json!([])),
            pool(requirement("arm64"), json!([])),
        );
        assert_eq!(
            advice(&config(""), &[amd.clone(), arm.clone()], [], []).len(),
            1
        );
        let taint =
            json!([{"key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule"}]);
        let tainted = pool(requirement("arm64"), taint);
        assert_eq!(
            advice(&config(""), &[amd.clone(), tainted.clone()], [], []).len(),
            1
        );
        assert!(advice(&config(""), &[tainted], [], []).is_empty());
        let untainted = config("taint: {manage: false}");
        assert!(advice(&untainted, &[amd.clone(), arm], [], []).is_empty());
        assert!(advice(&config(""), &[amd.clone(), amd], [], []).is_empty());
    }

    #[test]
    fn image_selection_needs_the_webhook() {
        let pod = |annotation: &str| -> Pod {
            let metadata =
                json!({"name": "p", "namespace": "ns", "annotations": {annotation: "app:c"}});
            serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}}))
                .unwrap()
        };
        let pods = [pod("archaware.dev/select-image.app"), pod("other")];
        let off = advice(&config(""), &[], [], &pods);
        assert!(
            off.len() == 1
                && off
                    .iter()
                    .all(|text| text.contains("selects images: ns/p. Set")),
            "{off:?}"
        );
        assert!(advice(&config("admission: {enabled: true}"), &[], [], &pods).is_empty());
    }

    #[test]
    fn foreign_taints_are_counted() {
        let node = |taint: &str, record: Option<&str>| -> Node {
            let taint =
                json!({"key": "kubernetes.io/arch", "value": taint, "effect": "NoSchedule"});
            let record = record.map(|record| json!({"archaware.dev/taint": record}));
            let node = json!({"metadata": {"name": "n", "annotations": record},
                "spec": {"taints": [taint, {"key": "other", "effect": "NoSchedule"}]}});
            serde_json::from_value(node).unwrap()
        };
        let own_taint = "kubernetes.io/arch=arm64:NoSchedule";
        let nodes = [
            node("arm64", Some(own_taint)),
            node("arm64", None),
            node("amd64", None),
        ];
        let found = advice(&config(""), &[], &nodes, []);
        let expected = "kubernetes.io/arch=amd64:NoSchedule (nodes: 1), kubernetes.io/arch=arm64:NoSchedule (nodes: 1)";
        assert!(found[0].contains(expected), "{found:?}");
        assert!(advice(&config("taint: {manage: false}"), &[], &nodes, []).is_empty());
    }

    #[test]
    fn hard_spread_needs_affinity() {
        let pod = |when: &str, selector: Value| -> Pod {
            let pod = json!({"metadata": {"name": "p", "namespace": "n"}, "spec": {
                "topologySpreadConstraints": [{"whenUnsatisfiable": when}], "nodeSelector": selector}});
            serde_json::from_value(pod).unwrap()
        };
        let bare = config("");
        let hard = [pod("DoNotSchedule", json!({}))];
        assert!(advice(&bare, &[], [], &hard)[0].contains(": n/p."));
        let selected = pod("DoNotSchedule", json!({"kubernetes.io/arch": "amd64"}));
        assert!(
            advice(
                &bare,
                &[],
                [],
                &[selected, pod("ScheduleAnyway", json!({}))]
            )
            .is_empty()
        );
        assert!(advice(&config("admission: {enabled: true}"), &[], [], &hard).is_empty());
        let mut honors = pod("DoNotSchedule", json!({}));
        honors.spec.topology_spread_constraints[0].node_taints_policy = "Honor".to_owned();
        assert!(advice(&bare, &[], [], &[honors]).is_empty());
    }
}
