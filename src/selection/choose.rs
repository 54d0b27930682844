//! Chooses the image of one container, by a model or by rules, for the nodes that its pod can land
//! on.

use std::{collections::BTreeSet, sync::Arc};

use crate::{evaluate::ImageAlternatives, image::ImageError};

use super::{
    Selecting,
    alternatives::alternative,
    by_rules::image_of,
    compatibility::{CompatibilityDocument, ImageSelection, NodeGroup},
    fitting::NotEvaluated,
    groups::AlikeNodes,
    landing::{Chosen, Pod, Unselected, count},
    problem::{NoMatch, SelectionProblem},
};

impl Selecting<'_> {
    /// Chooses the image of one container: by a model if the document has one and its server
    /// answers, otherwise by rules.
    pub(super) async fn choose_image<'a>(
        &self,
        pod: &Pod<'_>,
        selection: &ImageSelection,
        document: &Arc<CompatibilityDocument>,
        (alike, groups): (&Arc<[AlikeNodes]>, &[NodeGroup<'a>]),
        explained_candidates: Option<&mut Vec<ImageAlternatives>>,
    ) -> Result<Chosen<'a>, Unselected> {
        if !document.models.is_empty() {
            match self.predict(pod, selection, document, groups).await {
                Ok((chosen, candidates)) => {
                    if let Some(explained_candidates) = explained_candidates {
                        explained_candidates.push(ImageAlternatives {
                            container: selection.container.clone(),
                            document: selection.document.clone(),
                            selects_image: true,
                            nodes: count(groups),
                            candidates: candidates.iter().map(alternative).collect(),
                        });
                    }
                    return Ok(chosen);
                }
                // No model decided, so the rules of the document decide.
                Err(Unselected::Because(_)) if !document.entries.is_empty() => {}
                Err(other) => return Err(other),
            }
        }
        let nodes = count(groups);
        let fits = self.fits(pod, document, alike, groups).await;
        let fits = fits.map_err(|why| match why {
            NotEvaluated::TooMuch(why) => Unselected::Because(SelectionProblem::TooLarge {
                container: selection.container.clone(),
                document: selection.document.clone(),
                why: why.to_string(),
            }),
            NotEvaluated::Late | NotEvaluated::Stopping => {
                let error = ImageError::unanswered(&selection.document, why.to_string(), None);
                Unselected::Failed(selection.document.clone(), Box::new(error))
            }
        })?;
        let mut candidates = Vec::new();
        let of_document = explained_candidates.as_ref().map(|_| &mut candidates);
        let choice = self.choose(
            pod,
            &selection.document,
            document,
            (groups, &fits),
            of_document,
        );
        let choice = choice.await?;
        if let Some(explained_candidates) = explained_candidates {
            explained_candidates.push(ImageAlternatives {
                container: selection.container.clone(),
                document: selection.document.clone(),
                selects_image: true,
                nodes,
                candidates: candidates.iter().map(alternative).collect(),
            });
        }
        let choice = choice.map_err(|passed_over| {
            Unselected::Because(SelectionProblem::NoMatch(NoMatch {
                container: selection.container.clone(),
                document: selection.document.clone(),
                nodes,
                more: document.entries.len() - passed_over.len(),
                passed_over,
            }))
        })?;
        let image = image_of(document, choice.best.entry, &selection.document);
        let nodes = choice.nodes().ok_or_else(|| {
            Unselected::Because(SelectionProblem::NotSelectable {
                container: selection.container.clone(),
                image: image.clone(),
            })
        })?;
        let set = self.runs_on(pod, &image).await?;
        let nodes = nodes.on(set.as_ref());
        let fitting = std::iter::once(&choice.best).chain(&choice.further);
        let fitting = fitting.flat_map(|fit| fit.groups.iter().map(|group| group.index));
        let fitting: BTreeSet<usize> = fitting.collect();
        // Keeps only the groups that this container's node affinity selects: the image of the next
        // container is chosen for these groups.
        let groups = groups.iter().copied();
        let groups =
            groups.filter(|group| fitting.contains(&group.index) && nodes.select_group(group));
        Ok(Chosen {
            groups: groups.collect(),
            image,
            nodes,
        })
    }
}
