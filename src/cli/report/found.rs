//! Workloads that were found, before their images are resolved.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    cluster::{
        objects::{Container, PodSpec, annotations},
        workload::Workload,
    },
    evaluate::{AuthorPod, wrong_architecture::WrongArchitecture},
    placement::{Mode, mode},
    platform::Architectures,
    report::Requests,
};

#[derive(Clone, Debug, Default)]
pub(super) struct FoundWorkload {
    pub(super) kind: String,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    pub(super) pods: u64,
    pub(super) requests: Requests,
    /// Why some of its images are not known at all.
    pub(super) unread: Vec<String>,
    /// The distinct specs of its pods.
    pub(super) specs: Vec<FoundSpec>,
    /// Its pods that have a node.
    pub(super) bound: Vec<BoundPod>,
}

/// A pod, or a template of pods.
#[derive(Clone, Debug)]
pub(super) struct FoundSpec {
    /// Without what archaware added.
    pub(super) spec: PodSpec,
    pub(super) annotations: BTreeMap<String, String>,
    /// Whether the pull secrets of its ServiceAccount are still to be added.
    pub(super) is_template: bool,
}

/// A pod that has a node.
#[derive(Clone, Debug)]
pub(super) struct BoundPod {
    pub(super) name: String,
    pub(super) node: String,
    pub(super) images: BTreeSet<String>,
    /// The architectures that its author states by annotation.
    pub(super) stated: Option<Architectures>,
    /// Its containers that fail in a way that a wrong architecture can cause.
    pub(super) failing: Vec<WrongArchitecture>,
}

impl FoundSpec {
    pub(super) fn of_template(workload: &Workload) -> Self {
        Self {
            spec: workload.template.spec.clone(),
            annotations: annotations(&workload.template.metadata).clone(),
            is_template: true,
        }
    }

    /// The spec of an existing pod, without archaware's additions.
    pub(super) fn of_pod(spec: PodSpec, annotations: BTreeMap<String, String>) -> Self {
        Self {
            spec: AuthorPod::new(&spec, &annotations).spec.into_owned(),
            annotations,
            is_template: false,
        }
    }

    /// The images, and the pull secrets for them. Of specs with the same key only the first is
    /// kept.
    fn key(&self) -> (Vec<&str>, Vec<&str>) {
        let secrets = self.spec.image_pull_secrets.iter();
        (
            self.spec.images().into_keys().collect(),
            secrets.map(|secret| secret.name.as_str()).collect(),
        )
    }
}

impl FoundWorkload {
    /// A workload of a manifest.
    pub(super) fn of_manifest(workload: Workload, pods: u64, requests: Requests) -> Self {
        Self {
            specs: vec![FoundSpec::of_template(&workload)],
            kind: workload.kind,
            namespace: workload.name.namespace,
            name: workload.name.name,
            pods,
            requests,
            ..Self::default()
        }
    }

    /// Something that may run pods and cannot be read.
    pub(super) fn unread(kind: &str, namespace: Option<&str>, name: &str, why: String) -> Self {
        Self {
            kind: kind.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            unread: vec![why],
            ..Self::default()
        }
    }

    /// A workload that stands for a single image (`--images`).
    pub(super) fn of_image(image: &str) -> Self {
        let container = Container {
            image: Some(image.to_owned()),
            ..Container::default()
        };
        let spec = PodSpec {
            containers: vec![container],
            ..PodSpec::default()
        };
        Self {
            kind: "Image".to_owned(),
            name: image.to_owned(),
            specs: vec![FoundSpec {
                spec,
                annotations: BTreeMap::new(),
                is_template: false,
            }],
            ..Self::default()
        }
    }

    /// Adds a pod spec, unless it is known.
    pub(super) fn add(&mut self, spec: FoundSpec) {
        if !self.specs.iter().any(|known| known.key() == spec.key()) {
            self.specs.push(spec);
        }
    }
}

/// The architectures that the author states by annotation.
pub(super) fn stated_architectures(
    annotations: &BTreeMap<String, String>,
) -> Option<Architectures> {
    let none = BTreeMap::new();
    let (handling, ..) = mode::handling(annotations, &none, Mode::Inspect);
    handling.stated().cloned()
}
