//! Reads the objects that an explanation needs. A missing permission is reported, and the
//! explanation goes on without it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::coordination::v1::Lease;
use kube::core::{GroupVersionKind, discovery::ApiResource};
use serde_json::Value;

use crate::{
    cluster::{
        self,
        api::{ApiClient, ApiError},
        kinds::{self, KindError},
        lease::LeaseMemory,
        name::NamespacedName,
        objects::{Namespace, Node, PodSpec, RuntimeClass, annotations},
        workload::Workload,
    },
    explain::ExistingPod,
    placement::annotation,
};

use super::{
    super::permissions::MissingPermissions,
    MAX_OBJECTS,
    target::{self, Target},
};

/// Maximum number of pods, `ReplicaSet`s or Jobs that are kept for an explanation.
const MAX_LISTED: usize = 5000;

/// Reads objects, and collects the missing permissions.
pub(super) struct Reader {
    api: ApiClient,
    /// Permissions that are missing.
    pub(super) missing: MissingPermissions,
    namespaces: BTreeMap<String, Namespace>,
}

/// Facts about the cluster.
pub(super) struct ClusterFacts {
    /// All nodes; `None` without the permission to list nodes.
    pub(super) nodes: Option<Vec<Node>>,
    /// Whether archaware is installed: a node has its taint, or its Lease exists; `None` if the
    /// Lease cannot be read.
    pub(super) is_installed: Option<bool>,
    /// The namespace in which the Lease was looked up.
    pub(super) own_namespace: String,
}

impl Reader {
    pub(super) fn new(api: ApiClient) -> Self {
        Self {
            api,
            missing: MissingPermissions::default(),
            namespaces: BTreeMap::new(),
        }
    }

    /// An object of the cluster, with its pods.
    pub(super) async fn target(
        &mut self,
        kind: &str,
        namespace: &str,
        name: &str,
    ) -> anyhow::Result<Target> {
        let resource = kinds::find(&self.api, kind).await?;
        let name = NamespacedName::new(namespace, name);
        let object = self.api.find_dynamic(&resource, &name).await;
        let lacks = matches!(
            &object,
            Err(ApiError::Forbidden(_) | ApiError::Unauthorized(_))
        );
        let object = object.with_context(|| {
            let what = kinds::describe(&resource);
            let permission = format!(" (permission: get {what} in {namespace})");
            let permission = if lacks { permission } else { String::new() };
            format!("cannot read {} {name}{permission}", resource.kind)
        })?;
        let Some(object) = object else {
            let same_name = self.same_name_hint(&resource.kind, &name).await;
            bail!(
                "there is no {} {:?} in namespace {namespace:?}{same_name}",
                resource.kind,
                name.name
            );
        };
        if resource.kind == "Pod" && resource.group.is_empty() {
            let cannot_read = || format!("cannot read pod {name}");
            let pod = ExistingPod::read(object).with_context(cannot_read)?;
            return Ok(Target::of_pod(pod));
        }
        let Some(workload) = Workload::read(&object)? else {
            bail!("{} {name} has no pod template", resource.kind);
        };
        let daemon_set = target::daemon_set(&object)?;
        let uid = object.pointer("/metadata/uid").and_then(Value::as_str);
        let uid = uid.unwrap_or_default().to_owned();
        let pods = self
            .pods(namespace, uid.clone(), workload.selector.clone())
            .await?;
        let mut problem = creation_failure(&object);
        if problem.is_none() && pods.is_empty() && REPORT_BY_EVENT.contains(&&*resource.kind) {
            problem = self.failed_creation(namespace, &uid).await?;
        }
        let mut target = Target::of_template(workload, daemon_set, pods);
        target.creation_problem = problem;
        Ok(target)
    }

    /// The newest message of a controller that could not create a pod of an object.
    async fn failed_creation(
        &mut self,
        namespace: &str,
        uid: &str,
    ) -> anyhow::Result<Option<String>> {
        let gvk = GroupVersionKind::gvk("", "v1", "Event");
        let resource = ApiResource::from_gvk_with_plural(&gvk, "events");
        let listed = self.api.list_dynamic(&resource, Some(namespace), None)?;
        let is_failure = |event: &Value| {
            let text = |place: &str| event.pointer(place).and_then(Value::as_str);
            text("/reason") == Some("FailedCreate") && text("/involvedObject/uid") == Some(uid)
        };
        let failures = listed.try_filter(|event| std::future::ready(is_failure(event)));
        let failures = failures.take(MAX_LISTED).try_collect::<Vec<_>>().await;
        let permission = || format!("list events in {namespace}");
        let failures = self.missing.check(permission, failures)?;
        let failures = failures.unwrap_or_default();
        let text = |event: &Value, field: &str| {
            let text = event.get(field).and_then(Value::as_str);
            text.map(str::to_owned)
        };
        let newest = failures
            .iter()
            .max_by_key(|event| text(event, "lastTimestamp"));
        Ok(newest.and_then(|event| text(event, "message")))
    }

    /// The first of several words, if it names a kind, as in `deployment web`. A single word is a
    /// name.
    pub(super) async fn kind_in(&self, words: &[String]) -> anyhow::Result<Option<String>> {
        let Some(word) = words
            .first()
            .filter(|word| words.len() > 1 && !word.contains('/'))
        else {
            return Ok(None);
        };
        match kinds::find(&self.api, word).await {
            Ok(_) => Ok(Some(word.clone())),
            Err(KindError::Unknown(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A hint at an object of another kind with the same name, because people forget the kind;
    /// empty if there is none.
    async fn same_name_hint(&self, kind: &str, name: &NamespacedName) -> String {
        let other_kinds = kinds::known_kinds().filter(|other| other.kind != kind);
        for resource in other_kinds {
            if let Ok(Some(_)) = self.api.find_dynamic(&resource, name).await {
                let kind = resource.kind.to_lowercase();
                return format!("; did you mean {kind}/{}?", name.name);
            }
        }
        String::new()
    }

    /// The pods of a namespace that wait or fail, one for each controller.
    ///
    /// # Errors
    ///
    /// When the namespace does not exist, or its pods cannot be listed.
    pub(super) async fn troubled(&mut self, namespace: &str) -> anyhow::Result<Vec<Target>> {
        let name = NamespacedName::cluster(namespace);
        // Not everybody may read namespaces.
        if let Ok(None) = self.api.find_metadata::<Namespace>(&name).await {
            bail!("there is no namespace {namespace:?}: correct --namespace");
        }
        let resource = kinds::known_kind("Pod").context("pods are known")?;
        let listed = self.api.list_dynamic(&resource, Some(namespace), None)?;
        let troubled = |pod: Value| {
            let pod = ExistingPod::read(pod).map(|pod| Some(pod).filter(target::is_troubled));
            std::future::ready(pod.map_err(anyhow::Error::from))
        };
        let pods: Vec<ExistingPod> = listed
            .map_err(anyhow::Error::from)
            .try_filter_map(troubled)
            .take(MAX_LISTED)
            .try_collect()
            .await
            .with_context(|| format!("cannot list pods in namespace {namespace:?}"))?;
        let mut targets = Target::of_troubled(pods);
        if targets.len() > MAX_OBJECTS {
            let hidden = targets.len() - MAX_OBJECTS;
            tracing::warn!("{hidden} more pods need attention; name one to have it explained");
            targets.truncate(MAX_OBJECTS);
        }
        Ok(targets)
    }

    /// The pods of an object: those that it controls, and those of its `ReplicaSet`s and Jobs.
    async fn pods(
        &mut self,
        namespace: &str,
        uid: String,
        selector: Option<String>,
    ) -> anyhow::Result<Vec<ExistingPod>> {
        let mut owners = BTreeSet::from([uid]);
        for kind in ["ReplicaSet", "Job"] {
            // No selector: a ReplicaSet or Job may have other labels than its pods.
            let objects = self.list_owned(kind, namespace, None, &owners).await?;
            let uids = objects
                .iter()
                .filter_map(|object| object.pointer("/metadata/uid")?.as_str());
            let uids: Vec<String> = uids.map(str::to_owned).collect();
            owners.extend(uids);
        }
        // A selector may also match pods of other workloads.
        let pods = self.list_owned("Pod", namespace, selector, &owners).await?;
        pods.into_iter()
            .map(|pod| Ok(ExistingPod::read(pod)?))
            .collect()
    }

    /// The objects of a kind whose controller is one of `owners`, at most [`MAX_LISTED`].
    async fn list_owned(
        &mut self,
        kind: &str,
        namespace: &str,
        selector: Option<String>,
        owners: &BTreeSet<String>,
    ) -> anyhow::Result<Vec<Value>> {
        let Some(resource) = kinds::known_kind(kind) else {
            return Ok(Vec::new());
        };
        let listed = self
            .api
            .list_dynamic(&resource, Some(namespace), selector)?;
        let owned =
            listed.try_filter(|object| std::future::ready(owners.contains(controller(object))));
        let objects = owned.take(MAX_LISTED).try_collect().await;
        let permission = || format!("list {} in {namespace}", kinds::describe(&resource));
        Ok(self.missing.check(permission, objects)?.unwrap_or_default())
    }

    /// The nodes, and whether archaware is installed.
    pub(super) async fn cluster(
        &mut self,
        own_namespace: &str,
        memory: &dyn LeaseMemory,
    ) -> anyhow::Result<ClusterFacts> {
        let nodes = async { self.api.list::<Node>(None).try_collect::<Vec<Node>>().await };
        let name = NamespacedName::new(own_namespace, cluster::NAME);
        let lease = self.api.find::<Lease>(&name);
        let (nodes, lease) = tokio::join!(nodes, lease);
        let nodes = self.missing.check(|| "list nodes".to_owned(), nodes)?;
        let permission = || format!("get leases.coordination.k8s.io in {own_namespace}");
        let lease = self.missing.check(permission, lease)?;
        if let Some(Some(lease)) = &lease
            && let Some(stored) = annotations(&lease.metadata).get(annotation::STATE)
        {
            memory.read(stored);
        }
        let mut known_nodes = nodes.iter().flatten();
        let is_tainted =
            known_nodes.any(|node| annotations(&node.metadata).contains_key(annotation::TAINT));
        let is_installed = match lease {
            _ if is_tainted => Some(true),
            Some(lease) => Some(lease.is_some()),
            None => None,
        };
        Ok(ClusterFacts {
            nodes,
            is_installed,
            own_namespace: own_namespace.to_owned(),
        })
    }

    /// Adds the node selector and tolerations of a RuntimeClass, as Kubernetes does when a pod is
    /// created. Returns the reason if Kubernetes would reject the pod.
    pub(super) async fn add_class(&mut self, class: &str, spec: &mut PodSpec) -> Option<String> {
        let name = NamespacedName::cluster(class);
        let found = self.api.find::<RuntimeClass>(&name).await;
        let permission = || "get runtimeclasses.node.k8s.io".to_owned();
        let found = self.missing.check(permission, found);
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(%error, class, "cannot read the RuntimeClass: its node selector and tolerations are ignored");
            None
        });
        let Some(class_of_pod) = found? else {
            return Some(format!(
                "there is no RuntimeClass {class}: Kubernetes rejects the pod"
            ));
        };
        let scheduling = class_of_pod.scheduling.unwrap_or_default();
        let key = spec.add_scheduling(&scheduling).err()?;
        Some(format!(
            "its node selector and that of RuntimeClass {class} name different values of {key}: Kubernetes rejects the pod"
        ))
    }

    /// A namespace; without labels and annotations if it cannot be read or does not exist.
    pub(super) async fn namespace(&mut self, namespace: &str) -> Namespace {
        if let Some(known) = self.namespaces.get(namespace) {
            return known.clone();
        }
        let name = NamespacedName::cluster(namespace);
        let found = self.api.find::<Namespace>(&name).await;
        let found = self.missing.check(|| "get namespaces".to_owned(), found);
        let found = found.unwrap_or_else(|error| {
            tracing::warn!(%error, namespace, "cannot read the namespace: its annotations and labels count as none");
            None
        });
        let found = found.flatten().unwrap_or_default();
        self.namespaces.insert(namespace.to_owned(), found.clone());
        found
    }
}

/// Built-in kinds whose controllers report only by events that they cannot create a pod.
const REPORT_BY_EVENT: [&str; 3] = ["StatefulSet", "DaemonSet", "Job"];

/// Why no pod can be created, as the controllers of Deployments and `ReplicaSet`s state it in the
/// condition `ReplicaFailure`.
fn creation_failure(object: &Value) -> Option<String> {
    let conditions = object.pointer("/status/conditions")?.as_array()?;
    let text = |condition: &Value, field: &str| {
        let text = condition.get(field).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    let failure = conditions.iter().find(|condition| {
        text(condition, "type") == "ReplicaFailure" && text(condition, "status") == "True"
    })?;
    Some(text(failure, "message"))
}

/// The UID of an object's controller; empty if it has none.
fn controller(object: &Value) -> &str {
    let owners = object.pointer("/metadata/ownerReferences");
    let mut owners = owners.and_then(Value::as_array).into_iter().flatten();
    let owner = owners.find(|owner| owner.get("controller").and_then(Value::as_bool) == Some(true));
    let uid = owner.and_then(|owner| owner.get("uid")?.as_str());
    uid.unwrap_or_default()
}
