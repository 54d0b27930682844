use serde_json::{Value, json};

use crate::{
    placement::{PlacementPolicy, affinity::Affinity},
    platform::Os,
};

use super::*;

fn rules(yaml: &str) -> Vec<PodRule> {
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\n";
    let config = crate::config::parse("c", &format!("{head}rules:\n{yaml}"));
    config.unwrap().rules
}

fn labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

/// What rules say of a pod, in words: required nodes, preferred nodes, tolerations, and rules that are left out.
fn say(rules: &[PodRule], pod: &str, namespace: &str, spec: &Value) -> [String; 4] {
    let node_selector: BTreeMap<String, String> =
        serde_json::from_value(spec["nodeSelector"].clone()).unwrap_or_default();
    let affinity: Option<Affinity> = serde_json::from_value(spec["affinity"].clone()).unwrap();
    let author = AuthorSelection {
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
    let all = |one: &[Requirement]| {
        let texts: Vec<String> = one.iter().map(ToString::to_string).collect();
        texts.join(" and ")
    };
    let required = applied.demands.required();
    let required = if required.is_every() {
        Vec::new()
    } else {
        required.terms().iter().map(|one| all(one)).collect()
    };
    let preferred = applied.demands.preferred(false);
    let preferred = preferred.iter();
    let preferred = preferred.map(|one| format!("{} {}", one.weight, all(&one.expressions)));
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
        let said = say(&rules, pod, namespace, &none);
        assert_eq!(said, expected, "{pod} {namespace}");
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
        let [.., left_out] = say(&rules, "", "", &spec);
        let expected = match expected {
            "" => String::new(),
            reason => format!("{author}: {reason}"),
        };
        assert_eq!(left_out, expected, "{rule} {spec}");
    }
    let two = rules("- {name: one, nodes: [pool=a]}\n- {name: two, nodes: [pool=b]}\n");
    let [nodes, .., left_out] = say(&two, "", "", &json!({}));
    assert_eq!(
        [nodes.as_str(), left_out.as_str()],
        ["pool in (a)", earlier]
    );
}

#[test]
fn a_runtime_class_is_for_new_pods_that_have_none() {
    let head =
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\nadmission: {enabled: true}\n";
    let rules = "rules:\n- {name: one, runtimeClass: fast, nodes: [pool]}\n- {name: two, pods: app=web, runtimeClass: slow, nodes: [zone]}\n";
    let config = crate::config::parse("c", &format!("{head}{rules}")).unwrap();
    let other = "rule one is left out: the pod has another runtime class, which cannot be changed";
    let later = "rule two is left out: rules before it require another runtime class";
    let existing = "rule one is left out: a runtime class can be set only when a pod is created";
    for (app, class, is_new, expected, names, left_out) in [
        ("db", None, true, Some("fast"), &["one"][..], ""),
        ("db", None, false, None, &[], existing),
        ("db", Some("fast"), true, None, &["one"], ""),
        ("db", Some("fast"), false, None, &["one"], ""),
        ("db", Some("slow"), true, None, &[], other),
        ("web", None, true, Some("fast"), &["one"], later),
        ("web", Some("slow"), true, None, &["two"], other),
    ] {
        let case = format!("{app} {class:?} {is_new}");
        let labels = labels(&format!("app={app}"));
        let pod = RuledPod {
            labels: &labels,
            namespace_labels: &BTreeMap::new(),
            author: AuthorSelection {
                node_selector: &BTreeMap::new(),
                affinity: None,
            },
            runtime_class: class,
            is_new,
        };
        let applied = apply(&config.rules, pod);
        assert_eq!(applied.demands.class(), expected, "{case}");
        assert_eq!(applied.demands.rules().collect::<Vec<_>>(), names, "{case}");
        let told: Vec<_> = applied.left_out.iter().map(ToString::to_string).collect();
        assert_eq!(told.join("; "), left_out, "{case}");
    }
}

#[test]
fn impossible_rules_are_errors() {
    let head = "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\nrules:\n";
    for (yaml, problem) in [
        (
            "- {name: a, nodes: [x]}\n- {name: a, nodes: [y]}\n",
            "a name of its own",
        ),
        ("- {name: 'a b', nodes: [x]}\n", "a name of its own"),
        ("- {name: a}\n", "adds nothing"),
        ("- {name: a, nodes: ['']}\n", "is empty"),
        ("- {name: a, nodes: ['x in (']}\n", "not a label selector"),
        (
            "- {name: a, tolerations: [{key: k, value: 'x-{arch}'}]}\n",
            "{arch}",
        ),
        (
            "- {name: a, preferredNodes: [{nodes: x, weight: 101}]}\n",
            "1 to 100",
        ),
        ("- {nodes: [x]}\n", "name"),
        (
            "- {name: a, runtimeClass: gvisor}\n",
            "needs admission.enabled",
        ),
        (
            "- {name: a, runtimeClass: 'g v'}\n",
            "name of a RuntimeClass",
        ),
    ] {
        let error = crate::config::parse("c", &format!("{head}{yaml}")).unwrap_err();
        assert!(error.to_string().contains(problem), "{yaml}: {error}");
    }
}

/// docs/coming-from.md translates the settings of other tools: the placement is what they would have made.
#[test]
fn settings_of_other_tools_give_the_same_placement() {
    let page = include_str!("../../../docs/coming-from.md");
    let blocks: Vec<&str> = page.split("```yaml\n").skip(1).collect();
    let configs: Vec<crate::config::Config> = blocks
        .iter()
        .map(|block| crate::config::parse("page", block.split("```").next().unwrap()).unwrap())
        .collect();
    let [noe, tolerable, multiarcher, all] = configs.as_slice() else {
        panic!("{} configurations", configs.len());
    };
    let tolerations = |config: &crate::config::Config, images: &str| {
        let policy = PlacementPolicy::from(config);
        let decision = policy.limit(images.parse().unwrap());
        policy.missing_tolerations(&decision, &Os::linux(), &[])
    };
    let equal = |key: &str, value: &str| json!({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"});

    // noe: the architectures that are schedulable, a label that pod and node share, the preferred architecture.
    let policy = PlacementPolicy::from(noe);
    let decision = policy.limit("amd64,arm64,s390x".parse().unwrap());
    assert_eq!(decision.annotation(), "amd64,arm64");
    let shared = say(&noe.rules, "example.com/pool=x,app=web", "", &json!({}));
    assert_eq!(shared[0], "example.com/pool in (x)");
    assert_eq!(say(&noe.rules, "app=web", "", &json!({}))[0], "");
    let preferred = noe.affinity.preferences();
    assert_eq!(preferred.into_values().collect::<Vec<_>>(), [100]);

    // tolerable: a toleration for each supported architecture that all images have.
    let arch = "kubernetes.io/arch";
    let both = [equal(arch, "amd64"), equal(arch, "arm64")];
    assert_eq!(tolerations(tolerable, "amd64,arm64,s390x"), both);
    assert_eq!(tolerations(tolerable, "arm64"), [equal(arch, "arm64")]);

    // k8smultiarcher: its own toleration if the images are for linux/arm64.
    let own = equal("k8smultiarcher", "arm64Supported");
    assert!(tolerations(multiarcher, "amd64,arm64").contains(&own));
    assert!(!tolerations(multiarcher, "amd64").contains(&own));
    assert_eq!(say(&all.rules, "", "", &json!({}))[2], own.to_string());
}
