//! Finds the workloads of a cluster by their top owners, and the nodes of their pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::Context;
use futures::TryStreamExt;
use serde::Deserialize;
use serde_json::Value;

use crate::{
    cluster::{
        api::ApiClient,
        kinds,
        objects::{Node, Pod, annotations},
        workload::Workload,
    },
    evaluate::wrong_architecture,
    report::requests_of,
};

use super::{
    super::permissions::MissingPermissions,
    found::{BoundPod, FoundSpec, FoundWorkload, stated_architectures},
};

/// Built-in kinds with a pod template. Owners of other kinds are known only from `ownerReferences`.
const TEMPLATES: [&str; 7] = [
    "Deployment",
    "StatefulSet",
    "DaemonSet",
    "ReplicaSet",
    "ReplicationController",
    "CronJob",
    "Job",
];
/// Maximum length of a chain of owners. A usual chain is a pod, its `ReplicaSet`, its Deployment,
/// and one or two objects of an operator.
const MAX_OWNERS: usize = 8;

/// The workloads of a cluster.
pub(super) struct ClusterWorkloads {
    pub(super) found: Vec<FoundWorkload>,
    pub(super) nodes: Vec<Node>,
    pub(super) missing_permissions: MissingPermissions,
}

/// Who controls an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Owner {
    kind: String,
    name: String,
    uid: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Head {
    metadata: Metadata,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    uid: String,
    name: String,
    namespace: String,
    owner_references: Vec<OwnerReference>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct OwnerReference {
    kind: String,
    name: String,
    uid: String,
    controller: bool,
}

impl Head {
    fn read(object: &Value) -> Self {
        Self::deserialize(object).unwrap_or_default()
    }

    fn controller(self) -> Option<Owner> {
        let mut owners = self.metadata.owner_references.into_iter();
        let owner = owners.find(|owner| owner.controller)?;
        // The owner of a static pod's mirror pod is its Node, which is not a workload.
        (owner.kind != "Node").then_some(Owner {
            kind: owner.kind,
            name: owner.name,
            uid: owner.uid,
        })
    }
}

/// The workloads of a namespace, or of all.
pub(super) async fn read(
    api: &ApiClient,
    namespace: Option<&str>,
) -> anyhow::Result<ClusterWorkloads> {
    let mut reader = Reader {
        api,
        namespace,
        missing: MissingPermissions::default(),
    };
    let mut workloads = Workloads::default();
    let mut templates = Vec::new();
    for kind in TEMPLATES {
        let keep = |object: Value| {
            workloads.add_owner(&object);
            templates.extend(keep_template(object));
            Ok(())
        };
        reader.list(kind, keep).await?;
    }
    for object in &templates {
        workloads.add_template(object)?;
    }
    drop(templates);
    // Each pod is processed as it arrives, because there may be too many to keep in memory.
    reader
        .list("Pod", |object| workloads.add_pod(object))
        .await?;
    let nodes = api.list::<Node>(None).try_collect().await;
    let nodes = reader.missing.check(|| "list nodes".to_owned(), nodes)?;
    Ok(ClusterWorkloads {
        found: workloads.found.into_values().collect(),
        nodes: nodes.unwrap_or_default(),
        missing_permissions: reader.missing,
    })
}

struct Reader<'a> {
    api: &'a ApiClient,
    namespace: Option<&'a str>,
    missing: MissingPermissions,
}

impl Reader<'_> {
    /// Reads the objects of a kind, one after the other.
    async fn list(
        &mut self,
        kind: &'static str,
        mut each: impl FnMut(Value) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let Some(resource) = kinds::known_kind(kind) else {
            return Ok(());
        };
        let permission = || format!("list {}", kinds::describe(&resource));
        let listed = self.api.list_dynamic(&resource, self.namespace, None)?;
        let mut listed = std::pin::pin!(listed);
        loop {
            let next = listed.try_next().await;
            let Some(Some(mut object)) = self.missing.check(permission, next)? else {
                return Ok(());
            };
            // The items of a list have no `kind`.
            if let Some(fields) = object.as_object_mut() {
                fields.insert("apiVersion".to_owned(), resource.api_version.clone().into());
                fields.insert("kind".to_owned(), kind.into());
            }
            each(object)?;
        }
    }
}

/// Leaves out Jobs that ended, and `ReplicaSet`s without replicas, which rollouts leave behind.
fn keep_template(object: Value) -> Option<Value> {
    let text = |place: &str| object.pointer(place).and_then(Value::as_str);
    let kind = text("/kind").unwrap_or_default().to_owned();
    let ended = || {
        let conditions = object
            .pointer("/status/conditions")
            .and_then(Value::as_array);
        let mut conditions = conditions.into_iter().flatten();
        conditions.any(|condition| {
            let is_one_of = |field: &str, words: &[&str]| {
                condition
                    .get(field)
                    .and_then(Value::as_str)
                    .is_some_and(|word| words.contains(&word))
            };
            is_one_of("type", &["Complete", "Failed"]) && is_one_of("status", &["True"])
        })
    };
    let is_scaled_down = || object.pointer("/spec/replicas").and_then(Value::as_u64) == Some(0);
    let is_over = match kind.as_str() {
        "Job" => ended(),
        "ReplicaSet" => is_scaled_down(),
        _ => false,
    };
    (!is_over).then_some(object)
}

/// The workloads that were found.
#[derive(Default)]
struct Workloads {
    /// The controllers of the objects with a pod template, by the UID of the controlled object.
    owners: HashMap<String, Owner>,
    /// UIDs of the objects with a pod template.
    templates: BTreeSet<String>,
    /// By namespace, kind and name of the top owner.
    found: BTreeMap<(String, String, String), FoundWorkload>,
}

impl Workloads {
    fn add_owner(&mut self, object: &Value) {
        let head = Head::read(object);
        let uid = head.metadata.uid.clone();
        self.templates.insert(uid.clone());
        self.owners
            .extend(head.controller().map(|owner| (uid, owner)));
    }

    /// Follows the known controllers upwards, at most [`MAX_OWNERS`] times.
    fn top(&self, owner: Owner) -> Owner {
        let mut top = owner;
        for _ in 0..MAX_OWNERS {
            match self.owners.get(&top.uid) {
                Some(owner) => top = owner.clone(),
                None => break,
            }
        }
        top
    }

    fn workload(&mut self, namespace: &str, owner: &Owner) -> &mut FoundWorkload {
        let key = (namespace.to_owned(), owner.kind.clone(), owner.name.clone());
        self.found.entry(key).or_insert_with(|| FoundWorkload {
            kind: owner.kind.clone(),
            namespace: Some(namespace.to_owned()),
            name: owner.name.clone(),
            ..FoundWorkload::default()
        })
    }

    fn add_template(&mut self, object: &Value) -> anyhow::Result<()> {
        let Some(workload) = Workload::read(object)? else {
            return Ok(());
        };
        let head = Head::read(object);
        let (uid, namespace) = (head.metadata.uid.clone(), head.metadata.namespace.clone());
        let controller = head.controller();
        // Skip the ReplicaSet of a Deployment or the Job of a CronJob: its owner has the template.
        if controller
            .as_ref()
            .is_some_and(|owner| self.templates.contains(&owner.uid))
        {
            return Ok(());
        }
        let as_owner = Owner {
            kind: workload.kind.clone(),
            name: workload.name.name.clone(),
            uid,
        };
        let top = self.top(controller.unwrap_or(as_owner));
        self.workload(&namespace, &top)
            .add(FoundSpec::of_template(&workload));
        Ok(())
    }

    fn add_pod(&mut self, object: Value) -> anyhow::Result<()> {
        let requests = object.get("spec").map(requests_of).unwrap_or_default();
        let head = Head::read(&object);
        let as_owner = Owner {
            kind: "Pod".to_owned(),
            name: head.metadata.name.clone(),
            uid: head.metadata.uid.clone(),
        };
        let namespace = head.metadata.namespace.clone();
        let pod = Pod::deserialize(object)
            .with_context(|| format!("cannot read pod {namespace}/{}", as_owner.name))?;
        if matches!(pod.status.phase.as_deref(), Some("Succeeded" | "Failed")) {
            return Ok(());
        }
        let name = as_owner.name.clone();
        let top = self.top(head.controller().unwrap_or(as_owner));
        let workload = self.workload(&namespace, &top);
        workload.pods += 1;
        workload.requests = workload.requests + requests;
        if let Some(node) = pod.spec.node_name.clone().filter(|node| !node.is_empty()) {
            let images = pod.spec.images().into_keys().map(str::to_owned).collect();
            let stated = stated_architectures(annotations(&pod.metadata));
            workload.bound.push(BoundPod {
                name,
                node,
                images,
                stated,
                failing: wrong_architecture::find(&pod, None, |_| true),
            });
        }
        let annotations = annotations(&pod.metadata).clone();
        workload.add(FoundSpec::of_pod(pod.spec, annotations));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(kind: &str, name: &str, owner: Option<(&str, &str)>, spec: Value) -> Value {
        let owners: Vec<_> = owner
            .map(|(kind, name)| json!({"kind": kind, "name": name, "uid": format!("{kind}-{name}"), "controller": true}))
            .into_iter()
            .collect();
        let version = if kind == "Pod" { "v1" } else { "apps/v1" };
        json!({"apiVersion": version, "kind": kind, "spec": spec, "metadata": {
            "name": name, "namespace": "n", "uid": format!("{kind}-{name}"), "ownerReferences": owners}})
    }

    fn pod(name: &str, owner: Option<(&str, &str)>, image: &str) -> Value {
        let containers = json!([{"image": image, "resources": {"requests": {"cpu": "1"}}}]);
        object(
            "Pod",
            name,
            owner,
            json!({"containers": containers, "nodeName": "node"}),
        )
    }

    fn template(image: &str) -> Value {
        json!({"replicas": 1, "template": {"spec": {"containers": [{"image": image}]}}})
    }

    /// Pods belong to their top owner, whatever its kind is. Old `ReplicaSet`s and ended Jobs do
    /// not count.
    #[test]
    fn pods_belong_to_their_top_owner() {
        let mut old = object(
            "ReplicaSet",
            "web-0",
            Some(("Deployment", "web")),
            template("old"),
        );
        old["spec"]["replicas"] = json!(0);
        let mut ended = object("Job", "once", None, template("done"));
        ended["status"] = json!({"conditions": [{"type": "Complete", "status": "True"}]});
        let templates = [
            object("Deployment", "web", None, template("app:1")),
            old,
            object(
                "ReplicaSet",
                "web-1",
                Some(("Deployment", "web")),
                template("app:1"),
            ),
            object(
                "ReplicaSet",
                "canary-1",
                Some(("Rollout", "canary")),
                template("app:2"),
            ),
            object(
                "StatefulSet",
                "metrics",
                Some(("Prometheus", "metrics")),
                template("prometheus"),
            ),
            object("Deployment", "idle", None, template("idle")),
            ended,
        ];
        let pods = [
            pod("web-1-a", Some(("ReplicaSet", "web-1")), "app:1"),
            pod("web-1-b", Some(("ReplicaSet", "web-1")), "app:1"),
            pod("canary-1-a", Some(("ReplicaSet", "canary-1")), "app:2"),
            pod("metrics-0", Some(("StatefulSet", "metrics")), "prometheus"),
            // A pod of an old ReplicaSet that is still terminating.
            pod("web-0-a", Some(("ReplicaSet", "web-0")), "old"),
            pod("static", Some(("Node", "node")), "etcd"),
            pod("alone", None, "tool"),
        ];
        let mut workloads = Workloads::default();
        for object in &templates {
            workloads.add_owner(object);
        }
        let templates: Vec<Value> = templates.into_iter().filter_map(keep_template).collect();
        for object in &templates {
            workloads.add_template(object).unwrap();
        }
        for object in pods {
            workloads.add_pod(object).unwrap();
        }
        let found: Vec<_> = workloads
            .found
            .values()
            .map(|workload| {
                let images = workload
                    .specs
                    .iter()
                    .flat_map(|spec| spec.spec.images().into_keys());
                let name = format!("{}/{}", workload.kind, workload.name);
                (name, workload.pods, images.collect::<Vec<_>>().join(","))
            })
            .collect();
        let expected = [
            ("Deployment/idle", 0, "idle"),
            ("Deployment/web", 3, "app:1,old"),
            ("Pod/alone", 1, "tool"),
            ("Pod/static", 1, "etcd"),
            ("Prometheus/metrics", 1, "prometheus"),
            ("Rollout/canary", 1, "app:2"),
        ];
        assert_eq!(
            found,
            expected.map(|(name, pods, images)| (name.to_owned(), pods, images.to_owned()))
        );
        let web = &workloads.found[&("n".into(), "Deployment".into(), "web".into())];
        assert_eq!(web.requests.cpu_millicores, 3000);
        assert_eq!(web.bound.len(), 3);
    }
}
