//! The chart: it says what the manifests say, and API servers accept what it renders.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::*;

const CHART: &str = "charts/archaware";

/// Objects by kind, namespace and name.
type Objects = BTreeMap<[String; 3], Value>;

fn render(cluster: &TestCluster, values: &str) -> String {
    let file = cluster.dir().join("values.yaml");
    std::fs::write(&file, values).unwrap();
    let file = file.to_str().unwrap();
    let (done, rendered, error) = cluster.helm(&[
        "template",
        "archaware",
        CHART,
        "-n",
        "archaware",
        "-f",
        file,
    ]);
    assert!(done, "{values}: {error}");
    rendered
}

/// The objects of a stream of YAML, without what only Helm adds, and in an order that does not
/// matter to Kubernetes.
fn objects(text: &str) -> Objects {
    let documents = text.split("\n---\n");
    let documents = documents.map(|one| serde_saphyr::from_str::<Value>(one).unwrap_or_default());
    let mut all = Objects::new();
    for mut object in documents.filter(Value::is_object) {
        let text = |field: &str| {
            object
                .pointer(field)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let key = ["/kind", "/metadata/namespace", "/metadata/name"].map(text);
        let of_helm = object
            .pointer("/metadata/annotations")
            .is_some_and(|all| all.get("helm.sh/hook").is_some());
        // A chart is installed into a namespace that exists.
        if of_helm || key[0] == "Namespace" {
            continue;
        }
        if let Some(labels) = object.pointer_mut("/metadata/labels") {
            for label in [
                "helm.sh/chart",
                "app.kubernetes.io/version",
                "app.kubernetes.io/managed-by",
            ] {
                labels.as_object_mut().unwrap().remove(label);
            }
        }
        if let Some(config) = object.pointer_mut("/data/config.yaml") {
            *config = serde_saphyr::from_str(config.as_str().unwrap()).unwrap();
        }
        if let Some(template) = object.pointer_mut("/spec/template") {
            template["metadata"]["annotations"]
                .as_object_mut()
                .unwrap()
                .remove("checksum/config");
            for list in ["containers", "volumes"] {
                sort(&mut template["spec"][list]);
            }
            for container in template["spec"]["containers"].as_array_mut().unwrap() {
                container.as_object_mut().unwrap().remove("imagePullPolicy");
                sort(&mut container["volumeMounts"]);
            }
        }
        if let Some(webhooks) = object.get_mut("webhooks") {
            sort(webhooks);
        }
        all.insert(key, object);
    }
    all
}

fn sort(list: &mut Value) {
    if let Some(list) = list.as_array_mut() {
        list.sort_by_key(Value::to_string);
    }
}

#[tokio::test]
async fn the_chart_says_what_the_manifests_say() {
    let cluster = TestCluster::take().await;
    let (clean, said, error) = cluster.helm(&["lint", "--strict", CHART]);
    assert!(clean, "{said}{error}");
    let monitoring = "monitoring: {podMonitor: true, alerts: true, dashboard: true}";
    for (values, overlays) in [
        ("", &["host"][..]),
        ("containerd: none", &["none"]),
        ("containerd: sidecar", &["sidecar"]),
        ("webhook: {enabled: false}", &["controller-only"]),
        (monitoring, &["host", "monitoring"]),
    ] {
        let rendered = objects(&render(&cluster, values));
        let mut expected = Objects::new();
        for overlay in overlays {
            let folder = format!("manifests/{overlay}");
            expected.extend(objects(&cluster.kubectl(&["kustomize", &folder])));
        }
        let names = |all: &Objects| all.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&rendered), names(&expected), "{values}");
        for (key, object) in &expected {
            assert_eq!(&rendered[key], object, "{values}: {key:?}");
        }
    }
}

/// Components of kustomize are values here.
#[tokio::test]
async fn values_bring_their_permissions() {
    let cluster = TestCluster::take().await;
    let plain = objects(&render(&cluster, ""));
    let added = |values: &str| {
        let all = objects(&render(&cluster, values));
        let rules = |key: &[String; 3]| all[key]["rules"].clone();
        let new = all.keys().filter(|key| !plain.contains_key(*key));
        let gone = plain.keys().filter(|key| !all.contains_key(*key));
        let new: Vec<_> = new
            .map(|key| (key[0].clone(), key[1].clone(), key[2].clone(), rules(key)))
            .collect();
        let gone: Vec<_> = gone.map(|key| (key[0].clone(), key[2].clone())).collect();
        (new, gone)
    };
    for (values, component) in [
        ("config: {affinity: {recreatePods: true}}", "recreate-pods"),
        ("config: {misplaced: evict}", "evict-misplaced"),
    ] {
        let file = format!("manifests/{component}/permissions.yaml");
        let expected = objects(&std::fs::read_to_string(file).unwrap());
        let (new, gone) = added(values);
        assert_eq!(
            (new.len(), gone.len()),
            (expected.len(), 0),
            "{values}: {new:?}"
        );
        for (kind, namespace, name, rules) in new {
            assert_eq!(
                expected[&[kind, namespace, name]]["rules"],
                rules,
                "{values}"
            );
        }
    }
    let (new, gone) = added("pullSecrets: {scope: namespaces, namespaces: [team-a, team-b]}");
    let places: Vec<_> = new
        .iter()
        .map(|(kind, namespace, ..)| format!("{kind} {namespace}"))
        .collect();
    assert_eq!(places, ["RoleBinding team-a", "RoleBinding team-b"]);
    assert_eq!(
        gone,
        [(
            "ClusterRoleBinding".to_owned(),
            "archaware-pull-secrets".to_owned()
        )]
    );
    let report = objects(&render(
        &cluster,
        "{config: {daemonSets: report}, cleanOnUninstall: false}",
    ));
    let role = &report[&["ClusterRole", "", "archaware"].map(str::to_owned)];
    assert!(role["rules"].as_array().unwrap().contains(&json!({
        "apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["list", "watch"]})));
    // cert-manager's certificate in the place of archaware's own.
    let (new, gone) = added("webhook: {certManager: {enabled: true}}");
    let kinds: Vec<_> = new.iter().map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!(kinds, ["Certificate", "Issuer"]);
    assert_eq!(gone.len(), 2, "the Secret is not archaware's: {gone:?}");
}

#[tokio::test]
async fn what_it_renders_is_valid() {
    let cluster = TestCluster::take().await;
    for values in [
        "",
        "containerd: sidecar",
        "{containerd: none, webhook: {enabled: false}, hostNetwork: true, ports: {http: 18080, webhook: 18443}, priorityClassName: \"\", resourceQuota: false}",
        // Everything at once.
        "{config: {taint: {key: example.com/arch}, misplaced: evict, affinity: {recreatePods: true}, daemonSets: report}, \
          pullSecrets: {scope: namespaces, namespaces: [default]}, image: {digest: 'sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'}, \
          imagePullSecrets: [{name: a}], serviceAccountAnnotations: {a: b}, podAnnotations: {a: b}, podLabels: {a: b}, nodeSelector: {a: b}, \
          tolerations: [{key: a, operator: Exists}], topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}], \
          env: [{name: HTTPS_PROXY, value: 'http://proxy:3128'}], extraArgs: [--log-level=debug], \
          extraVolumes: [{name: files, emptyDir: {}}], extraVolumeMounts: [{name: files, mountPath: /files}], monitoring: {dashboard: true}}",
    ] {
        let rendered = render(&cluster, values);
        let file = cluster.dir().join("rendered.yaml");
        std::fs::write(&file, &rendered).unwrap();
        let file = file.to_str().unwrap();
        // What is unknown or misspelt is an error.
        cluster.kubectl(&["apply", "--dry-run=server", "--validate=strict", "-f", file]);
        let config = objects(&rendered);
        let config = &config[&["ConfigMap", "archaware", "archaware"].map(str::to_owned)]["data"]["config.yaml"];
        let path = cluster.dir().join("config.json");
        std::fs::write(&path, config.to_string()).unwrap();
        let (status, _, error) =
            cluster.archaware(&["config", "check", "--config", path.to_str().unwrap()]);
        assert_eq!(status, 0, "{values}: {error}");
        let key = config["taint"]["key"]
            .as_str()
            .unwrap_or("kubernetes.io/arch");
        let tolerated = format!("{{key: \"{key}\", operator: Exists}}");
        assert_eq!(
            rendered.matches(&tolerated).count(),
            2,
            "of the Deployment and of the last command"
        );
    }
    for (wrong, said) in [
        ("containerd: nowhere", "/containerd"),
        ("nodeselector: {}", "nodeselector"),
        ("config: {kind: Configuration}", "/config"),
        ("config: {daemonsets: report}", "daemonsets"),
        ("config: {taint: {manage: maybe}}", "/config/taint/manage"),
        ("config: {daemonSets: sometimes}", "/config/daemonSets"),
        (
            "config: {admission: {enabled: false}}",
            "/config/admission/enabled",
        ),
        (
            "podLabels: {app.kubernetes.io/name: other}",
            "app.kubernetes.io/name",
        ),
    ] {
        let file = cluster.dir().join("values.yaml");
        std::fs::write(&file, wrong).unwrap();
        let (done, _, error) =
            cluster.helm(&["template", "archaware", CHART, "-f", file.to_str().unwrap()]);
        assert!(!done && error.contains(said), "{wrong}: {error}");
    }
}
