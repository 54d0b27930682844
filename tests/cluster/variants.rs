//! Images that need more than the lowest variant of an architecture, on nodes of which the variant
//! is known or not.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Node, Pod},
};
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use testsupport::servers::node_feature_discovery;

use super::*;

const NFD: &str = "feature.node.kubernetes.io/cpu-cpuid.";
const LABEL: &str = "archaware.dev/variant";
const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";

/// A node with labels.
async fn node(cluster: &TestCluster, name: &str, architecture: &str, labels: &[(&str, &str)]) {
    cluster.create_cordoned_node(name, architecture).await;
    for (key, value) in labels {
        cluster.kubectl(&["label", "node", name, &format!("{key}={value}")]);
    }
    cluster.kubectl(&["uncordon", name]);
}

/// Two amd64 nodes by their own label, one by CPU features, one of which nothing is known, and an
/// arm64 node.
async fn nodes(cluster: &TestCluster) {
    let features = ["AVX", "AVX2", "FMA3"].map(|name| (format!("{NFD}{name}"), "true"));
    let features: Vec<_> = features
        .iter()
        .map(|(key, value)| (key.as_str(), *value))
        .collect();
    node(cluster, "v2", "amd64", &[(LABEL, "v2")]).await;
    node(cluster, "v4", "amd64", &[(LABEL, "v4")]).await;
    node(cluster, "features", "amd64", &features).await;
    node(cluster, "unknown", "amd64", &[]).await;
    node(cluster, "arm64", "arm64", &[]).await;
}

/// The nodes on which pods of this spec are placed, one after the other: each takes one.
async fn places(cluster: &TestCluster, kind: &str, image: &str, spec: Value) -> Vec<String> {
    let mut found = Vec::new();
    for n in 0.. {
        let name = format!("{kind}-{n}");
        let mut own = pod_spec(&[cluster.image(image)]);
        for (field, value) in spec.as_object().into_iter().flatten() {
            own[field] = value.clone();
        }
        let mut pod = pod(&name, own, json!({}));
        pod["metadata"]["labels"] = json!({"kind": kind});
        pod["spec"]["affinity"]["podAntiAffinity"] = json!({REQUIRED: [{
            "topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"kind": kind}},
        }]});
        cluster.create::<Pod>(pod).await;
        let node = eventually(&format!("{name} is tried"), DEADLINE, || {
            tried(cluster, &name)
        })
        .await;
        let Some(node) = node else {
            break;
        };
        found.push(node);
    }
    cluster.delete_pods(&cluster.namespace).await;
    found
}

/// Where the scheduler has placed a pod; `Some(None)`: nowhere. `None`: it has not tried yet.
async fn tried(cluster: &TestCluster, name: &str) -> Option<Option<String>> {
    let pod = cluster.pods().get(name).await.ok()?;
    let is_unschedulable = is_unschedulable(&pod);
    let node = pod.spec?.node_name;
    (node.is_some() || is_unschedulable).then_some(node)
}

fn sorted(names: &[String]) -> BTreeSet<&str> {
    names.iter().map(String::as_str).collect()
}

#[tokio::test]
async fn nodes_that_are_known_to_suffice_come_first() {
    let cluster = TestCluster::take().await;
    nodes(&cluster).await;
    let archaware = Controller::start_with_webhook(&cluster, "", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    // Only v2 is known not to suffice.
    let all = places(&cluster, "levels", "amd64-v3", json!({})).await;
    assert_eq!(sorted(&all[..2]), ["features", "v4"].into(), "{all:?}");
    assert_eq!(all[2..], ["unknown"]);
    let all = places(&cluster, "mixed", "amd64-v3-arm64", json!({})).await;
    assert_eq!(
        sorted(&all[..3]),
        ["arm64", "features", "v4"].into(),
        "{all:?}"
    );
    assert_eq!(all[3..], ["unknown"]);
    // One entry for v2 and higher ones: v2 suffices.
    let all = places(&cluster, "lowest", "amd64-levels", json!({})).await;
    assert_eq!(
        sorted(&all[..3]),
        ["features", "v2", "v4"].into(),
        "{all:?}"
    );
    // An entry for the lowest variant, too: no node is preferred, and none excluded.
    let all = places(&cluster, "any", "amd64-and-v3", json!({})).await;
    assert_eq!(all.len(), 4, "{all:?}");
    let pod = cluster.create_pod("shown", &["amd64-v3-arm64"]).await;
    assert_eq!(
        pod.metadata.annotations.unwrap()["archaware.dev/decision"],
        "amd64/v3,arm64"
    );
    let (namespace, name) = (cluster.namespace.as_str(), "shown");
    assert_eq!(
        answers(&cluster, &["explain", "-n", namespace, name]),
        by_variant("unknown")
    );
    // The same for a pod that does not exist; with `require` what is not known does not suffice.
    let folder = tempfile::tempdir().unwrap();
    let (file, config) = (
        folder.path().join("pod.json"),
        folder.path().join("config.yaml"),
    );
    let mut pod = super::pod(
        "new",
        pod_spec(&[cluster.image("amd64-v3-arm64")]),
        json!({}),
    );
    (pod["apiVersion"], pod["kind"]) = (json!("v1"), json!("Pod"));
    std::fs::write(&file, pod.to_string()).unwrap();
    std::fs::write(
        &config,
        "apiVersion: archaware.dev/v1alpha1\nkind: Configuration\nvariants: require\n",
    )
    .unwrap();
    let file = file.to_str().unwrap();
    assert_eq!(
        answers(&cluster, &["explain", "-f", file]),
        by_variant("unknown")
    );
    let config = config.to_str().unwrap();
    assert_eq!(
        answers(&cluster, &["explain", "-f", file, "--config", config]),
        by_variant("no")
    );
    let (status, report, error) = cluster.archaware(&["report", "-f", file, "-o", "json"]);
    assert_eq!(status, 0, "{error}");
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(
        report["workloads"][0]["architectures"],
        json!(["amd64/v3", "arm64"])
    );
    assert_eq!(archaware.stop().await, 0);
}

/// What `explain` says about the nodes, by the name of the first one of each group.
fn answers(cluster: &TestCluster, arguments: &[&str]) -> BTreeMap<String, String> {
    let all: Vec<&str> = arguments.iter().chain(&["-o", "json"]).copied().collect();
    let (status, output, error) = cluster.archaware(&all);
    assert_eq!(status, 0, "{error}");
    let explained: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(explained[0]["architectures"], json!(["amd64/v3", "arm64"]));
    let groups = explained[0]["nodes"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    groups
        .map(|group| (text(&group["examples"][0]), text(&group["fits"])))
        .collect()
}

/// The answers for the nodes of these tests, for an image that needs amd64/v3.
fn by_variant(unknown: &str) -> BTreeMap<String, String> {
    [
        ("v2", "no"),
        ("v4", "yes"),
        ("features", "yes"),
        ("arm64", "yes"),
        ("unknown", unknown),
    ]
    .map(|(node, fits)| (node.to_owned(), fits.to_owned()))
    .into()
}

#[tokio::test]
async fn with_require_pods_run_only_where_it_is_known() {
    let cluster = TestCluster::take().await;
    nodes(&cluster).await;
    for (name, zone) in [
        ("v2", "a"),
        ("v4", "a"),
        ("features", "b"),
        ("unknown", "b"),
        ("arm64", "b"),
    ] {
        cluster.kubectl(&["label", "node", name, &format!("zone={zone}")]);
    }
    let archaware =
        Controller::start_with_webhook(&cluster, "variants: require\n", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let all = places(&cluster, "levels", "amd64-v3", json!({})).await;
    assert_eq!(sorted(&all), ["features", "v4"].into());
    let all = places(&cluster, "mixed", "amd64-v3-arm64", json!({})).await;
    assert_eq!(sorted(&all), ["arm64", "features", "v4"].into());
    let zone = |name: &str| json!({"key": "zone", "operator": "In", "values": [name]});
    let by_name =
        json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["v2"]}]});
    let author = |terms: Value| json!({"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}});
    // The author's terms are repeated; one that names its node is left alone.
    for (kind, terms, image, expected) in [
        (
            "a",
            json!([{"matchExpressions": [zone("a")]}]),
            "amd64-v3-arm64",
            vec!["v4"],
        ),
        (
            "b",
            json!([{"matchExpressions": [zone("b")]}]),
            "amd64-v3-arm64",
            vec!["arm64", "features"],
        ),
        (
            "b-only",
            json!([{"matchExpressions": [zone("b")]}]),
            "amd64-v3",
            vec!["features"],
        ),
        (
            "both",
            json!([{"matchExpressions": [zone("a")]}, {"matchExpressions": [zone("b")]}]),
            "amd64-v3-arm64",
            vec!["arm64", "features", "v4"],
        ),
        (
            "named",
            json!([{"matchExpressions": [zone("b")]}, by_name]),
            "amd64-v3",
            vec!["features", "v2"],
        ),
    ] {
        let all = places(&cluster, kind, image, author(terms)).await;
        assert_eq!(sorted(&all), expected.into_iter().collect(), "{kind}");
    }
    let selected = json!({"nodeSelector": {"kubernetes.io/arch": "arm64"}});
    let all = places(&cluster, "selected", "amd64-v3-arm64", selected).await;
    assert_eq!(all, ["arm64"]);
    assert_eq!(archaware.stop().await, 0);
}

/// Nodes that are known by their model only: Neoverse N1 is Armv8.2, Cortex-A72 is Armv8.0.
#[tokio::test]
async fn a_model_is_known_to_suffice() {
    const VENDOR: &str = "feature.node.kubernetes.io/cpu-model.vendor_id";
    const MODEL: &str = "feature.node.kubernetes.io/cpu-model.id";

    let cluster = TestCluster::take().await;
    for (name, model) in [("n1", "53441"), ("a72", "53379")] {
        let labels = [(VENDOR, "ARM"), (MODEL, model)];
        node(&cluster, name, "arm64", &labels).await;
    }
    let archaware =
        Controller::start_with_webhook(&cluster, "variants: require\n", "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    for (name, needs, expected) in [
        ("v8-1", "arm64/v8.1", Some("n1")),
        ("v8-2", "arm64/v8.2", Some("n1")),
        ("v8-3", "arm64/v8.3", None),
    ] {
        let annotations = json!({"archaware.dev/architectures": needs});
        let own = pod(name, pod_spec(&[cluster.image("arm64")]), annotations);
        cluster.create::<Pod>(own).await;
        let found = eventually(&format!("{name} is tried"), DEADLINE, || {
            tried(&cluster, name)
        })
        .await;
        assert_eq!(found.as_deref(), expected, "{name}");
    }
    assert_eq!(archaware.stop().await, 0);
}

/// CPU flags of Linux, as `klauspost/cpuid` (and so NFD) names them.
const FLAGS: &[(&str, &str)] = &[
    ("abm", "LZCNT"),
    ("adx", "ADX"),
    ("aes", "AESNI"),
    ("avx", "AVX"),
    ("avx2", "AVX2"),
    ("avx512_bf16", "AVX512BF16"),
    ("avx512_bitalg", "AVX512BITALG"),
    ("avx512_vbmi2", "AVX512VBMI2"),
    ("avx512_vnni", "AVX512VNNI"),
    ("avx512_vpopcntdq", "AVX512VPOPCNTDQ"),
    ("avx512bw", "AVX512BW"),
    ("avx512cd", "AVX512CD"),
    ("avx512dq", "AVX512DQ"),
    ("avx512f", "AVX512F"),
    ("avx512ifma", "AVX512IFMA"),
    ("avx512vbmi", "AVX512VBMI"),
    ("avx512vl", "AVX512VL"),
    ("bmi1", "BMI1"),
    ("bmi2", "BMI2"),
    ("cx16", "CX16"),
    ("f16c", "F16C"),
    ("fma", "FMA3"),
    ("fsrm", "FSRM"),
    ("gfni", "GFNI"),
    ("hypervisor", "HYPERVISOR"),
    ("lahf_lm", "LAHF"),
    ("movbe", "MOVBE"),
    ("pni", "SSE3"),
    ("popcnt", "POPCNT"),
    ("sha_ni", "SHA"),
    ("sse4_1", "SSE4"),
    ("sse4_2", "SSE42"),
    ("sse4a", "SSE4A"),
    ("ssse3", "SSSE3"),
    ("vaes", "VAES"),
    ("vpclmulqdq", "VPCLMULQDQ"),
    ("xsave", "XSAVE"),
    ("xsavec", "XSAVEC"),
    ("xsaveopt", "XSAVEOPT"),
    ("xsaves", "XSAVES"),
];

/// Those of them that NFD publishes no label for, by default (`attributeBlacklist`).
const HIDDEN: &[&str] = &[
    "BMI1", "BMI2", "CX16", "F16C", "LZCNT", "POPCNT", "SSE3", "SSE4", "SSE42", "SSSE3",
];

/// The levels of the System V ABI, by all of their flags.
const LEVELS: &[(&str, &[&str])] = &[
    (
        "v2",
        &[
            "cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3",
        ],
    ),
    (
        "v3",
        &[
            "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave",
        ],
    ),
    (
        "v4",
        &["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"],
    ),
];

/// The labels of NFD before version 0.19 for the CPU of this machine, and its level by all flags,
/// of which NFD hides most.
fn this_cpu() -> (BTreeMap<String, &'static str>, Option<&'static str>) {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("flags")).unwrap();
    let flags: BTreeSet<&str> = line.split_whitespace().collect();
    let published = FLAGS
        .iter()
        .filter(|(flag, name)| flags.contains(flag) && !HIDDEN.contains(name));
    let labels = published.map(|(_, name)| (format!("{NFD}{name}"), "true"));
    let levels = LEVELS
        .iter()
        .take_while(|(_, needed)| needed.iter().all(|flag| flags.contains(flag)));
    (labels.collect(), levels.last().map(|(level, _)| *level))
}

/// NFD's labels say the level of a real CPU, and a real kubelet and containerd run what archaware
/// sends there.
#[tokio::test]
async fn the_level_of_a_real_cpu() {
    let cluster = TestCluster::take_with_node().await;
    let (older, level) = this_cpu();
    // NFD itself publishes the same and the levels, and hides the same.
    let labels = node_feature_discovery::labels_of_this_cpu();
    for label in older.keys() {
        assert_eq!(
            labels.get(label).map(String::as_str),
            Some("true"),
            "{label}"
        );
    }
    for hidden in HIDDEN {
        assert_eq!(labels.get(&format!("{NFD}{hidden}")), None, "{hidden}");
    }
    let published =
        |level: &str| labels.contains_key(&format!("{NFD}X86_64_{}", level.to_uppercase()));
    let highest = ["v4", "v3", "v2"]
        .into_iter()
        .find(|level| published(level));
    assert_eq!(highest, level);
    let nodes = cluster.nodes();
    let real = nodes
        .list(&ListParams::default())
        .await
        .unwrap()
        .items
        .remove(0);
    let real = real.metadata.name.unwrap();
    let patch = json!({"metadata": {"labels": labels}});
    nodes
        .patch(&real, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    node(&cluster, "old", "amd64", &[(LABEL, "v1")]).await;
    node(&cluster, "unknown", "amd64", &[]).await;
    let older: Vec<_> = older.iter().map(|(key, value)| (&**key, *value)).collect();
    node(&cluster, "older-nfd", "amd64", &older).await;
    let rewrites = format!(
        "registries: {{rewrites: [{{prefix: reg.local, replacement: \"{}\"}}]}}",
        cluster.registry()
    );
    let config = format!("variants: require\ntaint: {{variants: true}}\n{rewrites}\n");
    let archaware = Controller::start_with_webhook(&cluster, &config, "onMiss: gate").await;
    cluster.wait_until_tainted().await;
    let level_name = level.map_or(String::new(), |level| format!("-{level}"));
    for name in [&*real, "older-nfd"] {
        let node: Node = nodes.get(name).await.unwrap();
        let expected = format!("kubernetes.io/arch=amd64{level_name}:NoSchedule");
        assert_eq!(taints(&node), [expected].into(), "{name}");
    }
    // The pods are for the real one.
    nodes
        .delete("older-nfd", &Default::default())
        .await
        .unwrap();
    // The single image has no index, so containerd takes it on every node. The node knows its
    // registry by another name.
    for (name, image) in [("single", "amd64-v3"), ("index", "amd64-levels")] {
        let mut spec = pod_spec(&[format!("reg.local/testimg/{image}:latest")]);
        spec["hostNetwork"] = json!(true);
        cluster.create::<Pod>(pod(name, spec, json!({}))).await;
    }
    let runs = |needed: &str| level.is_some_and(|level| level >= needed);
    for (name, needed) in [("single", "v3"), ("index", "v2")] {
        if runs(needed) {
            assert_eq!(cluster.wait_until_bound(name).await, real);
        } else {
            cluster.wait_for_event(name, "FailedScheduling").await;
        }
    }
    if runs("v3") {
        eventually("the single image runs", DEADLINE, || async {
            (cluster.pods().get("single").await.ok()?.status?.phase? == "Running").then_some(())
        })
        .await;
        // containerd does not find the variant of an amd64 CPU.
        let waits = eventually("the index is not pulled", DEADLINE, || async {
            let status = cluster.pods().get("index").await.ok()?.status?;
            status
                .container_statuses?
                .first()?
                .state
                .as_ref()?
                .waiting
                .as_ref()?
                .message
                .clone()
        })
        .await;
        assert!(waits.contains("no match for platform"), "{waits}");
    }
    assert_eq!(archaware.stop().await, 0);
}

/// Taints alone keep pods of DaemonSets, and pods without node affinity, on nodes that suffice.
#[tokio::test]
async fn taints_say_the_variant() {
    let cluster = TestCluster::take().await;
    nodes(&cluster).await;
    let config = "taint: {variants: true}\naffinity: {required: false}\n";
    let archaware = Controller::start_with_webhook(&cluster, config, "onMiss: gate").await;
    let taint = |value: &str| format!("kubernetes.io/arch={value}:NoSchedule");
    for (name, value) in [
        ("v2", "amd64-v2"),
        ("v4", "amd64-v4"),
        // By features a node may be higher than they prove.
        ("features", "amd64"),
        ("unknown", "amd64"),
        ("arm64", "arm64"),
    ] {
        has_taint(&cluster, name, &taint(value)).await;
    }
    let all = places(&cluster, "levels", "amd64-v3", json!({})).await;
    assert_eq!(sorted(&all), ["features", "unknown", "v4"].into());
    let all = places(&cluster, "any", "amd64", json!({})).await;
    assert_eq!(sorted(&all), ["features", "unknown", "v2", "v4"].into());
    // A DaemonSet's pods are made for every node that its template tolerates.
    let selector = json!({"app": "agent"});
    let set = json!({"metadata": {"name": "agent"}, "spec": {
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": selector}, "spec": pod_spec(&[cluster.image("amd64-v3")])}}});
    cluster.create::<DaemonSet>(set).await;
    eventually("the DaemonSet's pods", DEADLINE, || async {
        let selector = ListParams::default().labels("app=agent");
        let pods = cluster.pods().list(&selector).await.ok()?;
        let nodes: BTreeSet<_> = pods
            .into_iter()
            .filter_map(|pod| pod.spec?.node_name)
            .collect();
        (nodes == ["features", "unknown", "v4"].map(str::to_owned).into()).then_some(())
    })
    .await;
    // What is found out about a node later comes into its taint, and its pods tolerate it before.
    let mut spec = pod_spec(&[cluster.image("amd64")]);
    spec["nodeSelector"] = json!({"kubernetes.io/hostname": "unknown"});
    cluster.create::<Pod>(pod("bound", spec, json!({}))).await;
    assert_eq!(cluster.wait_until_bound("bound").await, "unknown");
    cluster.kubectl(&["label", "node", "unknown", &format!("{LABEL}=v3")]);
    has_taint(&cluster, "unknown", &taint("amd64-v3")).await;
    assert_eq!(archaware.stop().await, 0);
    let (status, _, error) = cluster.archaware(&["clean"]);
    assert_eq!(status, 0, "{error}");
    for node in cluster.nodes().list(&ListParams::default()).await.unwrap() {
        assert_eq!(taints(&node), [].into());
    }
}

async fn has_taint(cluster: &TestCluster, name: &str, taint: &str) {
    eventually(&format!("{taint} on {name}"), DEADLINE, || async {
        let node = cluster.nodes().get(name).await.ok()?;
        taints(&node).contains(taint).then_some(())
    })
    .await;
}

/// What `archaware plan` says of nodes and pods.
#[tokio::test]
async fn the_plan_counts_nodes_that_suffice() {
    let cluster = TestCluster::take().await;
    nodes(&cluster).await;
    let mut spec = pod_spec(&[cluster.image("amd64-v3-arm64")]);
    spec["schedulerName"] = json!("none");
    cluster
        .create::<Pod>(pod("waiting", spec.clone(), json!({})))
        .await;
    spec["nodeName"] = json!("v2");
    cluster.create::<Pod>(pod("bound", spec, json!({}))).await;
    let (_, out, error) = cluster.archaware(&["plan", "-o", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{error}"));
    let detail = |action: &str, name: &str| {
        let mut rows = rows
            .iter()
            .filter(|row| row["action"] == action && row["name"] == name);
        rows.next()
            .map(|row| row["detail"].as_str().unwrap().to_owned())
    };
    assert_eq!(
        detail("tolerate", "waiting").unwrap(),
        "tolerates amd64/v3, arm64; nodes that suffice: 3, of unknown variant: 1, insufficient: 1"
    );
    let misplaced = detail("misplaced", "bound").unwrap();
    let expected = format!(
        "it runs on amd64/v2; its images: {} (amd64/v3, arm64)",
        cluster.image("amd64-v3-arm64")
    );
    assert_eq!(misplaced, expected);
}
