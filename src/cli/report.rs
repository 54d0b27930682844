//! `archaware report`: which architectures workloads could run on, and the obstacles: images, node
//! selectors, affinity and annotations. Reads only.

mod cache;
mod cluster;
mod csv;
mod found;
mod html;
mod inspect;
mod junit;
mod markdown;
mod markup;
mod table;

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use futures::{StreamExt, stream};
use serde_json::Value;

use crate::{
    cluster::{
        api::ApiClient,
        name::NamespacedName,
        objects::Namespace,
        workload::{Workload, may_run_images, template_of},
    },
    config::Config,
    image::Resolver,
    metrics::Metrics,
    platform::Architecture,
    report::{Answer, CanRun, KnownWorkload, Report, report, requests_of},
};

use cache::ReportCache;
use found::FoundWorkload;
use inspect::Inspector;

use super::{
    CommandStatus, Global, Persist, cluster_config, manifests, output, progress::Progress, resolver,
};

/// Workloads whose images are resolved concurrently; the limits per registry apply.
const CONCURRENCY: usize = 64;

#[derive(Debug, Args)]
pub(super) struct ReportCommand {
    /// Workloads of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["namespace", "filename", "images"])]
    all_namespaces: bool,
    /// Namespace of the workloads [default: the namespace of the kubeconfig's context]
    #[arg(short = 'n', long = "namespace", id = "namespace", value_name = "NAMESPACE", conflicts_with_all = ["filename", "images"])]
    of_namespace: Option<String>,
    /// Workloads of manifests, without a cluster: a file, a folder, or - for stdin; may be repeated
    #[arg(short, long, value_name = "PATH")]
    filename: Vec<PathBuf>,
    /// Images instead of workloads: a file with one in each line, or - for stdin
    #[arg(long, value_name = "FILE", conflicts_with = "filename")]
    images: Option<PathBuf>,
    /// The architecture to look at; several with commas, or repeated
    #[arg(
        long = "for",
        visible_alias = "arch",
        value_name = "ARCHITECTURE",
        value_delimiter = ',', default_value = "arm64", value_parser = architecture)]
    requested_architectures: Vec<Architecture>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: ReportOutput,
    /// Exit with status 1 if a workload cannot run on a requested architecture, or if that is not
    /// known (missing); or only if it is not known (unknown). Several with commas [default with -o
    /// junit: missing]
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    fail_on: Vec<FailOn>,
    /// Cache file with the image platforms that earlier reports read [default:
    /// ~/.cache/archaware/images.jsonl]
    #[arg(long, value_name = "FILE")]
    cache: Option<PathBuf>,
    /// Ask registries for every image
    #[arg(long, conflicts_with = "cache")]
    no_cache: bool,
    /// Print the JSON schema of -o json and end
    #[arg(long)]
    schema: bool,
}

/// The formats of `report`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum ReportOutput {
    /// For people.
    #[default]
    Table,
    /// For programs; stable.
    Json,
    /// One line for each workload and architecture, for spreadsheets.
    Csv,
    /// For issues and wikis.
    Markdown,
    /// One page for a browser, to be sent around: redirect it to a file.
    Html,
    /// A test case for each workload and architecture, for CI.
    Junit,
}

/// A finding that makes the command exit with status 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FailOn {
    /// It is not known whether a workload can run on a requested architecture: an image, or an
    /// object that may run pods, could not be read.
    Unknown,
    /// A workload is not known to run on a requested architecture.
    Missing,
}

impl ReportCommand {
    pub(super) async fn execute(self, global: Global) -> anyhow::Result<CommandStatus> {
        if self.schema {
            output::print(&output::json(&schemars::schema_for!(Report))?)?;
            return Ok(CommandStatus::Done);
        }
        let metrics = Metrics::default();
        if self.is_about_a_cluster() {
            let api = global.reachable_api(&metrics).await?;
            let loaded = cluster_config::load(&global, &api).await?;
            let mut inspector = self.inspector(&global, loaded.config, &metrics)?;
            let default = || {
                let named = global.namespace_of_objects.clone();
                named.unwrap_or_else(|| api.default_namespace().to_owned())
            };
            let namespace = self.of_namespace.clone().unwrap_or_else(default);
            let namespace = (!self.all_namespaces).then_some(namespace);
            let read = cluster::read(&api, namespace.as_deref()).await?;
            if let Some(name) = namespace.as_deref().filter(|_| read.found.is_empty()) {
                require_namespace(&api, name).await?;
            }
            inspector.use_cluster(&api, read.nodes);
            let place = namespace
                .map(|name| format!("namespace {name} of "))
                .unwrap_or_default();
            let source = format!("{place}cluster {}", api.server());
            let known = inspect(&inspector, read.found).await;
            let mut missing = read.missing_permissions;
            missing.extend(loaded.missing_permission);
            missing.extend(inspector.missing_permissions().to_vec());
            let missing = missing.to_vec();
            return self.finish(&report(
                source,
                known,
                &self.requested_architectures,
                missing,
            ));
        }
        let (source, found) = match &self.images {
            Some(file) => (name_of(file, "images"), read_images(file)?),
            None => (self.name_of_manifests(), self.read_manifests()?),
        };
        let inspector = self.inspector(&global, global.load_config()?, &metrics)?;
        let known = inspect(&inspector, found).await;
        self.finish(&report(
            source,
            known,
            &self.requested_architectures,
            Vec::new(),
        ))
    }

    fn is_about_a_cluster(&self) -> bool {
        self.images.is_none() && self.filename.is_empty()
    }

    fn inspector(
        &self,
        global: &Global,
        config: Config,
        metrics: &Metrics,
    ) -> anyhow::Result<Inspector> {
        let resolver = resolver(global, &config, metrics, Persist::No)?;
        let cache = self.open_cache(&resolver);
        Ok(Inspector::new(
            resolver,
            cache,
            config,
            self.requested_architectures.clone(),
        ))
    }

    /// Prints a report, and compares it with `--fail-on`.
    fn finish(&self, report: &Report) -> anyhow::Result<CommandStatus> {
        self.print(report)?;
        Ok(self.status(report))
    }

    /// Opens the cache of earlier reports. If that fails, the report is made without it.
    fn open_cache(&self, resolver: &Resolver) -> Option<ReportCache> {
        if self.no_cache {
            return None;
        }
        let path = self.cache.clone().or_else(ReportCache::default_path)?;
        let opened = ReportCache::open(&path, resolver);
        opened
            .inspect_err(|error| {
                let path = path.display();
                tracing::warn!(%error, "cannot use the cache {path}; the report asks registries for every image");
            })
            .ok()
    }

    fn name_of_manifests(&self) -> String {
        let names = self.filename.iter().map(|path| name_of(path, "manifests"));
        names.collect::<Vec<_>>().join(", ")
    }

    /// The workloads of the manifests, and what looks as if it runs images and cannot be read.
    fn read_manifests(&self) -> anyhow::Result<Vec<FoundWorkload>> {
        let mut found = Vec::new();
        for path in &self.filename {
            let manifests = manifests::read(path)?;
            let unread_files = manifests.unread.into_iter();
            found.extend(
                unread_files.map(|(file, why)| FoundWorkload::unread("File", None, &file, why)),
            );
            for (file, object) in manifests.objects {
                let cannot_read = || format!("cannot read {file}");
                let Some(workload) = Workload::read(&object).with_context(cannot_read)? else {
                    found.extend(may_run_images(&object).then(|| unread_object(&object)));
                    continue;
                };
                let pods = workload.replicas.unwrap_or(1);
                let spec = template_of(&object).and_then(|template| template.get("spec"));
                let requests = spec.map(requests_of).unwrap_or_default();
                found.push(FoundWorkload::of_manifest(
                    workload,
                    pods,
                    requests.times(pods),
                ));
            }
        }
        // A chart that renders to nothing must not pass a check in CI.
        if found.is_empty() {
            bail!("{} has no object that runs pods", self.name_of_manifests());
        }
        Ok(found)
    }

    fn print(&self, report: &Report) -> anyhow::Result<()> {
        for permission in &report.missing_permissions {
            tracing::warn!("the report is incomplete: you lack the permission to {permission}");
        }
        for workload in &report.workloads {
            for why in &workload.unread {
                tracing::warn!("images of {} are not known: {why}", table::name(workload));
            }
        }
        if report.workloads.is_empty() {
            let hint = if self.is_about_a_cluster() && !self.all_namespaces {
                "; -A looks at all namespaces"
            } else {
                ""
            };
            tracing::warn!("there are no workloads in {}{hint}", report.source);
        }
        let text = match self.output {
            ReportOutput::Table => table::print(report),
            ReportOutput::Json => output::json(report)?,
            ReportOutput::Csv => csv::print(report),
            ReportOutput::Markdown => markdown::print(report),
            ReportOutput::Html => html::print(report),
            ReportOutput::Junit => {
                let fails_unread = !self.fail_on().is_empty();
                junit::print(report, |answer| self.fails(answer), fails_unread)
            }
        };
        output::print(&text)
    }

    fn status(&self, report: &Report) -> CommandStatus {
        let workloads = report.workloads.iter();
        let answers = workloads.flat_map(|workload| &workload.answers);
        let mut fails = answers.map(|answer| self.fails(answer));
        // A check must not pass because it had nothing to check.
        let (checks, is_empty) = (!self.fail_on().is_empty(), report.workloads.is_empty());
        let unread = !report.missing_permissions.is_empty() && (checks || is_empty);
        let empty = checks && is_empty;
        if unread || empty || fails.any(|fails| fails) {
            CommandStatus::Failed
        } else {
            CommandStatus::Done
        }
    }

    fn fails(&self, answer: &Answer) -> bool {
        match answer.can_run {
            CanRun::Yes => false,
            CanRun::No => self.fail_on().contains(&FailOn::Missing),
            CanRun::Unknown => !self.fail_on().is_empty(),
        }
    }

    /// The findings that end with status 1. A file for a CI system and the exit status have to
    /// agree, so without `--fail-on` a file fails where test cases fail.
    fn fail_on(&self) -> &[FailOn] {
        if self.fail_on.is_empty() && self.output == ReportOutput::Junit {
            return &[FailOn::Missing];
        }
        &self.fail_on
    }
}

/// Parses an architecture. Only Go's architectures are valid, because nodes have no others.
fn architecture(text: &str) -> Result<Architecture, String> {
    let parsed = text.parse::<Architecture>().ok();
    let known = parsed.filter(Architecture::is_known);
    known.ok_or_else(|| {
        "unknown architecture; examples of known architectures: amd64, arm64, s390x".to_owned()
    })
}

/// Fails if a namespace without workloads does not exist. Skips the check without permission to
/// read namespaces.
async fn require_namespace(api: &ApiClient, name: &str) -> anyhow::Result<()> {
    let name = NamespacedName::cluster(name);
    if let Ok(None) = api.find_metadata::<Namespace>(&name).await {
        bail!("there is no namespace {:?}", name.name);
    }
    Ok(())
}

/// Resolves the images of workloads, with a progress bar.
async fn inspect(inspector: &Inspector, found: Vec<FoundWorkload>) -> Vec<KnownWorkload> {
    let progress = Progress::new();
    progress.expect(found.len());
    let known = stream::iter(found).map(|found| async {
        let known = inspector.inspect(found).await;
        progress.step();
        known
    });
    let known: Vec<_> = known.buffer_unordered(CONCURRENCY).collect().await;
    progress.finish();
    known
}

/// An object that looks as if it runs images.
fn unread_object(object: &Value) -> FoundWorkload {
    let text = |place: &str| object.pointer(place).and_then(Value::as_str);
    let name = text("/metadata/name").or_else(|| text("/metadata/generateName"));
    let why = "it names images at a place that archaware does not know: check them with --images";
    FoundWorkload::unread(
        text("/kind").unwrap_or_default(),
        text("/metadata/namespace"),
        name.unwrap_or_default(),
        why.to_owned(),
    )
}

fn name_of(path: &std::path::Path, what: &str) -> String {
    if path.as_os_str() == "-" {
        format!("{what} from stdin")
    } else {
        path.display().to_string()
    }
}

/// Images, one in each line. Empty lines and those that begin with # are left out.
fn read_images(file: &std::path::Path) -> anyhow::Result<Vec<FoundWorkload>> {
    let text = manifests::text(file)?;
    let lines = text.lines().map(str::trim);
    let images = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    let found: Vec<_> = images.map(FoundWorkload::of_image).collect();
    if found.is_empty() {
        bail!("{} names no image", file.display());
    }
    Ok(found)
}
