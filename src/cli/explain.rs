//! `archaware explain`: why a pod runs, or does not run, on the nodes where it is expected. Reads
//! only.

mod read;
mod target;
mod text;

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use clap::Args;

use crate::{
    cluster::{cluster_nodes::ClusterNodes, objects::Namespace},
    config,
    controller::Durable,
    evaluate::{
        Evaluation, Evaluator, KnownKeys, ResolvedImages, Subject, Verdict,
        pull_secrets::{PullSecrets, UnusablePullSecret},
        template::Template,
    },
    explain::{Explanation, Facts, explain},
    image::{ImageError, PullPolicy, ResolveRequest, credentials::CredentialSource},
    metrics::Metrics,
    placement::{
        Decision,
        demand::{Demand, Source},
    },
    plan::daemon_set,
    selection::compatibility,
    sources::sources,
};

use read::{ClusterFacts, Reader};
use target::Target;

use super::{CommandStatus, Global, Persist, cluster_config, output, resolver};

/// Maximum number of objects that are explained at once, because each is a page of text. `archaware
/// report` is for more.
const MAX_OBJECTS: usize = 50;

#[derive(Debug, Args)]
pub(super) struct ExplainCommand {
    /// What to explain: pod/NAME, deployment/NAME or any other kind that runs pods; a bare NAME is
    /// a pod. Without arguments: the pods of the namespace that wait or fail
    #[arg(value_name = "KIND/NAME", conflicts_with = "filename")]
    objects: Vec<String>,
    /// Namespace of the objects [default: the namespace of the kubeconfig's context]
    #[arg(
        short = 'n',
        long = "namespace",
        id = "namespace",
        value_name = "NAMESPACE"
    )]
    of_namespace: Option<String>,
    /// Manifests of objects that need not exist; - reads stdin
    #[arg(short, long, value_name = "FILE")]
    filename: Option<PathBuf>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: ExplainOutput,
    /// Print the JSON schema of -o json and end
    #[arg(long)]
    schema: bool,
}

/// Output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum ExplainOutput {
    /// For people.
    #[default]
    Table,
    /// For programs; stable.
    Json,
    /// YAML with the fields of `json`.
    Yaml,
}

impl ExplainCommand {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<CommandStatus> {
        if self.schema {
            let schema = schemars::schema_for!(Vec<Explanation>);
            output::print(&output::json(&schema)?)?;
            return Ok(CommandStatus::Done);
        }
        let manifests = self.filename.as_deref();
        let manifests = manifests.map(target::read_manifests).transpose()?;
        let metrics = Metrics::default();
        let api = global.reachable_api(&metrics).await?;
        let namespace = self
            .of_namespace
            .or_else(|| global.namespace_of_objects.clone());
        let is_named = namespace.is_some();
        let namespace = namespace.unwrap_or_else(|| api.default_namespace().to_owned());
        let loaded = cluster_config::load(&global, &api).await?;
        let config = Arc::new(loaded.config);
        let mut reader = Reader::new(api.clone());
        reader.missing.extend(loaded.missing_permission);
        let mut targets = Vec::new();
        if let Some(manifests) = manifests {
            let of_manifest = |manifest| Target::of_manifest(manifest, &namespace);
            targets.extend(manifests.into_iter().map(of_manifest));
        } else if self.objects.is_empty() {
            targets = reader.troubled(&namespace).await?;
        } else {
            let kind = reader.kind_in(&self.objects).await?;
            let is_kind = |word: &str| kind.as_deref() == Some(word);
            for (kind, name) in target::parse_objects(&self.objects, is_kind)? {
                targets.push(reader.target(&kind, &namespace, &name).await?);
            }
        }
        let keys = KnownKeys::new(&*config);
        let stored = Durable::new(keys.clone());
        let cluster = reader.cluster(&global.namespace(), &stored).await?;
        let nodes = ClusterNodes::from_nodes(cluster.nodes.iter().flatten().cloned());
        let evaluator = Evaluator {
            resolver: resolver(&global, &config, &metrics, Persist::No)?,
            pull_secrets: PullSecrets::new(api.clone()),
            policy: Arc::new((&*config).into()),
            config: config.clone(),
            keys,
            sources: sources(&config.selection, &nodes)?,
            nodes,
            explains: true,
        };
        // `work_beside` ends the watches of the sources when this future ends.
        let explaining = async {
            let mut explained = Vec::new();
            for target in targets {
                explained.push(explain_target(target, &evaluator, &mut reader, &cluster).await);
            }
            explained
        };
        let explained = evaluator.sources.work_beside(&api, explaining).await;
        let text = match self.output {
            ExplainOutput::Table if explained.is_empty() => {
                let hint = if is_named {
                    ""
                } else {
                    " (-n looks at another namespace)"
                };
                format!("No pod in namespace {namespace} waits or fails{hint}.\n")
            }
            ExplainOutput::Json => output::json(&explained)?,
            ExplainOutput::Yaml => output::yaml(&explained)?,
            ExplainOutput::Table => text::pages(&explained),
        };
        output::print(&text)?;
        Ok(CommandStatus::Done)
    }
}

async fn explain_target(
    mut target: Target,
    evaluator: &Evaluator,
    reader: &mut Reader,
    cluster: &ClusterFacts,
) -> Explanation {
    let namespace = match &target.name.namespace {
        Some(namespace) => reader.namespace(namespace).await,
        None => Namespace::default(),
    };
    if !target.is_existing_pod() {
        // Add the pull secrets of the ServiceAccount, as the admission plugin `ServiceAccount` does
        // when a pod is created.
        let namespace = target.name.namespace.clone().unwrap_or_default();
        let secrets = &evaluator.pull_secrets;
        if secrets.add_of_account(&namespace, target.spec_mut()).await {
            reader
                .missing
                .add(format!("get serviceaccounts in {namespace}"));
        }
    }
    let is_new = !target.is_existing_pod() && target.daemon_set().is_none();
    let own_class = target.subject().spec.runtime_class_name.clone();
    let mut class_problem = None;
    if let Some(class) = own_class.filter(|_| is_new) {
        class_problem = reader.add_class(&class, target.spec_mut()).await;
    }
    let mut evaluation = evaluate(&target, evaluator, &namespace).await;
    let class = evaluation.demands.class().map(str::to_owned);
    if let Some(class) = class.filter(|_| is_new) {
        class_problem = reader.add_class(&class, target.spec_mut()).await;
        // The admission plugin `RuntimeClass` changes the pod, so the API server calls the webhook
        // again. Evaluate again with the class, as the webhook does.
        target.spec_mut().runtime_class_name = Some(class.clone());
        evaluation = evaluate(&target, evaluator, &namespace).await;
        evaluation.demands.push(Demand {
            class: Some(class),
            ..Demand::from_source(Source::RuntimeClass)
        });
    }
    let template = target.daemon_set().map(|set| evaluator.template(set));
    let subject = template
        .as_ref()
        .map_or_else(|| target.subject(), Template::subject);
    if target.is_existing_pod() {
        // Images of an existing pod are not replaced, so show the candidates as if the pod were
        // recreated.
        let anew = if selects(evaluator, subject) {
            evaluator
                .evaluate_anew(subject, &namespace)
                .await
                .alternatives
        } else {
            Vec::new()
        };
        if !anew.is_empty() && anew.len() >= evaluation.alternatives.len() {
            evaluation.alternatives = anew;
        }
    }
    let (handling, handling_source, _) = evaluator.handling(subject, &namespace);
    let seen = all_images(evaluator, subject, &mut evaluation).await;
    if evaluation
        .unusable
        .iter()
        .any(UnusablePullSecret::is_forbidden)
    {
        reader
            .missing
            .add(format!("get secrets in {}", subject.namespace));
    }
    let tried = tried(evaluator, subject, &seen.failed).await;
    let counted = target.counted(cluster.nodes.as_deref());
    let withheld = template
        .as_ref()
        .and_then(|template| withheld(evaluator, template, &evaluation));
    let missing_permissions = reader.missing.to_vec();
    explain(&Facts {
        kind: &target.kind,
        name: &target.name,
        pod: target.pod.as_ref(),
        pods: &counted,
        subject,
        template: template.as_ref(),
        handling: (&handling, handling_source),
        evaluation: &evaluation,
        images: &seen.images,
        failed: &seen.failed,
        tried: &tried,
        nodes: cluster.nodes.as_deref(),
        // If the pod has archaware's additions, a missing Lease does not prove the absence of
        // archaware.
        is_installed: cluster
            .is_installed
            .filter(|installed| *installed || !target.has_traces()),
        own_namespace: &cluster.own_namespace,
        withheld: withheld.as_deref(),
        class_problem: class_problem.as_deref(),
        creation_problem: target.creation_problem.as_deref(),
        missing_permissions: &missing_permissions,
        policy: &evaluator.policy,
        config: &evaluator.config,
    })
}

async fn evaluate(target: &Target, evaluator: &Evaluator, namespace: &Namespace) -> Evaluation {
    let template = target.daemon_set().map(|set| evaluator.template(set));
    let of_template = template.as_ref().map(Template::subject);
    let subject = of_template.unwrap_or_else(|| target.subject());
    evaluator.evaluate(subject, namespace).await
}

/// Whether compatibility documents may select images for the pod, or prefer nodes.
fn selects(evaluator: &Evaluator, subject: Subject<'_>) -> bool {
    compatibility::is_requested(subject.annotations, subject.labels)
        || evaluator.config.selection.attached != config::AttachedDocuments::Ignore
}

/// All images, also those that did not matter for the evaluation.
async fn all_images(
    evaluator: &Evaluator,
    subject: Subject<'_>,
    evaluation: &mut Evaluation,
) -> ResolvedImages {
    let failed = match &evaluation.verdict {
        Verdict::Unresolved { failed, .. } => failed.clone(),
        Verdict::Decided(_) | Verdict::Skip => Vec::new(),
    };
    let mut seen = ResolvedImages {
        images: evaluation.images.clone(),
        failed,
        unusable: evaluation.unusable.clone(),
    };
    // Without a common architecture, the evaluation drops the errors of the other images, because
    // they cannot change the verdict. So resolve the images again.
    let is_cut_short = matches!(
        evaluation.verdict,
        Verdict::Decided(Decision::NoCommonArchitecture)
    );
    if is_cut_short || (seen.images.is_empty() && seen.failed.is_empty()) {
        let resolved = evaluator.resolve_all(subject).await;
        if seen.images.is_empty() {
            seen.images = resolved.images;
        }
        seen.failed = resolved.failed;
        evaluation.unusable.extend(resolved.unusable);
    }
    seen
}

/// Why archaware only reports a change of a DaemonSet's template and does not make it; `None` if it
/// makes the change, or if there is none.
fn withheld(
    evaluator: &Evaluator,
    template: &Template<'_>,
    evaluation: &Evaluation,
) -> Option<String> {
    let Verdict::Decided(decision) = &evaluation.verdict else {
        return None;
    };
    let by = evaluation.decided_by();
    let change = daemon_set::change(&evaluator.policy, template, decision, by)?;
    daemon_set::report_only(template, &change, decision, evaluator.config.daemon_sets)
}

/// Where credentials were found for images that could not be resolved.
async fn tried(
    evaluator: &Evaluator,
    subject: Subject<'_>,
    failed: &[(String, ImageError)],
) -> BTreeMap<String, Vec<CredentialSource>> {
    let (namespace, spec) = (subject.namespace, subject.spec);
    let credentials = evaluator.pull_secrets.for_pod(namespace, spec, false);
    let mut tried = BTreeMap::new();
    for (image, _) in failed {
        let request = ResolveRequest {
            image,
            policy: PullPolicy::IfNotPresent,
            keyring: &credentials.keyring,
            tenant: namespace,
        };
        let found = evaluator.resolver.credential_sources(request).await;
        tried.insert(image.clone(), found.unwrap_or_default());
    }
    tried
}
