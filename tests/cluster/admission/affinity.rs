//! Node affinity: what is added, and where pods are scheduled by it alone. No node is tainted here.

use std::collections::BTreeSet;

use kube::{ResourceExt, api::PostParams};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

use super::*;

const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
const UNTAINTED: &str = "taint: {manage: false}\naffinity: {required: true}\n";

/// What the author writes and what is stored. The rest of the affinity is unchanged.
#[tokio::test]
async fn the_architectures_are_added_and_nothing_else_changes() {
    let cluster = TestCluster::take().await;
    let preferred = "affinity: {preferred: [{architecture: arm64, weight: 80}]}\n";
    let _archaware = Controller::start_with_webhook(&cluster, preferred, "").await;
    let key = "kubernetes.io/arch";
    let arch = json!({"key": key, "operator": "In", "values": ["amd64", "arm64"]});
    let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
    let own = json!({"key": key, "operator": "In", "values": ["s390x"]});
    let old = json!({"key": "beta.kubernetes.io/arch", "operator": "NotIn", "values": ["arm"]});
    let field = json!([{"key": "metadata.name", "operator": "In", "values": ["n"]}]);
    let other = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "zone", "labelSelector": {"matchLabels": {"a": "b"}}},
    ]}});
    let soft = |weight: u8, expression: &Value| json!({"weight": weight, "preference": {"matchExpressions": [expression]}});
    let arm = soft(
        80,
        &json!({"key": key, "operator": "In", "values": ["arm64"]}),
    );
    let terms = |terms: Value| json!({"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}});
    let node = |terms: Value, preferred: Value| {
        let mut affinity = json!({"nodeAffinity": {}});
        if !terms.is_null() {
            affinity["nodeAffinity"][REQUIRED] = json!({"nodeSelectorTerms": terms});
        }
        if !preferred.is_null() {
            affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] = preferred;
        }
        affinity
    };
    let made = json!([{"matchExpressions": [arch]}]);
    let null = Value::Null;
    let mut beside = node(made.clone(), json!([arm]));
    beside["podAntiAffinity"] = other["podAntiAffinity"].clone();
    let mut contradicted = node(made.clone(), null.clone());
    contradicted["podAntiAffinity"] = other["podAntiAffinity"].clone();
    let few = json!({"key": key, "operator": "In", "values": ["arm64"]});
    for (n, (before, selector, after)) in [
        (null.clone(), json!({}), node(made.clone(), json!([arm]))),
        (json!({}), json!({"zone": "a"}), node(made.clone(), json!([arm]))),
        (other.clone(), json!({}), beside),
        (
            terms(json!([{"matchExpressions": [zone]}])),
            json!({}),
            node(json!([{"matchExpressions": [zone, arch]}]), json!([arm])),
        ),
        (
            terms(json!([{"matchExpressions": [zone]}, {"matchExpressions": [own]}, {"matchExpressions": [old, zone]}, {"matchExpressions": [zone], "matchFields": field}])),
            json!({}),
            node(json!([{"matchExpressions": [zone, arch]}, {"matchExpressions": [own, arch]}, {"matchExpressions": [old, zone, arch]}, {"matchExpressions": [zone, arch], "matchFields": field}]), json!([arm])),
        ),
        (terms(json!([{"matchFields": field}])), json!({}), terms(json!([{"matchFields": field}]))),
        (terms(json!([{}, {"matchExpressions": [zone]}])), json!({}), node(json!([{}, {"matchExpressions": [zone, arch]}]), json!([arm]))),
        (terms(json!([{"matchExpressions": [few]}])), json!({}), node(json!([{"matchExpressions": [few]}]), json!([arm]))),
        (null.clone(), json!({key: "arm64"}), null.clone()),
        // No node can run these: an autoscaler sees it.
        (null.clone(), json!({key: "s390x"}), node(made.clone(), null.clone())),
        (other.clone(), json!({"beta.kubernetes.io/arch": "s390x"}), contradicted),
        (
            node(null.clone(), json!([soft(1, &zone)])),
            json!({}),
            node(made.clone(), json!([soft(1, &zone), arm])),
        ),
        (
            node(null.clone(), json!([soft(1, &own)])),
            json!({}),
            node(made, json!([soft(1, &own)])),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let pod = create(&cluster, &format!("pod-{n}"), &["amd64-arm64"], |pod| {
            pod["spec"]["nodeSelector"] = selector.clone();
            pod["spec"]["affinity"] = before.clone();
        })
        .await;
        let stored = json!(pod.spec.unwrap().affinity);
        assert_eq!(stored, after, "case {n}: {before} with {selector}");
    }
}

/// A term of the author: expressions on zone and architecture, optionally a node name.
#[derive(Clone, Debug)]
struct Term {
    zone: Option<&'static str>,
    /// Key, operator, value.
    arch: Option<(&'static str, &'static str, &'static str)>,
    name: Option<usize>,
}

#[derive(Clone, Debug)]
struct Author {
    image: usize,
    selector: Option<(&'static str, &'static str)>,
    terms: Vec<Term>,
}

const IMAGES: &[(&str, &[&str])] = &[
    ("amd64", &["amd64"]),
    ("arm64", &["arm64"]),
    ("amd64-arm64", &["amd64", "arm64"]),
    ("multi", &["amd64", "arm64", "s390x"]),
];
const NODES: &[(&str, &str)] = &[
    ("amd64", "a"),
    ("amd64", "b"),
    ("arm64", "a"),
    ("arm64", "b"),
    ("s390x", "a"),
];
const ARCH: &str = "kubernetes.io/arch";
const OLD: &str = "beta.kubernetes.io/arch";

fn author() -> impl Strategy<Value = Author> {
    let architecture = || prop::sample::select(vec!["amd64", "arm64", "s390x"]);
    let arch = (
        prop::sample::select(vec![ARCH, OLD]),
        prop::sample::select(vec!["In", "NotIn"]),
        architecture(),
    );
    let zone = || prop::sample::select(vec!["a", "b"]);
    let term = (
        prop::option::of(zone()),
        prop::option::weighted(0.3, arch),
        prop::option::weighted(0.2, 0..NODES.len()),
    );
    let term = term.prop_map(|(zone, arch, name)| Term { zone, arch, name });
    let selector = prop_oneof![
        3 => Just(None),
        1 => zone().prop_map(|zone| Some(("zone", zone))),
        1 => architecture().prop_map(|arch| Some((ARCH, arch))),
    ];
    (0..IMAGES.len(), selector, prop::collection::vec(term, 0..4)).prop_map(
        |(image, selector, terms)| Author {
            image,
            selector,
            terms,
        },
    )
}

impl Term {
    fn to_json(&self) -> Value {
        let mut expressions = Vec::new();
        expressions.extend(
            self.zone
                .map(|zone| json!({"key": "zone", "operator": "In", "values": [zone]})),
        );
        expressions.extend(self.arch.map(
            |(key, operator, value)| json!({"key": key, "operator": operator, "values": [value]}),
        ));
        let mut term = json!({});
        if !expressions.is_empty() {
            term["matchExpressions"] = json!(expressions);
        }
        if let Some(node) = self.name {
            term["matchFields"] = json!([{"key": "metadata.name", "operator": "In", "values": [format!("node-{node}")]}]);
        }
        term
    }

    fn is_empty(&self) -> bool {
        self.zone.is_none() && self.arch.is_none() && self.name.is_none()
    }

    /// Whether the author's terms allow a node.
    fn allows(&self, node: usize) -> bool {
        let (architecture, zone) = NODES[node];
        !self.is_empty()
            && self.zone.is_none_or(|own| own == zone)
            && self.selects(architecture)
            && self.name.is_none_or(|own| own == node)
    }

    /// Whether the term allows an architecture.
    fn selects(&self, architecture: &str) -> bool {
        self.arch
            .is_none_or(|(_, operator, value)| (architecture == value) == (operator == "In"))
    }

    /// Whether the term only names a node: archaware does not change it.
    fn names_node(&self) -> bool {
        self.arch.is_none() && self.zone.is_none() && self.name.is_some()
    }
}

impl Author {
    /// The nodes that the author's terms and the images allow.
    fn nodes(&self) -> BTreeSet<usize> {
        let images = IMAGES[self.image].1;
        // No node is tainted: an author who selects none of the images' architectures means it.
        let is_selected = |architecture: &&str| {
            let by_selector = match self.selector {
                Some((ARCH, own)) => own == *architecture,
                _ => true,
            };
            let mut terms = self.terms.iter();
            by_selector && (self.terms.is_empty() || terms.any(|term| term.selects(architecture)))
        };
        let is_meant = !images.iter().any(is_selected);
        let runs = |node: usize| is_meant || images.contains(&NODES[node].0);
        let by_selector = |node: usize| match self.selector {
            None => true,
            Some(("zone", zone)) => NODES[node].1 == zone,
            Some((_, architecture)) => NODES[node].0 == architecture,
        };
        let by_terms = |node: usize| match self.terms.as_slice() {
            [] => runs(node),
            terms => terms
                .iter()
                .any(|term| term.allows(node) && (term.names_node() || runs(node))),
        };
        (0..NODES.len())
            .filter(|node| by_selector(*node) && by_terms(*node))
            .collect()
    }
}

#[tokio::test]
async fn no_pod_lands_where_its_author_or_its_images_forbid_it() {
    let cluster = TestCluster::take().await;
    for (n, (architecture, zone)) in NODES.iter().enumerate() {
        let name = format!("node-{n}");
        cluster.create_node(&name, architecture).await;
        let (zone, old) = (format!("zone={zone}"), format!("{OLD}={architecture}"));
        cluster.kubectl(&["label", "node", &name, &zone, &old]);
    }
    let archaware = Controller::start_with_webhook(&cluster, UNTAINTED, "").await;
    let mut runner = TestRunner::default();
    let mut pods = Vec::new();
    for n in 0..120 {
        let author = author().new_tree(&mut runner).unwrap().current();
        let mut spec = pod_spec(&[cluster.image(IMAGES[author.image].0)]);
        if let Some((key, value)) = author.selector {
            spec["nodeSelector"] = json!({key: value});
        }
        if !author.terms.is_empty() {
            let terms: Vec<Value> = author.terms.iter().map(Term::to_json).collect();
            spec["affinity"] = json!({"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}});
        }
        let pod = serde_json::from_value(pod(&format!("pod-{n}"), spec, json!({}))).unwrap();
        cluster
            .pods()
            .create(&PostParams::default(), &pod)
            .await
            .unwrap();
        pods.push(author);
    }
    let mut bound = 0;
    for (n, author) in pods.iter().enumerate() {
        let allowed = author.nodes();
        if allowed.is_empty() {
            continue;
        }
        let node = cluster.wait_until_bound(&format!("pod-{n}")).await;
        let node: usize = node.trim_start_matches("node-").parse().unwrap();
        assert!(
            allowed.contains(&node),
            "pod-{n} on {:?}: {author:?}",
            NODES[node]
        );
        bound += 1;
    }
    // The scheduler has tried all of them by now: those that fit nowhere stay pending.
    for (n, author) in pods.iter().enumerate() {
        if author.nodes().is_empty() {
            let pod = cluster.pods().get(&format!("pod-{n}")).await.unwrap();
            assert!(
                pod.spec.as_ref().unwrap().node_name.is_none(),
                "{}: {author:?}",
                pod.name_any()
            );
        }
    }
    assert!(bound > 60, "{bound} of 120 pods fit somewhere");
    assert_eq!(archaware.stop().await, 0);
}

/// With taints alone four of these pods stay pending for ever: the scheduler counts the nodes that
/// they do not tolerate, which stay empty (`nodeTaintsPolicy` is `Ignore` by default).
#[tokio::test]
async fn pods_that_must_be_spread_are_all_placed() {
    let cluster = TestCluster::take().await;
    for (name, architecture) in [
        ("a", "amd64"),
        ("b", "amd64"),
        ("c", "arm64"),
        ("d", "arm64"),
    ] {
        cluster.create_node(name, architecture).await;
    }
    let _archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let labels = json!({"app": "spread"});
    let mut nodes = Vec::new();
    for n in 0..6 {
        let mut spread = pod(
            &format!("spread-{n}"),
            pod_spec(&[cluster.image("amd64")]),
            json!({}),
        );
        spread["metadata"]["labels"] = labels.clone();
        spread["spec"]["topologySpreadConstraints"] = json!([{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": labels},
        }]);
        cluster.create::<Pod>(spread).await;
        nodes.push(cluster.wait_until_bound(&format!("spread-{n}")).await);
    }
    nodes.sort();
    assert_eq!(nodes, ["a", "a", "a", "b", "b", "b"]);
}
