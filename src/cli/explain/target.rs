//! The object that is explained, from the cluster or from a manifest.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, bail};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    cluster::{
        name::NamespacedName,
        objects::{DaemonSet, Node, PodSpec, PodTemplate, annotations, labels},
        workload::Workload,
    },
    evaluate::{Stage, Subject, wrong_architecture::find},
    explain::{ExistingPod, PodCount},
    placement::annotation,
    plan,
};

use super::{super::manifests, MAX_OBJECTS};

/// An object that is explained.
pub(super) struct Target {
    pub(super) kind: String,
    pub(super) name: NamespacedName,
    /// The template of its pods.
    template: PodTemplate,
    /// The object, if it is a DaemonSet.
    daemon_set: Option<DaemonSet>,
    /// The pod that is explained instead of its template.
    pub(super) pod: Option<ExistingPod>,
    pods: Vec<ExistingPod>,
    /// Why Kubernetes cannot create its pods.
    pub(super) creation_problem: Option<String>,
}

impl Target {
    /// The object of a manifest. `namespace` is used if the manifest names no namespace.
    pub(super) fn of_manifest(manifest: Manifest, namespace: &str) -> Self {
        let (mut workload, mut daemon_set) = (manifest.workload, manifest.daemon_set);
        let name = &mut workload.name;
        let namespace = name.namespace.get_or_insert_with(|| namespace.to_owned());
        if let Some(set) = &mut daemon_set {
            set.metadata.namespace = Some(namespace.clone());
        }
        Self::of_template(workload, daemon_set, Vec::new())
    }

    /// An object of the cluster that has a pod template, with its pods.
    pub(super) fn of_template(
        workload: Workload,
        daemon_set: Option<DaemonSet>,
        pods: Vec<ExistingPod>,
    ) -> Self {
        // For a DaemonSet the template is explained: the DaemonSet controller creates no pod for a
        // node whose taint the template does not tolerate, so no pod waits because of a taint.
        let pod = if daemon_set.is_some() {
            None
        } else {
            most_interesting(&pods).cloned()
        };
        Self {
            kind: workload.kind,
            name: workload.name,
            template: workload.template,
            daemon_set,
            pod,
            pods,
            creation_problem: None,
        }
    }

    /// A pod of the cluster.
    pub(super) fn of_pod(pod: ExistingPod) -> Self {
        Self {
            kind: "Pod".to_owned(),
            name: NamespacedName::of_object(&pod.pod),
            template: PodTemplate::default(),
            daemon_set: None,
            pod: Some(pod),
            pods: Vec::new(),
            creation_problem: None,
        }
    }

    /// Groups pods that wait or fail by controller. The target of a group explains its
    /// [`most_interesting`] pod, and counts its pods.
    pub(super) fn of_troubled(pods: Vec<ExistingPod>) -> Vec<Self> {
        let mut by_controller: BTreeMap<String, Vec<ExistingPod>> = BTreeMap::new();
        for pod in pods {
            let metadata = &pod.pod.metadata;
            let owner = pod.pod.controller().map(|owner| owner.uid.clone());
            let own_name = metadata.name.clone().unwrap_or_default();
            by_controller
                .entry(owner.unwrap_or(own_name))
                .or_default()
                .push(pod);
        }
        let mut targets: Vec<Self> = by_controller
            .into_values()
            .filter_map(|pods| {
                let pod = most_interesting(&pods)?.clone();
                let pods = if pods.len() > 1 { pods } else { Vec::new() };
                Some(Self {
                    pods,
                    ..Self::of_pod(pod)
                })
            })
            .collect();
        targets.sort_by(|a, b| a.name.name.cmp(&b.name.name));
        targets
    }

    pub(super) fn is_existing_pod(&self) -> bool {
        self.pod.is_some()
    }

    /// Whether archaware's gate or decision is on the pod.
    pub(super) fn has_traces(&self) -> bool {
        let pod = self.pod.as_ref().map(|pod| &pod.pod);
        pod.is_some_and(|pod| {
            let decided = annotations(&pod.metadata).contains_key(annotation::DECISION);
            decided || pod.spec.gate().is_some()
        })
    }

    pub(super) fn daemon_set(&self) -> Option<&DaemonSet> {
        self.daemon_set.as_ref()
    }

    /// The spec of the template.
    pub(super) fn spec_mut(&mut self) -> &mut PodSpec {
        match &mut self.daemon_set {
            Some(set) => &mut set.spec.template.spec,
            None => &mut self.template.spec,
        }
    }

    /// The pod or template to evaluate.
    pub(super) fn subject(&self) -> Subject<'_> {
        match &self.pod {
            Some(pod) => plan::pod::subject(&pod.pod),
            None => Subject {
                spec: &self.template.spec,
                annotations: annotations(&self.template.metadata),
                labels: labels(&self.template.metadata),
                namespace: self.name.namespace.as_deref().unwrap_or_default(),
                stage: Stage::Creation,
                decided_by_policy: None,
            },
        }
    }

    /// The object's pods, counted by phase and node architecture.
    pub(super) fn counted(&self, nodes: Option<&[Node]>) -> Vec<PodCount> {
        let of_node: BTreeMap<&str, &str> = nodes
            .unwrap_or_default()
            .iter()
            .filter_map(|node| Some((node.metadata.name.as_deref()?, node.view().architecture)))
            .collect();
        let mut counts: BTreeMap<(String, Option<String>), usize> = BTreeMap::new();
        for pod in &self.pods {
            let architecture = pod.node().and_then(|node| of_node.get(node).copied());
            let key = (pod.phase().to_owned(), architecture.map(str::to_owned));
            *counts.entry(key).or_default() += 1;
        }
        let counted = counts
            .into_iter()
            .map(|((phase, architecture), count)| PodCount {
                count,
                phase,
                architecture,
            });
        counted.collect()
    }
}

/// Whether a pod waits, or one of its containers does not run. A failed pod counts only if its
/// failure points to a wrong architecture, because archaware cannot explain other failures.
pub(super) fn is_troubled(pod: &ExistingPod) -> bool {
    let died = || pod.phase() == "Failed" && !find(&pod.pod, None, |_| false).is_empty();
    pod.is_pending()
        || (pod.pod.is_in_scope() && (pod.has_problems() || pod.phase() == "Pending"))
        || died()
}

/// The oldest pod of the first group that has one: pending pods, pods with a container that does
/// not run, other pods in scope, failed pods, all others. Pods with a deletion timestamp do not
/// count.
fn most_interesting(pods: &[ExistingPod]) -> Option<&ExistingPod> {
    let rank = |pod: &&ExistingPod| match pod.phase() {
        _ if pod.is_pending() => 0,
        _ if pod.pod.is_in_scope() && pod.has_problems() => 1,
        _ if pod.pod.is_in_scope() => 2,
        "Failed" => 3,
        _ => 4,
    };
    let pods = pods.iter();
    let alive = pods.filter(|pod| pod.pod.metadata.deletion_timestamp.is_none());
    alive.min_by_key(|pod| (rank(pod), pod.pod.metadata.creation_timestamp.clone()))
}

/// Parses objects as `kubectl` does: `pod/NAME`, the name of a pod, or a kind and names. `is_kind`:
/// whether a word names a kind.
pub(super) fn parse_objects(
    words: &[String],
    is_kind: impl Fn(&str) -> bool,
) -> anyhow::Result<Vec<(String, String)>> {
    let (kind, names) = match words {
        [kind, names @ ..] if !names.is_empty() && !kind.contains('/') && is_kind(kind) => {
            (kind.as_str(), names)
        }
        all => ("pod", all),
    };
    if names.len() > MAX_OBJECTS {
        bail!(
            "cannot explain {} objects at once, at most {MAX_OBJECTS}; use `archaware report`",
            names.len()
        );
    }
    let parsed = names.iter().map(|word| {
        let (kind, name) = match word.split_once('/') {
            Some(_) if kind != "pod" => bail!("{word:?} names a kind, but {kind:?} is already the kind of all objects: write only names after it"),
            Some(both) => both,
            None => (kind, word.as_str()),
        };
        if kind.is_empty() || name.is_empty() || name.contains('/') {
            bail!("{word:?} is not KIND/NAME");
        }
        Ok((kind.to_owned(), name.to_owned()))
    });
    parsed.collect()
}

/// An object of a manifest.
pub(super) struct Manifest {
    workload: Workload,
    daemon_set: Option<DaemonSet>,
}

/// The DaemonSet in an object, if it is one.
pub(super) fn daemon_set(object: &Value) -> Result<Option<DaemonSet>, serde_json::Error> {
    let text = |field: &str| object.get(field).and_then(Value::as_str);
    let is_one = text("kind") == Some("DaemonSet") && text("apiVersion") == Some("apps/v1");
    is_one.then(|| DaemonSet::deserialize(object)).transpose()
}

/// The objects of manifests that run pods.
pub(super) fn read_manifests(path: &Path) -> anyhow::Result<Vec<Manifest>> {
    let mut found = Vec::new();
    for (file, object) in manifests::read(path)?.objects {
        let cannot_read = || format!("cannot read {file}");
        if let Some(workload) = Workload::read(&object).with_context(cannot_read)? {
            let daemon_set = daemon_set(&object).with_context(cannot_read)?;
            found.push(Manifest {
                workload,
                daemon_set,
            });
        }
    }
    let name = path.display();
    if found.is_empty() {
        bail!("{name} has no object that runs pods");
    }
    if found.len() > MAX_OBJECTS {
        bail!(
            "{name} has {} objects that run pods, more than {MAX_OBJECTS}; use `archaware report -f`",
            found.len()
        );
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_named_as_for_kubectl() {
        for (words, expected) in [
            (&["pod/a"][..], Some(&[("pod", "a")][..])),
            (&["deploy/a"], Some(&[("deploy", "a")])),
            (
                &["rollouts.argoproj.io/a"],
                Some(&[("rollouts.argoproj.io", "a")]),
            ),
            (&["deployment", "a"], Some(&[("deployment", "a")])),
            (
                &["deployment", "a", "b"],
                Some(&[("deployment", "a"), ("deployment", "b")]),
            ),
            (&["a"], Some(&[("pod", "a")])),
            (&["deployment"], Some(&[("pod", "deployment")])),
            (&["a", "b"], Some(&[("pod", "a"), ("pod", "b")])),
            (&["a", "deploy/b"], Some(&[("pod", "a"), ("deploy", "b")])),
            (&["pod/"], None),
            (&["/a"], None),
            (&["pod/a/b"], None),
            (&["deployment", "deployment/a"], None),
        ] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let found = parse_objects(&words, |word| word == "deployment").ok();
            let expected = expected.map(|objects| {
                let owned = objects
                    .iter()
                    .map(|(kind, name)| ((*kind).to_owned(), (*name).to_owned()));
                owned.collect::<Vec<_>>()
            });
            assert_eq!(found, expected, "{words:?}");
        }
    }
}
