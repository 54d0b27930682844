//! Objects that run pods: a pod, or any kind with a pod template, in the form of the API server or
//! of a manifest.

mod custom;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::core::Selector;
use serde::Deserialize;
use serde_json::Value;

use crate::{error::chain, json::remove_nulls};

use super::{name::NamespacedName, objects::PodTemplate};

/// Paths of the pod template: in a `Deployment` and most other kinds, and in a `CronJob`.
const TEMPLATES: [&str; 2] = ["/spec/template", "/spec/jobTemplate/spec/template"];

/// An object that runs pods.
#[derive(Clone, Debug)]
pub struct Workload {
    /// `v1`, `apps/v1`, …
    pub api_version: String,
    /// `Pod`, `Deployment`, …
    pub kind: String,
    /// Its name; the namespace is `None` if a manifest does not say it.
    pub name: NamespacedName,
    /// The pod template; for a pod, the pod itself.
    pub template: PodTemplate,
    /// The number of pods that it runs at the same time: its replicas, or the parallelism of a Job;
    /// `None` if its kind has no such field.
    pub replicas: Option<u64>,
    /// The label selector of its pods.
    pub selector: Option<String>,
}

/// An object that should run pods and cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {name}: cannot read its pod template: {problem}")]
pub struct InvalidWorkload {
    kind: String,
    name: String,
    problem: String,
}

impl Workload {
    /// Parses an object; `None` if it runs no pods.
    ///
    /// # Errors
    ///
    /// When a field that archaware reads has another type than the API's.
    pub fn read(object: &Value) -> Result<Option<Self>, InvalidWorkload> {
        let (template, replicas) = if let Some(template) = template_of(object) {
            let mut template = template.clone();
            remove_nulls(&mut template);
            (template, pods_at_once(object))
        } else if let Some((template, replicas)) = custom::template(object) {
            (template, replicas)
        } else {
            return Ok(None);
        };
        let text = |place: &str| object.pointer(place).and_then(Value::as_str);
        let name = text("/metadata/name").or_else(|| text("/metadata/generateName"));
        let (kind, name) = (text("/kind").unwrap_or_default(), name.unwrap_or_default());
        let template = PodTemplate::deserialize(template).map_err(|error| InvalidWorkload {
            kind: kind.to_owned(),
            name: name.to_owned(),
            problem: chain(&error),
        })?;
        Ok(Some(Self {
            selector: selector(object.pointer("/spec/selector")),
            replicas,
            name: NamespacedName {
                namespace: text("/metadata/namespace").map(str::to_owned),
                name: name.to_owned(),
            },
            api_version: text("/apiVersion").unwrap_or_default().to_owned(),
            kind: kind.to_owned(),
            template,
        }))
    }

    /// Whether it is a pod.
    pub fn is_pod(&self) -> bool {
        self.kind == "Pod"
    }
}

/// The number of pods that an object runs at the same time.
fn pods_at_once(object: &Value) -> Option<u64> {
    // The API has an i32. A file may have any number.
    let number = |place: &str| {
        let number = object.pointer(place).and_then(Value::as_u64);
        number.map(|number| number.min(i32::MAX as u64))
    };
    // A Job starts no more pods than have to complete.
    let of_job = |spec: &str| {
        let parallelism = number(&format!("{spec}/parallelism")).unwrap_or(1);
        let completions = number(&format!("{spec}/completions"));
        completions.map_or(parallelism, |completions| completions.min(parallelism))
    };
    match object.get("kind").and_then(Value::as_str) {
        Some("Job") => Some(of_job("/spec")),
        Some("CronJob") => Some(of_job("/spec/jobTemplate/spec")),
        _ => number("/spec/replicas"),
    }
}

/// The pod template of an object, in the API's form; for a pod, the pod itself. `None` if it has
/// no such template.
pub fn template_of(object: &Value) -> Option<&Value> {
    let text = |field: &str| object.get(field).and_then(Value::as_str);
    if text("kind") == Some("Pod") && text("apiVersion") == Some("v1") {
        return Some(object);
    }
    let mut places = TEMPLATES.iter().filter_map(|place| object.pointer(place));
    places.find(|template| template.pointer("/spec/containers").is_some())
}

/// Where kinds of other APIs have containers.
const CONTAINERS: [&str; 3] = ["containers", "container", "steps"];
/// Policy APIs: their objects contain patterns for containers, but run none.
const POLICIES: [&str; 2] = ["kyverno.io/", "gatekeeper.sh/"];

/// Whether an object that is no [`Workload`] looks as if it runs images, and is not a policy: it
/// has containers in any field, or is of an operator's kind and names images.
pub fn may_run_images(object: &Value) -> bool {
    let text = |field: &str| object.get(field).and_then(Value::as_str);
    let version = text("apiVersion").unwrap_or_default();
    let is_policy = POLICIES.iter().any(|group| version.contains(group));
    // Helm values and pipelines of other tools have neither `kind` nor `apiVersion`.
    let is_object = text("kind").is_some() && !version.is_empty();
    is_object && !is_policy && (has_containers(object) || custom::may_run_images(version, object))
}

fn has_containers(object: &Value) -> bool {
    let has_image = |container: &Value| container.get("image").is_some_and(Value::is_string);
    match object {
        Value::Object(fields) => fields.iter().any(|(name, value)| {
            let is_list_of_containers = CONTAINERS.contains(&name.as_str())
                && match value {
                    Value::Array(items) => items.iter().any(has_image),
                    one => has_image(one),
                };
            is_list_of_containers || has_containers(value)
        }),
        Value::Array(items) => items.iter().any(has_containers),
        _ => false,
    }
}

/// The objects of a manifest. A list is replaced by its items.
pub fn objects(mut manifest: Value) -> Vec<Value> {
    let kind = manifest.get("kind").and_then(Value::as_str);
    let is_list = kind.is_some_and(|kind| kind.ends_with("List"));
    match manifest.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) if is_list => items.into_iter().flat_map(objects).collect(),
        Some(other) => {
            if let Some(items) = manifest.get_mut("items") {
                *items = other;
            }
            vec![manifest]
        }
        None => vec![manifest],
    }
}

/// A label selector as text; `None` if there is none, if it selects everything, or if it is
/// malformed.
fn selector(selector: Option<&Value>) -> Option<String> {
    let selector = selector?;
    // A ReplicationController has plain labels.
    let selector = if let Ok(labels) = BTreeMap::<String, String>::deserialize(selector) {
        labels.into_iter().collect()
    } else {
        Selector::try_from(LabelSelector::deserialize(selector).ok()?).ok()?
    };
    (!selector.selects_all()).then(|| selector.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(kind: &str, spec: Value) -> Value {
        json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": "a", "namespace": "n"}, "spec": spec})
    }

    #[test]
    fn what_runs_pods_is_found() {
        let pod = json!({"containers": [{"name": "c", "image": "i"}]});
        let template = json!({"metadata": {"labels": {"app": "a"}}, "spec": pod});
        for (kind, spec, expected) in [
            ("Pod", pod.clone(), true),
            ("Deployment", json!({ "template": template }), true),
            ("Rollout", json!({ "template": template }), true),
            (
                "CronJob",
                json!({"jobTemplate": {"spec": { "template": template }}}),
                true,
            ),
            // A template of something else.
            ("Certificate", json!({"template": {"spec": {}}}), false),
            ("ConfigMap", json!({}), false),
        ] {
            let found = Workload::read(&object(kind, spec)).unwrap();
            assert_eq!(found.is_some(), expected, "{kind}");
            let Some(found) = found else {
                continue;
            };
            assert_eq!(found.template.spec.images().len(), 1, "{kind}");
            assert_eq!(found.name.to_string(), "n/a");
        }
        assert!(Workload::read(&json!(7)).unwrap().is_none());
    }

    #[test]
    fn the_pods_of_a_job_are_its_parallelism() {
        let template = json!({"spec": {"containers": [{"image": "a"}]}});
        let job = |parallelism: Value, completions: Value| json!({"template": template, "parallelism": parallelism, "completions": completions});
        let cron = |job: Value| json!({"jobTemplate": {"spec": job}});
        for (kind, spec, expected) in [
            ("Job", job(json!(8), json!(null)), Some(8)),
            ("Job", job(json!(8), json!(3)), Some(3)),
            ("Job", job(json!(null), json!(3)), Some(1)),
            ("Job", job(json!(0), json!(null)), Some(0)),
            (
                "Job",
                job(json!(u64::MAX), json!(null)),
                Some(i32::MAX as u64),
            ),
            ("CronJob", cron(job(json!(8), json!(null))), Some(8)),
            (
                "Deployment",
                json!({"template": template, "replicas": 4, "parallelism": 8}),
                Some(4),
            ),
            ("DaemonSet", json!({"template": template}), None),
        ] {
            let found = Workload::read(&object(kind, spec.clone()))
                .unwrap()
                .unwrap();
            assert_eq!(found.replicas, expected, "{kind} {spec}");
        }
    }

    #[test]
    fn a_malformed_template_is_an_error_and_not_overlooked() {
        let spec = json!({"template": {"spec": {"containers": "all"}}});
        let error = Workload::read(&object("Deployment", spec)).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("Deployment a: "), "{text}");
    }

    #[test]
    fn what_is_null_is_not_there() {
        let spec = json!({"containers": [{"image": "a", "resources": null}], "initContainers": null, "nodeSelector": null});
        let mut object = object(
            "Deployment",
            json!({"template": {"metadata": null, "spec": spec}}),
        );
        object["metadata"]["labels"] = Value::Null;
        let found = Workload::read(&object).unwrap().unwrap();
        assert_eq!(found.template.spec.images().len(), 1);
        let list = json!({"kind": "List", "metadata": null, "items": [object]});
        assert_eq!(objects(list).len(), 1);
    }

    #[test]
    fn lists_are_their_items() {
        let inner = json!({"kind": "List", "items": [{"kind": "A"}, {"kind": "B"}]});
        let list = json!({"kind": "PodList", "items": [inner, {"kind": "C"}]});
        let kinds: Vec<_> = objects(list)
            .iter()
            .map(|owner| owner["kind"].clone())
            .collect();
        assert_eq!(kinds, ["A", "B", "C"]);
    }

    #[test]
    fn selectors_are_text() {
        for (value, expected) in [
            (json!({"app": "a", "b": "c"}), Some("app=a,b=c")),
            (
                json!({"matchLabels": {"app": "a"}, "matchExpressions": [
                    {"key": "k", "operator": "In", "values": ["x", "y"]},
                    {"key": "l", "operator": "NotIn", "values": ["x"]},
                    {"key": "m", "operator": "Exists"},
                    {"key": "n", "operator": "DoesNotExist"},
                ]}),
                Some("app=a,k in (x,y),l notin (x),m,!n"),
            ),
            (json!({}), None),
            (json!(7), None),
            (
                json!({"matchExpressions": [{"key": "k", "operator": "Like"}]}),
                None,
            ),
        ] {
            assert_eq!(selector(Some(&value)).as_deref(), expected, "{value}");
        }
    }
}
