//! The choice by the rules of a document for one container.

use std::collections::BTreeMap;

use crate::{image::Reference, platform::Architectures};

use super::{
    Selecting,
    compatibility::{
        Candidate, Choice, Compatibility, CompatibilityDocument, Fits, ImageFit, NoChoice,
        NodeGroup, PassedOver, RuleKeys,
    },
    landing::{Pod, Unselected},
};

/// An image that was resolved.
struct KnownImage {
    /// The node architectures that run it; `None` if it does not limit its pod.
    architectures: Option<Architectures>,
    /// Whether all considered nodes run it.
    runs_on_all: bool,
}

impl Selecting<'_> {
    /// Chooses an entry for one container. If no entry fits, returns why the first entries do not
    /// fit.
    pub(super) async fn choose<'d>(
        &self,
        pod: &Pod<'_>,
        reference: &str,
        document: &'d CompatibilityDocument,
        (groups, fits): (&[NodeGroup<'d>], &Fits),
        explained_candidates: Option<&mut Vec<Candidate>>,
    ) -> Result<Result<Choice<'d>, Vec<PassedOver>>, Unselected> {
        let names_fields = pod.subject.spec.author_nodes().names_fields();
        let fit = |image: Option<&KnownImage>, entry: &Compatibility, group: &NodeGroup<'_>| {
            let Some(image) = image else {
                return ImageFit::Unknown;
            };
            if !self.can_run(pod, image.architectures.as_ref(), group) {
                ImageFit::OtherArchitecture
            } else if names_fields && !(image.runs_on_all && fits.fit_all(entry)) {
                // archaware does not change affinity terms that name nodes (`matchFields`), so an
                // entry has to fit all named nodes.
                ImageFit::NotOnAllNamed
            } else {
                ImageFit::Runs
            }
        };
        // Reads images up to the first entry that can be chosen.
        let mut known_images: BTreeMap<String, KnownImage> = BTreeMap::new();
        for entry in document.candidates() {
            let fitting = || groups.iter().filter(|group| fits.fits(entry, group));
            if fitting().next().is_none() {
                continue;
            }
            let name = image_of(document, entry, reference);
            if !known_images.contains_key(&name) {
                let architectures = self.runs_on(pod, &name).await?;
                let can_run = |group| self.can_run(pod, architectures.as_ref(), group);
                let runs_on_all = groups.iter().all(can_run);
                let image = KnownImage {
                    architectures,
                    runs_on_all,
                };
                known_images.insert(name.clone(), image);
            }
            let image = known_images.get(&name);
            if fitting().any(|group| fit(image, entry, group) == ImageFit::Runs) {
                break;
            }
        }
        // Indexed by entry, because the image is looked up for each pair of an entry and a group.
        let entries = document.entries.iter();
        let of_entries: Vec<Option<&KnownImage>> = entries
            .map(|entry| known_images.get(&image_of(document, entry, reference)))
            .collect();
        let runs = |entry: &Compatibility, group: &NodeGroup<'_>| {
            fit(of_entries.get(entry.index).copied().flatten(), entry, group)
        };
        let choice = match Choice::choose(document, groups, fits, &runs) {
            Ok(choice) => Ok(choice),
            Err(NoChoice::Nothing(passed_over)) => Err(passed_over),
            // Unreachable: the loop above read every image that this choice needs.
            Err(NoChoice::Unknown(_)) => Err(Vec::new()),
        };
        if let Some(explained_candidates) = explained_candidates {
            *explained_candidates =
                Candidate::list(document, choice.as_ref().ok(), groups, fits, &runs);
        }
        Ok(choice)
    }
}

/// The image of an entry. In documents of ocifit-k8s it is the entry's tag. In documents of NFD it
/// is the document's subject; without a subject it is `reference`, the document's own reference.
pub(super) fn image_of(
    document: &CompatibilityDocument,
    entry: &Compatibility,
    reference: &str,
) -> String {
    match (document.keys, &document.subject) {
        (RuleKeys::Labels, _) => entry.tag.clone(),
        (RuleKeys::Features, None) => reference.to_owned(),
        (RuleKeys::Features, Some(digest)) => Reference::parse(reference).map_or_else(
            |_| reference.to_owned(),
            |image| format!("{}@{digest}", image.name()),
        ),
    }
}
