//! The choice for one container: among the nodes that its pod can land on, by a model or by rules.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;
use tokio::time::{Instant, error::Elapsed, timeout_at};

use crate::{
    evaluate::{ImageAlternatives, Subject, pull_secrets::PodCredentials},
    image::{ImageError, PullPolicy, Reference, ResolveRequest},
    placement::{
        UnknownVariants, affinity, keeps_away,
        node_set::NodeSet,
        requirement::{Operator, Requirement},
        suffices,
    },
    platform::Architectures,
};

use super::{
    COMPATIBILITY, Selecting,
    alternatives::alternative,
    compatibility::{
        Candidate, CandidateOutcome, Choice, Compatibility, CompatibilityDocument, FeatureKeys,
        Fits, ImageFit, ImageSelection, LabelKeys, NoChoice, NodeGroup, PassedOver, RuleKeys,
        SelectedNodes,
    },
    fitting::NotEvaluated,
    groups::{AlikeNodes, GroupBy},
    problem::{NoMatch, SelectionProblem},
};

/// An image that was resolved.
#[derive(Clone, Debug)]
struct KnownImage {
    /// The node architectures that run it; `None` if it does not limit its pod.
    architectures: Option<Architectures>,
    /// Whether all considered nodes run it.
    runs_on_all: bool,
}

/// An image that was chosen for one container.
pub(super) struct Chosen<'a> {
    pub(super) image: String,
    pub(super) nodes: SelectedNodes,
    /// The node groups that the image fits.
    pub(super) groups: Vec<NodeGroup<'a>>,
}

/// Why no image was chosen for one container.
pub(super) enum Unselected {
    /// The document or image could not be read in time.
    Failed(String, Box<ImageError>),
    /// The container keeps its image, for this reason.
    Because(SelectionProblem),
}

/// The limits of the choice for one pod.
pub(super) struct Pod<'a> {
    pub(super) subject: Subject<'a>,
    pub(super) credentials: &'a PodCredentials,
    pub(super) deadline: Instant,
    /// The architectures that the pod's other images share.
    pub(super) limit: Option<Architectures>,
    /// The nodes that earlier demands require.
    pub(super) required: NodeSet,
    /// The tolerations of earlier demands.
    pub(super) tolerations: Vec<&'a Value>,
}

impl Selecting<'_> {
    /// Chooses the image of one container: by a model if the document has one and its server
    /// answers, otherwise by rules.
    pub(super) async fn choose_image<'a>(
        &self,
        pod: &Pod<'_>,
        one: &ImageSelection,
        document: &Arc<CompatibilityDocument>,
        (alike, groups): (&Arc<[AlikeNodes]>, &[NodeGroup<'a>]),
        kept: Option<&mut Vec<ImageAlternatives>>,
    ) -> Result<Chosen<'a>, Unselected> {
        if !document.models.is_empty() {
            match self.predict(pod, one, document, groups).await {
                Ok((chosen, candidates)) => {
                    if let Some(kept) = kept {
                        kept.push(ImageAlternatives {
                            container: one.container.clone(),
                            document: one.document.clone(),
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
                container: one.container.clone(),
                document: one.document.clone(),
                why: why.to_string(),
            }),
            NotEvaluated::Late | NotEvaluated::Stopping => {
                let error = ImageError::unanswered(&one.document, why.to_string(), None);
                Unselected::Failed(one.document.clone(), Box::new(error))
            }
        })?;
        let mut candidates = Vec::new();
        let of_document = kept.as_ref().map(|_| &mut candidates);
        let choice = self.choose(pod, &one.document, document, (groups, &fits), of_document);
        let choice = choice.await?;
        if let Some(kept) = kept {
            kept.push(ImageAlternatives {
                container: one.container.clone(),
                document: one.document.clone(),
                selects_image: true,
                nodes,
                candidates: candidates.iter().map(alternative).collect(),
            });
        }
        let choice = choice.map_err(|passed_over| {
            Unselected::Because(SelectionProblem::NoMatch(NoMatch {
                container: one.container.clone(),
                document: one.document.clone(),
                nodes,
                more: document.entries.len() - passed_over.len(),
                passed_over,
            }))
        })?;
        let image = image_of(document, choice.best.entry, &one.document);
        let nodes = choice.nodes().ok_or_else(|| {
            Unselected::Because(SelectionProblem::NotSelectable {
                container: one.container.clone(),
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

    /// The choice of a model, and the result for each of its images.
    async fn predict<'a>(
        &self,
        pod: &Pod<'_>,
        one: &ImageSelection,
        document: &CompatibilityDocument,
        groups: &[NodeGroup<'a>],
    ) -> Result<(Chosen<'a>, Vec<Candidate>), Unselected> {
        let because = |why: String| {
            Unselected::Because(SelectionProblem::Model {
                container: one.container.clone(),
                document: one.document.clone(),
                why,
            })
        };
        let mut models = document.models.iter();
        let model = match &one.model {
            Some(name) => models.find(|model| model.tag == *name),
            None => models.next().filter(|_| document.models.len() == 1),
        };
        let model = model.ok_or_else(|| {
            because("name one of its models in the annotation …/model".to_owned())
        })?;
        let predictor = self.own.predictor.as_ref();
        let predictor =
            predictor.ok_or_else(|| because("selection.predictor is not configured".to_owned()))?;
        // The groups also have labels that the pod or other documents name: the server does not get
        // those.
        let told = predictor.labels();
        let labels = |group: &NodeGroup<'a>| {
            let all = group.facts.labels.iter();
            let told = all.filter(|(key, _)| told.contains(key));
            told.map(|(key, value)| (key.as_str(), value.as_str()))
                .collect()
        };
        let features = groups.iter().map(labels).collect();
        let asked = timeout_at(
            pod.deadline,
            predictor.ask(pod.subject.namespace, model, features),
        );
        let answer = asked.await.unwrap_or_else(|_| Err("it is too late".into()));
        let answer = answer.map_err(|why| because(format!("selection.predictor: {why}")))?;
        let image = model.images.get(&answer.architecture);
        let image = image.ok_or_else(|| {
            because(format!(
                "it has no image for {:?}, which selection.predictor chose",
                answer.architecture
            ))
        })?;
        let set = self.runs_on(pod, image).await?;
        let fits = |group: &&NodeGroup<'_>| {
            let value = group.facts.labels.get(&answer.label);
            value == Some(&answer.value) && self.can_run(pod, set.as_ref(), group)
        };
        let (all, names_fields) = (groups, pod.subject.spec.author_nodes().names_fields());
        let groups: Vec<_> = all.iter().filter(fits).copied().collect();
        // A term that names nodes gets no requirements, so the model must have chosen all named
        // nodes.
        if names_fields && groups.len() < all.len() {
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

    pub(super) async fn compatibility(
        &self,
        pod: &Pod<'_>,
        document: &str,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let (resolver, request) = (&self.evaluator.resolver, pod.request(document));
        let content = resolver.artifact_by(&COMPATIBILITY, request, pod.deadline);
        self.own.documents.parse(content.await?).await
    }

    /// The nodes in groups, by the labels that the documents and the pod's author use, once the
    /// nodes are known.
    ///
    /// # Errors
    ///
    /// When the nodes are not known in time.
    pub(super) async fn landing(
        &self,
        pod: &Pod<'_>,
        documents: &[&CompatibilityDocument],
    ) -> Result<Arc<[AlikeNodes]>, Elapsed> {
        let features = documents
            .iter()
            .flat_map(|document| document.features.names());
        let features: BTreeSet<String> = features.cloned().collect();
        let known = async {
            self.own.nodes.nodes.wait_until_known().await;
            if !features.is_empty() {
                let tenant = pod.subject.namespace;
                self.own.nodes.features.wait_for(tenant, &features).await;
            }
        };
        timeout_at(pod.deadline, known).await?;
        Ok(self.group(pod, documents))
    }

    fn group(&self, pod: &Pod<'_>, documents: &[&CompatibilityDocument]) -> Arc<[AlikeNodes]> {
        let author = pod.subject.spec.author_nodes();
        let mut keys = LabelKeys::default();
        // The pod's affinity also gets the architectures of the images.
        keys.keys.insert(affinity::LABEL.to_owned());
        keys.keys.extend(author.label_keys().map(str::to_owned));
        let required = pod.required.terms().iter().flatten();
        keys.keys
            .extend(required.map(|requirement| requirement.key.clone()));
        let mut features = FeatureKeys::default();
        for document in documents {
            keys.add(&document.labels);
            let predictor = self.own.predictor.as_ref();
            if let Some(predictor) = predictor.filter(|_| !document.models.is_empty()) {
                keys.add(predictor.labels());
            }
            features.add(&document.features);
        }
        let by = GroupBy {
            labels: &keys,
            features: &features,
            own_taint: &self.evaluator.policy.taint,
            variants: &self.evaluator.policy.variants,
        };
        if author.names_fields() {
            // The author selects nodes by name, as pods of DaemonSets do.
            return self.own.nodes.groups_of(by, |node| {
                let name = node.metadata.name.as_deref().unwrap_or_default();
                author.selects(node.view().labels, name)
            });
        }
        self.own.nodes.groups(by)
    }

    /// The node architectures that run an image; `None` if the image does not limit its pod.
    async fn runs_on(
        &self,
        pod: &Pod<'_>,
        image: &str,
    ) -> Result<Option<Architectures>, Unselected> {
        let resolved = self
            .evaluator
            .resolver
            .resolve_by(pod.request(image), pod.deadline);
        let resolved = resolved
            .await
            .map_err(|error| Unselected::Failed(image.to_owned(), Box::new(error)))?;
        let set = self.evaluator.policy.of_image(
            &resolved.platforms,
            pod.subject.spec.runtime(&pod.subject.spec.os()),
        );
        let runs_on = set.map(|set| self.evaluator.policy.widen(&set));
        Ok(runs_on.map(|set| self.evaluator.policy.within_schedulable(set)))
    }

    /// Whether nodes run an image for these architectures, and the pod's other images. For nodes of
    /// unknown variant the answer is that of the node affinity.
    pub(super) fn can_run(
        &self,
        pod: &Pod<'_>,
        image: Option<&Architectures>,
        group: &NodeGroup<'_>,
    ) -> bool {
        let is_possible = self.evaluator.policy.variants.unknown != UnknownVariants::Require;
        let mut sets = image.into_iter().chain(&pod.limit);
        sets.all(|set| suffices(set, group.architecture, group.variant).unwrap_or(is_possible))
    }

    /// The choice for one container, or why no entry was chosen: the first entries.
    async fn choose<'d>(
        &self,
        pod: &Pod<'_>,
        reference: &str,
        document: &'d CompatibilityDocument,
        (groups, fits): (&[NodeGroup<'d>], &Fits),
        kept: Option<&mut Vec<Candidate>>,
    ) -> Result<Result<Choice<'d>, Vec<PassedOver>>, Unselected> {
        let mut known: BTreeMap<String, KnownImage> = BTreeMap::new();
        // For each entry, by its index: the image, once it is known.
        let mut of_entries: Vec<Option<KnownImage>> = vec![None; document.entries.len()];
        let names_fields = pod.subject.spec.author_nodes().names_fields();
        let fit = |image: Option<&KnownImage>, entry: &Compatibility, group: &NodeGroup<'_>| {
            let Some(image) = image else {
                return ImageFit::Unknown;
            };
            if !self.can_run(pod, image.architectures.as_ref(), group) {
                ImageFit::OtherArchitecture
            } else if names_fields && !(image.runs_on_all && fits.fit_all(entry)) {
                // A term that names nodes gets no requirements, so an entry has to fit all named
                // nodes.
                ImageFit::NotOnAllNamed
            } else {
                ImageFit::Runs
            }
        };
        // Reads images up to the first entry that can be chosen.
        for entry in document.candidates() {
            let fitting = || groups.iter().filter(|group| fits.fits(entry, group));
            if fitting().next().is_none() {
                continue;
            }
            let name = image_of(document, entry, reference);
            let image = if let Some(image) = known.get(&name) {
                image.clone()
            } else {
                let architectures = self.runs_on(pod, &name).await?;
                let can_run = |group| self.can_run(pod, architectures.as_ref(), group);
                let runs_on_all = groups.iter().all(can_run);
                let image = KnownImage {
                    architectures,
                    runs_on_all,
                };
                known.entry(name).or_insert(image).clone()
            };
            let runs = |group| fit(Some(&image), entry, group) == ImageFit::Runs;
            let is_best = fitting().any(runs);
            if let Some(of_entry) = of_entries.get_mut(entry.index) {
                *of_entry = Some(image);
            }
            if is_best {
                break;
            }
        }
        // Further entries may have an image that is known.
        for (entry, of_entry) in document.entries.iter().zip(&mut of_entries) {
            if of_entry.is_none() {
                *of_entry = known.get(&image_of(document, entry, reference)).cloned();
            }
        }
        let runs = |entry: &Compatibility, group: &NodeGroup<'_>| {
            let image = of_entries.get(entry.index).and_then(Option::as_ref);
            fit(image, entry, group)
        };
        let choice = match Choice::choose(document, groups, fits, &runs) {
            Ok(choice) => Ok(choice),
            Err(NoChoice::Nothing(passed_over)) => Err(passed_over),
            // Above, each image was read that this choice asks for.
            Err(NoChoice::Unknown(_)) => Err(Vec::new()),
        };
        if let Some(kept) = kept {
            *kept = Candidate::list(document, choice.as_ref().ok(), groups, fits, &runs);
        }
        Ok(choice)
    }
}

pub(super) fn count(groups: &[NodeGroup<'_>]) -> usize {
    groups.iter().map(|group| group.count).sum()
}

impl Pod<'_> {
    pub(super) fn request<'a>(&'a self, image: &'a str) -> ResolveRequest<'a> {
        ResolveRequest {
            image,
            policy: PullPolicy::IfNotPresent,
            keyring: &self.credentials.keyring,
            tenant: self.subject.namespace,
        }
    }

    /// The groups of nodes that can take the pod.
    pub(super) fn groups<'a>(&self, alike: &'a [AlikeNodes]) -> Vec<NodeGroup<'a>> {
        let nodes = alike.iter().enumerate();
        let nodes = nodes.filter(|(_, nodes)| self.can_land_on(nodes));
        nodes.map(|(index, nodes)| nodes.group(index)).collect()
    }

    /// Whether the author, the pod's tolerations and earlier demands allow these nodes.
    fn can_land_on(&self, nodes: &AlikeNodes) -> bool {
        let spec = self.subject.spec;
        let author = spec.author_nodes();
        let own = spec.tolerations.as_deref().unwrap_or_default();
        let asked = || self.tolerations.iter().copied();
        let mut taints = nodes.taints.iter();
        // A selection by name was applied to each node before.
        (author.names_fields() || author.selects(&nodes.labels, ""))
            && self.required.selects(&nodes.labels)
            && !taints.any(|taint| keeps_away(taint, own) && keeps_away(taint, asked()))
    }

    pub(super) fn image_of(&self, container: &str) -> String {
        let mut all = self.subject.spec.selectable();
        let found = all.find(|(_, one)| one.name == container);
        found
            .and_then(|(_, one)| one.image.clone())
            .unwrap_or_default()
    }
}

/// The image of an entry: the image that the entry names, or the subject of the document.
/// `reference`: the name of the document.
fn image_of(document: &CompatibilityDocument, entry: &Compatibility, reference: &str) -> String {
    match (document.keys, &document.subject) {
        (RuleKeys::Labels, _) => entry.tag.clone(),
        (RuleKeys::Features, None) => reference.to_owned(),
        (RuleKeys::Features, Some(digest)) => Reference::parse(reference).map_or_else(
            |_| reference.to_owned(),
            |found| format!("{}@{digest}", found.name()),
        ),
    }
}
