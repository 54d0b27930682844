//! Facts about the images of a pod.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use crate::{
    evaluate::{EvaluatedImage, Verdict},
    image::{ImageError, credentials::CredentialSource},
    platform::{ImageArchitectures, NoPlatformReason},
};

use super::{ExistingPod, Facts};

/// An image, as `archaware inspect` shows it, and its credential.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedImage {
    /// The name of the image in the pod.
    pub image: String,
    /// The containers with this image; image volumes are not listed.
    pub containers: Vec<String>,
    /// The normalised name.
    pub reference: Option<String>,
    /// The digest of the index or manifest.
    pub digest: Option<String>,
    /// The platforms of the image, for every OS.
    pub platforms: Vec<String>,
    /// The architectures for the pod's OS; null if the image does not limit the pod: it names no
    /// platform, is not resolved, or is for Windows while the pod states no OS.
    pub architectures: Option<Vec<String>>,
    /// `registry`, `containerd` or `memory`; `nodes` if the image is never pulled, so that the
    /// architectures of the nodes that hold it count.
    pub source: Option<&'static str>,
    /// The place of the credential that the registry asked for; never its content.
    pub credential: Option<String>,
    /// Why the image names no platform, or limits no pod.
    pub note: Option<&'static str>,
    /// Why the image could not be resolved.
    pub error: Option<ExplainedError>,
}

/// Why an image could not be resolved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExplainedError {
    /// One of a fixed set: `NotFound`, `Denied`, `Unavailable`, …
    pub reason: &'static str,
    /// The error message.
    pub message: String,
    /// The places of credentials for the image, in the order in which archaware tried them.
    pub tried: Vec<String>,
    /// When archaware tries again; null if it does not, because the pod has a node, or tolerates
    /// every architecture.
    pub next_try: Option<String>,
}

pub(super) fn explain_images(facts: &Facts<'_>) -> Vec<ExplainedImage> {
    let containers = containers(facts);
    let containers_of = |name: &str| containers.get(name).cloned().unwrap_or_default();
    let resolved = facts.images.iter().map(|image| ExplainedImage {
        containers: containers_of(&image.name),
        ..ExplainedImage::resolved(image)
    });
    let waits = matches!(facts.evaluation.verdict, Verdict::Unresolved { .. });
    let is_retried = waits && facts.pod.is_none_or(ExistingPod::is_pending);
    let failed = facts.failed.iter().map(|(name, error)| {
        let tried = facts.tried.get(name).map(Vec::as_slice);
        ExplainedImage {
            containers: containers_of(name),
            ..ExplainedImage::failed(name, error, tried.unwrap_or_default(), is_retried)
        }
    });
    let mut explained_images: Vec<_> = resolved.chain(failed).collect();
    explained_images.sort_by(|a, b| a.image.cmp(&b.image));
    explained_images
}

/// The names of containers by their image. Selected images replace the images of the pod.
fn containers(facts: &Facts<'_>) -> BTreeMap<String, Vec<String>> {
    let replaced = |container: &str| {
        let mut changes = facts.evaluation.demands.images();
        changes.find(|change| change.container == container)
    };
    let spec = facts.subject.spec;
    let container_lists = [
        &spec.init_containers,
        &spec.containers,
        &spec.ephemeral_containers,
    ];
    let mut by_image: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for container in container_lists.into_iter().flatten() {
        let pod_image = container.image.clone().unwrap_or_default();
        let image = replaced(&container.name).map_or(pod_image, |change| change.to.clone());
        by_image
            .entry(image)
            .or_default()
            .push(container.name.clone());
    }
    by_image
}

impl ExplainedImage {
    fn named(image: &str) -> Self {
        Self {
            image: image.to_owned(),
            containers: Vec::new(),
            reference: None,
            digest: None,
            platforms: Vec::new(),
            architectures: None,
            source: None,
            credential: None,
            note: None,
            error: None,
        }
    }

    fn resolved(image: &EvaluatedImage) -> Self {
        let resolved = image.resolved.as_ref();
        let platforms = image.platforms.platforms().iter();
        let reason = image.platforms.no_platform_reason();
        let credential = resolved.and_then(|resolved| resolved.credential.as_ref());
        Self {
            reference: resolved.map(|resolved| resolved.reference.to_string()),
            digest: resolved.map(|resolved| resolved.digest.to_string()),
            platforms: platforms.map(ToString::to_string).collect(),
            architectures: image
                .architectures
                .as_ref()
                .map(ImageArchitectures::to_strings),
            source: Some(resolved.map_or("nodes", |resolved| resolved.source.as_str())),
            credential: credential.map(ToString::to_string),
            note: reason.map(NoPlatformReason::as_str),
            ..Self::named(&image.name)
        }
    }

    fn failed(
        image: &str,
        error: &ImageError,
        tried: &[CredentialSource],
        is_retried: bool,
    ) -> Self {
        let error = ExplainedError {
            reason: error.reason().as_str(),
            message: error.chain(),
            tried: tried.iter().map(ToString::to_string).collect(),
            next_try: is_retried.then(|| next_try(error)),
        };
        Self {
            error: Some(error),
            ..Self::named(image)
        }
    }
}

/// When archaware asks for an image again. This is a range of pauses, because only the controller
/// counts the failures.
fn next_try(error: &ImageError) -> String {
    if let Some(after) = error.retry_after() {
        return format!("in {} s, as its registry asks", after.as_secs());
    }
    match error.reason().backoff() {
        Some(backoff) => format!(
            "after {} s, then with pauses that grow to {} s",
            backoff.first.as_secs(),
            backoff.max.as_secs()
        ),
        None => "when the pod changes".to_owned(),
    }
}

/// For example `app:1.4 is for amd64 only`.
pub(super) fn say_lacking(images: &[&EvaluatedImage]) -> Option<String> {
    let limits_of = |image: &EvaluatedImage| {
        let set = image.architectures.as_ref();
        let set = set.filter(|set| !set.is_empty());
        let set = set.map(|set| format!("for {} only", set.join(", ")));
        set.unwrap_or_else(|| "for another OS".to_owned())
    };
    match images {
        [] => None,
        [image] => Some(format!("{} is {}", image.name, limits_of(image))),
        [image, rest @ ..] => {
            let more = match rest {
                [other] => format!(", {} is {}", other.name, limits_of(other)),
                rest => format!(", and {} more images", rest.len()),
            };
            Some(format!("{} is {}{more}", image.name, limits_of(image)))
        }
    }
}
