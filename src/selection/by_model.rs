//! Lets a model choose the image of one container.

use tokio::time::timeout_at;

use crate::{
    placement::{
        annotation::OCIFIT_PREFIX,
        node_set::NodeSet,
        requirement::{Operator, Requirement},
    },
    text::{brief, brief_list},
};

use super::{
    Selecting,
    compatibility::{
        Candidate, CandidateOutcome, CompatibilityDocument, ImageSelection, NodeGroup,
        SelectedNodes,
    },
    landing::{Chosen, Pod, Unselected},
    problem::SelectionProblem,
};

/// Maximum characters of a model's name in a message, and maximum number of names.
const MAX_NAME: usize = 64;
const MAX_NAMES: usize = 8;

impl Selecting<'_> {
    /// Lets a model choose. Also returns the result for each image of the model.
    pub(super) async fn predict<'a>(
        &self,
        pod: &Pod<'_>,
        selection: &ImageSelection,
        document: &CompatibilityDocument,
        groups: &[NodeGroup<'a>],
    ) -> Result<(Chosen<'a>, Vec<Candidate>), Unselected> {
        let because = |why: String| {
            Unselected::Because(SelectionProblem::Model {
                container: selection.container.clone(),
                document: selection.document.clone(),
                why,
            })
        };
        let mut models = document.models.iter();
        let model = match &selection.model {
            Some(name) => models.find(|model| model.tag == *name),
            None => models.next().filter(|_| document.models.len() == 1),
        };
        let model = model.ok_or_else(|| {
            let names = document
                .models
                .iter()
                .map(|model| brief(&model.tag, MAX_NAME));
            let names = brief_list(names, ", ", MAX_NAMES);
            let annotation = format!("{OCIFIT_PREFIX}model");
            because(match &selection.model {
                Some(name) => format!(
                    "it has no model {:?}, which the annotation {annotation} names, only {names}",
                    brief(name, MAX_NAME)
                ),
                None => {
                    format!("the annotation {annotation} has to name one of its models: {names}")
                }
            })
        })?;
        let predictor = self.parts.predictor.as_ref();
        let predictor =
            predictor.ok_or_else(|| because("selection.predictor is not configured".to_owned()))?;
        // The groups also have labels that the pod or other documents name: the server does not get
        // those.
        let predictor_labels = predictor.labels();
        let labels = |group: &NodeGroup<'a>| {
            let group_labels = group.facts.labels.iter();
            let sent = group_labels.filter(|(key, _)| predictor_labels.contains(key));
            sent.map(|(key, value)| (key.as_str(), value.as_str()))
                .collect()
        };
        let features = groups.iter().map(labels).collect();
        let prediction = timeout_at(
            pod.deadline,
            predictor.ask(pod.subject.namespace, model, features),
        );
        let answer = prediction
            .await
            .unwrap_or_else(|_| Err("no answer in time".into()));
        let answer = answer.map_err(|why| because(format!("selection.predictor: {why}")))?;
        let image = model.images.get(&answer.architecture);
        let image = image.ok_or_else(|| {
            because(format!(
                "the model has no image for the architecture {:?}, which selection.predictor chose",
                answer.architecture
            ))
        })?;
        let set = self.runs_on(pod, image).await?;
        let fits = |group: &&NodeGroup<'_>| {
            let value = group.facts.labels.get(&answer.label);
            value == Some(&answer.value) && self.can_run(pod, set.as_ref(), group)
        };
        let (all_groups, names_fields) = (groups, pod.subject.spec.author_nodes().names_fields());
        let groups: Vec<_> = all_groups.iter().filter(fits).copied().collect();
        // archaware does not change affinity terms that name nodes (`matchFields`), so the model
        // must have chosen all named nodes.
        if names_fields && groups.len() < all_groups.len() {
            return Err(because(format!(
                "selection.predictor chose {image}, which is not for all nodes that the pod names (matchFields)"
            )));
        }
        if groups.is_empty() {
            return Err(because(format!(
                "no node with the label {}={} runs {image}, which selection.predictor chose",
                answer.label, answer.value
            )));
        }
        let requirement = Requirement::new(&answer.label, Operator::In, vec![answer.value.clone()]);
        let nodes = SelectedNodes {
            required: NodeSet::all_of([requirement]),
            preferred: Vec::new(),
        };
        let candidate = |(architecture, tag): (&String, &String)| Candidate {
            tag: tag.clone(),
            weight: 0,
            outcome: if *architecture == answer.architecture {
                CandidateOutcome::ChosenByModel {
                    label: answer.label.clone(),
                    value: answer.value.clone(),
                }
            } else {
                CandidateOutcome::NotByModel
            },
        };
        let candidates = model.images.iter().map(candidate).collect();
        let chosen = Chosen {
            image: image.clone(),
            nodes: nodes.on(set.as_ref()),
            groups,
        };
        Ok((chosen, candidates))
    }
}
