//! Image selection for one pod: reads the compatibility documents that it names, and chooses by the nodes that it can land on.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use tokio::time::Instant;

use crate::{
    cluster::{
        nodes::{AlikeNodes, GroupBy},
        objects::PodSpec,
    },
    image::{ImageError, PullPolicy, Reference, ResolveRequest},
    placement::{
        Decision, Mode, keeps_away,
        mode::Rule,
        pod::AffinityAccess,
        reinvocation,
        selection::{
            self, Choice, Compatibility, CompatibilityDocument, DocumentFormat, ImageChange,
            ImageSelection, InvalidSelection, LabelKeys, NoChoice, NodeGroup, PassedOver,
            SelectedNodes,
        },
        suffices,
    },
    platform::Architectures,
};

use super::{Evaluator, Stage, Subject, Verdict, pull_secrets::PodCredentials};

/// What was selected for a pod.
#[derive(Clone, Debug, Default)]
pub struct SelectedImages {
    /// Images to replace. Those that stay as they are because they are the best are among them.
    pub images: Vec<ImageChange>,
    /// What the nodes have to be for them.
    pub nodes: SelectedNodes,
    /// Why something was not selected.
    pub problems: Vec<SelectionProblem>,
    /// What could not be read in time.
    pub(super) failed: Vec<(String, ImageError)>,
    /// The spec with these images.
    pub(super) spec: Option<PodSpec>,
}

/// Why no image was selected.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SelectionProblem {
    /// The request is invalid.
    Invalid(String),
    /// No image fits a node that the pod can land on.
    NoMatch(NoMatch),
    /// The nodes that fit cannot be told from the others by labels.
    NotSelectable {
        /// The container.
        container: String,
        /// The image that fits some nodes.
        image: String,
    },
    /// The pod exists, and nothing was selected when it was created.
    Created(String),
}

/// No image fits a node that the pod can land on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NoMatch {
    /// The container.
    pub container: String,
    /// The reference of the document.
    pub document: String,
    /// How many nodes there are on which the pod can land.
    pub nodes: usize,
    /// The entries, with the rules that failed.
    pub passed_over: Vec<PassedOver>,
}

impl From<InvalidSelection> for SelectionProblem {
    fn from(invalid: InvalidSelection) -> Self {
        Self::Invalid(invalid.to_string())
    }
}

impl fmt::Display for SelectionProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid(why) => write!(f, "no image is selected: {why}"),
            Self::NoMatch(no_match) => no_match.fmt(f),
            Self::NotSelectable { container, image } => write!(
                f,
                "container {container}: the nodes that {image} fits cannot be selected by labels, so it keeps its image"
            ),
            Self::Created(container) => write!(
                f,
                "container {container}: no image was selected when the pod was created, because the webhook did not answer or no \
                 image fitted a node; create the pod anew"
            ),
        }
    }
}

impl fmt::Display for NoMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            container,
            document,
            nodes,
            passed_over,
        } = self;
        let are = if *nodes == 1 { "node" } else { "nodes" };
        write!(
            f,
            "container {container}: no image of {document} fits the {nodes} {are} on which the pod can land"
        )?;
        for (index, entry) in passed_over.iter().enumerate() {
            let between = if index == 0 { ": " } else { "; " };
            let failed: Vec<_> = entry
                .failed
                .iter()
                .map(|(rule, count)| format!("{rule} fails on {count}"))
                .collect();
            let why = if failed.is_empty() {
                "has a negative weight".to_owned()
            } else {
                failed.join(", ")
            };
            write!(f, "{between}{}: {why}", entry.tag)?;
        }
        Ok(())
    }
}

/// The architectures on which images run, by reference; `None`: on all.
type KnownImages = BTreeMap<String, Option<Architectures>>;

/// What limits the choice for one pod.
struct Pod<'a> {
    subject: Subject<'a>,
    credentials: &'a PodCredentials,
    deadline: Instant,
    /// The architectures that its other images share.
    limit: Option<Architectures>,
}

impl Evaluator {
    /// Selects the images of a pod that asks for it.
    pub(super) async fn select_images(
        &self,
        subject: Subject<'_>,
        rule: &Rule,
        deadline: Instant,
    ) -> SelectedImages {
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
            let late = requested.into_iter().map(|one| one.container);
            selected.problems = late.map(SelectionProblem::Created).collect();
            return selected;
        }
        // Until it is selected, an image does not limit the pod.
        spec.set_images(requested.iter().map(|one| (one.container.as_str(), None)));
        if subject.stage == Stage::Template {
            selected.spec = Some(spec);
            return selected;
        }
        let credentials = self
            .pull_secrets
            .for_pod(subject.namespace, subject.spec, false);
        let limit = match rule {
            Rule::Mode(Mode::Any | Mode::Ignore) => None,
            Rule::Architectures(set) => Some(set.clone()),
            Rule::Mode(Mode::Inspect) => {
                let resolved =
                    self.resolve_images(&spec, subject.namespace, &credentials, deadline);
                match resolved.await.0 {
                    // No selection changes that.
                    Verdict::Decided(Decision::NoCommonArchitecture) => return selected,
                    Verdict::Decided(Decision::Architectures(set)) => Some(set),
                    Verdict::Unresolved { known, .. } => known,
                    Verdict::Decided(Decision::TolerateAll) | Verdict::Skip => None,
                }
            }
        };
        let pod = Pod {
            subject,
            credentials: &credentials,
            deadline,
            limit,
        };
        self.select(&pod, &requested, &mut selected).await;
        // What stays as it is counts again.
        let stays = requested.iter().filter(|one| {
            let mut problems = selected.problems.iter();
            problems.any(|problem| problem.container() == Some(&one.container))
        });
        let original = |name: &str| {
            let mut all = subject.spec.selectable();
            let (_, container) = all.find(|(_, container)| container.name == name)?;
            container.image.as_deref()
        };
        spec.set_images(stays.map(|one| (one.container.as_str(), original(&one.container))));
        let chosen = selected.images.iter();
        spec.set_images(chosen.map(|one| (one.container.as_str(), Some(one.to.as_str()))));
        selected.spec = Some(spec);
        selected
    }

    /// Chooses for one container after the other, each among the nodes that the images before it fit.
    async fn select(
        &self,
        pod: &Pod<'_>,
        requested: &[ImageSelection],
        selected: &mut SelectedImages,
    ) {
        let mut documents = Vec::new();
        for one in requested {
            match self.compatibility(pod, &one.document).await {
                Ok(document) => documents.push((one, document)),
                Err(error) => selected.failed.push((one.document.clone(), error)),
            }
        }
        let features = documents
            .iter()
            .flat_map(|(_, document)| &document.features);
        let features: BTreeSet<String> = features.cloned().collect();
        let known = async {
            self.nodes.wait_until_known().await;
            if !features.is_empty() {
                self.nodes.features.wait_for(&features).await;
            }
        };
        if tokio::time::timeout_at(pod.deadline, known).await.is_err() {
            let why = "the nodes of the cluster, or their NodeFeature objects, are not listed yet";
            let late = documents.iter().map(|(one, _)| {
                let error = ImageError::unanswered(&one.document, why, None);
                (one.document.clone(), error)
            });
            selected.failed.extend(late);
            return;
        }
        let all = documents.iter().map(|(_, document)| &**document);
        let alike = self.landing(pod, all);
        let mut groups: Vec<NodeGroup<'_>> = alike
            .iter()
            .filter(|nodes| pod.can_land_on(nodes))
            .map(AlikeNodes::group)
            .collect();
        for (one, document) in &documents {
            let choice = match self.choose(pod, &one.document, document, &groups).await {
                Ok(choice) => choice,
                Err(failed) => {
                    selected.failed.push(failed);
                    continue;
                }
            };
            let choice = match choice {
                Ok(choice) => choice,
                Err(passed_over) => {
                    let no_match = NoMatch {
                        container: one.container.clone(),
                        document: one.document.clone(),
                        nodes: groups.iter().map(|group| group.count).sum(),
                        passed_over,
                    };
                    selected.problems.push(SelectionProblem::NoMatch(no_match));
                    continue;
                }
            };
            let image = document.image(choice.best.entry, &one.document);
            let Some(nodes) = choice.nodes() else {
                selected.problems.push(SelectionProblem::NotSelectable {
                    container: one.container.clone(),
                    image,
                });
                continue;
            };
            let fitting = std::iter::once(&choice.best).chain(&choice.further);
            let fitting: Vec<_> = fitting.flat_map(|fit| fit.groups.iter().copied()).collect();
            groups.retain(|group| fitting.iter().any(|fit| group.is_same(fit)));
            let taken = std::mem::take(&mut selected.nodes);
            selected.nodes = taken.and(nodes);
            selected.images.push(ImageChange {
                container: one.container.clone(),
                from: pod.image_of(&one.container),
                to: image,
            });
        }
    }

    async fn compatibility(
        &self,
        pod: &Pod<'_>,
        document: &str,
    ) -> Result<Arc<CompatibilityDocument>, ImageError> {
        let request = pod.request(document);
        self.resolver.compatibility_by(request, pod.deadline).await
    }

    /// The nodes in groups, by what the documents and the pod's author say about their labels.
    fn landing<'a>(
        &self,
        pod: &Pod<'_>,
        documents: impl Iterator<Item = &'a CompatibilityDocument>,
    ) -> Arc<[AlikeNodes]> {
        let author = pod.subject.spec.author_selection();
        let mut keys = LabelKeys::default();
        keys.keys.extend(author.label_keys().map(str::to_owned));
        let mut features = None;
        for document in documents {
            keys.keys.extend(document.labels.keys.iter().cloned());
            keys.prefixes
                .extend(document.labels.prefixes.iter().cloned());
            if !document.features.is_empty() {
                features = Some(&self.nodes.features);
            }
        }
        let by = GroupBy {
            labels: &keys,
            features,
            own_taint: &self.policy.taint,
            variants: &self.policy.variants,
        };
        if author.names_fields() {
            // As the pods of DaemonSets do.
            return self.nodes.groups_of(by, |node| {
                let name = node.metadata.name.as_deref().unwrap_or_default();
                author.selects(node.view().labels, name)
            });
        }
        self.nodes.groups(by)
    }

    /// The choice for one container, or why each entry was passed over.
    async fn choose<'a>(
        &self,
        pod: &Pod<'_>,
        reference: &str,
        document: &'a CompatibilityDocument,
        groups: &[NodeGroup<'a>],
    ) -> Result<Result<Choice<'a>, Vec<PassedOver>>, (String, ImageError)> {
        let mut known = KnownImages::new();
        loop {
            let runs = |entry: &Compatibility, group: &NodeGroup<'_>| {
                let image = known.get(&document.image(entry, reference))?;
                let mut sets = image.iter().chain(&pod.limit);
                let can_run = |set: &Architectures| {
                    suffices(set, group.architecture, group.variant) != Some(false)
                };
                Some(sets.all(can_run))
            };
            match document.choose(groups, runs) {
                Ok(choice) => return Ok(Ok(choice)),
                Err(NoChoice::Nothing(passed_over)) => return Ok(Err(passed_over)),
                Err(NoChoice::Unknown(entry)) => {
                    let image = document.image(entry, reference);
                    let request = pod.request(&image);
                    let resolved = self.resolver.resolve_by(request, pod.deadline).await;
                    let resolved = resolved.map_err(|error| (image.clone(), error))?;
                    let os = pod.subject.spec.os();
                    let set = self.policy.of_image(&resolved.platforms, &os);
                    known.insert(image, set.map(|set| self.policy.widen(set)));
                }
            }
        }
    }
}

/// Whether a pod may ask for image selection.
pub(super) fn is_requested(subject: Subject<'_>, rule: &Rule) -> bool {
    *rule != Rule::Mode(Mode::Ignore)
        && selection::is_requested(subject.annotations, subject.labels)
}

/// The containers whose images are to be selected, without those whose images were.
fn requested(subject: Subject<'_>) -> Result<Vec<ImageSelection>, InvalidSelection> {
    let containers = subject.spec.selectable();
    let containers: Vec<(&str, &str)> = containers
        .map(|(_, one)| (one.name.as_str(), one.image.as_deref().unwrap_or_default()))
        .collect();
    let done = match subject.stage {
        Stage::Pod => {
            let recorded = reinvocation::recorded_change(subject.annotations);
            reinvocation::undo_images(&recorded, containers.iter().copied())
        }
        Stage::Template | Stage::Creation => Vec::new(),
    };
    let requested = selection::requested(subject.annotations, subject.labels, &containers);
    let mut requested = match requested {
        // The image that was to be replaced is no longer there.
        Err(InvalidSelection::NoTarget(_)) if !done.is_empty() => return Ok(Vec::new()),
        other => other?,
    };
    requested.retain(|one| !done.iter().any(|own| own.container == one.container));
    Ok(requested)
}

impl Pod<'_> {
    fn request<'a>(&'a self, image: &'a str) -> ResolveRequest<'a> {
        ResolveRequest {
            image,
            policy: PullPolicy::IfNotPresent,
            keyring: &self.credentials.keyring,
            tenant: self.subject.namespace,
        }
    }

    /// Whether its author and its tolerations allow these nodes.
    fn can_land_on(&self, nodes: &AlikeNodes) -> bool {
        let spec = self.subject.spec;
        let author = spec.author_selection();
        let tolerations = spec.tolerations.as_deref().unwrap_or_default();
        let mut taints = nodes.taints.iter();
        // A selection by name was applied to each node.
        (author.names_fields() || author.selects(&nodes.labels, ""))
            && !taints.any(|taint| keeps_away(taint, tolerations))
    }

    fn image_of(&self, container: &str) -> String {
        let mut all = self.subject.spec.selectable();
        let found = all.find(|(_, one)| one.name == container);
        found
            .and_then(|(_, one)| one.image.clone())
            .unwrap_or_default()
    }
}

impl SelectionProblem {
    /// The container that keeps its image.
    fn container(&self) -> Option<&String> {
        match self {
            Self::Invalid(_) => None,
            Self::NoMatch(NoMatch { container, .. })
            | Self::NotSelectable { container, .. }
            | Self::Created(container) => Some(container),
        }
    }
}

impl CompatibilityDocument {
    /// The image of an entry: what it names, or the one that the document is about. `reference`: where the document was found.
    fn image(&self, entry: &Compatibility, reference: &str) -> String {
        match (self.format, &self.subject) {
            (DocumentFormat::Labels, _) => entry.tag.clone(),
            (DocumentFormat::Features, None) => reference.to_owned(),
            (DocumentFormat::Features, Some(digest)) => Reference::parse(reference).map_or_else(
                |_| reference.to_owned(),
                |found| format!("{}@{digest}", found.name()),
            ),
        }
    }
}
