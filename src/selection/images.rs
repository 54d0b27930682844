//! Image selection for one pod: reads the compatibility documents that the pod names, and chooses
//! images that fit nodes on which the pod can land.

use futures::{FutureExt, future::BoxFuture};
use tokio::time::timeout_at;

use crate::{
    cluster::{api::ApiClient, objects::PodSpec},
    evaluate::{
        Evaluator, ImageAlternatives, Stage, Subject, Verdict,
        source::{DemandSource, Evaluating},
    },
    image::ImageError,
    placement::{
        Decision, Mode,
        change::AffinityAccess,
        demand::{Demand, ImageChange, Source},
        mode::Handling,
        record,
    },
};

use super::{
    ImageSelector, Selecting,
    compatibility::{self, ImageSelection, InvalidSelection, MAX_MEMORY, SelectedNodes},
    landing::{Pod, Unselected},
    problem::SelectionProblem,
};

/// The images that were selected for a pod.
#[derive(Clone, Debug, Default)]
struct SelectedImages {
    /// The chosen images, including those that the container already has.
    images: Vec<ImageChange>,
    /// The requirements of these images on nodes.
    nodes: SelectedNodes,
    /// Reasons why no image was selected, for each selection that failed.
    problems: Vec<SelectionProblem>,
    /// All candidates, with [`Evaluator::explains`].
    candidates: Vec<ImageAlternatives>,
    /// Documents and images that could not be read in time.
    failed: Vec<(String, ImageError)>,
    /// The spec with the selected images.
    spec: Option<PodSpec>,
}

/// The selection of images by compatibility documents, for pods that ask for it.
pub struct ImageSelectionSource(pub ImageSelector);

impl DemandSource for ImageSelectionSource {
    fn ask<'a>(
        &'a self,
        evaluator: &'a Evaluator,
        pod: &'a mut Evaluating<'_>,
    ) -> Option<BoxFuture<'a, ()>> {
        let subject = pod.subject();
        let is_requested = pod.handling != Handling::Mode(Mode::Ignore)
            && compatibility::is_requested(subject.annotations, subject.labels);
        let ask = async move {
            let selecting = Selecting {
                evaluator,
                parts: &self.0.0,
            };
            let selected = selecting.select_images(pod).await;
            if let Some(spec) = selected.spec {
                *pod.spec_mut() = spec;
            }
            let problems = selected.problems.iter().map(SelectionProblem::notice);
            let evaluation = &mut pod.evaluation;
            evaluation.raised.extend(problems);
            evaluation.alternatives = selected.candidates;
            pod.unread = selected.failed;
            if !selected.images.is_empty() {
                evaluation.demands.push(Demand {
                    require: selected.nodes.required,
                    prefer: selected.nodes.preferred,
                    images: selected.images,
                    ..Demand::from_source(Source::ImageSelection)
                });
            }
        };
        is_requested.then(|| ask.boxed())
    }

    fn follow(&self, api: &ApiClient) -> Option<(&'static str, BoxFuture<'static, ()>)> {
        let reading = self.0.0.nodes.features.clone().follow(api.clone());
        Some(("watch of NodeFeatures", reading.boxed()))
    }
}

impl Selecting<'_> {
    /// Selects the images of a pod that asks for it.
    async fn select_images(&self, evaluating: &Evaluating<'_>) -> SelectedImages {
        let (subject, deadline) = (evaluating.subject(), evaluating.deadline);
        let mut selected = SelectedImages::default();
        let mut spec = subject.spec.clone();
        let requested = match requested(subject) {
            Ok(requested) => requested,
            Err(invalid) => {
                selected.problems.push(invalid.into());
                return selected;
            }
        };
        if requested.is_empty() {
            return selected;
        }
        if subject.stage != Stage::Template && subject.affinity_access() == AffinityAccess::Closed {
            let containers = requested.into_iter().map(|selection| selection.container);
            selected.problems = containers.map(SelectionProblem::Created).collect();
            return selected;
        }
        // An image that is still to be selected does not limit the pod.
        spec.set_images(
            requested
                .iter()
                .map(|selection| (selection.container.as_str(), None)),
        );
        if subject.stage == Stage::Template {
            selected.spec = Some(spec);
            return selected;
        }
        let secrets = &self.evaluator.pull_secrets;
        let credentials = secrets.for_pod(subject.namespace, subject.spec, false);
        let limit = match &evaluating.handling {
            Handling::Mode(Mode::Any | Mode::Ignore) => None,
            Handling::Architectures(set) => Some(set.clone()),
            Handling::Mode(Mode::Inspect) => {
                let resolving =
                    self.evaluator
                        .resolve_images(&spec, subject.namespace, &credentials, deadline);
                let (images, failed) = resolving.await;
                match self.evaluator.verdict(&images, &failed, None) {
                    // The other images already leave no architecture, so a selection cannot help.
                    Verdict::Decided(Decision::NoCommonArchitecture) => return selected,
                    Verdict::Decided(Decision::Architectures(set)) => Some(set),
                    Verdict::Unresolved { known, .. } => known,
                    Verdict::Decided(Decision::TolerateAll) | Verdict::Skip => None,
                }
            }
        };
        // The API server accepts no additional affinity terms for an existing pod that has terms,
        // so this pod can get only one alternative.
        let is_single = subject.affinity_access() == AffinityAccess::Narrowing
            && subject.spec.author_nodes().has_terms();
        let earlier = &evaluating.evaluation.demands;
        let required = earlier.required();
        let pod = Pod {
            subject,
            credentials: &credentials,
            deadline,
            limit,
            required: if is_single {
                required.truncated(1)
            } else {
                required
            },
            tolerations: earlier.tolerations().collect(),
        };
        self.select(&pod, &requested, &mut selected).await;
        // If a container keeps its image, this image limits the pod again.
        let failed_selections = requested.iter().filter(|selection| {
            let mut problems = selected.problems.iter();
            problems.any(|problem| problem.container() == Some(&selection.container))
        });
        let original = |name: &str| {
            let mut containers = subject.spec.selectable();
            let (_, container) = containers.find(|(_, container)| container.name == name)?;
            container.image.as_deref()
        };
        spec.set_images(
            failed_selections
                .map(|selection| (selection.container.as_str(), original(&selection.container))),
        );
        let chosen = selected.images.iter();
        spec.set_images(chosen.map(|change| (change.container.as_str(), Some(change.to.as_str()))));
        selected.spec = Some(spec);
        selected
    }

    /// Chooses the images of one container after the other. Each choice considers only the nodes
    /// that fit the images chosen before.
    async fn select(
        &self,
        pod: &Pod<'_>,
        requested: &[ImageSelection],
        selected: &mut SelectedImages,
    ) {
        let place = self.parts.pods.enter(pod.subject.namespace);
        let Ok(_place) = timeout_at(pod.deadline, place).await else {
            let why = "images are being selected for too many other pods of this namespace";
            selected.failed.extend(requested.iter().map(|selection| {
                let error = ImageError::unanswered(&selection.document, why, None);
                (selection.document.clone(), error)
            }));
            return;
        };
        let mut documents = Vec::new();
        let mut memory = 0;
        for selection in requested {
            match self.compatibility(pod, &selection.document).await {
                Ok(document) if memory + document.memory > MAX_MEMORY => {
                    selected.problems.push(SelectionProblem::TooLarge {
                        container: selection.container.clone(),
                        document: selection.document.clone(),
                        why: "the documents of the pod take too much memory together".to_owned(),
                    });
                }
                Ok(document) => {
                    memory += document.memory;
                    documents.push((selection, document));
                }
                Err(error) => selected.failed.push((selection.document.clone(), error)),
            }
        }
        let all_documents: Vec<_> = documents.iter().map(|(_, document)| &**document).collect();
        let Ok(alike) = self.landing(pod, &all_documents).await else {
            let why = "the nodes of the cluster, or their NodeFeature objects, are not listed yet";
            let failures = documents.iter().map(|(selection, _)| {
                let error = ImageError::unanswered(&selection.document, why, None);
                (selection.document.clone(), error)
            });
            selected.failed.extend(failures);
            return;
        };
        let mut groups = pod.groups(&alike);
        for (selection, document) in &documents {
            let explained_candidates = self.evaluator.explains.then_some(&mut selected.candidates);
            let landing = (&alike, groups.as_slice());
            let chosen = match self
                .choose_image(pod, selection, document, landing, explained_candidates)
                .await
            {
                Ok(chosen) => chosen,
                Err(Unselected::Failed(image, error)) => {
                    selected.failed.push((image, *error));
                    continue;
                }
                Err(Unselected::Because(problem)) => {
                    selected.problems.push(problem);
                    continue;
                }
            };
            groups.retain(|group| chosen.groups.iter().any(|fit| group.is_same(fit)));
            let earlier_nodes = std::mem::take(&mut selected.nodes);
            selected.nodes = earlier_nodes.and_on(chosen.nodes, &groups);
            selected.images.push(ImageChange {
                container: selection.container.clone(),
                from: pod.image_of(&selection.container),
                to: chosen.image,
            });
        }
        let nodes = std::mem::take(&mut selected.nodes);
        selected.nodes = nodes.sorted_by(&groups);
    }
}

/// The containers whose images are still to be selected.
fn requested(subject: Subject<'_>) -> Result<Vec<ImageSelection>, InvalidSelection> {
    let containers = subject.spec.selectable();
    let containers: Vec<(&str, &str)> = containers
        .map(|(_, container)| {
            (
                container.name.as_str(),
                container.image.as_deref().unwrap_or_default(),
            )
        })
        .collect();
    // A container for which an image was selected before is left out, whatever its image is now.
    let recorded_changes = match subject.stage {
        Stage::Pod => record::read(subject.annotations).images,
        Stage::Template | Stage::Creation => Vec::new(),
    };
    let requested = compatibility::requested(subject.annotations, subject.labels, &containers);
    let mut requested = match requested {
        // The image to replace is gone, because it was replaced before.
        Err(InvalidSelection::NoTarget(_)) if !recorded_changes.is_empty() => return Ok(Vec::new()),
        other => other?,
    };
    requested.retain(|selection| {
        !recorded_changes
            .iter()
            .any(|change| change.container == selection.container)
    });
    Ok(requested)
}
