//! How many workloads can run on an architecture, and which images keep the most workloads from it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::platform::{Architecture, Architectures};

use super::{CanRun, KnownImage, KnownWorkload};

/// Workloads, and the sum of their requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Amount {
    /// How many workloads.
    pub workloads: u64,
    /// How many pods they have.
    pub pods: u64,
    /// CPU that the pods request, in thousandths of a core.
    pub cpu_millicores: u64,
    /// Memory that the pods request.
    pub memory_bytes: u64,
}

/// The workloads that can run on an architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// The architecture.
    pub architecture: String,
    /// All workloads.
    pub total: Amount,
    /// Pods that are on nodes of this architecture already.
    pub pods_there: u64,
    /// Workloads that can run on this architecture today.
    pub can_run: Amount,
    /// Workloads that only one image keeps from this architecture, and nothing else.
    pub blocked_by_one_image: Amount,
    /// Other workloads that cannot run on this architecture. Several images lack it; or the
    /// author's node selector, affinity or annotation excludes it; or one image lacks it, and
    /// another image is not known.
    pub blocked_otherwise: Amount,
    /// Workloads with an image that is not known, and without a known obstacle.
    pub unknown: Amount,
    /// The images that keep workloads from this architecture; first the images that are the only
    /// obstacle of the most workloads.
    pub blockers: Vec<Blocker>,
}

/// An image that does not exist for an architecture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Blocker {
    /// The image.
    pub image: String,
    /// The architectures for which it exists.
    pub architectures: Vec<String>,
    /// The workloads that use the image.
    pub blocks: Amount,
    /// The workloads that nothing but this image keeps from the architecture.
    pub blocks_alone: Amount,
}

impl Amount {
    pub(super) fn add(&mut self, workload: &KnownWorkload) {
        let requests = workload.requests;
        self.workloads += 1;
        self.pods = self.pods.saturating_add(workload.pods);
        self.cpu_millicores = self.cpu_millicores.saturating_add(requests.cpu_millicores);
        self.memory_bytes = self.memory_bytes.saturating_add(requests.memory_bytes);
    }
}

impl Summary {
    pub(super) fn for_architecture(
        architecture: &Architecture,
        workloads: &[KnownWorkload],
    ) -> Self {
        let mut summary = Self {
            architecture: architecture.to_string(),
            total: Amount::default(),
            pods_there: 0,
            can_run: Amount::default(),
            blocked_by_one_image: Amount::default(),
            blocked_otherwise: Amount::default(),
            unknown: Amount::default(),
            blockers: Vec::new(),
        };
        let mut blockers: BTreeMap<String, Blocker> = BTreeMap::new();
        for workload in workloads {
            summary.total.add(workload);
            let there = workload.runs_on.get(architecture.as_str());
            summary.pods_there += there.copied().unwrap_or_default();
            let answer = workload.answer(architecture);
            let only = answer.blocked_by.len() == 1
                && answer.unknown.is_empty()
                && !answer.excluded
                && answer.pinned_to.is_empty()
                && workload.unread.is_empty();
            let amount = match answer.can_run {
                CanRun::Yes => &mut summary.can_run,
                CanRun::Unknown => &mut summary.unknown,
                CanRun::No if only => &mut summary.blocked_by_one_image,
                CanRun::No => &mut summary.blocked_otherwise,
            };
            amount.add(workload);
            for image in answer.blocked_by {
                let known_image = workload.images.get(&image);
                let blocker = blockers.entry(image).or_insert_with_key(|image| Blocker {
                    image: image.clone(),
                    architectures: known_image.map(architectures).unwrap_or_default(),
                    blocks: Amount::default(),
                    blocks_alone: Amount::default(),
                });
                blocker.blocks.add(workload);
                if only {
                    blocker.blocks_alone.add(workload);
                }
            }
        }
        summary.blockers = blockers.into_values().collect();
        let most = |blocker: &Blocker| {
            let (alone, all) = (blocker.blocks_alone, blocker.blocks);
            (
                alone.workloads,
                alone.cpu_millicores,
                all.workloads,
                all.cpu_millicores,
            )
        };
        // Stable: images with equal numbers stay in the order of their names.
        summary
            .blockers
            .sort_by_key(|blocker| std::cmp::Reverse(most(blocker)));
        summary
    }
}

fn architectures(image: &KnownImage) -> Vec<String> {
    match image {
        KnownImage::Resolved { architectures, .. } => architectures
            .as_ref()
            .map(Architectures::to_strings)
            .unwrap_or_default(),
        KnownImage::Failed { .. } => Vec::new(),
    }
}
