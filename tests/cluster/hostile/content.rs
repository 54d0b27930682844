//! What one tenant writes into its objects: more than any real object has, as far as the API server
//! and the registry take it.

use k8s_openapi::api::apps::v1::DaemonSet;
use testimg::Image;

use super::*;

const NFD: &str = "application/vnd.nfd.image-compatibility.spec.v1alpha1+yaml";
/// Containers whose images are selected, as many as archaware allows.
const SELECTIONS: usize = 16;
/// Nodes that differ by a feature.
const DIFFERENT_NODES: usize = 200;
/// Maximum bytes of a line of the log.
const LINE: usize = 16 * 1024;

/// More tolerations than any real pod has.
fn tolerations() -> Value {
    json!(vec![json!({"key": "a"}); 100_000])
}

/// A record of additions that archaware never made, as costly to take back as possible.
fn forged() -> (String, Value) {
    let expression = |n: usize| json!({"key": format!("k{n}"), "operator": "Exists"});
    let expressions = |count| (0..count).map(expression).collect::<Vec<_>>();
    let terms = vec![json!({"matchExpressions": expressions(2)}); 341];
    let all: Vec<usize> = (0..4096).collect();
    let record = json!({"version": 1, "affinity": {"require": {
        "architectures": ["amd64"], "alternatives": vec![expressions(16); 64], "terms": all}},
        "tolerations": vec![json!({"key": "b"}); 2000]});
    let affinity = json!({"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
    (record.to_string(), affinity)
}

/// Documents that are much larger in memory, or in messages, than in the registry, and one that takes
/// many comparisons with many different nodes.
fn documents() -> [(&'static str, String); 5] {
    let entry = |rules: &str| format!("compatibilities: [{{rules: [{rules}]}}]");
    let mut aliases = "a0: &a0 [x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..9 {
        let inner = vec![format!("*a{}", level - 1); 8].join(",");
        aliases += &format!("a{level}: &a{level} [{inner}]\n");
    }
    let long = "\\e[2J".repeat(8_000);
    let no_operator = format!(
        "{{name: \"{long}\", matchFeatures: [{{feature: a.b, matchExpressions: {{c: {{op: \"{long}\"}}}}}}]}}"
    );
    let alternative = "{matchFeatures: [{feature: cpu.cpuid, matchName: {op: In, value: [X]}}]}";
    let alternatives = vec![alternative; 2_800].join(",");
    let empty = vec!["{}"; 80_000].join(",");
    let rules = vec!["{name: aaaaaaaaaaaaaaaa}"; 8_000].join(",");
    [
        ("empty", entry(&empty)),
        ("aliases", format!("{aliases}compatibilities: *a8")),
        ("rules", entry(&rules)),
        ("names", entry(&no_operator)),
        (
            "alternatives",
            entry(&format!("{{matchAny: [{alternatives}]}}")),
        ),
    ]
}

async fn attack(cluster: &TestCluster, namespace: &str, registry: &FakeRegistry) {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), namespace);
    let create = async |name: &str, spec: Value, annotations: Value| {
        let pod = serde_json::from_value(pod(name, spec, annotations)).unwrap();
        pods.create(&PostParams::default(), &pod).await.unwrap();
    };
    let image = format!("{}:multi", registry.image("app"));
    let spec = || pod_spec(std::slice::from_ref(&image));
    for (tag, document) in documents() {
        assert!(document.len() < 256 * 1024, "{tag}");
        for number in 0..SELECTIONS {
            // Another digest, so that each is parsed.
            let document = format!("# {number}\n{document}");
            let artifact = Image::artifact("application/vnd.test", NFD, &document);
            registry.add_tag("app", &format!("{tag}-{number}"), &artifact);
        }
        let (mut spec, mut annotations) = (spec(), json!({}));
        let containers = (0..SELECTIONS).map(|number| {
            let name = format!("c{number}");
            let reference = format!("{}:{tag}-{number}", registry.image("app"));
            annotations[format!("archaware.dev/select-image.{name}")] = json!(reference);
            json!({"name": name, "image": image})
        });
        spec["containers"] = containers.collect();
        create(&format!("document-{tag}"), spec, annotations).await;
    }
    let (record, affinity) = forged();
    for number in 0..4 {
        let mut spec = spec();
        spec["affinity"] = affinity.clone();
        let annotations = json!({"archaware.dev/added": record});
        create(&format!("record-{number}"), spec, annotations).await;
    }
    for number in 0..4 {
        let mut spec = spec();
        spec["tolerations"] = tolerations();
        create(&format!("tolerations-{number}"), spec, json!({})).await;
    }
    let sets: Api<DaemonSet> = Api::namespaced(cluster.client.clone(), namespace);
    let mut spec = spec();
    spec["tolerations"] = tolerations();
    // No node has this label, so that no pods are made.
    spec["nodeSelector"] = json!({"example.com/none": "there"});
    let set = json!({"metadata": {"name": "tolerations"}, "spec": {
        "selector": {"matchLabels": {"app": "a"}},
        "template": {"metadata": {"labels": {"app": "a"}}, "spec": spec},
    }});
    let set = serde_json::from_value(set).unwrap();
    sets.create(&PostParams::default(), &set).await.unwrap();
}

#[tokio::test]
async fn the_content_of_objects_costs_little() {
    let cluster = TestCluster::take().await;
    cluster.create_three_nodes().await;
    for number in 0..DIFFERENT_NODES {
        let label = format!("feature.node.kubernetes.io/cpu-cpuid.F{number}");
        let node =
            json!({"metadata": {"labels": {label: "true"}}, "spec": {"unschedulable": true}});
        let name = format!("different-{number}");
        cluster.create_node_with(&name, "s390x", node).await;
    }
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let (healthy, registry) = (
        FakeRegistry::start().await.unwrap(),
        FakeRegistry::start().await.unwrap(),
    );
    registry.add_tag("app", "multi", &testimg::find("multi"));
    let place = async |round: usize| {
        let mut times = Vec::new();
        for number in 0..PODS {
            let number = round * PODS + number;
            let tag = format!("v{number}");
            healthy.add_tag("app", &tag, &testimg::numbered(number));
            let image = format!("{}:{tag}", healthy.image("app"));
            times.push(time_until_bound(&cluster, &format!("healthy-{number}"), image).await);
        }
        times.sort();
        times[PODS / 2]
    };
    let before = place(0).await;
    let vitals = Vitals::watch(&cluster, &archaware).await;
    let namespace = format!("{}-hostile", cluster.namespace);
    cluster.create_namespace(&namespace, json!({})).await;
    let attack = attack(&cluster, &namespace, &registry);
    let ((), during) = tokio::join!(attack, place(1));
    let after = place(2).await;
    println!(
        "hostile content: pods of another tenant placed in {before:.0?} before, {during:.0?} during and {after:.0?} after it"
    );
    vitals.end(&cluster, &archaware).await;
    let log = archaware.log();
    let longest = log.lines().max_by_key(|line| line.len()).unwrap();
    assert!(longest.len() < LINE && !log.contains('\u{1b}'), "{longest}");
    // Objects that are too large are left alone. Users learn why.
    let answer = cluster.kubectl(&[
        "get",
        "pod",
        "tolerations-0",
        "-n",
        &namespace,
        "-o",
        "jsonpath={.metadata.annotations}",
    ]);
    assert!(!answer.contains("archaware.dev"), "{answer}");
    assert_eq!(archaware.stop().await, 0);
}
