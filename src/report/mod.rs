//! Which architectures the workloads of a cluster, or of manifests, could run on, and the
//! obstacles: images, node selectors, affinity and annotations. Pure: facts about workloads in, a
//! report out.

mod quantity;
mod summary;

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::Serialize;

use crate::platform::{Architecture, Architectures, ImageArchitectures};

pub use quantity::{Requests, cores, requests_of};
pub use summary::{Amount, Blocker, Summary};

/// Facts about a workload.
#[derive(Clone, Debug, Default)]
pub struct KnownWorkload {
    /// Kind of its top owner.
    pub kind: String,
    /// Namespace of the workload.
    pub namespace: Option<String>,
    /// Name of the workload.
    pub name: String,
    /// The number of its pods; for a manifest, the number of replicas.
    pub pods: u64,
    /// What all of its pods request together.
    pub requests: Requests,
    /// The images of its pods.
    pub images: BTreeMap<String, KnownImage>,
    /// The architectures that its author states by annotation.
    pub stated: Option<Architectures>,
    /// The requested architectures that its author's node selector or affinity excludes.
    pub excluded: BTreeSet<Architecture>,
    /// The architectures of the nodes that its node selector and node affinity select, by labels
    /// other than that of the architecture; `None` if they do not limit it.
    pub pinned_to: Option<BTreeSet<String>>,
    /// Why some of its images are not known at all.
    pub unread: Vec<String>,
    /// The number of its pods with a node, by architecture of the node.
    pub runs_on: BTreeMap<String, u64>,
    /// Its pods on the wrong architecture: an image, or a program in an image, does not run on
    /// their node.
    pub misplaced: Vec<MisplacedPod>,
}

/// Facts about an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownImage {
    /// The image is resolved.
    Resolved {
        /// Its platforms, of every OS.
        platforms: Vec<String>,
        /// The image's own architectures; `None` if the image does not limit its pod.
        built_for: Option<ImageArchitectures>,
        /// The architectures of the nodes that run it; `None` if the image does not limit its pod.
        architectures: Option<Architectures>,
    },
    /// It could not be resolved.
    Failed {
        /// One of a fixed set: `NotFound`, `Denied`, …
        reason: &'static str,
        /// The error message.
        message: String,
    },
}

/// A pod on the wrong architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MisplacedPod {
    /// Name of the pod.
    pub pod: String,
    /// The node of the pod.
    pub node: String,
    /// The architecture of that node, with the variant if it is known.
    pub architecture: String,
    /// The images that do not run there.
    pub images: Vec<String>,
    /// How the pod fails for that reason, for example `exec format error`; null if no such failure
    /// was seen.
    pub failure: Option<String>,
}

impl MisplacedPod {
    /// The failure, or `no failure seen`.
    pub fn state(&self) -> &str {
        self.failure.as_deref().unwrap_or("no failure seen")
    }
}

/// `archaware report -o json`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Where the workloads were found.
    pub source: String,
    /// For each requested architecture: the workloads that can run on it, and the images that keep
    /// the rest from it.
    pub summaries: Vec<Summary>,
    /// The workloads, by namespace, kind and name.
    pub workloads: Vec<ReportedWorkload>,
    /// Their images, by name.
    pub images: Vec<ReportedImage>,
    /// Permissions without which something could not be read.
    pub missing_permissions: Vec<String>,
}

/// One workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReportedWorkload {
    /// Kind of its top owner, for example `Deployment` or `Rollout`.
    pub kind: String,
    /// Its namespace; null if a manifest does not say it.
    pub namespace: Option<String>,
    /// Name of the workload.
    pub name: String,
    /// The number of its pods; for a manifest, the number of replicas.
    pub pods: u64,
    /// CPU that its pods request together, in thousandths of a core.
    pub cpu_millicores: u64,
    /// Memory that its pods request together.
    pub memory_bytes: u64,
    /// The images of its pods.
    pub images: Vec<String>,
    /// The architectures on which all of its images run, or which its author states. Null if no
    /// image limits it, or if an image could not be resolved.
    pub architectures: Option<Vec<String>>,
    /// Why some of its images are not known at all: a container without image, an object that names
    /// images at a place that archaware does not know, a file that cannot be read.
    pub unread: Vec<String>,
    /// For each requested architecture: whether the workload could run on it.
    pub answers: Vec<Answer>,
    /// The number of its pods with a node, by architecture of the node.
    pub runs_on: BTreeMap<String, u64>,
    /// Its pods on nodes that do not run one of their images, or a program in an image.
    pub misplaced: Vec<MisplacedPod>,
}

/// Whether a workload could run on an architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The architecture.
    pub architecture: String,
    /// `yes`, `no`, or `unknown` if an image is not known and nothing else says `no`.
    pub can_run: CanRun,
    /// The images that do not exist for it.
    pub blocked_by: Vec<String>,
    /// The images that could not be resolved.
    pub unknown: Vec<String>,
    /// Whether the workload's node selector, node affinity or annotation of architectures excludes
    /// the architecture.
    pub excluded: bool,
    /// The architectures of the existing nodes that its node selector and node affinity select by
    /// other labels, if the asked architecture is not among them.
    pub pinned_to: Vec<String>,
}

/// Whether something can run.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema, strum::IntoStaticStr,
)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "lowercase")]
pub enum CanRun {
    /// It can.
    Yes,
    /// It cannot.
    No,
    /// It is not known.
    Unknown,
}

impl CanRun {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// One image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReportedImage {
    /// The image as workloads name it.
    pub image: String,
    /// Its platforms, of every OS.
    pub platforms: Vec<String>,
    /// The architectures of the nodes that run the image. Null if the image does not limit its
    /// pods, or could not be resolved.
    pub architectures: Option<Vec<String>>,
    /// The number of workloads that use the image.
    pub workloads: u64,
    /// Why it could not be resolved.
    pub error: Option<ReportedError>,
}

/// Why an image could not be resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReportedError {
    /// One of a fixed set: `NotFound`, `Denied`, …
    pub reason: &'static str,
    /// The error message.
    pub message: String,
}

impl KnownImage {
    /// Whether nodes of an architecture run it; `None` if it is not known.
    fn runs_on(&self, architecture: &Architecture) -> Option<bool> {
        match self {
            Self::Resolved { architectures, .. } => {
                let set = architectures.as_ref();
                Some(set.is_none_or(|set| set.contains(architecture.as_str())))
            }
            Self::Failed { .. } => None,
        }
    }
}

impl KnownWorkload {
    fn answer(&self, architecture: &Architecture) -> Answer {
        let mut blocked_by = Vec::new();
        let mut unknown = Vec::new();
        let mut excluded = self.excluded.contains(architecture);
        if let Some(stated) = &self.stated {
            excluded |= !stated.contains(architecture.as_str());
        } else {
            for (name, image) in &self.images {
                match image.runs_on(architecture) {
                    Some(true) => {}
                    Some(false) => blocked_by.push(name.clone()),
                    None => unknown.push(name.clone()),
                }
            }
        }
        let pinned = self.pinned_to.as_ref();
        let pinned = pinned.filter(|set| !set.contains(architecture.as_str()));
        let is_read = self.stated.is_some() || self.unread.is_empty();
        let can_run = if excluded || pinned.is_some() || !blocked_by.is_empty() {
            CanRun::No
        } else if unknown.is_empty() && is_read {
            CanRun::Yes
        } else {
            CanRun::Unknown
        };
        Answer {
            architecture: architecture.to_string(),
            can_run,
            blocked_by,
            unknown,
            excluded,
            pinned_to: pinned.into_iter().flatten().cloned().collect(),
        }
    }

    /// The architectures that its author states, else those on which all of its images run;
    /// `None` if no image limits the workload, or if an image could not be resolved.
    fn architectures(&self) -> Option<Architectures> {
        if let Some(stated) = &self.stated {
            return Some(stated.clone());
        }
        if !self.unread.is_empty() {
            return None;
        }
        let mut shared: Option<Architectures> = None;
        for image in self.images.values() {
            match image {
                KnownImage::Failed { .. } => return None,
                KnownImage::Resolved { architectures, .. } => {
                    let Some(image_architectures) = architectures else {
                        continue;
                    };
                    shared = Some(shared.map_or_else(
                        || image_architectures.clone(),
                        |shared| shared.and(image_architectures),
                    ));
                }
            }
        }
        shared
    }
}

/// The report about workloads. `asked_architectures`: the architectures that the user asks about.
pub fn report(
    source: String,
    mut workloads: Vec<KnownWorkload>,
    asked_architectures: &[Architecture],
    missing_permissions: Vec<String>,
) -> Report {
    let order = |workload: &KnownWorkload| {
        (
            workload.namespace.clone(),
            workload.kind.clone(),
            workload.name.clone(),
        )
    };
    workloads.sort_by_cached_key(order);
    let summaries = asked_architectures
        .iter()
        .map(|architecture| Summary::for_architecture(architecture, &workloads));
    Report {
        source,
        summaries: summaries.collect(),
        images: images(&workloads),
        workloads: workloads
            .iter()
            .map(|workload| ReportedWorkload {
                kind: workload.kind.clone(),
                namespace: workload.namespace.clone(),
                name: workload.name.clone(),
                pods: workload.pods,
                cpu_millicores: workload.requests.cpu_millicores,
                memory_bytes: workload.requests.memory_bytes,
                images: workload.images.keys().cloned().collect(),
                architectures: workload
                    .architectures()
                    .as_ref()
                    .map(Architectures::to_strings),
                unread: workload.unread.clone(),
                answers: asked_architectures
                    .iter()
                    .map(|architecture| workload.answer(architecture))
                    .collect(),
                runs_on: workload.runs_on.clone(),
                misplaced: workload.misplaced.clone(),
            })
            .collect(),
        missing_permissions,
    }
}

fn images(workloads: &[KnownWorkload]) -> Vec<ReportedImage> {
    let mut by_name: BTreeMap<&String, (u64, &KnownImage)> = BTreeMap::new();
    for (name, image) in workloads.iter().flat_map(|workload| &workload.images) {
        let known = by_name.entry(name).or_insert((0, image));
        known.0 += 1;
        // The image may be readable with the credentials of another namespace.
        if matches!(known.1, KnownImage::Failed { .. }) {
            known.1 = image;
        }
    }
    let reported = by_name.into_iter().map(|(name, (workloads, image))| {
        let (platforms, architectures, error) = match image {
            KnownImage::Resolved {
                platforms,
                architectures,
                ..
            } => (
                platforms.clone(),
                architectures.as_ref().map(Architectures::to_strings),
                None,
            ),
            KnownImage::Failed { reason, message } => (
                Vec::new(),
                None,
                Some(ReportedError {
                    reason,
                    message: message.clone(),
                }),
            ),
        };
        ReportedImage {
            image: name.clone(),
            platforms,
            architectures,
            workloads,
            error,
        }
    });
    reported.collect()
}

#[cfg(test)]
mod tests;
