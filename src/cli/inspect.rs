//! `archaware inspect`: the platforms of images.

use std::collections::BTreeMap;

use clap::Args;
use futures::future::join_all;
use serde::Serialize;

use crate::{
    image::{
        ImageError, PullPolicy, Reference, ResolveRequest, Resolved,
        credentials::{self, Keyring},
        trace,
    },
    metrics::Metrics,
    platform::Os,
    telemetry::{RecordedEvent, Recorder},
};

use super::{
    CommandStatus, Global, Persist,
    output::{self, Output},
    resolver,
};

#[derive(Debug, Args)]
pub(super) struct InspectCommand {
    /// Images, as a pod names them
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// How to print
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
    /// Operating system of the architectures and variants in -o json; the table lists all platforms
    #[arg(long, default_value = "linux")]
    os: Os,
    /// Also print each request and each answer from a cache, to stderr
    #[arg(long)]
    trace: bool,
}

/// One element of `-o json`. Unknown fields are null.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectResult {
    image: String,
    reference: Option<String>,
    digest: Option<String>,
    media_type: Option<&'static str>,
    platforms: Vec<String>,
    architectures: Vec<String>,
    /// By architecture: the node variants that suffice. Omits an architecture if every variant
    /// suffices.
    variants: BTreeMap<String, Vec<&'static str>>,
    source: Option<&'static str>,
    note: Option<&'static str>,
    error: Option<InspectFailure>,
}

#[derive(Serialize)]
struct InspectFailure {
    reason: &'static str,
    message: String,
}

impl InspectCommand {
    /// Records the requests for `--trace`.
    pub(super) fn recorder(&self) -> Option<Recorder> {
        self.trace.then(|| Recorder::new(trace::TARGET))
    }

    pub(super) async fn execute(
        self,
        global: Global,
        recorder: Option<Recorder>,
    ) -> anyhow::Result<CommandStatus> {
        let config = global.load_config()?;
        let keys = credentials::ready_keyring(Keyring::default());
        let resolver = resolver(&global, &config, &Metrics::default(), Persist::No)?;
        let deadline = tokio::time::Instant::now() + config.resolution.budget;
        let lines = join_all(self.images.iter().map(|image| {
            let (resolver, keys, os) = (resolver.clone(), &keys, &self.os);
            async move {
                let request = ResolveRequest {
                    image,
                    policy: PullPolicy::IfNotPresent,
                    keyring: keys,
                    // A registry that hangs does not delay other registries.
                    tenant: image.split('/').next().unwrap_or_default(),
                };
                let answer = resolver.resolve_by(request, deadline).await;
                InspectResult::new(image, resolver.reference(image), answer, os)
            }
        }))
        .await;
        if let Some(recorder) = recorder {
            eprintln!("{}", trace_table(&recorder.events()));
        }
        let failed = lines.iter().any(|line| line.error.is_some());
        match self.output {
            Output::Json => output::print(&output::json(&lines)?)?,
            Output::Table => output::print(&table(&lines))?,
        }
        Ok(if failed {
            CommandStatus::Failed
        } else {
            CommandStatus::Done
        })
    }
}

impl InspectResult {
    fn new(
        image: &str,
        reference: Result<Reference, ImageError>,
        answer: Result<Resolved, ImageError>,
        os: &Os,
    ) -> Self {
        let reference = reference.ok().map(|reference| reference.to_string());
        let mut line = Self {
            image: image.to_owned(),
            reference,
            digest: None,
            media_type: None,
            platforms: Vec::new(),
            architectures: Vec::new(),
            variants: BTreeMap::new(),
            source: None,
            note: None,
            error: None,
        };
        match answer {
            Ok(resolved) => {
                let architectures = resolved.platforms.architectures(os).unwrap_or_default();
                line.platforms = resolved
                    .platforms
                    .platforms()
                    .iter()
                    .map(ToString::to_string)
                    .collect();
                line.variants = architectures
                    .iter()
                    .filter(|(_, variants)| !variants.is_any())
                    .map(|(name, variants)| (name.to_string(), variants.names(name).collect()))
                    .collect();
                line.architectures = architectures
                    .iter()
                    .map(|(name, _)| name.to_string())
                    .collect();
                line.note = resolved
                    .platforms
                    .no_platform_reason()
                    .map(crate::platform::NoPlatformReason::as_str);
                line.digest = Some(resolved.digest.to_string());
                line.media_type = Some(resolved.media_type);
                line.source = Some(resolved.source.as_str());
            }
            Err(error) => {
                let (reason, message) = (error.reason().as_str(), error.chain());
                line.error = Some(InspectFailure { reason, message });
            }
        }
        line
    }
}

/// One line per request, in the order in which the requests ended.
fn trace_table(events: &[RecordedEvent]) -> String {
    let rows = events.iter().map(|event| {
        let field = |name| event.field(name).to_owned();
        let request = format!("{} {}{}", field("method"), field("host"), field("path"));
        vec![
            event.at.as_millis().to_string(),
            field("peer"),
            request,
            field("status"),
            field("milliseconds"),
            field("attempt"),
            field("credential"),
        ]
    });
    output::table(
        &[
            "AT MS",
            "ASKED",
            "REQUEST",
            "STATUS",
            "TOOK MS",
            "ATTEMPT",
            "CREDENTIAL",
        ],
        rows,
    )
}

fn table(lines: &[InspectResult]) -> String {
    let rows = lines.iter().map(|line| {
        let what = match (&line.error, line.note) {
            (Some(error), _) => format!("{}: {}", error.reason, error.message),
            (None, Some(note)) => format!("any architecture ({note})"),
            (None, None) => line.platforms.join(", "),
        };
        vec![
            line.image.clone(),
            what,
            line.source.unwrap_or("-").to_owned(),
        ]
    });
    output::table(&["IMAGE", "PLATFORMS", "SOURCE"], rows)
}
