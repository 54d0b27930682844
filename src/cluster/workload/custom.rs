//! Kinds of operators that run images without a pod template at the usual place.

use serde_json::{Map, Value, json};

/// Where an operator's kinds name the images that they run.
struct CustomKind {
    /// The API group.
    group: &'static str,
    kinds: &'static [&'static str],
    /// Paths of images. `*` stands for every item of a list.
    images: &'static [&'static str],
    /// Path of an object with `nodeSelector` and `affinity` in the form of a pod's spec.
    nodes: &'static str,
    /// Path of the number of pods.
    replicas: Option<&'static str>,
}

const CUSTOM_KINDS: [CustomKind; 9] = [
    CustomKind {
        group: "argoproj.io",
        kinds: &["Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate"],
        images: &[
            "spec/templates/*/container/image",
            "spec/templates/*/script/image",
            "spec/templates/*/initContainers/*/image",
            "spec/templates/*/sidecars/*/image",
            "spec/templates/*/containerSet/containers/*/image",
        ],
        nodes: "spec",
        replicas: None,
    },
    CustomKind {
        group: "argoproj.io",
        kinds: &["CronWorkflow"],
        images: &[
            "spec/workflowSpec/templates/*/container/image",
            "spec/workflowSpec/templates/*/script/image",
            "spec/workflowSpec/templates/*/initContainers/*/image",
            "spec/workflowSpec/templates/*/sidecars/*/image",
            "spec/workflowSpec/templates/*/containerSet/containers/*/image",
        ],
        nodes: "spec/workflowSpec",
        replicas: None,
    },
    CustomKind {
        group: "monitoring.coreos.com",
        kinds: &[
            "Prometheus",
            "PrometheusAgent",
            "Alertmanager",
            "ThanosRuler",
        ],
        images: &[
            "spec/image",
            "spec/thanos/image",
            "spec/containers/*/image",
            "spec/initContainers/*/image",
        ],
        nodes: "spec",
        replicas: Some("spec/replicas"),
    },
    CustomKind {
        group: "postgresql.cnpg.io",
        kinds: &["Cluster"],
        images: &["spec/imageName"],
        // Its `affinity` has a form of its own, with a node selector.
        nodes: "spec/affinity",
        replicas: Some("spec/instances"),
    },
    CustomKind {
        group: "acid.zalan.do",
        kinds: &["postgresql"],
        images: &[
            "spec/dockerImage",
            "spec/sidecars/*/image",
            "spec/initContainers/*/image",
        ],
        nodes: "spec",
        replicas: Some("spec/numberOfInstances"),
    },
    CustomKind {
        group: "sparkoperator.k8s.io",
        kinds: &["SparkApplication"],
        images: &[
            "spec/image",
            "spec/driver/image",
            "spec/executor/image",
            "spec/driver/sidecars/*/image",
            "spec/executor/sidecars/*/image",
            "spec/driver/initContainers/*/image",
            "spec/executor/initContainers/*/image",
        ],
        nodes: "spec",
        replicas: None,
    },
    CustomKind {
        group: "kubevirt.io",
        kinds: &["VirtualMachine", "VirtualMachineInstanceReplicaSet"],
        images: &[
            "spec/template/spec/volumes/*/containerDisk/image",
            "spec/template/spec/domain/firmware/kernelBoot/container/image",
        ],
        nodes: "spec/template/spec",
        replicas: Some("spec/replicas"),
    },
    CustomKind {
        group: "core.strimzi.io",
        kinds: &["StrimziPodSet"],
        images: &[
            "spec/pods/*/spec/containers/*/image",
            "spec/pods/*/spec/initContainers/*/image",
        ],
        nodes: "spec/pods/0/spec",
        replicas: None,
    },
    CustomKind {
        group: "tekton.dev",
        kinds: &["Task", "ClusterTask"],
        images: &[
            "spec/stepTemplate/image",
            "spec/steps/*/image",
            "spec/sidecars/*/image",
        ],
        nodes: "spec",
        replicas: None,
    },
];

/// A pod template with the images that an object of a known kind names, and its number of pods.
/// `None` if the kind is not known, or if the object names no image: its operator chooses one then.
pub(super) fn template(object: &Value) -> Option<(Value, Option<u64>)> {
    let text = |field: &str| object.get(field).and_then(Value::as_str);
    let (group, _) = text("apiVersion")?.split_once('/')?;
    let kind = text("kind")?;
    let custom = CUSTOM_KINDS
        .iter()
        .find(|custom| custom.group == group && custom.kinds.contains(&kind))?;
    let mut images: Vec<&str> = Vec::new();
    for path in custom.images {
        collect(object, path, &mut images);
    }
    images.sort_unstable();
    images.dedup();
    if images.is_empty() {
        return None;
    }
    let containers: Vec<Value> = images.iter().map(|image| json!({"image": image})).collect();
    let mut spec = Map::from_iter([("containers".to_owned(), containers.into())]);
    let pointer = |path: &str| object.pointer(&format!("/{path}"));
    for field in ["nodeSelector", "affinity"] {
        let nodes = pointer(custom.nodes).and_then(|nodes| nodes.get(field));
        spec.extend(nodes.map(|nodes| (field.to_owned(), nodes.clone())));
    }
    let replicas = custom.replicas.and_then(pointer).and_then(Value::as_u64);
    Some((json!({"spec": spec}), replicas))
}

/// Collects the non-empty strings at a path.
fn collect<'a>(value: &'a Value, path: &str, found: &mut Vec<&'a str>) {
    let (field, rest) = path.split_once('/').unwrap_or((path, ""));
    let children: Vec<&Value> = match value {
        Value::Array(items) if field == "*" => items.iter().collect(),
        value => value.get(field).into_iter().collect(),
    };
    for child in children {
        match child {
            Value::String(text) if rest.is_empty() && !text.is_empty() => found.push(text),
            child if !rest.is_empty() => collect(child, rest, found),
            _ => {}
        }
    }
}

/// API groups whose objects run images by pod templates at most: those of Kubernetes, and of tools
/// that look for images or verify them.
const OTHER_GROUPS: [&str; 19] = [
    "admissionregistration.k8s.io",
    "apiextensions.k8s.io",
    "apiregistration.k8s.io",
    "apps",
    "batch",
    "certificates.k8s.io",
    "coordination.k8s.io",
    "discovery.k8s.io",
    "events.k8s.io",
    "image.toolkit.fluxcd.io",
    "kustomize.config.k8s.io",
    "networking.k8s.io",
    "node.k8s.io",
    "policy",
    "policy.sigstore.dev",
    "rbac.authorization.k8s.io",
    "resource.k8s.io",
    "scheduling.k8s.io",
    "storage.k8s.io",
];

/// Whether an object looks as if it runs images: it is of no kind of Kubernetes, and a field like
/// `image`, `imageName` or `dockerImage` names an image, by itself or as an object with a
/// repository.
pub(super) fn may_run_images(api_version: &str, object: &Value) -> bool {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    !group.is_empty() && !OTHER_GROUPS.contains(&group) && names_images(object)
}

fn names_images(object: &Value) -> bool {
    match object {
        Value::Object(fields) => fields.iter().any(|(name, value)| {
            let is_image = match value {
                Value::String(text) => !text.is_empty() && !text.contains(char::is_whitespace),
                Value::Object(parts) => parts.get("repository").is_some_and(Value::is_string),
                _ => false,
            };
            (is_image && is_name_of_image(name)) || names_images(value)
        }),
        Value::Array(items) => items.iter().any(names_images),
        _ => false,
    }
}

fn is_name_of_image(field: &str) -> bool {
    let field = field.strip_suffix("Name").unwrap_or(field);
    field == "image" || field.ends_with("Image")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(version: &str, kind: &str, spec: &Value) -> Value {
        json!({"apiVersion": version, "kind": kind, "metadata": {"name": "a"}, "spec": spec})
    }

    #[test]
    fn known_kinds_name_their_images() {
        let selector = json!({"pool": "a"});
        for (version, kind, spec, images, pods) in [
            (
                "argoproj.io/v1alpha1",
                "Workflow",
                json!({"nodeSelector": selector, "templates": [
                    {"script": {"image": "a", "source": "x"}},
                    {"container": {"image": "b"}, "sidecars": [{"image": "c"}]},
                    {"steps": []},
                ]}),
                &["a", "b", "c"][..],
                None,
            ),
            (
                "argoproj.io/v1alpha1",
                "CronWorkflow",
                json!({"workflowSpec": {"nodeSelector": selector, "templates": [{"script": {"image": "a"}}]}}),
                &["a"],
                None,
            ),
            (
                "monitoring.coreos.com/v1",
                "Prometheus",
                json!({"image": "p", "replicas": 2, "nodeSelector": selector}),
                &["p"],
                Some(2),
            ),
            (
                "postgresql.cnpg.io/v1",
                "Cluster",
                json!({"imageName": "pg", "instances": 3, "affinity": {"nodeSelector": selector}}),
                &["pg"],
                Some(3),
            ),
            (
                "acid.zalan.do/v1",
                "postgresql",
                json!({"dockerImage": "pg", "nodeSelector": selector}),
                &["pg"],
                None,
            ),
            (
                "sparkoperator.k8s.io/v1beta2",
                "SparkApplication",
                json!({"image": "s", "driver": {"image": "d"}, "nodeSelector": selector}),
                &["d", "s"],
                None,
            ),
            (
                "kubevirt.io/v1",
                "VirtualMachine",
                json!({"template": {"spec": {"nodeSelector": selector, "volumes": [
                    {"containerDisk": {"image": "disk"}}, {"emptyDisk": {}}]}}}),
                &["disk"],
                None,
            ),
            (
                "core.strimzi.io/v1",
                "StrimziPodSet",
                json!({"pods": [{"spec": {"nodeSelector": selector, "containers": [{"image": "kafka"}]}}]}),
                &["kafka"],
                None,
            ),
        ] {
            let (template, replicas) = template(&object(version, kind, &spec)).unwrap();
            let containers: Vec<_> = images.iter().map(|image| json!({"image": image})).collect();
            assert_eq!(template["spec"]["containers"], json!(containers), "{kind}");
            assert_eq!(template["spec"]["nodeSelector"], selector, "{kind}");
            assert_eq!(replicas, pods, "{kind}");
        }
        for (version, kind, image) in [
            ("monitoring.coreos.com/v1", "Prometheus", ""),
            ("monitoring.coreos.com/v1", "ServiceMonitor", "a"),
            ("example.com/v1", "Prometheus", "a"),
        ] {
            let object = object(version, kind, &json!({"image": image}));
            assert_eq!(template(&object), None, "{version} {kind}");
        }
    }

    #[test]
    fn other_kinds_look_as_if_they_run_images() {
        for (version, spec, expected) in [
            (
                "example.com/v1",
                json!({"runner": {"workerImage": "a:1"}}),
                true,
            ),
            (
                "example.com/v1",
                json!({"list": [{"imageName": "a"}]}),
                true,
            ),
            (
                "example.com/v1",
                json!({"image": {"repository": "a", "tag": "1"}}),
                true,
            ),
            ("example.com/v1", json!({"image": "of a cat"}), false),
            (
                "example.com/v1",
                json!({"image": {"type": "string"}}),
                false,
            ),
            (
                "example.com/v1",
                json!({"imagePullPolicy": "Always"}),
                false,
            ),
            ("v1", json!({"image": "a"}), false),
            ("storage.k8s.io/v1", json!({"image": "a"}), false),
            ("image.toolkit.fluxcd.io/v1", json!({"image": "a"}), false),
        ] {
            let found = may_run_images(version, &object(version, "Any", &spec));
            assert_eq!(found, expected, "{version} {spec}");
        }
    }
}
