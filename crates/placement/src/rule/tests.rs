use serde_json::{Value, json};

use crate::affinity::Affinity;

use super::*;

fn rules(yaml: &str) -> Vec<PodRule> {
    crate::yaml(yaml)
}

fn labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// What rules say of a pod, in words: required nodes, preferred nodes, tolerations, and rules that
/// are left out.
fn describe_applied_rules(
    rules: &[PodRule],
    pod: &str,
    namespace: &str,
    spec: &Value,
) -> [String; 4] {
    let node_selector: BTreeMap<String, String> =
        serde_json::from_value(spec["nodeSelector"].clone()).unwrap_or_default();
    let affinity: Option<Affinity> = serde_json::from_value(spec["affinity"].clone()).unwrap();
    let author = AuthorNodes {
        node_selector: &node_selector,
        affinity: affinity.as_ref(),
    };
    let (pod, namespace) = (labels(pod), labels(namespace));
    let pod = RuledPod {
        labels: &pod,
        namespace_labels: &namespace,
        author,
        runtime_class: spec["runtimeClassName"].as_str(),
        is_new: true,
    };
    let applied = apply(rules, pod);
    let text_of = |requirements: &[Requirement]| {
        let texts: Vec<String> = requirements.iter().map(ToString::to_string).collect();
        texts.join(" and ")
    };
    let required = applied.demands.required();
    let required = if required.is_every() {
        Vec::new()
    } else {
        required
            .terms()
            .iter()
            .map(|requirements| text_of(requirements))
            .collect()
    };
    let preferred = applied.demands.preferred(false);
    let preferred = preferred.iter();
    let preferred = preferred
        .map(|preference| format!("{} {}", preference.weight, text_of(&preference.expressions)));
    let tolerations = applied.demands.tolerations().map(ToString::to_string);
    let left_out = applied.left_out.iter().map(ToString::to_string);
    [
        required.join(" or "),
        preferred.collect::<Vec<_>>().join("; "),
        tolerations.collect::<Vec<_>>().join("; "),
        left_out.collect::<Vec<_>>().join("; "),
    ]
}

#[test]
fn rules_select_pods_by_their_labels_and_namespaces() {
    let rules = rules(
        "- {name: gpu, pods: app=train, namespaces: 'team in (a, b)', nodes: ['gpu', 'zone=z1,!spot'], \
         preferredNodes: [{nodes: disk=ssd, weight: 5}], \
         tolerations: [{key: gpu, operator: Exists, effect: NoSchedule}]}\n\
         - {name: pool, matchNodeLabels: [pool]}\n",
    );
    let none = json!({});
    let gpu = r#"{"effect":"NoSchedule","key":"gpu","operator":"Exists"}"#;
    for (pod, namespace, expected) in [
        ("app=train", "team=c", ["", "", "", ""]),
        ("app=web", "team=a", ["", "", "", ""]),
        (
            "app=train",
            "team=a",
            [
                "gpu exists or zone in (z1) and spot does not exist",
                "5 disk in (ssd)",
                gpu,
                "",
            ],
        ),
        // Two rules: both have to hold.
        (
            "app=train,pool=x",
            "team=b",
            [
                "gpu exists and pool in (x) or zone in (z1) and spot does not exist and pool in (x)",
                "5 disk in (ssd)",
                gpu,
                "",
            ],
        ),
        ("pool=x", "", ["pool in (x)", "", "", ""]),
    ] {
        let texts = describe_applied_rules(&rules, pod, namespace, &none);
        assert_eq!(texts, expected, "{pod} {namespace}");
    }
}

#[test]
fn what_contradicts_is_left_out_and_told() {
    let required = |terms: Value| json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}});
    let term = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "pool", "operator": operator, "values": values}]});
    let author = "rule one is left out: its nodes contradict the pod's node selector or required node affinity";
    let earlier = "rule two is left out: its nodes contradict those of rules before it: pool in (b), and pool in (a)";
    for (rule, spec, expected) in [
        ("['pool=a']", json!({}), ""),
        ("['pool=a']", json!({"nodeSelector": {"pool": "a"}}), ""),
        (
            "['pool=a']",
            json!({"nodeSelector": {"pool": "b"}}),
            "pool in (a), and pool in (b)",
        ),
        (
            "['pool=a', 'zone']",
            json!({"nodeSelector": {"pool": "b"}}),
            "",
        ),
        (
            "['pool!=b']",
            json!({"nodeSelector": {"pool": "b"}}),
            "pool not in (b), and pool in (b)",
        ),
        (
            "['!pool']",
            json!({"nodeSelector": {"pool": "b"}}),
            "pool does not exist, and pool in (b)",
        ),
        (
            "['pool']",
            required(json!([term("DoesNotExist", &[])])),
            "pool exists, and pool does not exist",
        ),
        (
            "['pool=a']",
            required(json!([term("In", &["b", "c"])])),
            "pool in (a), and pool in (b, c)",
        ),
        (
            "['pool=a']",
            required(json!([term("In", &["b"]), term("In", &["a"])])),
            "",
        ),
        (
            "['pool=a']",
            required(json!([term("NotIn", &["a", "b"])])),
            "pool in (a), and pool not in (a, b)",
        ),
        ("['pool=a']", required(json!([term("Gt", &["1"])])), ""),
    ] {
        let rules = rules(&format!("- {{name: one, nodes: {rule}}}\n"));
        let [.., left_out] = describe_applied_rules(&rules, "", "", &spec);
        let expected = match expected {
            "" => String::new(),
            reason => format!("{author}: {reason}"),
        };
        assert_eq!(left_out, expected, "{rule} {spec}");
    }
    let two = rules("- {name: one, nodes: [pool=a]}\n- {name: two, nodes: [pool=b]}\n");
    let [nodes, .., left_out] = describe_applied_rules(&two, "", "", &json!({}));
    assert_eq!(
        [nodes.as_str(), left_out.as_str()],
        ["pool in (a)", earlier]
    );
}

#[test]
fn a_runtime_class_is_for_new_pods_that_have_none() {
    let rules = rules(
        "- {name: one, runtimeClass: fast, nodes: [pool]}\n- {name: two, pods: app=web, runtimeClass: slow, nodes: [zone]}\n",
    );
    let other_class =
        "rule one is left out: the pod has another runtime class, which cannot be changed";
    let later = "rule two is left out: rules before it require another runtime class";
    let existing = "rule one is left out: a runtime class can be set only when a pod is created";
    for (app, class, is_new, expected, names, left_out) in [
        ("db", None, true, Some("fast"), &["one"][..], ""),
        ("db", None, false, None, &[], existing),
        ("db", Some("fast"), true, None, &["one"], ""),
        ("db", Some("fast"), false, None, &["one"], ""),
        ("db", Some("slow"), true, None, &[], other_class),
        ("web", None, true, Some("fast"), &["one"], later),
        ("web", Some("slow"), true, None, &["two"], other_class),
    ] {
        let case = format!("{app} {class:?} {is_new}");
        let labels = labels(&format!("app={app}"));
        let pod = RuledPod {
            labels: &labels,
            namespace_labels: &BTreeMap::new(),
            author: AuthorNodes {
                node_selector: &BTreeMap::new(),
                affinity: None,
            },
            runtime_class: class,
            is_new,
        };
        let applied = apply(&rules, pod);
        assert_eq!(applied.demands.class(), expected, "{case}");
        assert_eq!(applied.demands.rules().collect::<Vec<_>>(), names, "{case}");
        let reasons: Vec<_> = applied.left_out.iter().map(ToString::to_string).collect();
        assert_eq!(reasons.join("; "), left_out, "{case}");
    }
}
