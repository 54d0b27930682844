//! `archaware plan`: prints what `archaware run` would change now. Changes nothing.

mod bound_pods;
mod planned_node;
mod variants;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, LazyLock},
};

use anyhow::Context;
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use kube::ResourceExt;
use serde::Serialize;

use crate::{
    cluster::{
        api::ApiClient,
        cluster_nodes::ClusterNodes,
        lease,
        name::NamespacedName,
        objects::{DaemonSet, Namespace, Node, Pod},
    },
    config::{Config, DaemonSets, OnMiss},
    controller::{self, Durable},
    evaluate::{
        Evaluation, Evaluator, KnownKeys, Notice, Verdict, pull_secrets::PullSecrets,
        template::Template,
    },
    metrics::Metrics,
    placement::{Decision, PlacementPolicy, change::PodChange, node},
    plan,
    sources::sources,
};

use planned_node::PlannedNode;
use variants::Variants;

use super::{
    CommandStatus, Global, Persist, cluster_config,
    output::{self, Output},
    resolver,
};

/// Pods and DaemonSets that are evaluated concurrently; the limits per registry apply.
const CONCURRENCY: usize = 64;

#[derive(Debug, Args)]
pub(super) struct PlanCommand {
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// End with status 2 if `run` would change something; 0 means that nothing would change
    #[arg(long)]
    detailed_exitcode: bool,
}

/// One planned change.
#[derive(Serialize, PartialEq, Eq, PartialOrd, Ord)]
struct PlanRow {
    kind: &'static str,
    namespace: Option<String>,
    name: String,
    action: &'static str,
    detail: String,
}

type NamespacesByName = HashMap<String, Namespace>;

impl PlanCommand {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<CommandStatus> {
        let metrics = Metrics::default();
        // Loaded first, so that errors in a file are reported before connecting.
        let given = global.load_config()?;
        drop(resolver(&global, &given, &metrics, Persist::No)?);
        let api = global.reachable_api(&metrics).await?;
        let loaded = cluster_config::load(&global, &api).await?;
        if let Some(permission) = &loaded.missing_permission {
            tracing::warn!(
                "the plan uses the defaults instead of the installed configuration: you lack the permission to {permission}"
            );
        }
        let config = Arc::new(loaded.config);
        let resolver = resolver(&global, &config, &metrics, Persist::No)?;
        let keys = KnownKeys::new(&*config);
        let stored = Durable::new(keys.clone());
        if let Err(error) = lease::read_memory(&api, &global.namespace(), &stored).await {
            tracing::warn!(%error, "cannot read archaware's Lease; the plan does not recognise taints and tolerations of earlier configurations");
        }
        let listed = api.list(None).try_collect().await;
        let nodes: Vec<Node> = listed.context("cannot list nodes")?;
        let known = ClusterNodes::from_nodes(nodes.iter().cloned());
        let evaluator = Evaluator {
            resolver,
            pull_secrets: PullSecrets::new(api.clone()),
            policy: Arc::new((&*config).into()),
            config: config.clone(),
            keys,
            sources: sources(&config.selection, &known)?,
            nodes: known,
            explains: false,
        };
        let pods = api
            .list(None)
            .try_filter(|pod: &Pod| std::future::ready(pod.is_in_scope()));
        let listed = pods.try_collect().await;
        let pods: Vec<Pod> = listed.context("cannot list pods")?;
        let mut installed = (*config).clone();
        if !loaded.is_found {
            // Nothing is installed: assume the settings of manifests/archaware.yaml.
            installed.admission.enabled = true;
            installed.admission.on_miss = OnMiss::Gate;
        }
        for finding in advice(&api, &installed, &nodes, &pods).await {
            tracing::warn!("{finding}");
        }
        // `work_beside` ends the watches of the sources when this future ends.
        let steps = steps(&api, &config, &evaluator, &nodes, pods);
        let mut steps = evaluator.sources.work_beside(&api, steps).await?;
        steps.sort();
        match self.output {
            Output::Json => output::print(&output::json(&steps)?)?,
            Output::Table if steps.is_empty() => output::print("Nothing to do.\n")?,
            Output::Table => output::print(&(table(&steps) + &total(&steps)))?,
        }
        let changes = steps.iter().any(PlanRow::is_change);
        Ok(if self.detailed_exitcode && changes {
            CommandStatus::Changes
        } else {
            CommandStatus::Done
        })
    }
}

/// What `archaware run` would log after its start.
async fn advice(api: &ApiClient, config: &Config, nodes: &[Node], pods: &[Pod]) -> Vec<String> {
    let pools = controller::node_pools(api).await;
    let unbound = pods.iter().filter(|pod| !pod.is_bound());
    let mut advice = plan::advice::advice(config, &pools, nodes, unbound);
    match controller::without_pull_secrets(api).await {
        Ok(consequence) => advice.extend(consequence.map(str::to_owned)),
        // The advice is complete except for this check, so the plan goes on.
        Err(error) => tracing::debug!(%error, "cannot check the permission to read pull secrets"),
    }
    advice
}

async fn steps(
    api: &ApiClient,
    config: &Config,
    evaluator: &Evaluator,
    nodes: &[Node],
    pods: Vec<Pod>,
) -> anyhow::Result<Vec<PlanRow>> {
    let namespaces: NamespacesByName = api
        .list(None)
        .map_ok(|namespace: Namespace| (namespace.name_any(), namespace))
        .try_collect()
        .await
        .context("cannot list namespaces")?;
    // Every list is read completely first, because its `continue` token would expire while
    // registries are asked.
    let listed = api.list(None).try_collect().await;
    let sets: Vec<DaemonSet> = listed.context("cannot list DaemonSets")?;
    let (bound, unbound): (Vec<Pod>, Vec<Pod>) = pods.into_iter().partition(Pod::is_bound);
    let policy = node::TaintPolicy::from(config);
    let keys = evaluator.keys.get();
    let variants = Variants::count(nodes, &evaluator.policy);
    let nodes: Vec<PlannedNode<'_>> = nodes
        .iter()
        .filter(|node| node.metadata.deletion_timestamp.is_none())
        .map(|node| PlannedNode::new(node, &policy, &keys))
        .collect();
    let bound = bound_pods::plan(bound, &nodes, evaluator, &namespaces).await;
    let mut steps = bound.rows;
    for node in nodes {
        let tolerated = bound.tolerated.get(&node.node.name_any());
        steps.extend(node.rows(tolerated.copied().unwrap_or_default()));
    }
    let sets =
        stream::iter(sets).filter(|_| std::future::ready(!config.webhook_handles_daemon_sets()));
    let sets = sets.map(|set| of_daemon_set(set, evaluator, &namespaces));
    let sets: Vec<Option<PlanRow>> = sets.buffer_unordered(CONCURRENCY).collect().await;
    steps.extend(sets.into_iter().flatten());
    let pods = stream::iter(unbound).map(|pod| of_pod(pod, evaluator, &namespaces, &variants));
    let pods: Vec<Option<PlanRow>> = pods.buffer_unordered(CONCURRENCY).collect().await;
    steps.extend(pods.into_iter().flatten());
    Ok(steps)
}

async fn of_daemon_set(
    set: DaemonSet,
    evaluator: &Evaluator,
    namespaces: &NamespacesByName,
) -> Option<PlanRow> {
    let template = evaluator.template(&set);
    let namespace = namespace_of(&set, namespaces);
    let evaluation = evaluator.evaluate(template.subject(), namespace).await;
    let planned = planned_template(&template, &evaluation, evaluator);
    let notices = evaluation.notices(&evaluator.policy);
    PlanRow::with_notices("DaemonSet", &set, planned, &notices)
}

/// The action of `run` on a template, and its detail; `None` if `run` does not change it.
fn planned_template(
    template: &Template<'_>,
    evaluation: &Evaluation,
    evaluator: &Evaluator,
) -> Option<(&'static str, String)> {
    let Verdict::Decided(decision) = &evaluation.verdict else {
        return wait(evaluation);
    };
    let by = evaluation.decided_by();
    let change = plan::daemon_set::change(&evaluator.policy, template, decision, by)?;
    let mode = evaluator.config.daemon_sets;
    if let Some(why) = plan::daemon_set::report_only(template, &change, decision, mode) {
        Some(("report", why))
    } else if change.rolls() {
        let tolerated = decision.annotation();
        let detail = format!(
            "the template will tolerate {tolerated}; the change starts a rollout of the DaemonSet"
        );
        Some(("changeTemplate", detail))
    } else if mode == DaemonSets::Manage {
        let detail = "updates the annotation that records tolerations; no rollout";
        Some(("record", detail.to_owned()))
    } else {
        None
    }
}

async fn of_pod(
    pod: Pod,
    evaluator: &Evaluator,
    namespaces: &NamespacesByName,
    variants: &Variants<'_>,
) -> Option<PlanRow> {
    let subject = plan::pod::subject(&pod);
    let namespace = namespace_of(&pod, namespaces);
    let evaluation = evaluator.evaluate(subject, namespace).await;
    let policy = &evaluator.policy;
    let planned = planned(&pod, &evaluation, policy, variants);
    let mut notices = evaluation.notices(policy);
    // The detail of the row already explains why no node can run the pod.
    notices.retain(|notice| !notice.is_conflict());
    PlanRow::with_notices("Pod", &pod, planned, &notices)
}

/// The action of `run` on a pod, and its detail; `None` if `run` does not change the pod.
fn planned(
    pod: &Pod,
    evaluation: &Evaluation,
    policy: &PlacementPolicy,
    variants: &Variants<'_>,
) -> Option<(&'static str, String)> {
    let subject = plan::pod::subject(pod);
    Some(match &evaluation.verdict {
        Verdict::Decided(decision) => {
            let change = subject.change(policy, decision, evaluation);
            match decision {
                Decision::NoCommonArchitecture => {
                    ("none", evaluation.explain_no_common_architecture(policy))
                }
                _ if change.is_empty() && pod.spec.gate().is_none() => return None,
                Decision::TolerateAll => {
                    let images = selected(&change);
                    (
                        "tolerateAll",
                        format!("tolerates every architecture{images}"),
                    )
                }
                Decision::Architectures(set) => {
                    let nodes = variants.describe(set).unwrap_or_default();
                    let images = selected(&change);
                    (
                        "tolerate",
                        format!("tolerates {}{nodes}{images}", set.join(", ")),
                    )
                }
            }
        }
        Verdict::Skip => {
            pod.spec.gate()?;
            ("release", "removes archaware's scheduling gate".to_owned())
        }
        Verdict::Unresolved { .. } => wait(evaluation)?,
    })
}

/// A text about the containers that get another image; empty if there are none.
fn selected(change: &PodChange) -> String {
    let images = change.images.iter().filter(|image| image.from != image.to);
    let images = images.map(|image| format!("container {} gets {}", image.container, image.to));
    let changes: Vec<String> = images.collect();
    let between = if changes.is_empty() { "" } else { "; " };
    format!("{between}{}", changes.join("; "))
}

/// The action `wait`, with the errors of the images; `None` unless the images are unresolved.
fn wait(evaluation: &Evaluation) -> Option<(&'static str, String)> {
    let Verdict::Unresolved { failed, .. } = &evaluation.verdict else {
        return None;
    };
    let describe = |(image, error): &(String, crate::image::ImageError)| {
        format!("{image}: {}: {}", error.reason().as_str(), error.chain())
    };
    Some((
        "wait",
        failed.iter().map(describe).collect::<Vec<_>>().join("; "),
    ))
}

fn namespace_of<'a, K: ResourceExt>(object: &K, namespaces: &'a NamespacesByName) -> &'a Namespace {
    static UNKNOWN: LazyLock<Namespace> = LazyLock::new(Namespace::default);
    object
        .namespace()
        .and_then(|name| namespaces.get(&name))
        .unwrap_or(&UNKNOWN)
}

impl PlanRow {
    /// A row with the action of `run` and the texts of its events; `None` without both.
    fn with_notices<K: ResourceExt>(
        kind: &'static str,
        object: &K,
        planned: Option<(&'static str, String)>,
        notices: &[Notice],
    ) -> Option<Self> {
        let (action, detail) = match planned {
            Some((action, detail)) => (action, Some(detail)),
            None if notices.is_empty() => return None,
            None => ("report", None),
        };
        let notices = notices.iter().map(ToString::to_string);
        let details: Vec<String> = detail.into_iter().chain(notices).collect();
        Some(Self::new(kind, object, action, details.join("; ")))
    }

    /// Whether `run` would change the object, or make Kubernetes change it. The other rows only
    /// report.
    fn is_change(&self) -> bool {
        const CHANGES: [&str; 11] = [
            "taint",
            "untaint",
            "move",
            "correct",
            "disown",
            "tolerate",
            "tolerateAll",
            "release",
            "changeTemplate",
            "record",
            "evict",
        ];
        CHANGES.contains(&self.action)
    }

    fn new<K: ResourceExt>(
        kind: &'static str,
        object: &K,
        action: &'static str,
        detail: String,
    ) -> Self {
        Self {
            kind,
            namespace: object.namespace(),
            name: object.name_any(),
            action,
            detail,
        }
    }
}

/// For example `Changes: 3 taint, 2 tolerate. Only reported: 1 none.`
fn total(steps: &[PlanRow]) -> String {
    let count = |is_change: bool| {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for step in steps.iter().filter(|step| step.is_change() == is_change) {
            *counts.entry(step.action).or_default() += 1;
        }
        let counts = counts
            .iter()
            .map(|(action, count)| format!("{count} {action}"));
        counts.collect::<Vec<_>>().join(", ")
    };
    let parts = [("Changes", count(true)), ("Only reported", count(false))];
    let parts = parts.into_iter().filter(|(_, counts)| !counts.is_empty());
    let parts: Vec<String> = parts
        .map(|(what, counts)| format!("{what}: {counts}."))
        .collect();
    format!("{}\n", parts.join(" "))
}

fn table(steps: &[PlanRow]) -> String {
    let rows = steps.iter().map(|step| {
        let name = NamespacedName {
            namespace: step.namespace.clone(),
            name: step.name.clone(),
        };
        vec![
            step.kind.to_owned(),
            name.to_string(),
            step.action.to_owned(),
            step.detail.clone(),
        ]
    });
    output::table(&["KIND", "NAME", "ACTION", "DETAIL"], rows)
}
