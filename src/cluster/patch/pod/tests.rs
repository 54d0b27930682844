use std::{collections::BTreeMap, slice};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proptest::prelude::*;

use super::*;
use crate::{
    config::Config,
    placement::{
        NodeVariant, PlacementPolicy, UnknownVariants, UnlabelledNodes, affinity, affinity_change,
        author_nodes::AuthorNodes,
        demand::{Demand, Source},
        node_set::NodeSet,
        requirement::Requirement,
        suffices,
    },
    platform::{Architecture, Architectures},
};

fn subject(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

fn tolerating(tolerations: &[Value]) -> PodChange {
    PodChange {
        tolerations: tolerations.to_vec(),
        ..PodChange::default()
    }
}

#[test]
fn a_pod_with_and_without_a_list() {
    let toleration = json!({"key": "k"});
    let decision = Decision::TolerateAll;
    let bare = subject(json!({"metadata": {"uid": "u"}}));
    assert_eq!(
        apply(
            &bare,
            tolerating(slice::from_ref(&toleration)),
            &decision,
            false
        )
        .into_operations(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/tolerations", "value": null},
            {"op": "add", "path": "/spec/tolerations", "value": [{"key": "k"}]},
            {"op": "test", "path": "/metadata/annotations", "value": null},
            {"op": "add", "path": "/metadata/annotations", "value": {
                "archaware.dev/decision": "any", "archaware.dev/added": r#"{"version":1,"tolerations":[{"key":"k"}]}"#,
            }},
        ])
    );
    let full = subject(json!({
        "metadata": {"uid": "u", "annotations": {}},
        "spec": {"tolerations": [{"key": "other", "unknown": 1}]},
    }));
    assert_eq!(
        apply(
            &full,
            tolerating(&[toleration.clone(), toleration]),
            &decision,
            false
        )
        .into_operations(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/tolerations", "value": [{"key": "other", "unknown": 1}]},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "k"}},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "k"}},
            {"op": "test", "path": "/metadata/annotations/archaware.dev~1decision", "value": null},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1decision", "value": "any"},
            {"op": "test", "path": "/metadata/annotations/archaware.dev~1added", "value": null},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1added", "value": r#"{"version":1,"tolerations":[{"key":"k"},{"key":"k"}]}"#},
        ])
    );
}

#[test]
fn the_decision_removes_the_gate_and_keeps_foreign_gates() {
    let gated = subject(json!({
        "metadata": {"uid": "u", "annotations": {}},
        "spec": {"schedulingGates": [{"name": "other"}, {"name": GATE}]},
    }));
    assert_eq!(
        remove_gate(&gated).into_operations(),
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/spec/schedulingGates/1/name", "value": GATE},
            {"op": "remove", "path": "/spec/schedulingGates/1"},
        ])
    );
    assert!(remove_gate(&subject(json!({"metadata": {"uid": "u"}}))).is_empty());
}

/// Every shape of affinity that a pod can have, with what is added to it.
#[test]
fn affinity_is_added_to_what_is_there() {
    let policy = |affinity: Option<&Affinity>| {
        let arm64: Architecture = "arm64".parse().unwrap();
        let preferred = vec![affinity_change::Preference {
            architecture: arm64.clone(),
            weight: 5,
        }];
        let author = AuthorNodes {
            node_selector: &BTreeMap::new(),
            affinity,
        };
        let policy = PlacementPolicy::from(&Config::default());
        let wanted = affinity_change::AffinityDemand {
            unlabelled: &UnlabelledNodes::none(),
            required: &["arm64".parse().unwrap()],
            suitable: None,
            variants: &policy.variants,
            nodes: &NodeSet::every(),
            prefer: Vec::new(),
            terms_are_open: true,
        };
        affinity_change::decide(&wanted, preferred, author)
    };
    let arch = json!({"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]});
    let required = json!({"nodeSelectorTerms": [{"matchExpressions": [arch]}]});
    let preferred = json!({"weight": 5, "preference": {"matchExpressions": [arch]}});
    let zone = json!({"key": "zone", "operator": "Exists"});
    let r = format!("{NODE_AFFINITY}/{REQUIRED}");
    let p = format!("{NODE_AFFINITY}/{PREFERRED}");
    let both = json!({REQUIRED: required, PREFERRED: [preferred]});
    for (affinity, expected) in [
        (
            json!(null),
            json!([
                {"op": "test", "path": AFFINITY, "value": null},
                {"op": "add", "path": AFFINITY, "value": {"nodeAffinity": both}},
            ]),
        ),
        (
            json!({"podAffinity": {}}),
            json!([
                {"op": "test", "path": NODE_AFFINITY, "value": null},
                {"op": "add", "path": NODE_AFFINITY, "value": both},
            ]),
        ),
        (
            json!({"nodeAffinity": {}}),
            json!([
                {"op": "test", "path": r, "value": null},
                {"op": "add", "path": r, "value": required},
                {"op": "test", "path": p, "value": null},
                {"op": "add", "path": p, "value": [preferred]},
            ]),
        ),
        (
            json!({"nodeAffinity": {
                REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchExpressions": [zone]}]},
                PREFERRED: [{"weight": 1, "preference": {"matchExpressions": [zone]}}],
            }}),
            json!([
                {"op": "add", "path": format!("{r}/nodeSelectorTerms/1/matchExpressions/-"), "value": arch},
                {"op": "add", "path": format!("{r}/nodeSelectorTerms/0/matchExpressions/-"), "value": arch},
                {"op": "add", "path": format!("{p}/-"), "value": preferred},
            ]),
        ),
    ] {
        let pod = subject(json!({"spec": {"affinity": affinity}}));
        let mut patch = JsonPatch::for_object(&ObjectMeta::default());
        let change = policy(pod.spec.affinity.as_ref());
        patch.affinity(pod.spec.affinity.as_ref(), &change);
        assert_eq!(patch.into_operations(), expected, "{affinity}");
    }
}

#[test]
fn an_earlier_call_is_undone_before_the_next_one() {
    let (ours, theirs) = (json!({"key": "a"}), json!({"key": "b"}));
    let pod = subject(json!({
        "metadata": {"annotations": {annotation::ADDED: r#"{"version":1,"tolerations":[{"key":"a"}]}"#}},
        "spec": {"tolerations": [ours, theirs]},
    }));
    let mut without_owned = pod.clone();
    let recorded = record::read(pod.metadata.annotations.as_ref().unwrap());
    let undo = record::undo(&recorded, without_owned.spec.tolerations.as_mut(), None);
    let decision = Decision::TolerateAll;
    let admission = AdmissionPatch {
        undo,
        change: tolerating(&[json!({"key": "c"})]),
        decision: Some(&decision),
        gate: true,
    };
    assert_eq!(
        admit(&pod, &without_owned.spec, admission).into_operations(),
        json!([
            {"op": "remove", "path": "/spec/tolerations/0"},
            {"op": "add", "path": "/spec/tolerations/-", "value": {"key": "c"}},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1decision", "value": "any"},
            {"op": "add", "path": "/metadata/annotations/archaware.dev~1added", "value": r#"{"version":1,"tolerations":[{"key":"c"}]}"#},
            {"op": "add", "path": "/spec/schedulingGates", "value": [{"name": GATE}]},
        ])
    );
}

/// Labels of a node.
fn labels(
    architecture: &str,
    variant: Option<&str>,
    has_v3: bool,
    zone: &str,
) -> BTreeMap<String, String> {
    let features =
        ["AVX", "AVX2", "FMA3"].map(|name| format!("feature.node.kubernetes.io/cpu-cpuid.{name}"));
    let features = features.iter().map(|key| (key.as_str(), "true"));
    let variant_label = variant.map(|variant| ("archaware.dev/variant", variant));
    let labels = [("kubernetes.io/arch", architecture), ("zone", zone)];
    let labels = labels
        .into_iter()
        .chain(variant_label)
        .chain(features.filter(|_| has_v3));
    labels
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

fn selects(pod: &Pod, labels: &BTreeMap<String, String>) -> bool {
    pod.spec.author_nodes().selects(labels, "node")
}

fn patched(pod: &Value, patch: JsonPatch) -> Value {
    let operations: json_patch::Patch =
        serde_json::from_value(patch.unguarded().into_operations()).unwrap();
    let mut pod = pod.clone();
    json_patch::patch(&mut pod, &operations).unwrap();
    pod
}

/// Without the empty parents that a removal leaves.
fn normalised(mut pod: Value) -> Value {
    let is_empty = |value: &Value| value.is_null() || *value == json!({}) || *value == json!([]);
    for pointer in [NODE_AFFINITY, AFFINITY, "/spec"] {
        if let Some(Value::Object(object)) = pod.pointer_mut(pointer) {
            object.retain(|_, value| !is_empty(value));
        }
    }
    pod
}

/// Demands on nodes that image selection can make.
fn nodes_of_an_image() -> impl Strategy<Value = Demand> {
    let on = |key: &str, operator: &str, values: &[&str]| {
        let requirement = json!({"key": key, "operator": operator, "values": values});
        serde_json::from_value::<Requirement>(requirement).unwrap()
    };
    let (a, b) = (on("zone", "In", &["a"]), on("zone", "In", &["b"]));
    let avx = on("feature.node.kubernetes.io/cpu-cpuid.AVX", "Exists", &[]);
    let choices = vec![
        vec![],
        vec![vec![a.clone()]],
        vec![vec![a.clone()], vec![b.clone()]],
        vec![vec![avx.clone(), b], vec![a, avx]],
    ];
    let required = prop::sample::select(choices);
    let preferred = prop::sample::select(vec![0, 7]);
    (required, preferred).prop_map(|(required, weight)| {
        let preferred = required.first().filter(|_| weight > 0);
        let preferred = preferred.map(|expressions| affinity::WeightedTerm {
            weight,
            expressions: expressions.clone(),
        });
        let is_open = required.is_empty();
        Demand {
            prefer: preferred.into_iter().collect(),
            require: if is_open {
                NodeSet::every()
            } else {
                NodeSet::any_of(required)
            },
            ..Demand::from_source(Source::ImageSelection)
        }
    })
}

proptest! {
    /// With archaware's additions, any affinity of the author selects those of the author's nodes
    /// that suffice for the images. A second decision adds nothing, and the additions can be
    /// removed again.
    #[test]
    fn affinity_of_variants_is_added_once_and_comes_off(
        terms in prop::option::of(prop::collection::vec(
            (prop::option::of("[ab]"), prop::option::of(prop::sample::select(vec!["amd64", "arm64"]))), 1..4,
        )),
        preferred in any::<bool>(),
        images in prop::sample::select(vec!["amd64,arm64", "amd64/v3", "amd64/v3,arm64", "amd64/v3,arm64,s390x"]),
        require in any::<bool>(),
        selected in prop::option::of(nodes_of_an_image()),
    ) {
        let terms: Option<Vec<Value>> = terms.map(|terms| terms.into_iter().map(|(zone, arch)| {
            let zone = zone.or_else(|| arch.is_none().then(|| "a".to_owned()));
            let zone = zone.map(|zone| json!({"key": "zone", "operator": "In", "values": [zone]}));
            let arch = arch.map(|arch| json!({"key": "kubernetes.io/arch", "operator": "In", "values": [arch]}));
            json!({"matchExpressions": zone.into_iter().chain(arch).collect::<Vec<_>>()})
        }).collect());
        let mut node = json!({});
        if let Some(terms) = terms {
            node[REQUIRED] = json!({"nodeSelectorTerms": terms});
        }
        if preferred {
            node[PREFERRED] = json!([{"weight": 1, "preference": {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}}]);
        }
        let before = normalised(json!({"spec": {"containers": [], "affinity": {"nodeAffinity": node}}}));
        let mut policy = PlacementPolicy::from(&Config::default());
        policy.variants.unknown = if require { UnknownVariants::Require } else { UnknownVariants::Prefer };
        let set: Architectures = images.parse().unwrap();
        let change = |pod: &Pod, selected: Option<&Demand>, terms_are_open| {
            let every = NodeSet::every();
            let selector = BTreeMap::new();
            let author = AuthorNodes { node_selector: &selector, affinity: pod.spec.affinity.as_ref() };
            let wanted = affinity_change::AffinityDemand {
            unlabelled: &UnlabelledNodes::none(),
                required: slice::from_ref(&set),
                suitable: Some(&set),
                variants: &policy.variants,
                nodes: selected.map_or(&every, |demand| &demand.require),
                prefer: selected.map_or_else(Vec::new, |demand| demand.prefer.clone()),
                terms_are_open,
            };
            affinity_change::decide(&wanted, Vec::new(), author)
        };
        let pod = subject(before.clone());
        // Terms that exclude all architectures of the images are the author's mistake, which
        // archaware reports elsewhere (`ArchitectureExcluded`).
        let author = AuthorNodes { node_selector: &BTreeMap::new(), affinity: pod.spec.affinity.as_ref() };
        prop_assume!(!author.excludes_all(&set));
        let added = change(&pod, selected.as_ref(), true);
        let mut patch = JsonPatch::for_object(&ObjectMeta::default());
        patch.affinity(pod.spec.affinity.as_ref(), &added);
        let after = patched(&before, patch);
        let pod_after = subject(after.clone());
        for architecture in ["amd64", "arm64", "s390x"] {
            for label in [None, Some("v2"), Some("v3"), Some("4711")] {
                for (has_v3, zone) in [(false, "a"), (true, "a"), (true, "b")] {
                    if architecture != "amd64" && matches!(label, Some("v2" | "v3")) {
                        continue;
                    }
                    let node = labels(architecture, label, has_v3, zone);
                    let variant = match label {
                        Some(name @ ("v2" | "v3")) => Some(NodeVariant::Exactly(name)),
                        _ => has_v3.then_some(NodeVariant::AtLeast("v3")),
                    };
                    let suffices = suffices(&set, architecture, variant);
                    let runs = if require { suffices == Some(true) } else { suffices != Some(false) };
                    let expected = runs && selects(&pod, &node) && selected.as_ref().is_none_or(|image| image.require.selects(&node));
                    prop_assert_eq!(selects(&pod_after, &node), expected, "{:?} {}", node, after);
                }
            }
        }
        // The second case is an existing pod: no image is selected again, and its terms
        // cannot be repeated.
        for (selected, terms_are_open) in [(selected.as_ref(), true), (None, false)] {
            let again = change(&pod_after, selected, terms_are_open);
            prop_assert!(again.is_empty(), "{:?} {}", again, after);
        }
        let mut without = pod_after.clone();
        let found = without.spec.affinity.as_mut().map(|affinity| affinity_change::undo(affinity, &added)).unwrap_or_default();
        prop_assert!(found.is_complete(&added), "{:?} {:?} {}", found, added, after);
        let undo = record::FoundAdditions { affinity: found, ..Default::default() };
        let mut patch = JsonPatch::for_object(&ObjectMeta::default());
        patch.undo(&undo);
        prop_assert_eq!(normalised(patched(&after, patch)), before);
    }
}
